"""Cross-entropy over logits that are cut by words: no rank ever has all of a token's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windrow_sidecar.compute.communicator import Communicator


class VocabularyCrossEntropy:
    """`torch.nn.functional.cross_entropy` of logits whose words are cut over the ranks.

    Two collectives of one and two numbers for each token take the place of the gathered logits.

    Args:
        ranks: that share the words.
        words: [begin, end) of this rank's logits that are words; what follows them is padding.
    """

    def __init__(self, ranks: Communicator, words: tuple[int, int]) -> None:
        self._ranks, self._words = ranks, words

    def __call__(self, logits: Tensor, labels: Tensor, *, reduction: str) -> Tensor:
        """Return the loss of each token, [tokens], or with `reduction` "sum" their sum, [].

        Args:
            logits: [tokens, words of this rank with their padding].
            labels: int64 [tokens], of the whole vocabulary; the same on every rank.
            reduction: "none" or "sum".
        """
        begin, end = self._words
        losses: Tensor = _CrossEntropy.apply(logits[:, : end - begin], labels - begin, self._ranks)
        return losses.sum() if reduction == "sum" else losses


class _CrossEntropy(torch.autograd.Function):
    """log(sum of exp over all ranks' words) - the logit of the label, for each token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, at: Tensor, ranks: Communicator) -> Tensor:  # noqa: ANN401
        tokens, words = logits.shape
        largest = logits.new_full((tokens,), -torch.inf) if words == 0 else logits.amax(dim=1)
        shifted = logits - ranks.largest(largest)[:, None]
        mine = (at >= 0) & (at < words)
        # A rank without words has nothing to pick from.
        safe = at.clamp(0, max(0, words - 1))
        picked = shifted.new_zeros(tokens)
        if words:
            picked = torch.where(mine, shifted.gather(1, safe[:, None])[:, 0], picked)
        powers = shifted.exp()
        sums = ranks.sum(torch.stack([powers.sum(dim=1), picked]))
        ctx.save_for_backward(powers.div_(sums[0][:, None]), safe, mine)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        shares, safe, mine = ctx.saved_tensors
        of_logits = shares * gradient[:, None]
        if of_logits.shape[1]:
            of_label = torch.where(mine, gradient, torch.zeros_like(gradient))
            of_logits.scatter_add_(1, safe[:, None], -of_label[:, None])
        return of_logits, None, None
