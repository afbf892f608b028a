"""Keeps the demo's picture current: reads the API server twice a second, in a thread."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from windrow.client import WindrowClient
from windrow.errors import Transient, UserError
from windrow.views import EventView, JobView, SlotView
from windrow_lab.cluster.manifests import NAMESPACE
from windrow_lab.demo.display import Frame, History, draw, line

log = logging.getLogger(__name__)

READ_EVERY_S = 0.5
LINE_EVERY_S = 5.0


class Watcher:
    """A context manager that shows what happens: a live picture, or a line every five seconds.

    It only looks: what it cannot read just now is shown as it was.

    Args:
        client: of its own, since its thread reads while the caller's acts.
        console: where it is shown; a terminal gets the picture.
        kubernetes: version.
        policy: name of the policy that decides.
    """

    def __init__(
        self, client: WindrowClient, console: Console, *, kubernetes: str, policy: str
    ) -> None:
        self._client, self._console = client, console
        self._kubernetes, self._policy = kubernetes, policy
        self._began = time.monotonic()
        self._phase, self._objective_ms, self._job_name = "starting", 0.0, ""
        self._tpots: dict[str, History] = {}
        self._steps: dict[str, int] = {}
        self._losses = History()
        self._slots: list[SlotView] = []
        self._job: JobView | None = None
        self._events: list[EventView] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def say(self, phase: str) -> None:
        """Name what the run does now."""
        self._phase = phase
        if not self._console.is_terminal:
            self._print(f"{self._clock():5.1f} s  {phase}")

    def objective(self, milliseconds: float) -> None:
        """Show the objective from now on."""
        self._objective_ms = milliseconds

    def follow(self, job_name: str) -> None:
        """Show this job from now on."""
        self._job_name = job_name

    def frame(self) -> Frame:
        """Return what there is to show."""
        return Frame(
            elapsed_s=self._clock(),
            kubernetes=self._kubernetes,
            policy=self._policy,
            objective_ms=self._objective_ms,
            phase=self._phase,
            slots=self._slots,
            job=self._job,
            tpot_history={name: list(h.values) for name, h in self._tpots.items()},
            loss_history=list(self._losses.values),
            events=self._events,
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _clock(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        if not self._console.is_terminal:
            self._print_lines()
            return
        with Live(draw(self.frame()), console=self._console, auto_refresh=False) as live:
            while not self._stop.wait(READ_EVERY_S):
                self._read()
                live.update(draw(self.frame()), refresh=True)

    def _print_lines(self) -> None:
        while not self._stop.wait(LINE_EVERY_S):
            self._read()
            if self._slots:
                self._print(line(self.frame()))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _read(self) -> None:
        try:
            slots = self._client.slots(namespace=NAMESPACE)
            job = self._client.get(self._job_name, namespace=NAMESPACE) if self._job_name else None
            self._events = self._client.recent_events(namespace=NAMESPACE)
        except (Transient, UserError) as e:
            log.debug("cannot read the API server: %s", e)
            return
        self._slots = slots
        for slot in slots:
            # Read more often than it is written: each report counts once.
            if slot.tpot_p99_s is not None and slot.steps != self._steps.get(slot.name):
                self._tpots.setdefault(slot.name, History()).add(slot.tpot_p99_s * 1e3)
            self._steps[slot.name] = slot.steps
        if job is not None and (self._job is None or job.step != self._job.step):
            self._losses.add(job.loss)
        self._job = job
