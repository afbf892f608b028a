"""Batch tokens on their way to the front: one message a step at most."""

from __future__ import annotations

from windrow_sidecar.engines.builtin.web.channel import SocketChannel
from windrow_sidecar.engines.builtin.web.messages import Finished, Output


class TokenBatcher:
    """Collects what steps produce.

    A first token and the end of a request go out with their step; other tokens every `interval`
    steps.
    """

    def __init__(self, channel: SocketChannel, *, interval: int) -> None:
        self._channel, self._interval = channel, interval
        self._tokens: list[tuple[int, int]] = []
        self._finished: list[Finished] = []
        self._started: set[int] = set()
        self._steps = 0
        self._urgent = False

    def token(self, request_id: int, token: int) -> None:
        """Keep a token."""
        self._tokens.append((request_id, token))
        if request_id not in self._started:
            self._started.add(request_id)
            self._urgent = True

    def finished(self, end: Finished) -> None:
        """Keep a request's end."""
        self._finished.append(end)
        self._started.discard(end.id)
        self._urgent = True

    def end_step(self) -> None:
        """Send what has been kept, if it is time."""
        self._steps += 1
        if self._urgent or self._steps >= self._interval:
            self.flush()

    def flush(self) -> None:
        """Send what has been kept, if anything; and what the socket did not take before."""
        if self._tokens or self._finished:
            self._channel.send(Output(tuple(self._tokens), tuple(self._finished)))
            self._tokens, self._finished = [], []
        else:
            self._channel.flush()
        self._steps, self._urgent = 0, False
