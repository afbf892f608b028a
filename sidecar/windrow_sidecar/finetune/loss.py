"""What a micro-batch's loss is, and its gradient at the output of the last layer.

Only positions with a label pass through norm and head, a slice at a time, so that the logits (the
largest tensor of a step: positions x vocabulary) never exist as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windrow_sidecar.finetune.data import IGNORED

# Logits of one slice: 2**22 fp32 elements, 16 MiB.
SLICE_ELEMENTS = 1 << 22


class Head:
    """Final norm, output embedding and cross-entropy."""

    def __init__(self, norm: nn.Module, head: nn.Module, config: Any) -> None:  # noqa: ANN401
        self._norm, self._head = norm, head
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._positions = max(1, SLICE_ELEMENTS // int(config.vocab_size))

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over all labels; shapes as below."""
        with torch.no_grad():
            rows, targets = _targets(hidden, labels)
            total = torch.zeros((), dtype=torch.float64)
            for start in range(0, len(rows), self._positions):
                cut = slice(start, start + self._positions)
                total += self._slice(rows[cut], targets[cut])
            return total

    def loss_and_gradient(
        self, hidden: Tensor, labels: Tensor, *, labels_in_batch: int
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the cross-entropy, d(mean loss of the whole batch)/d(hidden)).

        Args:
            hidden: [rows, width, hidden], output of the last layer.
            labels: [rows, width], int64; position i is predicted from i - 1; -100: ignored.
            labels_in_batch: by which the batch's loss is divided, over all its micro-batches.
        """
        rows, targets = _targets(hidden.detach(), labels)
        gradient = torch.empty_like(rows)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(rows), self._positions):
            cut = slice(start, start + self._positions)
            piece = rows[cut].requires_grad_()
            loss = self._slice(piece, targets[cut])
            (loss / labels_in_batch).backward()  # type: ignore[no-untyped-call]
            assert piece.grad is not None
            gradient[cut] = piece.grad
            total += loss.detach()
        full = torch.zeros_like(hidden)
        full[:, :-1][labels[:, 1:] != IGNORED] = gradient
        return total, full

    def _slice(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = self._head(self._norm(rows)).float()
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return functional.cross_entropy(logits, targets, reduction="sum")


def _targets(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pick the positions that predict a label: ([n, hidden], [n])."""
    wanted = labels[:, 1:] != IGNORED
    return hidden[:, :-1][wanted], labels[:, 1:][wanted]
