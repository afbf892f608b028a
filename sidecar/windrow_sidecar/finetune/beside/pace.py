"""When a worker may compute beside its tasklets: whenever decode grants it anything."""

from __future__ import annotations

from windrow_sidecar._core import Page
from windrow_sidecar.finetune.beside.grants import Used, may_launch
from windrow_sidecar.qos.view import Decision

_DECODE = 0


class GrantPace:
    """When the worker may compute at all, for what it does beside its tasklets.

    On its core such work takes as much from decode as a tasklet does, so it stands still when no
    tasklet may run. Reads the page only, so any thread may ask.
    """

    def __init__(self, page: Page) -> None:
        self._page, self._seq = page, -1

    def granted(self) -> bool:
        """Whether the newest grant is of any compute, and decode is there."""
        self._seq = self._page.grant_seq
        grant = Decision(*self._page.read_grant())
        silent_ns = self._page.heartbeat_age_ns(_DECODE)
        return may_launch(grant, Used(), 0, decode_silent_ns=silent_ns)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is another grant."""
        self._page.wait_grant(self._seq, timeout_s=timeout_s)
