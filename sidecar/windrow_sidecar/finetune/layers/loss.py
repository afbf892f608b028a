"""What a micro-batch's loss is, and its gradient at the output of the last layer.

Only positions with a label pass through norm and head, a slice at a time, so that the logits (the
largest tensor of a step: positions x vocabulary) never exist as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from windrow_sidecar.finetune.base.structure import asking, logits_of, unsupported
from windrow_sidecar.finetune.layers.layerwise import DecoderStack
from windrow_sidecar.finetune.training.data import IGNORED

# Logits of one slice: 2**22 fp32 elements, 16 MiB.
SLICE_ELEMENTS = 1 << 22


class Head:
    """Final norm, output embedding and cross-entropy."""

    def __init__(self, stack: DecoderStack) -> None:
        """Take the head of a model.

        Raises:
            UserError: the model makes other logits of the last hidden states than norm, head and
                soft cap do.
        """
        config = stack.config
        self._norm: nn.Module = stack.norm
        self._head: nn.Module = stack.head
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._positions = max(1, SLICE_ELEMENTS // int(config.vocab_size))
        with torch.no_grad(), asking(stack.model):
            theirs, embedded = logits_of(stack.model, stack.layers, stack.probe)
            ours = self._logits(embedded)
        if not torch.allclose(ours, theirs.float(), rtol=1e-2, atol=1e-3):
            raise unsupported(stack.model, "more than a norm and a head make its logits")

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over all targets; shapes as below."""
        with torch.no_grad():
            wanted = targets != IGNORED
            rows, labels = hidden[wanted], targets[wanted]
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            for start in range(0, len(rows), self._positions):
                cut = slice(start, start + self._positions)
                total += self._slice(rows[cut], labels[cut])
            return total

    def loss_and_gradient(
        self, hidden: Tensor, targets: Tensor, *, labels_in_batch: int
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the cross-entropy, d(mean loss of the whole batch)/d(hidden)).

        Args:
            hidden: [rows, tokens, hidden], output of the last layer.
            targets: [rows, tokens], int64: what follows each token; -100: ignored.
            labels_in_batch: by which the batch's loss is divided, over all its micro-batches.
        """
        wanted = targets != IGNORED
        rows, labels = hidden.detach()[wanted], targets[wanted]
        gradient = torch.empty_like(rows)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(rows), self._positions):
            cut = slice(start, start + self._positions)
            piece = rows[cut].requires_grad_()
            loss = self._slice(piece, labels[cut])
            (loss / labels_in_batch).backward()  # type: ignore[no-untyped-call]
            assert piece.grad is not None
            gradient[cut] = piece.grad
            total += loss.detach()
        full = torch.zeros_like(hidden)
        full[wanted] = gradient
        return total, full

    def _slice(self, rows: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self._logits(rows), labels, reduction="sum")

    def _logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self._head(self._norm(rows)).float()
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
