"""Joined jobs of one worker: each keeps its runner, checkpoints, commands and end."""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from support.lent_allocations import CHUNKS, LentAllocations

from windrow.crd import CheckpointSpec
from windrow.eventlog import EventLog, TaskletEvent, read_events
from windrow.protocol import Ending
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.job.assembly import JobSpec, TrainingSession
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.job.job_handle import JobHandle
from windrow_sidecar.finetune.job.joint_turns import (
    JointRuntime,
    JointTurns,
    JointWatch,
    open_joint,
)
from windrow_sidecar.finetune.job.ledger import JobState, Ledger
from windrow_sidecar.finetune.job.multiplexer import JobMultiplexer
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.health import StallWatch
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.equality import small_spec
from windrow_sidecar.testing.tinyjob import (
    LAYERS,
    SpoilingHome,
    activation_budget_of,
    adapter_of,
    finish,
    tiny_job,
    tiny_llama,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OWNER = 7
KINDS = {
    "tone": {"steps": 5},
    "code": {"adapter": {"lora": {"rank": 3, "alpha": 3, "targetModules": "q_proj"}}, "seed": 5},
    "late": {"adapter": {"lora": {"rank": 4, "alpha": 4, "targetModules": "up_proj"}}, "seed": 9},
    "apart": {"adapter": {"type": "ia3"}, "seed": 7, "steps": 3},
}


@dataclass
class Told:
    """A reporter with commands that are given once some tasklets have run, who remembers."""

    commands: dict[int, str] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    after: int = 0

    def event(self, event) -> None:
        self.kinds.append(event.kind)

    def take_command(self):
        due = [at for at in self.commands if at <= self.after]
        return self.commands.pop(min(due)) if due else None


class Gate(OpenGate):
    """Open; a wait lasts no time. Counts tasklets for everybody's commands."""

    def __init__(self) -> None:
        super().__init__(1)
        self.told: list[Told] = []
        self.launched = []

    def launch(self, tasklet) -> bool:
        self.launched.append(tasklet)
        for told in self.told:
            told.after += 1
        return super().launch(tasklet)

    def wait(self) -> None:
        for told in self.told:
            told.after += 1


@functools.cache
def alone(name: str) -> dict:
    """Return the adapter that a job learns alone."""
    job = tiny_job(**KINDS[name])
    finish(job)
    return adapter_of(job)


@functools.cache
def much_room() -> ActivationBudget:
    """Return the budget of a tiny job that has more memory than there is."""
    return activation_budget_of(tiny_job(**KINDS["tone"]), lambda: 1 << 30)


class Worker:
    """Tiny jobs with all that runs them, joined where they can be.

    Args:
        root: of their folders.
        gate: of the device (default: open).
        memory: makes the memory of a stream, or of joint ones (default: of the worker's own).
        budget: of any of the jobs.
    """

    def __init__(self, root, gate=None, memory=None, budget=None) -> None:
        self.root, self.gate, self.home = root, gate or Gate(), SpoilingHome()
        self._memory = memory or (lambda stream, budget: OwnMemory(stream, self.home))
        self._budget, self.fits_alone = budget, lambda job: False
        self.base = BaseModel(tiny_llama(), None, None, shared=False)
        self.jobs, self.told, self.endings, self.events, self.states = {}, {}, {}, {}, {}
        self.made: list[JointTurns] = []
        self.joined: dict[str, list[tuple[int, str]]] = {}

    def handle(self, name: str, commands=None) -> JobHandle:
        tiny = tiny_job(base=shallow_clone(self.base).model, **KINDS[name])
        told = self.told[name] = Told(commands or {})
        self.gate.told.append(told)
        folder = JobFolder(self.root / name, name, 1)
        folder.claim()
        spec = small_spec().model_copy(update={"checkpoint": CheckpointSpec(everySteps=3)})
        budget = self._budget or much_room()
        state = self.states[name] = JobState(stall=StallWatch(after_s=0))
        session = TrainingSession(
            *(JobSpec("default", name, name, 1, spec), tiny.model, tiny.stream, 16, False),
            *(Origin(), budget, HostDevice(), DataSplit((), ())),
        )
        events = self.events[name] = EventLog(
            self.root / name / f"{name}.events.jsonl", source="test"
        )
        ledger = Ledger(session, folder, told, events, state)
        memory = self._memory(tiny.stream, budget)
        self.jobs[name] = tiny
        return JobHandle(
            name,
            tiny.stream,
            memory,
            Runner(tiny.stream, self.gate, memory, ledger, told, state),
            failed=lambda error: Ending.FAILED,
            ended=lambda ending: self.endings.update({name: ending}),
            joined=lambda others, why: self.joined.setdefault(name, []).append((others, why)),
            apart="its adapter is ia3" if name == "apart" else "",
            activation_budget=budget,
        )

    def joint(self) -> JointTurns:
        runtime = JointRuntime(TorchBoundaries(), lambda: MicroLimits(60), HostDevice())
        stream, budget = open_joint(shallow_clone(self.base), runtime)
        memory = self._memory(stream, budget)
        fits_alone = lambda job: self.fits_alone(job)  # noqa: E731
        self.made.append(
            JointTurns(*(stream, memory, budget, self.gate, JointWatch()), fits_alone=fits_alone)
        )
        return self.made[-1]

    def run(self, *handles, arrivals=lambda: None) -> None:
        JobMultiplexer(handles, arrivals=arrivals, clock=lambda: 0.0, joint=self.joint).run()

    def tasklets(self, name: str) -> list[TaskletEvent]:
        self.events[name].flush()
        log = read_events(self.root / name)
        return [event for _, event in log if isinstance(event, TaskletEvent)]

    def near(self, name: str) -> bool:
        """Return whether a job has learnt what it learns alone, but for fp32's rounding."""
        ours, theirs = adapter_of(self.jobs[name]), alone(name)
        return all(torch.allclose(ours[n], theirs[n], rtol=0.0, atol=TOLERANCE) for n in theirs)


# Rates are 1e-2, and AdamW's first steps are as long as the rate whatever the gradient is: one that
# is nearly 0 may turn round. Equality itself is held in float64 (test_joint_jobs); here a job that
# has lost or doubled a micro-batch is off by some 1e-2.
TOLERANCE = 2e-3


def test_joined_jobs_and_one_apart_all_reach_their_ends_and_learn_what_each_learns_alone(tmp_path):
    worker = Worker(tmp_path)
    worker.run(*(worker.handle(name) for name in ("tone", "code", "apart")))
    assert worker.endings == dict.fromkeys(("tone", "code", "apart"), Ending.SUCCEEDED)
    assert len(worker.made) == 1
    assert worker.home.moved
    assert worker.joined["tone"][0] == worker.joined["code"][0] == (1, "")
    assert worker.joined["apart"][0] == (0, "its adapter is ia3")
    assert all(worker.near(name) for name in worker.jobs)
    forward = [
        t for t in worker.gate.launched if t.phase is Phase.FORWARD and not t.micro.evaluation
    ]
    assert max(len(t.micro.rows) for t in forward) > 3  # of one job at most 3
    for name, steps in (("tone", 5), ("code", 4)):
        tasklets = worker.tasklets(name)
        losses = [t for t in tasklets if t.phase == "loss"]
        seen = worker.jobs[name].stream.tokens_seen
        assert sum(t.tokens for t in losses) == seen
        assert {t.step for t in tasklets} >= set(range(steps))
        assert worker.told[name].kinds.count("EVALUATED") == 2


def test_the_time_of_joint_tasklets_is_counted_once(tmp_path):
    worker = Worker(tmp_path)
    worker.run(worker.handle("tone"), worker.handle("code"))
    times = {(t.start_ns, t.end_ns) for name in worker.jobs for t in worker.tasklets(name)}
    all_ns = sum(end - begin for begin, end in times)
    busy = sum(state.busy_ns for state in worker.states.values())
    # Each part is rounded to a nanosecond.
    assert abs(busy - all_ns) <= 2 * len(times)


def test_a_job_that_joins_in_the_middle_and_one_that_stops_leave_the_others_as_they_are(tmp_path):
    worker = Worker(tmp_path)
    first = worker.handle("tone"), worker.handle("code", {25: "STOP"})
    came = iter([lambda: worker.handle("late")])

    def arrivals():
        return next(came, None) if len(worker.gate.launched) > 14 else None

    worker.run(*first, arrivals=arrivals)
    assert worker.endings == {
        "tone": Ending.SUCCEEDED,
        "code": Ending.STOPPED,
        "late": Ending.SUCCEEDED,
    }
    assert worker.near("tone")
    assert worker.near("late")
    # With one other, with two, with one again; what ends says nothing more.
    assert worker.joined["tone"][:3] == [(1, ""), (2, ""), (1, "")]
    assert worker.joined["code"] == [(1, ""), (2, "")]
    assert worker.joined["late"][:2] == [(2, ""), (1, "")]
    # What has stopped goes on elsewhere from its own checkpoint.
    again = Worker(tmp_path)
    again.run(again.handle("code"))
    assert again.endings == {"code": Ending.SUCCEEDED}
    assert again.near("code")


def test_a_job_that_pauses_holds_up_no_other_and_goes_on_afterwards(tmp_path):
    worker = Worker(tmp_path)
    handles = worker.handle("tone", {12: "PAUSE", 90: "RESUME"}), worker.handle("code")
    worker.run(*handles)
    assert list(worker.endings) == ["code", "tone"]
    assert all(worker.near(name) for name in worker.jobs)


def test_a_job_that_fails_ends_alone_and_the_others_stay_joined(tmp_path):
    worker = Worker(tmp_path)
    handles = [worker.handle(name) for name in ("tone", "code", "late")]
    with torch.no_grad():
        next(iter(worker.jobs["code"].stream.learns.values())).fill_(torch.nan)
    worker.run(*handles)
    assert worker.endings.pop("code") is Ending.FAILED
    assert set(worker.endings.values()) == {Ending.SUCCEEDED}
    assert worker.near("tone")
    assert worker.near("late")


def test_where_a_joint_tasklet_fails_jobs_go_on_in_turns(tmp_path, monkeypatch, caplog):
    worker = Worker(tmp_path)
    handles = [worker.handle(name) for name in ("tone", "code")]
    made, calls = worker.joint, itertools.count()

    def fails() -> JointTurns:
        joint = made()
        sound = joint.stream.run

        def broken(tasklet):
            if next(calls) == 15:
                raise MemoryError("no room for this")
            return sound(tasklet)

        monkeypatch.setattr(joint.stream, "run", broken)
        return joint

    monkeypatch.setattr(worker, "joint", fails)
    worker.run(*handles)
    assert len(worker.made) == 1
    assert set(worker.endings.values()) == {Ending.SUCCEEDED}
    assert all(worker.near(name) for name in worker.jobs)
    assert "a joint tasklet failed" in caplog.text


def test_a_joint_tasklet_that_is_given_up_in_its_middle_runs_again(tmp_path, monkeypatch):
    worker = Worker(tmp_path)
    handles = [worker.handle(name) for name in ("tone", "code")]
    made, calls = worker.joint, itertools.count()

    def gives_up() -> JointTurns:
        joint = made()

        def point(*_) -> None:
            if next(calls) % 7 == 3:
                raise BrokenOff

        for layer in joint.stream.stack.layers:
            layer.self_attn.register_forward_hook(point)
        return joint

    monkeypatch.setattr(worker, "joint", gives_up)
    worker.run(*handles)
    assert next(calls) > 10
    assert all(worker.near(name) for name in worker.jobs)


def test_what_an_ended_job_had_is_free_with_the_micro_batch_on_its_way(tmp_path, monkeypatch):
    worker, streams = Worker(tmp_path), {}

    def handle(name):
        made = worker.handle(name, {30: "STOP"} if name == "code" else None)
        streams[name] = weakref.ref(made.stream)
        del worker.jobs[name], worker.states[name]
        return made

    came = iter([functools.partial(handle, name) for name in ("tone", "code", "apart")])
    named, held, launch = [], [], worker.gate.launch

    def launched(tasklet) -> bool:
        named.append(list(worker.endings))
        held.append([name for name in worker.endings if streams[name]() is not None])
        return launch(tasklet)

    monkeypatch.setattr(worker.gate, "launch", launched)
    worker.run(arrivals=lambda: next(came, None))
    assert worker.endings["code"] is Ending.STOPPED
    # One that stops with rows in the micro-batch on its way is there until that ends.
    for name in ("code", "apart"):
        since = next(n for n, names in enumerate(named) if name in names)
        assert not [n for n, names in enumerate(held) if name in names and n > since + 2 * LAYERS]


class Crowding(OwnMemory):
    """Memory with no room for what three joined jobs have on the host."""

    def starving(self, tasklet) -> bool:
        members = getattr(self._stream, "members", ())
        if len(members) < 3:
            return super().starving(tasklet)
        self.offload()
        return True


def test_where_memory_has_no_room_for_all_fewer_are_joined_and_one_has_turns(tmp_path, caplog):
    caplog.set_level("INFO")
    worker = Worker(tmp_path, memory=lambda stream, budget: Crowding(stream, worker.home))
    worker.fits_alone = lambda job: True
    worker.run(*(worker.handle(name) for name in ("tone", "code", "late")))
    assert set(worker.endings.values()) == {Ending.SUCCEEDED}
    assert all(worker.near(name) for name in worker.jobs)
    assert "no room for the adapters and moments of 3 joined jobs" in caplog.text
    assert worker.joined["tone"][:2] == [(2, ""), (1, "")]
    why = "no room for the adapters and moments of more joined jobs"
    assert worker.joined["late"][:2] == [(2, ""), (0, why)]


class ChunkHome(SpoilingHome):
    """A home in lent chunks: what has come back there takes memory of the allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self._places, self._leaves = None, {}, False

    def out(self, tensor):
        self._leaves = True
        if (address := self._places.pop(tensor.data_ptr(), None)) is not None:
            self.allocator.free(address)
        return super().out(tensor)

    def back(self, tensor):
        made = super().back(tensor)
        self._places[made.data_ptr()] = self.allocator.allocate(max(1, made.nbytes))
        return made

    def settle(self) -> None:
        """Free what torch would have freed: tensors that were not moved out are gone."""
        if self._leaves:
            self.close()
        self._leaves = False

    def close(self) -> None:
        for address in self._places.values():
            self.allocator.free(address)
        self._places.clear()


class TakesBack(Gate):
    """Decode asks all chunks back, again and again, and lends some where the worker waits."""

    def __init__(self, beside) -> None:
        super().__init__()
        self._beside, self.left = beside, 0

    def launch(self, tasklet) -> bool:
        assert self._beside.decode.draining(OWNER) == []
        if len(self.launched) % 9 == 5:
            self._beside.decode.revoke(CHUNKS)
        return super().launch(tasklet)

    def wait(self) -> None:
        super().wait()
        if not self._beside.decode.held(OWNER):
            self.left += 1
            self._beside.decode.lend(2, owner=OWNER)


def test_jobs_whose_memory_is_all_in_chunks_leave_them_whoever_has_the_device(tmp_path, run_dir):
    home = ChunkHome()
    beside = LentAllocations(run_dir, OWNER, home=home)
    home.allocator = beside.allocator
    beside.lend(2)
    budget = activation_budget_of(tiny_job(**KINDS["tone"]), beside.budget.free_bytes)
    gate = TakesBack(beside)
    memory = lambda stream, budget: beside.memory.tenancy().serve(stream, budget)  # noqa: E731
    worker = Worker(tmp_path, gate, memory, budget)
    worker.run(*(worker.handle(name, {20: "PAUSE", 60: "RESUME"}) for name in ("tone",)))
    first = gate.left
    worker.run(*(worker.handle(name) for name in ("code", "late", "apart")))
    assert min(first, gate.left - first) > 3
    assert set(worker.endings.values()) == {Ending.SUCCEEDED}
    assert all(worker.near(name) for name in worker.jobs)
    home.close()
    beside.memory.give_all_back()
    assert beside.decode.held(OWNER) == []
    beside.close()
