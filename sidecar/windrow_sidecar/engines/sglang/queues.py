"""Read which requests wait in SGLang's scheduler, and what each says of its wait."""

from __future__ import annotations

from typing import Any, Final

# Of a request's `custom_params`: for how many milliseconds a policy may hold it back.
DEFERRAL_PARAMETER: Final = "windrow_deferral_ms"
_LEAST_MS, _MOST_MS = 1.0, 60_000.0


def waiting_requests(scheduler: Any) -> list[Any]:  # noqa: ANN401
    """Return the requests that find no KV. Those whose KV is on its way have theirs."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is None:
        return [*scheduler.waiting_queue]
    arrived = [entry.req for entry in queue.queue if entry.waiting_for_input]
    return [*queue.retracted_queue, *arrived]


def own_deferral_us(request: Any) -> int:  # noqa: ANN401
    """Return a request's own bound in microseconds; 0 where it has none, or not a valid one.

    A bound outside of 1 ms to 1 minute counts as the nearer of the two, as a policy's does.
    """
    said = getattr(getattr(request, "sampling_params", None), "custom_params", None)
    bound = said.get(DEFERRAL_PARAMETER) if isinstance(said, dict) else None
    if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != bound:
        return 0
    # An integer of JSON may be longer than a float can be.
    return round(1000 * min(max(bound, _LEAST_MS), _MOST_MS))
