"""From logits to tokens, on the device that the logits are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windrow_sidecar.engines.builtin.scheduler import EngineRequest


def sample(logits: torch.Tensor, requests: Sequence[EngineRequest]) -> list[int]:
    """Return one token per request from logits [b, vocab], greedy where the temperature is 0."""
    tokens: list[int] = redraw(logits.argmax(-1), logits, requests).tolist()
    return tokens


def redraw(
    greedy: torch.Tensor, logits: torch.Tensor, requests: Sequence[EngineRequest]
) -> torch.Tensor:
    """Replace the greedy choice [>= b] of those requests that have a temperature, in place.

    Costs nothing where none has; otherwise a sort of their logits, without waiting for the device.
    """
    rows = [row for row, request in enumerate(requests) if request.generator is not None]
    if not rows:
        return greedy
    drawn = [requests[row] for row in rows]
    device = logits.device
    settings = torch.tensor(
        [
            # The number comes from the request's own generator, on the host: a seed gives the same
            # numbers whatever else is in the batch.
            (r.submit.temperature, r.submit.top_p, float(torch.rand((), generator=r.generator)))
            for r in drawn
        ]
    ).to(device)
    index = torch.tensor(rows, device=device)
    return greedy.index_copy_(0, index, draw(logits[index], *settings.unbind(1)))


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw from the smallest set of tokens whose probability reaches top_p.

    logits: [n, vocab]; temperature above 0, top_p, and `uniform` in [0, 1) as random numbers: [n].
    Returns tokens [n].
    """
    scaled = logits.float() / temperature[:, None]
    probabilities, order = torch.softmax(scaled, -1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where(before < top_p[:, None], 0.0)
    reached = kept.cumsum(-1)
    choice = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)
    # Rounding may put the number at the very end of the sum.
    last = (kept > 0).sum(-1, keepdim=True) - 1
    return order.gather(-1, choice.minimum(last)).squeeze(-1)
