"""Cost of memory and page, in the core and through the bindings, and the delay of a revoke.

Builds the benchmark of the core (`benchmarks/native`) and runs it; takes the rest through Python.

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

from benchmarks.allocation_trace import peak_bytes, read_trace, replay
from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from benchmarks.native.rows import measure_native
from benchmarks.partition import measure_partition
from windrow_sidecar._core import (
    Arena,
    DeviceAllocator,
    Geometry,
    Page,
    monotonic_ns,
    small_pool_blocks_for,
)
from windrow_sidecar.qos.view import Grant, Offer, View

# The demo's arena: 128 chunks of 1.5 MiB.
GEOMETRY = Geometry(
    layers=6, kv_heads=4, head_dim=32, dtype_bytes=4, block_bytes=128 * 1024, chunks=128
)
RESERVED = 4
WORKER = 7  # its job epoch
REPEATS, CALLS = 31, 2_000
REVOKES = 300
TRACE = ROOT / "benchmarks" / "traces" / "lora-2x1024.txt"
FRAGMENTATION_GOAL_MB = 100


# Waits for a grant and answers with the time at which it saw it.
CHILD = """
import sys
from windrow_sidecar._core import Arena, monotonic_ns
from windrow_sidecar.qos.view import Grant, Offer
arena = Arena.attach(sys.argv[1])
page, seen = arena.page, 0
print("ready", flush=True)
while True:
    seen = page.wait_grant(seen, timeout_s=60)
    now = monotonic_ns()
    if Grant._make(page.read_grant()).chunks < 0:
        break
    for chunk in arena.draining(7):
        arena.give_back(chunk, owner=7)
    page.publish_offer(Offer(tokens_done=now))
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


def calls_to_measure(
    arena: Arena, page: Page
) -> dict[str, tuple[Callable[[], object], float | None]]:
    """Each with its goal in nanoseconds, where it has one."""

    def take_and_return() -> None:
        arena.return_kv(arena.take_kv())

    def lend_and_give_back() -> None:
        for chunk in arena.lend(1, owner=WORKER):
            arena.give_back(chunk, owner=WORKER)

    return {
        "bindings: take_kv and return_kv": (take_and_return, None),
        "bindings: lend and give_back of one chunk": (lend_and_give_back, None),
        "bindings: counts": (arena.counts, None),
        "bindings: publish a view": (
            lambda: page.publish_view(View(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
            200,
        ),
        "bindings: publish a grant": (
            lambda: page.publish_grant(Grant(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)),
            None,
        ),
        "bindings: read a grant": (page.read_grant, 200),
        "bindings: check the pause epoch": (lambda: page.pause_epoch, None),
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
    struct_on_mmap = Baseline("struct on mmap", middle(baseline)[0])
    return [
        Result(
            name,
            middle(timings[name])[0],
            "ns",
            "lower",
            goal,
            middle(timings[name])[1],
            struct_on_mmap if name.endswith("publish a view") else None,
        )
        for name, (_call, goal) in measured.items()
    ]


def measure_iteration(driver: str) -> list[Result]:
    """A recorded LoRA iteration on lent chunks: what it wastes, and what idle aliases save it.

    Three times: the first maps, the second finds its mappings, the third finds them again after all
    chunks were given back and lent again.
    """
    steps = read_trace(TRACE)
    chunk_bytes = 128 * 1024 * 1024
    geometry = Geometry(
        layers=32,
        kv_heads=8,
        head_dim=128,
        dtype_bytes=2,
        block_bytes=2 * 1024 * 1024,
        chunks=-(-(peak_bytes(steps) + FRAGMENTATION_GOAL_MB * 10**6) // chunk_bytes),
    )
    arena = Arena.create(geometry, reserved_chunks=0, driver=driver)
    allocator = DeviceAllocator.over(arena)

    def lend_all() -> None:
        for chunk in arena.lend(geometry.chunks, owner=WORKER):
            allocator.lend(chunk)

    lend_all()
    allocator.keep_small(small_pool_blocks_for(steps))
    first, second = replay(steps, allocator), replay(steps, allocator)
    allocator.shrink_to(0)
    for chunk in allocator.take_quiet():
        arena.give_back(chunk, owner=WORKER)
    lend_all()
    again = replay(steps, allocator)
    worst = max(r.most_fragmentation_bytes for r in (first, second, again))
    allocator.check()
    arena.close()
    return [
        Result(
            "LoRA iteration of 2 x 1,024 tokens: held minus requested",
            worst / 1e6,
            "MB",
            "lower",
            FRAGMENTATION_GOAL_MB,
        ),
        Result(
            "mapping calls of that iteration once chunks are lent again",
            again.mapping_calls,
            "calls",
            "lower",
            None,
            None,
            Baseline("without idle aliases", again.mapping_calls + again.saved_calls),
        ),
    ]


def measure_return(arena: Arena, socket: Path, revokes: int) -> list[Result]:
    """Measure from the revoke until a waiting worker sees it, and until the chunk is back."""
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
        page.publish_grant(Grant())
        if page.wait_offer(offers, timeout_s=10) == offers:
            raise RuntimeError("the worker does not answer")
        back_us.append((monotonic_ns() - began) / 1e3)
        seen_us.append((Offer._make(page.read_offer()).tokens_done - began) / 1e3)
    page.publish_grant(Grant(chunks=-1))
    worker.communicate(timeout=60)
    seen, seen_spread = middle(seen_us)
    back, back_spread = middle(back_us)
    return [
        Result(
            "bindings: a revoke is seen by a sleeping worker", seen, "us", "lower", 200, seen_spread
        ),
        Result("bindings: a revoked chunk is back", back, "us", "lower", 500, back_spread),
    ]


def main() -> None:
    """Measure and write."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--driver",
        choices=["host", "cuda"],
        default="host",
        help="whose create, map, unmap and copy are measured, and where the recorded iteration "
        "runs (default host); all else is bookkeeping of the core, the same on both",
    )
    options = parser.parse_args()
    env = environment()
    repeats = 5 if options.quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        began = time.perf_counter()
        arena = Arena.create(GEOMETRY, reserved_chunks=RESERVED)
        created_ms = (time.perf_counter() - began) * 1e3
        results = [
            *measure_native(TRACE, options.driver, quick=options.quick),
            Result("make an arena of 192 MiB, resident", created_ms, "ms", "lower", 1_000),
            *measure_calls(arena, repeats),
            *measure_iteration(options.driver),
            *measure_partition(options.driver, repeats),
            *measure_return(arena, Path(folder) / "arena.sock", 30 if options.quick else REVOKES),
        ]
        arena.check()
        arena.close()
    write("memory", results, env, options.json)


if __name__ == "__main__":
    main()
