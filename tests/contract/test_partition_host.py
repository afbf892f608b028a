"""The host's partition moves every thread of its process to its share of the cores, and back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from windrow.errors import UserError
from windrow_sidecar.cgroup import CgroupLimits, read_limits
from windrow_sidecar.compute.host import HostPartition

UNLIMITED = CgroupLimits(cpus=None, memory_bytes=None)


@pytest.fixture
def threads() -> list[int]:
    """Return what the partition asked compute to use, in order."""
    return []


@pytest.fixture
def partition(cores, threads) -> HostPartition:
    return HostPartition.from_affinity("decode", set_threads=threads.append, limits=UNLIMITED)


@contextmanager
def running_thread(name: str = "compute") -> Iterator[int]:
    """A thread that waits; gives its native id."""
    stop, started = threading.Event(), threading.Event()
    ids: list[int] = []

    def body() -> None:
        ids.append(threading.get_native_id())
        Path(f"/proc/self/task/{ids[0]}/comm").write_text(name)
        started.set()
        stop.wait()

    thread = threading.Thread(target=body)
    thread.start()
    started.wait()
    try:
        yield ids[0]
    finally:
        stop.set()
        thread.join()


def test_decode_takes_the_first_cores_and_the_worker_the_last(partition):
    partition.activate(1)
    assert os.sched_getaffinity(0) == {partition.cpus[0]}
    worker = HostPartition("finetune", partition.cpus, set_threads=lambda n: None)
    worker.activate(1)
    assert os.sched_getaffinity(0) == {partition.cpus[-1]}


def test_the_last_level_is_every_core_with_a_thread_each(partition, threads):
    partition.activate(1)
    partition.activate(partition.total_units)
    assert os.sched_getaffinity(0) == set(partition.cpus)
    assert threads[-1] == partition.total_units


def test_every_thread_moves_not_only_the_caller(partition):
    with running_thread() as thread_id:
        partition.activate(1)
        assert os.sched_getaffinity(thread_id) == {partition.cpus[0]}


def test_a_thread_that_starts_after_a_move_inherits_the_share(partition):
    partition.activate(1)
    with running_thread() as thread_id:
        assert os.sched_getaffinity(thread_id) == {partition.cpus[0]}


def test_threads_shrink_before_cores_and_grow_after_them(partition, threads):
    masks: list[int] = []
    partition._set_threads = lambda n: masks.append(len(os.sched_getaffinity(0)))
    partition.activate(partition.total_units)
    partition.activate(1)
    partition.activate(partition.total_units)
    n = partition.total_units
    # At each call compute had never more threads than cores.
    assert masks == [n, n, n]


def test_an_unchanged_share_makes_no_call(partition, threads):
    partition.activate(1)
    os.sched_setaffinity(0, partition.cpus)
    partition.activate(1)
    assert threads == [1]
    assert os.sched_getaffinity(0) == set(partition.cpus)


def test_excluded_threads_are_never_moved(partition):
    with running_thread() as thread_id:
        partition.exclude(thread_id)
        partition.activate(1)
        assert os.sched_getaffinity(thread_id) == set(partition.cpus)


@pytest.mark.parametrize("name", ["grpc_global_tim", "event_engine"])
def test_threads_of_grpc_stay_on_the_last_core(partition, name):
    with running_thread(name) as thread_id:
        partition.activate(1)
        assert os.sched_getaffinity(thread_id) == {partition.cpus[-1]}


def test_threads_that_start_in_the_background_stay_on_the_last_core(partition):
    with partition.background_threads():
        context = running_thread()
        thread_id = context.__enter__()
    try:
        partition.activate(1)
        assert os.sched_getaffinity(thread_id) == {partition.cpus[-1]}
    finally:
        context.__exit__(None, None, None)


def test_release_gives_every_core_back_to_every_thread(partition):
    with running_thread("grpc_x") as thread_id:
        partition.activate(1)
        partition.release()
        assert os.sched_getaffinity(thread_id) == set(partition.cpus)
    assert os.sched_getaffinity(0) == set(partition.cpus)


def test_every_number_of_cores_is_a_level(partition):
    assert partition.levels() == tuple(range(1, partition.total_units + 1))


def test_one_core_is_refused_with_what_is_needed():
    with pytest.raises(UserError, match="at least two cores") as error:
        HostPartition("decode", [0])
    assert error.value.reason == "TooFewCores"


def test_cores_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match=r"cores \[99999\] do not exist"):
        HostPartition("decode", [0, 99999])


def test_a_quota_below_two_cores_is_refused():
    with pytest.raises(UserError, match="CPU quota"):
        HostPartition.from_affinity(
            "decode", set_threads=lambda n: None, limits=CgroupLimits(cpus=1.5, memory_bytes=None)
        )


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        (
            "0::/pods/a\n",
            {
                "pods/a/cpu.max": "max 100000\n",
                "pods/cpu.max": "250000 100000\n",
                "pods/a/memory.max": "1073741824\n",
                "memory.max": "max\n",
            },
            CgroupLimits(cpus=2.5, memory_bytes=1 << 30),
        ),
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.limit_in_bytes": "4096\n",
                "cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            CgroupLimits(cpus=None, memory_bytes=4096),
        ),
        ("0::/gone\n", {}, UNLIMITED),
    ],
    ids=["v2", "v1", "not mounted"],
)
def test_the_tightest_limit_of_all_groups_above_counts(tmp_path, group, files, expected):
    write_tree(tmp_path / "fs", files)
    (tmp_path / "cgroup").write_text(group)
    assert read_limits(tmp_path / "cgroup", tmp_path / "fs") == expected


NARROWED = """
import os
from windrow_sidecar.compute.host import HostPartition, load_openmp

partition = HostPartition.from_affinity("finetune")
if {loads}:
    load_openmp()
os.sched_setaffinity(0, partition.cpus[-1:])
import torch

partition.activate(1)
partition.activate(2)
before = set(os.listdir("/proc/self/task"))
rows = torch.ones(1 << 17)
(second,) = set(os.listdir("/proc/self/task")) - before

def sleeps():
    lines = open(f"/proc/self/task/{{second}}/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

before = sleeps()
for _ in range(1000):
    rows.add_(1)
print(sleeps() - before)
"""


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("loads", "asleep"), [(True, False), (False, True)])
def test_a_process_that_loads_openmp_before_it_is_narrowed_has_a_team_that_spins(loads, asleep):
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000000000"}
    program = [sys.executable, "-c", NARROWED.format(loads=loads)]
    done = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    # A thread that waits asleep does so in each of a thousand regions, one that spins in none.
    assert (int(done.stdout) > 500) == asleep
