"""Bring finished adapters to where the pod's servers load them from, as the operator asks.

Each copy is made by a process (`windrow_sidecar.finetune.arrival`) that yields to decode in
everything and ends with the agent. For each namespace one runs at a time, so that a place that
answers slowly holds up nobody else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from windrow.proto import attach_pb2
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import access_document

_log = logging.getLogger(__name__)

_MODULE = "windrow_sidecar.finetune.arrival"
_ENDS_WITHIN_S = 900.0
_MOST_AT_A_TIME = 4  # each takes 0.1 GB
_MOST_ANSWER_BYTES = 64 * 1024
# A native client would pass by the guard of the network.
_ENVIRONMENT = {"HF_HUB_DISABLE_XET": "1"}


class AdapterStore:
    """Carries out orders to store adapters, those for a directory one after the other.

    Args:
        settings: of the agent.
        told: takes what became of each order.
    """

    def __init__(
        self, settings: AgentSettings, told: Callable[[attach_pb2.AdapterStored], None]
    ) -> None:
        self._settings, self._told = settings, told
        self._turns: dict[str, asyncio.Lock] = {}  # by the directory of a namespace
        self._places = asyncio.Semaphore(_MOST_AT_A_TIME)
        self._waiting: set[tuple[str, str]] = set()  # directories of namespaces, and digests
        self._processes: set[asyncio.subprocess.Process] = set()

    async def store(self, order: attach_pb2.StoreAdapter) -> None:
        """Have an adapter stored, or removed, and tell what became of it; twice the same is one."""
        copy = order.cache, order.digest
        if copy in self._waiting and not order.forget:
            return
        self._waiting.add(copy)
        try:
            turn = self._turns.setdefault(order.cache, asyncio.Lock())
            async with turn, self._places:
                error = await self._run(order)
        finally:
            self._waiting.discard(copy)
        if error:
            what = "removed" if order.forget else "stored"
            _log.warning("the adapter of job %s is not %s: %s", order.job_uid, what, error)
        if order.forget:
            return
        self._told(
            attach_pb2.AdapterStored(job_uid=order.job_uid, digest=order.digest, error=error)
        )

    async def close(self) -> None:
        """End the processes that run; their drafts go with a later order."""
        for process in [*self._processes]:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run(self, order: attach_pb2.StoreAdapter) -> str:
        """Return why the adapter is not stored; "": it is."""
        python = sys.executable
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", "windrow_sidecar.agent.spawn", str(os.getpid()), "--"),
            *(python, "-m", _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
        )
        line = json.dumps(_document(self._settings, order)) + "\n"
        self._processes.add(process)
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                said, _ = await process.communicate(line.encode())
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"it was not copied within {_ENDS_WITHIN_S:.0f} s"
        finally:
            self._processes.discard(process)
        try:
            answer = json.loads(said[:_MOST_ANSWER_BYTES])
        except ValueError:
            code = process.returncode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return f"the process that copies it ended with {how}; see the sidecar's log"
        if "error" not in answer:
            return ""
        return " ".join(filter(None, (f"{answer['error']}.", answer.get("remedy"))))


def _document(settings: AgentSettings, order: attach_pb2.StoreAdapter) -> dict[str, object]:
    return {
        "source": order.source,
        "forget": order.forget,
        "digest": order.digest,
        "cache": order.cache,
        "cacheBytes": order.cache_bytes,
        "keep": list(order.keep),
        "trees": list(order.outputs.trees),
        "mounts": list(order.outputs.mounts),
        "access": access_document(settings, order.access),
        "secret": dict(order.secret),
    }
