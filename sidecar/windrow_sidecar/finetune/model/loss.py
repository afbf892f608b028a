"""Compute a micro-batch's loss and its gradient at the output of the last layer.

Only positions with a label pass through norm and head, a slice at a time, so that the logits (the
largest tensor of a step: positions x vocabulary) never exist as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from windrow_sidecar.compute.queued import to_device
from windrow_sidecar.finetune.data.split import IGNORED
from windrow_sidecar.finetune.model.around import NOTHING
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.linear_loss import CrossEntropyOfLogits, rows_of_slice
from windrow_sidecar.finetune.model.structure import (
    asking,
    in_mode,
    logits_of,
    standing_in,
    unsupported,
)
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys
from windrow_sidecar.finetune.model.whole import check_numbers

log = logging.getLogger(__name__)

# Logits of one slice: fp32, 16 MiB. On a GPU 64 MiB: each slice reads the head's weights twice, and
# 16 MiB are 32 positions at 128,256 words: of a Llama 3 8B 134 GB for a step of 2,048 tokens, 32 ms
# on an H200, which takes 300 ms for all of the step. Where logits are made in place there are more.
SLICE_ELEMENTS, GPU_SLICE_ELEMENTS = 1 << 22, 1 << 24


# `torch.nn.functional.cross_entropy`, or its like over a part of the words on each rank. It takes
# logits [tokens, words], labels int64 [tokens] and `reduction`: "sum" ([]) or "none" ([tokens]).
CrossEntropy = Callable[..., Tensor]


class Head:
    """The final norm, the model's own logits, and cross-entropy.

    Where logits are a frozen linear layer's output and nothing else, their gradient is written by
    hand (see `linear_loss`); else autograd computes it.
    """

    def __init__(
        self, stack: DecoderStack, cross_entropy: CrossEntropy = functional.cross_entropy
    ) -> None:
        """Take the head of a model; `cross_entropy`: of its logits.

        Raises:
            UserError: the model makes other logits of the last hidden states, or none that are
                finite.
        """
        self._stack, self._cross_entropy = stack, cross_entropy
        self._by_hand: CrossEntropyOfLogits | None = None
        model = stack.model
        with torch.no_grad(), asking(model), in_mode(model, training=False):
            theirs, embedded = logits_of(model, stack.layers, stack.probe, stack.returned)
            ours = self._logits(embedded[0])
        if not torch.isfinite(theirs).all():
            check_numbers(model)
            raise unsupported(
                model,
                "its logits are not finite",
                "Look for numbers in its config.json that make them so.",
            )
        if not torch.allclose(ours, theirs[0].float(), rtol=1e-2, atol=1e-3):
            raise unsupported(model, "its logits are not made of its last hidden states alone")
        self._product = self._find_product(embedded[0])
        elements = GPU_SLICE_ELEMENTS if stack.device.type == "cuda" else SLICE_ELEMENTS
        fused = self._by_hand is not None and self._by_hand.fused
        words = int(stack.config.vocab_size)
        self._positions = rows_of_slice(words, elements, stack.device, fused=fused)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over all targets: float64 [], without graph.

        Args:
            hidden: [rows, tokens, hidden], output of the last layer.
            targets: [rows, tokens], int64, on the host: what follows each token; -100: ignored.
        """
        with torch.no_grad():
            at, labels = _labelled(targets, hidden.device)
            rows = hidden[at]
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            for start in range(0, len(rows), self._positions):
                cut = slice(start, start + self._positions)
                losses, _ = self._learn(rows[cut], labels[cut], None)
                total += losses.sum(dtype=torch.float64)
            return total

    def loss_and_gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        labels_in_batch: int,
        dropout: DropoutKeys | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the cross-entropy, d(mean loss of the whole batch)/d(hidden)).

        Args:
            hidden: [rows, tokens, hidden], output of the last layer.
            targets: [rows, tokens], int64, on the host: what follows each token; -100: ignored.
            labels_in_batch: by which the batch's loss is divided, over all its micro-batches.
            dropout: receives which of the tokens run, where it is set for all of them.
        """
        at, labels = _labelled(targets, hidden.device)
        rows, places = hidden.detach()[at], at[0] * targets.shape[1] + at[1]
        gradient = torch.empty_like(rows)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(rows), self._positions):
            cut = slice(start, start + self._positions)
            with dropout.only(places[cut]) if dropout else NOTHING:
                losses, of_slice = self._learn(rows[cut], labels[cut], 1.0 / labels_in_batch)
            assert of_slice is not None
            gradient[cut] = of_slice
            total += losses.sum(dtype=torch.float64)
        full = torch.zeros_like(hidden)
        full[at] = gradient
        return total, full

    def row_losses(
        self,
        hidden: Tensor,
        targets: Tensor,
        row_of: Tensor,
        rows: int,
        *,
        learn: bool,
        dropout: DropoutKeys | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (cross-entropy of each row: float64 [rows], d(their sum)/d(hidden)).

        Args:
            hidden: [lines, tokens, hidden], output of the last layer.
            targets: [lines, tokens], int64, on the host: what follows each token; -100: ignored.
            row_of: [lines, tokens], int64, on the host: to which row a token belongs.
            rows: how many there are.
            learn: False: no gradient is computed.
            dropout: receives which of the tokens run, where it is set for all of them.
        """
        at, labels = _labelled(targets, hidden.device)
        into = to_device(row_of[targets != IGNORED], hidden.device)
        picked, places = hidden.detach()[at], at[0] * targets.shape[1] + at[1]
        gradient = torch.empty_like(picked) if learn else None
        sums = torch.zeros(rows, dtype=torch.float64, device=hidden.device)
        for start in range(0, len(picked), self._positions):
            cut = slice(start, start + self._positions)
            with dropout.only(places[cut]) if dropout else NOTHING:
                losses, of_slice = self._learn(picked[cut], labels[cut], 1.0 if learn else None)
            if gradient is not None:
                assert of_slice is not None
                gradient[cut] = of_slice
            sums.index_add_(0, into[cut], losses.double())
        if gradient is None:
            return sums, None
        full = torch.zeros_like(hidden)
        full[at] = gradient
        return sums, full

    def _learn(
        self, rows: Tensor, labels: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (the loss of each position, [positions], d(their scaled sum)/d(rows)), no graph.

        Args:
            rows: output of the last layer, [positions, hidden]; a view.
            labels: int64 [positions].
            scale: None: there is no gradient.
        """
        learn = scale is not None
        piece = rows.detach().requires_grad_(learn)
        with torch.set_grad_enabled(learn):
            if self._by_hand is None or self._product is None:
                losses = self._cross_entropy(self._logits(piece), labels, reduction="none")
                if scale is not None:
                    (losses.sum() * scale).backward()  # type: ignore[no-untyped-call]
                return losses.detach(), piece.grad
            logits: Tensor = self._product(self._stack.norm(piece))
        losses, of_logits = self._by_hand.take(logits, labels, scale)
        if learn:
            torch.autograd.backward(logits, of_logits)
        return losses, piece.grad

    def _find_product(self, hidden: Tensor) -> nn.Linear | None:
        """Return the linear layer whose output the logits are; None: they are not one's.

        Args:
            hidden: output of the last layer, [positions, hidden], to try on.
        """
        model = self._stack.model
        product = model.get_output_embeddings()  # type: ignore[operator]
        if (
            self._cross_entropy is not functional.cross_entropy
            or type(product) is not nn.Linear
            or any(
                type(p) is not nn.Parameter or p.requires_grad or p.dtype != hidden.dtype
                for p in product.parameters()
            )
        ):
            return None
        calls: list[tuple[Tensor, Tensor]] = []
        handle = product.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
        try:
            with torch.no_grad(), asking(model), in_mode(model, training=False):
                normed = self._stack.norm(hidden)
                logits = self._behind_norm(normed)
        finally:
            handle.remove()
        # The very tensors: not scaled, capped or widened on their way.
        if len(calls) != 1 or calls[0][1] is not logits or not _same(calls[0][0], normed[None]):
            return None
        self._by_hand = CrossEntropyOfLogits(product.weight.shape[0], product.weight.dtype)
        if why := self._by_hand.fuse(logits[0]):
            log.info("the loss is computed by torch's operators, not Triton's kernel: %s", why)
        return product

    def _logits(self, rows: Tensor) -> Tensor:
        """Let the model go on behind its decoder, which answers with `rows`, [positions, hidden].

        So scales, caps and biases of its logits are its own.
        """
        return self._behind_norm(self._stack.norm(rows))[0].float()

    def _behind_norm(self, normed: Tensor) -> Tensor:
        """Return the model's logits, [1, positions, words], of [positions, hidden] behind norm."""
        stack = self._stack
        ids = torch.zeros(1, 1, dtype=torch.int64, device=normed.device)  # nobody looks at them
        answer = stack.answer(last_hidden_state=normed[None])
        with standing_in(stack.decoder, lambda *_, **__: answer):
            logits: Tensor = stack.model(input_ids=ids, use_cache=False).logits
        return logits


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, [...] each, are the same memory in the same order."""
    where = [(t.data_ptr(), t.shape, t.stride(), t._version) for t in (one, other)]
    return where[0] == where[1]


def _labelled(targets: Tensor, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return where the labels are (row and token of each), and the labels, all on `device`.

    Found on the host: a GPU that picks by a mask makes the host wait for how many there are.
    """
    wanted = targets != IGNORED
    at = to_device(wanted.nonzero().T.contiguous(), device).unbind()
    return at, to_device(targets[wanted], device)
