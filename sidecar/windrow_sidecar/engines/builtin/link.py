"""The engine's end of the channel to the HTTP front: requests in, tokens out."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

from windrow_sidecar.engines.builtin.web.channel import PeerGone, SocketChannel
from windrow_sidecar.engines.builtin.web.messages import (
    Cancel,
    EngineReady,
    Finished,
    FrontUp,
    Output,
    Submit,
)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Content of one engine message for one request."""

    tokens: list[int]
    end: Finished | None


class EngineLink:
    """Link that carries requests to the engine, and tokens back to their readers."""

    def __init__(self, channel: SocketChannel, on_gone: asyncio.Event) -> None:
        self._channel, self._gone = channel, on_gone
        self._ids = itertools.count(1)
        self._inboxes: dict[int, asyncio.Queue[RequestUpdate]] = {}
        self.max_context = 0  # 0: not ready

    def start(self) -> None:
        """Listen to the engine on the running event loop, and say that the port answers."""
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._on_readable)
        self._send(FrontUp())

    def submit(self, **fields: Any) -> tuple[int, asyncio.Queue[RequestUpdate]]:  # noqa: ANN401
        """Send a request (all fields of Submit but its id); returns its id and its inbox."""
        request_id = next(self._ids)
        inbox = self._inboxes[request_id] = asyncio.Queue()
        self._send(Submit(id=request_id, **fields))
        return request_id, inbox

    def forget(self, request_id: int, *, error: str) -> None:
        """Tell the engine that nobody wants more of a request; nothing where it has ended."""
        if self._inboxes.pop(request_id, None) is not None and not self._gone.is_set():
            self._send(Cancel(request_id, error))

    def _on_readable(self) -> None:
        try:
            for message in self._channel.receive():
                if isinstance(message, Output):
                    self._spread(message)
                elif isinstance(message, EngineReady):
                    self.max_context = message.max_context
        except PeerGone:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._gone.set()

    def _spread(self, output: Output) -> None:
        tokens: dict[int, list[int]] = {}
        for request_id, token in output.tokens:
            tokens.setdefault(request_id, []).append(token)
        ends = {end.id: end for end in output.finished}
        for request_id in {**tokens, **ends}:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.put_nowait(RequestUpdate(tokens.get(request_id, []), ends.get(request_id)))
            if request_id in ends:
                self._inboxes.pop(request_id, None)

    def _send(self, message: object) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._channel.send(message)
            if self._channel.unsent_bytes:
                loop.add_writer(self._channel.fileno(), self._on_writable)
        except PeerGone:
            self._gone.set()

    def _on_writable(self) -> None:
        try:
            self._channel.flush()
        except PeerGone:
            self._gone.set()
        if not self._channel.unsent_bytes or self._gone.is_set():
            asyncio.get_running_loop().remove_writer(self._channel.fileno())
