"""The forward pass of a Llama model over the paged KV cache, in fp32 on the host.

One pass serves both kinds of work; only attention differs. Everything runs on the caller's thread
under `torch.inference_mode`, with as many OpenMP threads as the partition has set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from windrow_sidecar.engines.builtin.config import LlamaConfig
from windrow_sidecar.engines.builtin.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.rope import RotaryTable
from windrow_sidecar.engines.builtin.weights import Layout, view

# (layer, q [n, heads, head_dim] rotated and scaled) -> [n, heads * head_dim]
Attention = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    down: torch.Tensor


class LlamaModel:
    """Decodes and prefills.

    Args:
        config: of the model.
        layout: where its parameters lie.
        storage: uint8, the parameters' bytes; stays alive with the model.
        cache: the KV cache of all requests.
    """

    def __init__(
        self, config: LlamaConfig, layout: Layout, storage: torch.Tensor, cache: KvCache
    ) -> None:
        self._config, self._cache = config, cache
        self._rotary = RotaryTable(config)
        self._embedding = view(layout, storage, "model.embed_tokens.weight")
        self._norm = view(layout, storage, "model.norm.weight")
        self._head = (
            self._embedding if config.tied_embeddings else view(layout, storage, "lm_head.weight")
        )
        self._layers = [_layer(layout, storage, i) for i in range(config.layers)]
        self._attended = torch.empty(0, config.kv_heads, config.q_per_kv, config.head_dim)

    def decode(self, tokens: Sequence[int], kvs: Sequence[SequenceKv]) -> torch.Tensor:
        """Append one token to each request and return the logits [b, vocab] of what follows.

        Each request has a page for the slot at its `n_tokens`, which grows by one.
        """
        positions = [kv.n_tokens for kv in kvs]
        slots = [self._cache.slot_row(kv, kv.n_tokens) for kv in kvs]
        for kv in kvs:
            kv.n_tokens += 1
        hidden = self._forward(tokens, positions, slots, self._decode_attention(kvs))
        return functional.linear(self._rms_norm(hidden, self._norm), self._head)

    def prefill(self, tokens: Sequence[int], kv: SequenceKv) -> None:
        """Compute the KV of the next tokens of a prompt whose pages are there already."""
        begin = kv.n_tokens
        positions = list(range(begin, begin + len(tokens)))
        slots = [self._cache.slot_row(kv, position) for position in positions]
        kv.n_tokens += len(tokens)
        self._forward(tokens, positions, slots, self._prefill_attention(kv, begin, len(tokens)))

    def _forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        attend: Attention,
    ) -> torch.Tensor:
        """Run all layers for n tokens; writes their K and V at `slots` before attending."""
        config, cache = self._config, self._cache
        cos, sin = self._rotary.at(torch.tensor(positions))
        slot_index = torch.tensor(slots)
        q_and_k = (config.heads + config.kv_heads) * config.head_dim
        x = functional.embedding(torch.tensor(tokens), self._embedding)
        for i, layer in enumerate(self._layers):
            qkv = functional.linear(self._rms_norm(x, layer.attention_norm), layer.qkv)
            qk = qkv[:, :q_and_k].view(qkv.shape[0], -1, config.head_dim)
            qk = self._rotary.rotate(qk, cos, sin)
            cache.key_slots[i].index_copy_(0, slot_index, qk[:, config.heads :].flatten(1))
            cache.value_slots[i].index_copy_(0, slot_index, qkv[:, q_and_k:])
            x = x.addmm_(attend(i, qk[:, : config.heads]), layer.out.t())
            gate, up = functional.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(
                2, dim=1
            )
            x = x.addmm_(functional.silu(gate).mul_(up), layer.down.t())
        return x

    def _decode_attention(self, kvs: Sequence[SequenceKv]) -> Attention:
        """One query per request over all of its tokens, request by request.

        A padded batch does not pay: one context of 4,000 tokens among ones of 500 would make all of
        them cost as much.
        """
        cache, config = self._cache, self._config
        if self._attended.shape[0] < len(kvs):
            self._attended = self._attended.new_empty(len(kvs), *self._attended.shape[1:])
        attended = self._attended[: len(kvs)]
        plan = []
        for row, kv in enumerate(kvs):
            n_pages = cache.pages_for(kv.n_tokens)
            key_rows, keys, value_rows, values = cache.gathered(n_pages, kv.n_tokens)
            plan.append(
                (
                    kv.row_index[:n_pages],
                    key_rows,
                    keys.permute(1, 2, 0),
                    value_rows,
                    values.transpose(0, 1),
                    attended[row],
                )
            )
        grouped = (len(kvs), config.kv_heads, config.q_per_kv, config.head_dim)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            key_pages, value_pages = cache.key_pages[layer], cache.value_pages[layer]
            queries = q.reshape(grouped).unbind()
            for query, (index, key_rows, keys, value_rows, values, out) in zip(
                queries, plan, strict=True
            ):
                torch.index_select(key_pages, 0, index, out=key_rows)
                weights = torch.softmax(torch.bmm(query, keys), -1)
                torch.index_select(value_pages, 0, index, out=value_rows)
                torch.bmm(weights, values, out=out)
            return attended.flatten(1)

        return attend

    def _prefill_attention(self, kv: SequenceKv, begin: int, n: int) -> Attention:
        """Let n queries of one request, from position `begin` on, see all that stands before."""
        cache, config = self._cache, self._config
        n_pages = cache.pages_for(begin + n)
        key_rows, keys, value_rows, values = cache.gathered(n_pages, begin + n)
        index = kv.row_index[:n_pages]
        visible = torch.ones(n, begin + n, dtype=torch.bool).tril_(begin)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            torch.index_select(cache.key_pages[layer], 0, index, out=key_rows)
            torch.index_select(cache.value_pages[layer], 0, index, out=value_rows)
            attended = functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys.transpose(0, 1).repeat_interleave(config.q_per_kv, 0)[None],
                values.transpose(0, 1).repeat_interleave(config.q_per_kv, 0)[None],
                attn_mask=visible,
                scale=1.0,  # already in q
            )
            return attended[0].transpose(0, 1).flatten(1)

        return attend

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.norm_eps)


def _layer(layout: Layout, storage: torch.Tensor, i: int) -> _Layer:
    def of(*names: str) -> torch.Tensor:
        return view(layout, storage, *(f"model.layers.{i}.{name}.weight" for name in names))

    return _Layer(
        attention_norm=of("input_layernorm"),
        qkv=of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=of("self_attn.o_proj"),
        mlp_norm=of("post_attention_layernorm"),
        gate_up=of("mlp.gate_proj", "mlp.up_proj"),
        down=of("mlp.down_proj"),
    )
