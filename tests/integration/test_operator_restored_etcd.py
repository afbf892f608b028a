"""The cluster's store is put back to an older snapshot while jobs run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import urllib3
from kubernetes import client, config
from operator_process import HURRIED, LISTS_OFTEN, Cluster, OperatorProcess, install_crds, running
from waiting import wait_until

from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings


class RestorableStore:
    """The data of a control plane's etcd: copied, and put back under all who use it."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._data, self._copy = Path(plane.kubeconfig).parent / "etcd", folder / "snapshot"
        self._logs, self._started = folder, []

    def _process(self, program: str) -> int:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                words = self._words(int(entry.name))
                own = str(self._data.parent) in " ".join(words)
                if own and words[0].endswith(f"/{program}"):
                    return int(entry.name)
        raise AssertionError(f"{program} does not run")

    @staticmethod
    def _words(pid: int) -> list[str]:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        except (FileNotFoundError, ProcessLookupError):
            return []

    def save(self) -> None:
        etcd = self._process("etcd")
        os.kill(etcd, signal.SIGSTOP)
        shutil.copytree(self._data, self._copy)
        os.kill(etcd, signal.SIGCONT)

    def put_back(self) -> None:
        """End the API server and etcd, and start both over the copy."""
        programs = ("kube-apiserver", "etcd")
        pids = {program: self._process(program) for program in programs}
        commands = {program: self._words(pid) for program, pid in pids.items()}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(self._words(pid) for pid in pids.values()), "both have ended")
        shutil.rmtree(self._data)
        shutil.copytree(self._copy, self._data)
        for program in reversed(programs):
            with (self._logs / f"{program}.log").open("ab") as log:
                self._started.append(
                    subprocess.Popen(
                        commands[program], stdout=log, stderr=log, cwd=self._data.parent
                    )
                )

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def plane(tools):
    with ControlPlane(ControlPlaneSettings(tools)) as own:
        yield own


@pytest.fixture
def store(plane, tmp_path):
    made = RestorableStore(plane, tmp_path)
    yield made
    made.close()


@pytest.fixture
def cluster(plane, store, tmp_path):
    """A Cluster of a control plane that is this test's own."""
    with config.new_client_from_config(str(plane.kubeconfig)) as kube:
        install_crds(kube)
        client.CoreV1Api(kube).create_namespace({"metadata": {"name": "team"}})
        operator = OperatorProcess(
            plane.kubeconfig,
            tmp_path,
            *HURRIED,
            *LISTS_OFTEN,
        )
        operator.start()
        made = Cluster(kube, "team", operator)
        yield made
        made.close()
        if operator.process.poll() is None:
            operator.end()
        print(operator.log.read_text()[-20000:])


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_what_runs_goes_on_and_what_the_snapshot_does_not_know_ends(cluster, store, plane):
    cluster.policy()
    first, second = (cluster.attach(cluster.pod(f"decode-{i}")) for i in range(2))
    for sidecar in (first, second):
        sidecar.beat()
    cluster.job("early")
    slot = wait_until(lambda: cluster.status("early").get("slot"), "a placement")
    at, other = (first, second) if "decode-0" in slot else (second, first)
    early = at.next("assign")
    at.report(early, "STARTED")
    at.beat(running(early, step=3, total_steps=100, loss=3.5))
    cluster.await_state("Running", "early")
    store.save()

    cluster.job("late")
    late = other.next("assign")
    other.report(late, "STARTED")
    other.beat(running(late, step=2, total_steps=100, loss=3.0))
    cluster.await_state("Running", "late")
    at.beat(running(early, step=50, total_steps=100, loss=2.5))
    wait_until(lambda: cluster.status("early").get("step") == "50/100", "a newer status")

    store.put_back()

    def serves() -> bool:
        try:
            return not cluster.has_job("late")
        except (client.ApiException, urllib3.exceptions.HTTPError):
            return False

    wait_until(serves, "the snapshot is served")
    # A watch that holds a version of the future tells of nothing; a listing makes up for it.
    wait_until(
        lambda: any(m.WhichOneof("message") == "command" for m in other.told),
        "the job that nobody knows is ended",
        seconds=150,
    )
    ended = other.next("command")
    assert (ended.job_uid, ended.epoch) == (late.job_uid, late.epoch)

    at.report(early, "SUCCEEDED", adapter_path="/out/early")
    wait_until(
        lambda: cluster.status("early").get("state") == "Succeeded",
        "the end of the job is written over the older status",
        seconds=150,
    )
    assert cluster.status("early")["epoch"] == early.epoch
    other.beat()
    cluster.job("after")
    slot = wait_until(lambda: cluster.status("after").get("slot"), "a placement of a new job")
    (first if "decode-0" in slot else second).next("assign")
