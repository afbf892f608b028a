"""Cost of being stoppable, and how soon a pause is obeyed, with the worker's own gate."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.engine.setting import Setting
from benchmarks.harness import Baseline, Result, middle
from windrow_sidecar._core import Arena, Geometry, Page
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.adapter.adapters import Adapter
from windrow_sidecar.finetune.colocated.grants import GrantGate, OfferFacts
from windrow_sidecar.finetune.data.split import Example
from windrow_sidecar.finetune.engine.micro_batch_group import MicroBatchGroup, ModelParts, padded
from windrow_sidecar.finetune.engine.orders import Lookahead, layer_major
from windrow_sidecar.finetune.engine.sizing import Estimates, Paced, WholeRows
from windrow_sidecar.finetune.engine.suspension import Suspension, between_modules
from windrow_sidecar.finetune.job.assembly import TaskletRuntime, TrainingSession, open_session
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.standalone.dedicated import open_alone
from windrow_sidecar.finetune.tasklets import MicroBatch, MicroLimits
from windrow_sidecar.finetune.training.health import StallWatch
from windrow_sidecar.heap import settle_heap
from windrow_sidecar.qos.view import Action, Grant, Offer, Phase

COST_GOAL, COST_GOAL_ON_GPU = 0.01, 0.005
# A quarter of an objective of 40 ms, as in Harli.
BOUND_US = 10_000


def stopping(
    setting: Setting, *, rounds: int, pauses: int, others: Sequence[tuple[int, int]] = ()
) -> list[Result]:
    """Both figures; on the host with one core. `others`: steps whose cost is wanted, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the worker does
    try:
        costs = [_cost(replace(setting, step=step), rounds) for step in (*others, setting.step)]
        return [*costs, *_pause(setting, pauses)]
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def _cost(setting: Setting, rounds: int) -> Result:
    """The layers of a micro-batch in tasklets under a gate, against one forward and backward."""
    device = setting.find()
    base = setting.base(device)
    plain, parts = _parts(setting, device, base), _parts(setting, device, base)
    gate, page = _gate(Estimates(), device)
    head = parts.stack.model.get_output_embeddings()  # type: ignore[operator]
    between_modules(parts.stack.layers, head, _suspension(gate).point)
    ids = torch.randint(3, 250, setting.step, generator=torch.Generator().manual_seed(1))
    rows = [Example(tuple(row), tuple(row), "random") for row in ids.tolist()]
    settle_heap()
    whole: list[float] = []
    shares: list[float] = []
    arms = (
        (plain, lambda: _uninterrupted(plain, rows)),
        (parts, lambda: _in_tasklets(parts, rows, gate, page)),
    )
    for number in range(rounds):
        # In pairs, of which the machine's noise meets both, and each as often first.
        took = {}
        for of, work in arms if number % 2 else arms[::-1]:
            for parameter in of.adapter.model.parameters():
                parameter.grad = None
            took[of] = _timed(device, work)
        whole.append(took[plain])
        shares.append(took[parts] / took[plain] - 1)
    value, spread = middle(shares[1:])
    return Result(
        f"cost of being stoppable, {setting.what}, {setting.step[0]} x {setting.step[1]} tokens",
        value,
        "ratio",
        "lower",
        goal=COST_GOAL_ON_GPU if setting.on_gpu else COST_GOAL,
        spread=spread,
        baseline=Baseline("seconds of an uninterrupted pass", statistics.median(whole)),
    )


def _parts(setting: Setting, device: ComputeDevice, base: BaseModel) -> ModelParts:
    session = open_alone(setting.job(), device, shallow_clone(base))
    stack = DecoderStack(session.model.get_base_model())
    adapter = Adapter(session.model)
    adapter.switch(on=True, training=True)
    return ModelParts(stack, Head(stack), adapter)


def _suspension(gate: GrantGate) -> Suspension:
    return Suspension(gate, StallWatch(), lambda: False)


def _timed(device: ComputeDevice, work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    device.mark().wait()
    return time.perf_counter() - begun


def _in_tasklets(parts: ModelParts, rows: list[Example], gate: GrantGate, page: Page) -> None:
    micro = MicroBatch(0, tuple(range(len(rows))), tuple(row.length for row in rows))
    labels = sum(row.targets for row in rows)
    batch_group = MicroBatchGroup(
        parts, [micro], rows, TorchBoundaries(), labels_in_batch=labels, seed=1
    )
    ahead, sizing = Lookahead(layer_major, batch_group.progress), WholeRows()
    while (tasklet := ahead.peek(sizing)) is not None:
        page.beat(0)
        gate.launch(tasklet)
        batch_group.run(tasklet)
        ahead.ran(tasklet)
        gate.landed(tasklet)
        gate.take_ran()


def _uninterrupted(parts: ModelParts, rows: list[Example]) -> None:
    """The same layers and head as one graph."""
    ids, targets = padded(rows)
    at = parts.stack.begin(ids.to(parts.stack.device))
    hidden = at.inputs[0]
    for layer, call in zip(parts.stack.layers, at.calls, strict=True):
        hidden = layer(hidden, *call.args, **call.kwargs)
    assert hidden is not None
    _, gradient = parts.head.loss_and_gradient(
        hidden.detach(), targets, labels_in_batch=sum(row.targets for row in rows)
    )
    hidden.backward(gradient)  # type: ignore[no-untyped-call]


def _pause(setting: Setting, pauses: int) -> list[Result]:
    """Revoke at random moments; how long until the worker says that nothing runs."""
    estimates, device = Estimates(), setting.find()
    gate, page = _gate(estimates, device)
    session = _paced_session(setting, device, gate, estimates)
    took_us: list[float] = []
    over = threading.Event()
    beats = threading.Thread(target=_beat, args=(page, over), daemon=True)
    beats.start()
    told = (page, pauses, took_us, _units(device))
    decode = threading.Thread(target=_decode, args=told, daemon=True)
    _run_until(session, gate, lambda: session.stream.position.step >= 1)
    decode.start()
    _run_until(session, gate, lambda: not decode.is_alive())
    over.set()
    beats.join()
    ordered = sorted(took_us)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    name = f"pause to quiet, {setting.what}, bound {BOUND_US / 1e3:g} ms"
    return [
        Result(f"{name}: p50", statistics.median(ordered) / 1e3, "ms", "lower"),
        Result(f"{name}: p99", p99 / 1e3, "ms", "lower", goal=BOUND_US / 1e3),
    ]


def _run_until(session: TrainingSession, gate: GrantGate, done: Callable[[], bool]) -> None:
    while not done():
        tasklet = session.stream.peek()
        assert tasklet is not None  # endless
        if gate.launch(tasklet):
            session.stream.run(tasklet)
            gate.landed(tasklet)
        else:
            gate.quiet(tasklet)
            gate.wait(0.001)


def _decode(page: Page, pauses: int, took_us: list[float], units: int) -> None:
    """Grant, and revoke after a random while."""
    draw = random.Random(7)
    for epoch in range(1, pauses + 1):
        go = Grant(Action.GO, units, in_flight_bound_us=BOUND_US, pause_epoch=epoch - 1)
        _publish(page, go)
        time.sleep(draw.uniform(0.03, 0.08))
        _publish(page, Grant(Action.PAUSE, in_flight_bound_us=BOUND_US, pause_epoch=epoch))
        begun = time.perf_counter_ns()
        while not _is_quiet(page, epoch):
            time.sleep(0.0001)
        took_us.append((time.perf_counter_ns() - begun) / 1e3)
    _publish(page, Grant(Action.GO, units, in_flight_bound_us=BOUND_US, pause_epoch=pauses))


def _beat(page: Page, over: threading.Event) -> None:
    """Beat as an idle decode does: a slow first step must not look like its death."""
    while not over.wait(0.05):
        page.beat(0)


def _is_quiet(page: Page, epoch: int) -> bool:
    offer = Offer._make(page.read_offer())
    return offer.pause_epoch_seen >= epoch and offer.in_flight_us == 0


def _units(device: ComputeDevice) -> int:
    return device.total_units() if device.queues else 1


def _gate(estimates: Estimates, device: ComputeDevice) -> tuple[GrantGate, Page]:
    geometry = Geometry(
        layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2
    )
    page = Arena.create(geometry, reserved_chunks=1).page
    units, facts = _units(device), OfferFacts(1)
    _publish(page, Grant(Action.GO, units, in_flight_bound_us=BOUND_US))
    gate = GrantGate(
        page,
        WholeDevice("finetune", units),
        estimates,
        lambda: facts,
        decode_lives=lambda: True,
        device=device,
    )
    return gate, page


def _publish(page: Page, decision: Grant) -> None:
    page.beat(0)
    page.publish_grant(decision)


def _paced_session(
    setting: Setting, device: ComputeDevice, gate: GrantGate, estimates: Estimates
) -> TrainingSession:
    most, bound_us = setting.step[0] * setting.step[1], BOUND_US
    # As `harvested` paces: while one runs, the next is queued behind it.
    sizing = Paced(estimates, bound_us // 2 if device.queues else bound_us, _units(device))
    return open_session(
        setting.job(),
        setting.base(device),
        TaskletRuntime(
            TorchBoundaries(),
            lambda: MicroLimits(min(most, sizing.tokens(Phase.BACKWARD))),
            sizing=lambda: sizing,
            between=_suspension(gate).point,
            device=device,
        ),
    )
