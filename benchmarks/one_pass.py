"""Measure what finetune tokens gain in the products of a decode step, on two cores.

The products of one layer (q, k and v as one, o, gate and up as one, down) of the shape of
Llama-3.2-1B in fp32, for `b` decode rows and `n` finetune rows; adapters of rank 16 on every
product are computed on the finetune rows alone. Attention is left out: it is apart in every form.

- *in turns*: decode's rows, then the finetune rows, each on both cores;
- *in one pass*: both in the same products, on both cores;
- *side by side*: decode's rows on one core while a process on the other repeats the finetune rows.
  This is what two processes on one device are.

A round plays all forms one after the other. The forward pass alone can be shared: a
backward pass has no counterpart in decode.

The last two figures of a shape say what the form means for a user: how long a decode step takes,
and how many finetune rows a second pass, in one pass over side by side.

Example: python -m benchmarks.one_pass --json /tmp/one-pass.json
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import torch

from benchmarks.harness import Baseline, Result, arguments, environment, write
from benchmarks.light.trainers import two_cores

HIDDEN, INTERMEDIATE, KEY_VALUE, RANK = 2048, 8192, 512, 16
PRODUCTS: Final = (
    (HIDDEN, HIDDEN + 2 * KEY_VALUE),
    (HIDDEN, HIDDEN),
    (HIDDEN, 2 * INTERMEDIATE),
    (INTERMEDIATE, HIDDEN),
)
BATCHES, ROWS = (1, 8, 32), (16, 64, 256)
ROUNDS = 9
GOAL_OF_THE_SUM = 0.9


class Layer:
    """Products of one layer with their adapters, over random weights in fp32."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(7)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=made) / math.sqrt(columns)

        self._weights = [matrix(out, into) for into, out in PRODUCTS]
        self._a = [matrix(RANK, into) for into, _ in PRODUCTS]
        self._b = [matrix(out, RANK) for _, out in PRODUCTS]

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """Return an input of `rows` rows for each product."""
        made = torch.Generator().manual_seed(rows)
        return [torch.randn(rows, into, generator=made) for into, _ in PRODUCTS]

    def exact(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return each product's output without an adapter, in float64."""
        pairs = zip(inputs, self._weights, strict=True)
        return [x.double() @ weight.double().T for x, weight in pairs]

    def run(self, inputs: list[torch.Tensor], adapted: int = 0) -> list[torch.Tensor]:
        """Return each product's output; its last `adapted` rows pass the adapters as well."""
        outputs = []
        for x, weight, a, b in zip(inputs, self._weights, self._a, self._b, strict=True):
            y = torch.mm(x, weight.T)
            if adapted:
                y[-adapted:] += (x[-adapted:] @ a.T) @ b.T
            outputs.append(y)
        return outputs


@dataclass(frozen=True)
class Times:
    """Seconds of one round."""

    decode: float
    finetune: float
    one_pass: float
    decode_beside: float
    finetune_beside: float


def main() -> None:
    """Measure; print and write the figures."""
    options = arguments(__doc__).parse_args()
    cores, env = two_cores(), environment()
    rounds = 2 if options.quick else ROUNDS
    results: list[Result] = []
    layer, neighbour = Layer(), _Neighbour(cores[1])
    try:
        with torch.inference_mode():
            for batch in BATCHES:
                for rows in ROWS:
                    times = [_round(layer, batch, rows, cores, neighbour) for _ in range(rounds)]
                    results += _figures(f"{batch} decode rows, {rows} finetune rows", times)
            results.append(_distance(layer))
    finally:
        neighbour.close()
    write("one-pass", results, env, options.json)


def _round(layer: Layer, batch: int, rows: int, cores: list[int], neighbour: _Neighbour) -> Times:
    decode, finetune = layer.inputs(batch), layer.inputs(rows)

    def together() -> None:
        layer.run([torch.cat(pair) for pair in zip(decode, finetune, strict=True)], rows)

    torch.set_num_threads(2)
    alone = _seconds(lambda: layer.run(decode))
    window = _seconds(lambda: layer.run(finetune, rows))
    fused = _seconds(together)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[:1])
    try:
        beside, window_beside = neighbour.beside(lambda: layer.run(decode), rows)
    finally:
        os.sched_setaffinity(0, cores)
    return Times(alone, window, fused, beside, window_beside)


def _seconds(call: Callable[[], object]) -> float:
    """Return the median of three calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class _Neighbour:
    """A process on the other core that repeats finetune rows while it is asked to."""

    def __init__(self, core: int) -> None:
        self._pipe, there = multiprocessing.Pipe()
        # Not forked: OpenMP's threads of this process would be missing there.
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_repeat, args=(core, there), daemon=True)
        self._process.start()

    def beside(self, call: Callable[[], object], rows: int) -> tuple[float, float]:
        """Return seconds of a call, and of a finetune window of `rows` rows that ran beside it."""
        self._pipe.send(rows)
        self._pipe.recv()  # it has a window behind it
        own: list[float] = []
        while len(own) < 3 or not self._pipe.poll():
            began = time.perf_counter()
            call()
            own.append(time.perf_counter() - began)
        self._pipe.recv()  # three windows
        self._pipe.send(None)
        taken: float = self._pipe.recv()
        return statistics.median(own), taken

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _repeat(core: int, orders: Connection) -> None:
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    layer = Layer()
    with torch.inference_mode():
        while True:
            try:
                rows: int = orders.recv()
            except EOFError:
                return
            finetune = layer.inputs(rows)
            layer.run(finetune, rows)
            orders.send(None)
            taken: list[float] = []
            while not orders.poll():
                began = time.perf_counter()
                layer.run(finetune, rows)
                taken.append(time.perf_counter() - began)
                if len(taken) == 3:
                    orders.send(None)  # enough; it repeats until the other side has measured
            orders.recv()
            orders.send(statistics.median(taken))


def _figures(shape: str, times: list[Times]) -> list[Result]:
    def median(of: Callable[[Times], float]) -> float:
        return round(statistics.median(map(of, times)), 3)

    of_sum = [each.one_pass / (each.decode + each.finetune) for each in times]
    low, _, high = statistics.quantiles(of_sum, n=4, method="inclusive")
    return [
        Result(
            f"{shape}: one pass over in turns",
            round(statistics.median(of_sum), 3),
            "",
            "lower",
            goal=GOAL_OF_THE_SUM,
            spread=round(high - low, 3),
        ),
        Result(
            f"{shape}: decode alone, of in turns",
            median(lambda each: each.decode / (each.decode + each.finetune)),
            "",
            "higher",
        ),
        Result(
            f"{shape}: step in one pass over side by side",
            median(lambda each: each.one_pass / each.decode_beside),
            "",
            "lower",
            baseline=Baseline("side by side, ms", median(lambda each: each.decode_beside * 1e3)),
        ),
        Result(
            f"{shape}: finetune rows a second in one pass over side by side",
            median(lambda each: each.finetune_beside / each.one_pass),
            "",
            "higher",
        ),
    ]


def _distance(layer: Layer) -> Result:
    """Return how far decode's rows of one pass are from float64, over those of a step alone."""
    batch, rows = 8, 64
    decode, finetune = layer.inputs(batch), layer.inputs(rows)
    both = [torch.cat(pair) for pair in zip(decode, finetune, strict=True)]
    wanted = layer.exact(decode)
    fused = [each[:batch] for each in layer.run(both, rows)]
    alone = layer.run(decode)
    return Result(
        "distance of decode's rows from float64, one pass over alone",
        round(_furthest(fused, wanted) / _furthest(alone, wanted), 3),
        "",
        "lower",
    )


def _furthest(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(
        float((one.double() - other).abs().max()) for one, other in zip(found, wanted, strict=True)
    )


if __name__ == "__main__":
    main()
