"""A run says that its figures mean nothing where its machine was busy, and only there."""

import os
import shutil
from dataclasses import replace

import pytest

from windrow.eventlog import TaskletEvent
from windrow_lab.demo.disturbance import MachineSample, disturbances
from windrow_lab.figures.report import rows_of
from windrow_lab.machine.cpu_use import CpuUse

QUIET = MachineSample(at_s=0.0, pass_us=5000.0, busy_share=0.03, stolen_s=7.0)
LATER = replace(QUIET, at_s=100.0, pass_us=5200.0)


def trained(*step_ms: float) -> list[TaskletEvent]:
    """Return the optimizer steps of a trainer, of a hundred tokens and so many milliseconds."""
    made, at_ns = [], 0
    for number, ms in enumerate(step_ms, 1):
        at_ns += int(ms * 1e6)
        made.append(
            TaskletEvent(
                job_uid="u", epoch=1, step=number, phase="opt", layer=0, tokens=0,
                tokens_done=100 * number, start_ns=at_ns - 1000, end_ns=at_ns, units=2,
            )
        )  # fmt: skip
    return made


FIRST = min(os.sched_getaffinity(0))  # a core on which work can be timed
STEADY = trained(*[100.0] * 20)


def test_a_quiet_machine_is_not_mentioned():
    assert disturbances(QUIET, LATER, STEADY, cores=2) == []


@pytest.mark.parametrize(
    ("before", "after", "dedicated", "said"),
    [
        (replace(QUIET, busy_share=0.5), LATER, STEADY, "Before the run, other processes used 50%"),
        (QUIET, replace(LATER, busy_share=0.11), STEADY, "After the run, other processes used 11%"),
        (QUIET, replace(LATER, pass_us=5600.0), STEADY, "1.12 times as long"),
        (replace(QUIET, pass_us=6000.0), LATER, STEADY, "1.15 times as long"),
        # 30 s of 2 cores and 100 s.
        (QUIET, replace(LATER, stolen_s=37.0), STEADY, "gave 15% of its cores"),
        (QUIET, LATER, trained(*[100.0] * 12, *[130.0] * 8), "1.25 times as fast"),
    ],
)
def test_each_disturbance_is_a_sentence(before, after, dedicated, said):
    (found,) = disturbances(before, after, dedicated, cores=2)
    assert said in found


def test_the_first_steps_of_the_reference_run_and_a_run_of_few_steps_say_nothing():
    assert disturbances(QUIET, LATER, trained(*[300.0] * 4, *[100.0] * 16), cores=2) == []
    assert disturbances(QUIET, LATER, trained(100.0, 300.0, 100.0), cores=2) == []


def test_pods_that_share_cores_are_a_disturbance():
    (found,) = disturbances(QUIET, LATER, STEADY, cores=2, oversubscribed=True)
    assert "shared the cores" in found


def test_the_first_row_of_a_disturbed_summary_says_so():
    tpot = {"p50": 1.0, "p99": 2.0}
    summary = {
        "serving": {
            "tpot_ms": tpot, "objective_ms": 9.0, "steps": 3, "steps_over_objective": 0,
            "share_over_objective": 0.0, "requests_completed": 1, "requests_failed": 0,
        },
        "harvest": {
            "tokens": 1, "tokens_per_second": 1.0, "eta": 1.43,
            "dedicated_tokens_per_second": 1.0,
        },
        "job": {
            "steps": 1, "loss": {"first": 1.0, "last": 1.0},
            "eval_loss": {"base": None, "tuned": None},
        },
    }  # fmt: skip
    assert rows_of(summary)[0][0] == "Job"
    (label, value), *_ = rows_of({**summary, "disturbances": ["The machine was slow."]})
    assert label == "These figures mean nothing: the machine was busy"
    assert value == "The machine was slow."


def test_a_sample_is_taken_of_this_machine():
    sample = MachineSample.take({0})
    assert 0 <= sample.busy_share <= 1
    assert sample.pass_us > 0


class FakedProc:
    """Writes a /proc of two cores, whose processes use ticks as a test says."""

    def __init__(self, folder):
        self.folder, self.cores = folder, [[0] * 10, [0] * 10]
        self.processes = {}
        self.used(os.getpid(), "windrow", 1)

    def used(self, pid, name, parent, ticks=0, *, children=0):
        """Have a process use some ticks of a core, and reap children that had used some."""
        old = self.processes.get(pid, (name, parent, 0, 0))
        self.processes[pid] = (name, parent, old[2] + ticks, old[3] + children)

    def passes(self, *, busy=0, stolen=0, ticks=50):
        """Let half a second pass on both cores; `busy` and `stolen` of the first one's ticks."""
        self.cores[0][0] += busy
        self.cores[0][7] += stolen
        self.cores[0][3] += ticks - busy - stolen
        self.cores[1][4] += ticks  # waits for a disk
        self.write()

    def write(self):
        lines = [f"cpu{FIRST + n} " + " ".join(map(str, c)) for n, c in enumerate(self.cores)]
        (self.folder / "stat").write_text("cpu 1 2 3\n" + "\n".join(lines) + "\nintr 5\n")
        for old in self.folder.glob("[0-9]*"):
            shutil.rmtree(old)
        for pid, (name, parent, own, children) in self.processes.items():
            (self.folder / str(pid)).mkdir()
            fields = ["S", parent, *[0] * 9, own, 0, children, 0, *[0] * 20]
            text = f"{pid} ({name}) " + " ".join(map(str, fields))
            (self.folder / str(pid) / "stat").write_text(text)


@pytest.fixture
def proc(tmp_path):
    faked = FakedProc(tmp_path)
    faked.write()
    return faked


def sampled(proc, *moments):
    """Take a sample during which these happen, one for each look; returns it and the looks."""
    looks = []

    def wait(_seconds):
        moments[len(looks)]()
        looks.append(1)

    sample = MachineSample.take([FIRST], proc=proc.folder, wait=wait)
    return sample, len(looks)


def test_a_machine_that_idles_is_looked_at_once(proc):
    sample, looks = sampled(proc, proc.passes)
    assert (sample.busy_share, sample.busiest, looks) == (0.0, "", 1)


def test_what_this_process_and_its_children_use_is_not_others(proc):
    me = os.getpid()

    def setup():
        proc.used(me, "windrow", 1, ticks=10)
        proc.used(900, "git", me, ticks=20)
        proc.used(901, "sh (a) b", 900, ticks=5)
        proc.passes(busy=35)

    before = CpuUse.read([FIRST], proc.folder)
    setup()
    assert CpuUse.read([FIRST], proc.folder).others_share(before) == 0
    # The child has ended: what it used is in its parent's account now.
    before = CpuUse.read([FIRST], proc.folder)
    del proc.processes[900], proc.processes[901]
    proc.used(me, "windrow", 1, children=25 + 15)
    proc.passes(busy=15)
    assert CpuUse.read([FIRST], proc.folder).others_share(before) == 0


def test_what_a_hypervisor_takes_is_nobodys_process(proc):
    sample, looks = sampled(proc, lambda: proc.passes(stolen=30))
    assert (sample.busy_share, looks) == (0.0, 1)
    assert sample.stolen_s == pytest.approx(30 / os.sysconf("SC_CLK_TCK"))


def test_a_build_that_is_just_ending_is_no_disturbance(proc):
    ends = lambda: proc.passes(busy=45)  # noqa: E731
    sample, looks = sampled(proc, ends, ends, proc.passes, proc.passes, proc.passes)
    assert (sample.busy_share, sample.busiest, looks) == (0.0, "", 5)


def test_a_process_that_goes_on_is_one_and_is_named(proc):
    def goes_on():
        proc.used(77, "cc1plus", 1, ticks=20)
        proc.used(78, "kworker", 2, ticks=5)
        proc.used(79, "sleeps", 1)
        proc.passes(busy=25)

    sample, looks = sampled(proc, *[goes_on] * 5)
    assert looks == 5
    assert sample.busy_share == pytest.approx(0.5)
    (said,) = disturbances(
        sample, replace(LATER, stolen_s=0.0, pass_us=sample.pass_us), STEADY, cores=2
    )
    assert said == (
        "Before the run, other processes used 50% of its cores, mostly cc1plus (77), kworker (78)."
    )


def test_cores_that_a_container_numbers_otherwise_count_all(proc):
    before = CpuUse.read([FIRST + 9], proc.folder)
    proc.used(77, "cc1plus", 1, ticks=50)
    proc.passes(busy=50)
    assert CpuUse.read([FIRST + 9], proc.folder).others_share(before) == pytest.approx(0.5)


def test_the_real_proc_is_read():
    cores = sorted(os.sched_getaffinity(0))
    before = CpuUse.read(cores)
    assert before.total >= before.busy > 0
    assert before.own > 0
    assert os.getpid() not in before.others
    assert os.getppid() in before.others
    sum(range(10**6))
    now = CpuUse.read(cores)
    assert now.total >= before.total
    assert 0 <= now.others_share(before) <= 1
