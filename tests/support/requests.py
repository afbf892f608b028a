"""Completions asked of one decode pod, one after another, while a test goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import httpx
from waiting import wait_until

# Between two requests: a worker that loads its libraries has only the time that decode leaves.
BETWEEN_S = 0.3


@dataclass
class Requests:
    """Asks from a thread until the block ends; each request must be answered with tokens.

    Attributes:
        endpoint: of the engine.
        answered: how many were answered, and well.
        failures: what became of the others.
    """

    endpoint: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Requests:
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=70)

    def go_on(self, more: int) -> None:
        """Wait until so many further requests have been answered, or one was not."""
        target = self.answered + more
        wait_until(
            lambda: self.failures or self.answered >= target, f"{more} more requests", seconds=60
        )

    def _ask(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not self._stop.wait(BETWEEN_S):
                try:
                    ask(http, self.endpoint)
                    self.answered += 1
                except (httpx.HTTPError, AssertionError) as error:
                    self.failures.append(repr(error))


def ask(http: httpx.Client, endpoint: str, tokens: int = 24) -> None:
    """Ask for a completion; fails where it is not answered with tokens."""
    body = {"model": "m", "prompt": "A coffee machine", "max_tokens": tokens}
    answer = http.post(f"{endpoint}/v1/completions", json=body)
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] > 0
