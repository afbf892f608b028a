"""Choose tokens from logits, on the logits' device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from windrow_sidecar.engines.builtin.scheduler import EngineRequest


class Draws(NamedTuple):
    """Sampling parameters, on the device, of the requests of a batch that have a temperature.

    rows [n]: theirs in the batch, int64; temperature above 0, top_p, and uniform in [0, 1) [n].
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor


def draws_of(requests: Sequence[EngineRequest], device: torch.device) -> Draws | None:
    """Return how tokens of these requests are drawn; None where none has a temperature.

    Never waits for the device: the copy is queued, from pinned memory. Called before a step is
    launched, so that sampling can follow its logits at once.
    """
    settings = [
        # The number comes from the request's own generator, on the host: a seed gives the same
        # numbers whatever else is in the batch.
        (row, r.submit.temperature, r.submit.top_p, float(torch.rand((), generator=r.generator)))
        for row, r in enumerate(requests)
        if r.generator is not None
    ]
    if not settings:
        return None
    host = torch.tensor(settings, dtype=torch.float64).t().contiguous()  # exact for a row's number
    if device.type == "cuda":
        host = host.pin_memory()
    rows, *others = host.to(device, non_blocking=True)
    return Draws(rows.to(torch.int64), *(other.float() for other in others))


def sample(logits: torch.Tensor, requests: Sequence[EngineRequest]) -> list[int]:
    """Return one token per request from logits [b, vocab], greedy where the temperature is 0."""
    chosen = redraw(logits.argmax(-1), logits, draws_of(requests, logits.device))
    tokens: list[int] = chosen.tolist()
    return tokens


def redraw(greedy: torch.Tensor, logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    """Replace the greedy choice [>= b] of those requests that have a temperature, in place.

    Costs nothing where none has; otherwise a sort of their logits, without waiting for the device.
    """
    if draws is None:
        return greedy
    index, *settings = draws
    return greedy.index_copy_(0, index, draw(logits[index], *settings))


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
