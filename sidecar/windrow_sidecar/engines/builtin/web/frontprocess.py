"""Start the HTTP front as the engine's child, before anything slow, and end it with the engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from windrow.errors import UserError, WindrowError
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.web.channel import PeerGone, SocketChannel
from windrow_sidecar.engines.builtin.web.front import FrontSettings
from windrow_sidecar.engines.builtin.web.messages import FrontUp

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 2.0


class FrontProcess:
    """The child and our end of the channel to it."""

    def __init__(
        self, settings: EngineSettings, *, eos_token_ids: Sequence[int], cpus: Sequence[int]
    ) -> None:
        listening = listen(settings.host, settings.port)
        ours, theirs = socket.socketpair()
        with listening, theirs:
            for_front = FrontSettings(
                channel_fd=theirs.fileno(),
                listen_fd=listening.fileno(),
                model_path=str(settings.model_path),
                served_name=settings.served_name,
                eos_token_ids=list(eos_token_ids),
                disaggregated=settings.disaggregated,
                cpus=list(cpus),
            )
            # It stays in our process group: across sessions its niceness would mean nothing.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "windrow_sidecar.engines.builtin.web.front",
                    for_front.to_json(),
                ],
                pass_fds=(theirs.fileno(), listening.fileno()),
            )
        self.channel = SocketChannel(ours)

    def wait_until_up(self) -> None:
        """Return once the port answers. Raises WindrowError when it does not come up."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.channel.wait(0.1)
            try:
                if any(isinstance(message, FrontUp) for message in self.channel.receive()):
                    return
            except PeerGone:
                break
        raise WindrowError("the HTTP front did not start; its log says why")

    def stop(self) -> None:
        """Close the channel, which ends the front; kill it where that is not enough. Reaps it."""
        self.channel.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
            field="--port",
            remedy="Choose another port, or end what uses it.",
            reason="PortInUse",
        ) from error
    return sock
