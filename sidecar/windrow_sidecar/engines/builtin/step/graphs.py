"""CUDA graphs of a step, one for each batch size: captured once, then a launch each.

All graphs share one memory pool: only one runs at a time, and what a step leaves behind lies in
buffers that were made before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_log = logging.getLogger(__name__)

# The first pass of a shape loads kernels and picks GEMM algorithms: not to be done in a capture.
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Captures:
    """What the graphs took at start-up."""

    graphs: int
    seconds: float
    n_bytes: int  # of device memory, warm-ups' workspaces included


class GraphRunner:
    """Captures `compute(bucket)` and replays it. On the current device; one thread.

    Args:
        compute: launches the pass; makes no decision on the host that a replay would have to make
            again, and waits for nothing.
    """

    def __init__(self, compute: Callable[[int], None]) -> None:
        self._compute = compute
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self, buckets: Sequence[int]) -> Captures:
        """Make a graph for each bucket, the largest first: the others fit into its memory."""
        began_s = time.monotonic()
        free_before = torch.cuda.mem_get_info()[0]
        pool = None
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for bucket in sorted(buckets, reverse=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._compute(bucket)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may take memory meanwhile: with `global` that would end the capture.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                self._compute(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = graph
        torch.cuda.synchronize()
        made = Captures(
            graphs=len(self._graphs),
            seconds=time.monotonic() - began_s,
            n_bytes=free_before - torch.cuda.mem_get_info()[0],
        )
        _log.info(
            "captured %d graphs in %.1f s, %.0f MiB",
            made.graphs,
            made.seconds,
            made.n_bytes / 2**20,
        )
        return made

    def replay(self, bucket: int) -> None:
        """Launch a captured pass on the current stream."""
        self._graphs[bucket].replay()
