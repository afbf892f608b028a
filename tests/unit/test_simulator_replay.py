"""A run that follows the simulator's own rules is played again as it was."""

from __future__ import annotations

import json
import random
from shutil import copytree

import pytest

from windrow.errors import UserError
from windrow.eventlog import EventLog, MarkEvent, RequestEvent, StepEvent, TaskletEvent
from windrow_lab.figures.summary import load_marks
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_simulator.arena import ArenaGeometry
from windrow_simulator.decode import SECOND_NS, DecodeGpu
from windrow_simulator.figures import SlotFigures
from windrow_simulator.replay import TaskletWorth, replay
from windrow_simulator.traffic import DecodeRequest
from windrow_simulator.truth import MeasuredTruth, Noise, Residuals, Worker
from windrow_simulator.worker import SimulatedWorker, WorkerMemory

OBJECTIVE_US = 12_000
SECONDS, WARM_UP = 60, 10
DEDICATED, BESIDE = 4000.0, 1700.0
PROFILE = {
    "key": "made",
    "device": "host:2-cores",
    "driver": "host",
    "engine": "builtin",
    "takenAt": "2025-01-01T00:00:00Z",
    "solo": [
        {"units": 1, "c0Us": 3000.0, "b0Us": 500.0, "k0NsPerToken": 200.0},
        {"units": 2, "c0Us": 2000.0, "b0Us": 350.0, "k0NsPerToken": 150.0},
    ],
}


class Recorded:
    """A GPU whose steps, requests and tokens are written as a run's are."""

    def __init__(self, folder):
        draw = random.Random(5)
        truth = MeasuredTruth(PROFILE, 2, Worker(DEDICATED, {1: BESIDE}, {2: DEDICATED}, {1: 1.06}))
        noise = Noise(Residuals(tuple(1 + 0.2 * draw.random() ** 4 for _ in range(999))), 3)
        self.worker = SimulatedWorker(
            truth, (1, 2), WorkerMemory(), layer_tokens=64, layers=8, draw=random.Random(2)
        )
        self.worker.assign(1)
        self.gpu = DecodeGpu(
            host_levels(2),
            PROFILE,
            truth,
            noise,
            self.worker,
            ArenaGeometry(512, 1 << 21, 512, 8),
            SlotFigures(OBJECTIVE_US),
        )
        self.gpu.on_finished = self._finished
        self._before = self.gpu.hook.before_step
        self._after = self.gpu.hook.after_step
        self.gpu.hook.before_step, self.gpu.hook.after_step = self._decide, self._end
        self._log = EventLog(folder / "pods" / "decode-0" / "d.events.jsonl", source="decode-0")
        self._jobs = EventLog(folder / "pods" / "decode-0" / "w.events.jsonl", source="worker")
        self._next_opt_ns = 0
        self._work, self.worker.run, self._rest = self.worker.run, self._ran, 0.0

    def _ran(self, begin_ns, end_ns, *, beside_decode):
        units = self.worker.interference_units(begin_ns)
        made = self._work(begin_ns, end_ns, beside_decode=beside_decode)
        tokens, self._rest = divmod(self._rest + made, 1)
        middle_ns = (begin_ns + end_ns) // 2
        for phase, at_ns in (("fwd", begin_ns), ("bwd", middle_ns)) if tokens else ():
            self._jobs.append(
                TaskletEvent("j", 1, 1, phase, 0, int(tokens), 0, at_ns, end_ns - 1, units)
            )
        return made

    def _decide(self, facts):
        self._facts, self._grant = facts, self._before(facts)
        return self._grant

    def _end(self, end_ns, latency_us):
        f, g = self._facts, self._grant
        step = StepEvent(
            *(f.step, f.start_ns, end_ns, f.batch, f.context_tokens, int(f.admitted_tokens > 0)),
            *(0, f.waiting, g.decode_units or 2, g.finetune_units, g.predicted_us, 10.0, 0, 0),
        )
        self._log.append(step)
        self._after(end_ns, latency_us)
        if end_ns >= self._next_opt_ns:
            self._next_opt_ns = end_ns + SECOND_NS // 4
            tokens = int(self.worker.tokens)
            self._jobs.append(
                TaskletEvent("j", 1, 1, "opt", 0, 0, tokens, end_ns - 1000, end_ns, 1)
            )

    def _finished(self, request):
        self._log.append(
            RequestEvent(
                str(request.number),
                request.arrived_ns,
                request.first_ns,
                self.gpu.now_ns,
                request.prompt_tokens,
                request.output_tokens,
                "",
            )
        )

    def run(self):
        draw = random.Random(9)
        at_s, number = 0.0, 0
        while at_s < WARM_UP + SECONDS:
            at_ns = SECOND_NS + int(at_s * 1e9)
            prompt, output = draw.randint(50, 400), draw.randint(20, 120)
            self.gpu.submit(DecodeRequest(at_ns, at_ns, prompt, output, number))
            at_s, number = at_s + draw.expovariate(3.0), number + 1
        self.gpu.run_until(SECOND_NS * (1 + WARM_UP))
        self.gpu.set_terms(HarvestTerms("p", "windrow", "harvest", OBJECTIVE_US))
        self.gpu.run_until(SECOND_NS * (1 + WARM_UP + SECONDS + 10))
        self._log.flush()
        self._jobs.flush()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    Recorded(path).run()
    begin_ns = SECOND_NS * (1 + WARM_UP)
    marks = EventLog(path / "run.events.jsonl", source="run")
    for mark in load_marks(
        begin_ns,
        seconds=SECONDS,
        drained_ns=begin_ns + 70 * SECOND_NS,
        objective_ms=OBJECTIVE_US / 1e3,
    ):
        assert isinstance(mark, MarkEvent)
        marks.append(mark)
    marks.flush()
    alone = EventLog(path / "dedicated" / "d.events.jsonl", source="dedicated")
    for i in range(11):
        begin_ns, at_ns = (i - 1) * SECOND_NS, i * SECOND_NS
        n = int(DEDICATED)
        turn_ns = begin_ns + SECOND_NS // 3
        alone.append(TaskletEvent("j", 1, i, "fwd", 0, n, 0, begin_ns, turn_ns, 2))
        alone.append(TaskletEvent("j", 1, i, "bwd", 0, n, 0, turn_ns, at_ns, 2))
        alone.append(TaskletEvent("j", 1, i, "opt", 0, 0, i * n, at_ns, at_ns, 2))
    alone.flush()
    (path / "summary.json").write_text(json.dumps({"run": {"policy": "windrow"}}))
    (path / "profile.json").write_text(json.dumps(PROFILE))
    return path


def test_a_run_by_the_simulators_rules_is_found_again(folder):
    found = replay(folder, repeats=3)
    rows = {row["name"]: row for row in found["compared"]}
    assert all(row["met"] for row in rows.values()), rows
    # The first part teaches what a worker costs, and how fast it is beside decode.
    assert found["learned"]["beside"] == pytest.approx(1.06, abs=0.04)
    assert found["learned"]["tokens_per_second_beside"][1] == pytest.approx(BESIDE, rel=0.1)


def test_tasklets_are_worth_what_their_phase_takes_on_the_whole_device():
    def tasklet(phase, tokens, begin_ms, end_ms, done=0):
        return TaskletEvent("j", 1, 1, phase, 0, tokens, done, begin_ms * 10**6, end_ms * 10**6, 2)

    # Between two optimizer steps 1,000 tokens: a forward of 30 ms and a backward of 60, and of the
    # 10 ms that neither takes each has its part.
    worth = TaskletWorth(
        [
            *(tasklet("fwd", 500, 0, 9), tasklet("opt", 0, 9, 10, done=200)),
            *(tasklet("fwd", 1000, 10, 40), tasklet("bwd", 1000, 45, 105)),
            tasklet("opt", 0, 105, 110, done=1200),
        ]
    )
    assert worth.tokens([tasklet("fwd", 300, 0, 1)]) == pytest.approx(100)
    assert worth.tokens([tasklet("bwd", 300, 0, 1), tasklet("opt", 0, 1, 2)]) == pytest.approx(200)
    with pytest.raises(UserError, match="finished no two steps"):
        TaskletWorth([tasklet("opt", 0, 9, 10, done=200)])


def test_a_run_that_is_too_short_teaches_nothing(folder, tmp_path):
    (tmp_path / "summary.json").write_text((folder / "summary.json").read_text())
    (tmp_path / "profile.json").write_text((folder / "profile.json").read_text())
    (tmp_path / "run.events.jsonl").write_text((folder / "run.events.jsonl").read_text())
    copytree(folder / "dedicated", tmp_path / "dedicated")
    with pytest.raises(UserError, match="too few"):
        replay(tmp_path)
