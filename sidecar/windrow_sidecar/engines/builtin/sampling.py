"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windrow_sidecar.engines.builtin.scheduler import Request


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Return one token per request from logits [b, vocab], greedy where the temperature is 0."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, request in enumerate(requests):
        if request.generator is not None:
            tokens[row] = _draw(logits[row], request)
    return tokens


def _draw(logits: torch.Tensor, request: Request) -> int:
    """Draw from the smallest set of tokens whose probability reaches top_p."""
    probabilities, order = torch.softmax(logits / request.submit.temperature, -1).sort(
        descending=True
    )
    before = probabilities.cumsum(0) - probabilities
    kept = probabilities.where(before < request.submit.top_p, 0.0)
    choice = torch.multinomial(kept, 1, generator=request.generator)
    return int(order[choice])
