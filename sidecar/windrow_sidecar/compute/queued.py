"""Values that go to a GPU and come back without the host waiting for what the GPU computes.

On the host everything is there when a call returns, and nothing here does more than a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's values, [...], on `device`, behind what is queued there.

    On a GPU by way of pinned memory: from other memory torch waits for all that its stream has.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Reading:
    """A number, [], on its way from a device."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = number.detach()
        if number.is_cuda:
            self._host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._host.copy_(number, non_blocking=True)
            # The waiting thread sleeps: a spinning worker would take a core from decode.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))

    @property
    def is_here(self) -> bool:
        """True where `value` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def value(self) -> float:
        """Return it; waits until it is here."""
        if self._event is not None and not self.is_here:
            self._event.synchronize()
        return float(self._host)


def behind(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return what another thread calls before it reads these tensors, [...] each.

    What that thread queues from then on begins behind what this one has queued so far: on a GPU
    each thread has a stream of its own choice, and streams of shares wait for no other.
    """
    of_gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = []
    for device in of_gpus:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append((device, event))

    def follow() -> None:
        for device, event in events:
            torch.cuda.current_stream(device).wait_event(event)

    return follow
