"""What memory and page cost on decode's path, through the bindings, and how soon a revoke is seen.

Example: python -m benchmarks.memory --json memory.json
"""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.progress import track

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from windrow_sidecar._core import Arena, Geometry, Page, monotonic_ns

# The demo's arena: 128 chunks of 1.5 MiB.
GEOMETRY = Geometry(
    layers=6, kv_heads=4, head_dim=32, dtype_bytes=4, block_bytes=128 * 1024, chunks=128
)
RESERVED = 4
WORKER = 7  # its job epoch
REPEATS, CALLS = 31, 2_000
REVOKES = 300

# Waits for a grant and answers with the time at which it saw it.
CHILD = """
import sys
from windrow_sidecar._core import Arena, monotonic_ns
arena = Arena.attach(sys.argv[1])
page, seen = arena.page, 0
print("ready", flush=True)
while True:
    seen = page.wait_grant(seen, timeout_s=60)
    now = monotonic_ns()
    if page.read_grant()[12] < 0:
        break
    for chunk in arena.draining(7):
        arena.give_back(chunk, owner=7)
    page.publish_offer(*[0] * 8, (), *[0] * 7, now)
"""


class StructPage:
    """The baseline of publishing: `struct.pack_into` on a mapped page, without any ordering."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 4096)
        self._pack = struct.Struct("<16q").pack_into

    def publish_view(self, *words: int) -> None:
        """Write the words of a view and the time."""
        self._pack(self._map, 0, *words, monotonic_ns())


def nanoseconds_per_call(call: Callable[[], object], calls: int) -> float:
    """Mean over that many calls, with the loop's own share."""
    began = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - began) / calls


def calls_to_measure(arena: Arena, page: Page) -> dict[str, tuple[Callable[[], object], float]]:
    """Each with its goal in nanoseconds."""

    def take_and_return() -> None:
        arena.return_kv(arena.take_kv())

    def lend_and_give_back() -> None:
        for chunk in arena.lend(1, owner=WORKER):
            arena.give_back(chunk, owner=WORKER)

    return {
        "take_kv and return_kv": (take_and_return, 1_000),
        "lend and give_back of one chunk": (lend_and_give_back, 2_000),
        "counts": (arena.counts, 500),
        "publish a view": (
            lambda: page.publish_view(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
            250,
        ),
        "publish a grant": (
            lambda: page.publish_grant(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
            250,
        ),
        "read a grant": (page.read_grant, 250),
        "check the pause epoch": (lambda: page.pause_epoch, 100),
    }


def measure_calls(arena: Arena, repeats: int) -> list[Result]:
    """All calls in turn within each repeat, so that a slow moment hits them alike."""
    beside = StructPage()
    measured = calls_to_measure(arena, arena.page)
    timings: dict[str, list[float]] = {name: [] for name in measured}
    baseline: list[float] = []
    for _ in track(range(repeats), description="calls"):
        for name, (call, _goal) in measured.items():
            timings[name].append(nanoseconds_per_call(call, CALLS))
        baseline.append(
            nanoseconds_per_call(
                lambda: beside.publish_view(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                CALLS,
            )
        )
    results = []
    for name, (_call, goal) in measured.items():
        value, spread = middle(timings[name])
        struct_on_mmap = Baseline("struct on mmap", middle(baseline)[0])
        results.append(
            Result(
                name,
                value,
                "ns",
                "lower",
                goal,
                spread,
                struct_on_mmap if name == "publish a view" else None,
            )
        )
    return results


def measure_revokes(arena: Arena, socket: Path, revokes: int) -> list[Result]:
    """From the revoke in decode until a waiting worker sees it, and until the chunk is back."""
    arena.serve(str(socket))
    worker = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(socket)], stdout=subprocess.PIPE, text=True
    )
    if worker.stdout is None or worker.stdout.readline() != "ready\n":
        raise RuntimeError("the worker did not attach")
    page, seen_us, back_us = arena.page, [], []
    for _ in track(range(revokes), description="revokes"):
        arena.lend(1, owner=WORKER)
        offers = page.offer_seq
        began = monotonic_ns()
        arena.revoke(1)
        page.publish_grant(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        if page.wait_offer(offers, timeout_s=10) == offers:
            raise RuntimeError("the worker does not answer")
        back_us.append((monotonic_ns() - began) / 1e3)
        seen_us.append((page.read_offer()[16] - began) / 1e3)
    page.publish_grant(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0)
    worker.communicate(timeout=60)
    seen, seen_spread = middle(seen_us)
    back, back_spread = middle(back_us)
    return [
        Result("a revoke is seen by a waiting worker", seen, "us", "lower", 200, seen_spread),
        Result("a revoked chunk is back", back, "us", "lower", 500, back_spread),
    ]


def main() -> None:
    """Measure and write."""
    options = arguments(__doc__).parse_args()
    env = environment()
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        began = time.perf_counter()
        arena = Arena.create(GEOMETRY, reserved_chunks=RESERVED)
        created_ms = (time.perf_counter() - began) * 1e3
        results = [
            Result("make an arena of 192 MiB, resident", created_ms, "ms", "lower", 1_000),
            *measure_calls(arena, 5 if options.quick else REPEATS),
            *measure_revokes(arena, Path(folder) / "arena.sock", 30 if options.quick else REVOKES),
        ]
        arena.check()
        arena.close()
    write("memory", results, env, options.json)


if __name__ == "__main__":
    main()
