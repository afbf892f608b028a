"""The forward pass of a Llama model over the paged KV cache, in the type of its weights.

One pass serves prompts and decode; only attention differs. Everything runs on the caller's thread
under `torch.inference_mode`: on the host with as many OpenMP threads as the partition has set, on a
GPU on the caller's current stream, without ever waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.layer_ops import LayerOps, TorchOps
from windrow_sidecar.engines.builtin.llama.rope import RotaryTable
from windrow_sidecar.engines.builtin.llama.weights import Layout, view

# Enters a context in which a layer's matrices are in memory.
Holds = Callable[[int], AbstractContextManager[None]]
_IN_MEMORY: AbstractContextManager[None] = nullcontext()

# (layer, q [n, heads, head_dim] rotated and scaled) -> [n, heads * head_dim]
Attention = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer, views of the model's storage; [out, in] but for the norms."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    down: torch.Tensor


class LlamaModel:
    """Weights, and the pass over them; `gathered.py` and `static_step.py` decode with it.

    Args:
        config: of the model.
        layout: where its parameters lie.
        storage: uint8, the parameters' bytes, on the cache's device; stays alive with the model.
        cache: the KV cache of all requests.
        holds: is entered around what computes with a layer's matrices; None: all are in memory.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layout: Layout,
        storage: torch.Tensor,
        cache: KvCache,
        holds: Holds | None = None,
    ) -> None:
        self.config, self.cache = config, cache
        self.holds: Holds = holds or (lambda _: _IN_MEMORY)
        self.device, self.dtype = storage.device, layout.dtype
        self.rotary = RotaryTable(config, storage.device)
        self.ops: LayerOps = TorchOps(config, cache, self.rotary)
        self._embedding = view(layout, storage, "model.embed_tokens.weight")
        self._norm = view(layout, storage, "model.norm.weight")
        self._head = (
            self._embedding if config.tied_embeddings else view(layout, storage, "lm_head.weight")
        )
        self.layers = [_layer(layout, storage, i) for i in range(config.layers)]

    def prefill(self, tokens: Sequence[int], kv: SequenceKv) -> None:
        """Compute the KV of the next tokens of a prompt whose pages are there already."""
        begin = kv.n_tokens
        positions = list(range(begin, begin + len(tokens)))
        slots = [self.cache.slot_row(kv, position) for position in positions]
        kv.n_tokens += len(tokens)
        attend = self._prefill_attention(kv, begin, len(tokens))
        self.forward(self.integers(tokens), self.integers(positions), self.integers(slots), attend)

    def integers(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return new int64 [numbers] on the model's device."""
        return torch.tensor(numbers, device=self.device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attention,
        ops: LayerOps | None = None,
    ) -> torch.Tensor:
        """Run all layers for tokens [n]; writes their K and V at `slots` before attending.

        Returns [n, hidden]. Whether it can be captured in a graph is up to `attend` and `ops`.
        """
        ops = ops or self.ops
        placed = ops.place(positions, slots)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            with self.holds(i):
                qkv = functional.linear(self.rms_norm(x, layer.attention_norm), layer.qkv)
                attended = attend(i, ops.rotate_and_store(i, qkv, placed))
                x = self.add_product(x, attended, layer.out)
                gate_up = functional.linear(self.rms_norm(x, layer.mlp_norm), layer.gate_up)
                x = self.add_product(x, ops.gate(gate_up), layer.down)
        return x

    def add_product(
        self, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add rows [n, units] times a weight [hidden, units] to `x` [n, hidden], in its place."""
        return x.addmm_(rows, weight.t())

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [n]: [n, hidden], new memory."""
        return functional.embedding(tokens, self._embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of what follows, from `forward`."""
        return functional.linear(self.rms_norm(hidden, self._norm), self._head)

    def _prefill_attention(self, kv: SequenceKv, begin: int, n: int) -> Attention:
        """Let n queries of one request, from position `begin` on, see all earlier tokens."""
        cache, config = self.cache, self.config
        key_rows, keys, value_rows, values = cache.gathered(begin + n)
        index = cache.rows_of(kv, begin + n)
        visible = torch.ones(n, begin + n, dtype=torch.bool, device=self.device).tril_(begin)

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

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm of `x` [n, units] by `weight` [units]."""
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _layer(layout: Layout, storage: torch.Tensor, i: int) -> LlamaLayer:
    def of(*names: str) -> torch.Tensor:
        return view(layout, storage, *(f"model.layers.{i}.{name}.weight" for name in names))

    return LlamaLayer(
        attention_norm=of("input_layernorm"),
        qkv=of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=of("self_attn.o_proj"),
        mlp_norm=of("post_attention_layernorm"),
        gate_up=of("mlp.gate_proj", "mlp.up_proj"),
        down=of("mlp.down_proj"),
    )
