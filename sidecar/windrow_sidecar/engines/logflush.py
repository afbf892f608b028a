"""Write the event log once a second, away from the decode loop."""

from __future__ import annotations

import threading

from windrow.eventlog import FLUSH_INTERVAL_S, EventLog


class LogFlusher:
    """A thread in the background for as long as the engine serves."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="windrow-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left and end."""
        self._over.set()
        self._thread.join(timeout=2 * FLUSH_INTERVAL_S)
        self._log.flush()

    def _run(self) -> None:
        while not self._over.wait(FLUSH_INTERVAL_S):
            self._log.flush()
