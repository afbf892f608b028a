"""Run the parts of `.ci/run`: stage by stage, lanes of a stage side by side, also after a red one.

Parts beside others write to a file each, in build/ci/, and are printed whole as they end; a part
that has the machine to itself is printed as it runs. The last lines say how long each part took,
and which were red. An interrupt ends what runs, and its children, and prints what they have said.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

WIDTH = 80
LOGS = Path("build", "ci")
# After an interrupt, which a terminal sends as well: so long parts may clean up, and then what they
# have left behind has until it is killed.
ENDS_WITHIN_S, LEFT_WITHIN_S = 60.0, 5.0
INTERRUPTED = 130

Part = tuple[str, ...]
Lane = tuple[Part, ...]
Stage = tuple[Lane, ...]


def tests(target: str, *passes: str) -> Part:
    """Return the part that runs those passes of a make target; none: all of them."""
    only = " ".join(f"--only {shlex.quote(name)}" for name in passes)
    return ("make", target, *([f"PASSES={only}"] if only else ()))


# A node's tests mostly wait for pods; beside them runs what neither measures nor has a deadline for
# a worker in idle time, and clang-tidy, which takes a minute of one core. A node has namespaces and
# a cgroup of its own.
STAGES: tuple[Stage, ...] = (
    ((("make", "packages"),),),
    ((("make", "setup"),),),
    ((("make", "-j2", "--output-sync=target", "lint", "docs"),),),
    ((tests("test"),),),
    (
        (("make", "test-node"), ("make", "chart")),
        (
            tests(
                "test-extended",
                "side by side",
                "equality, plain kernels",
                "equality, AVX2 kernels",
            ),
            ("make", "sglang"),
            tests("test-sglang", "two at a time"),
            ("make", "tidy"),
        ),
    ),
    ((tests("test-extended", "two at a time", "alone"),),),
    ((tests("test-sglang", "alone"),),),
)


@dataclass
class Parts:
    """Holds what has run, what runs now, and whether it was interrupted. Lanes are threads.

    Attributes:
        took: each part that has ended, seconds that it took, exit code.
        seconds: that all of them took.
    """

    took: list[tuple[Part, float, int]] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: threading.Event = field(default_factory=threading.Event)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: threading.Thread | None = None

    def run(self, stages: Sequence[Stage]) -> int:
        """Run them all; returns 0, 1 where a part was red, 130 after an interrupt."""
        begun = time.monotonic()
        for stage in stages:
            beside = len(stage) > 1
            lanes = [threading.Thread(target=self._lane, args=(lane, beside)) for lane in stage]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                while lane.is_alive():  # a join without end would keep signals waiting
                    lane.join(0.2)
        if self._ending is not None:
            self._ending.join()
        self.seconds = time.monotonic() - begun
        return INTERRUPTED if self.interrupted.is_set() else int(any(c for _, _, c in self.took))

    def _lane(self, parts: Lane, beside: bool) -> None:
        for part in parts:
            if self.interrupted.is_set():
                return
            begun = time.monotonic()
            code = self._aside(part) if beside else self._shown(part)
            with self._lock:
                self.took.append((part, time.monotonic() - begun, code))

    def _shown(self, part: Part) -> int:
        self._say(_heading(part))
        return self._wait(part, None)

    def _aside(self, part: Part) -> int:
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{re.sub('[^a-z0-9]+', '-', ' '.join(part).lower()).strip('-')}.log"
        self._say(f"begins beside others, see {log}: {shlex.join(part)}")
        with log.open("wb") as out:
            code = self._wait(part, out.fileno())
        self._say(f"{_heading(part)}\n{log.read_text(encoding='utf-8', errors='replace')}")
        return code

    def _wait(self, part: Part, out: int | None) -> int:
        # A group of its own: an interrupt reaches all that the part has started, and only that.
        with self._lock:
            if self.interrupted.is_set():
                return INTERRUPTED
            process = subprocess.Popen(
                part, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )
            self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code if code >= 0 else 128 - code

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """End what runs; a handler of signals."""
        if not self.interrupted.is_set():
            self.interrupted.set()
            self._ending = threading.Thread(target=self._end)
            self._ending.start()

    def _end(self) -> None:
        with self._lock:
            groups = [process.pid for process in self._running]
        _signal(groups, signal.SIGINT)
        _await(lambda: not self._running, ENDS_WITHIN_S)
        # A shell has what it starts in the background ignore interrupts.
        _signal(groups, signal.SIGTERM)
        _await(lambda: not _signal(groups, 0), LEFT_WITHIN_S)
        _signal(groups, signal.SIGKILL)

    def summary(self) -> Iterator[str]:
        """Return the seconds of each part, then the red ones."""
        yield f"{' summary of all parts ':=^{WIDTH}}"
        for part, seconds, _ in self.took:
            yield f"{seconds:.0f} s: {shlex.join(part)}"
        yield f"{self.seconds:.0f} s: all parts"
        for part, _, code in self.took:
            if code:
                yield f"red: {shlex.join(part)} (exit code {code})"


def _signal(groups: Sequence[int], number: int) -> int:
    """Signal groups of processes; returns how many are left."""
    left = 0
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            left += 1
    return left


def _await(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


def _heading(part: Part) -> str:
    return f"{f' {shlex.join(part)} ':#^{WIDTH}}"


def main(stages: Sequence[Stage] = STAGES) -> int:
    """Run the stages and sum them up; returns the exit code."""
    parts = Parts()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, parts.end)
    code = parts.run(stages)
    print("\n".join(parts.summary()), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
