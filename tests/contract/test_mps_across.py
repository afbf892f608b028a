"""Trials across what containers have apart: over the stand-ins of libcuda and of MPS's program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from windrow.conditions import Reason
from windrow_sidecar.compute import mps_across
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon
from windrow_sidecar.compute.mps_across import (
    APART,
    PIDS,
    Separation,
    try_across,
    try_decodes_daemon,
)
from windrow_sidecar.compute.mps_joining import DaemonNote

FAKE = Path(__file__).with_name("fake_mps_control.py")
LONG_S = 60.0  # a machine under load starts a process slowly


@pytest.fixture
def daemon(run_dir, cuda_standin) -> Iterator[MpsDaemon]:
    (run_dir / CONTROL).symlink_to(FAKE)
    daemon = MpsDaemon(run_dir / "mps", control=str(run_dir / CONTROL))
    daemon.start()
    yield daemon
    daemon.abandon()


def test_a_client_of_another_pid_namespace_is_named_and_its_work_ends_by_that_number(daemon):
    modes = [folder.stat().st_mode for folder in map(Path, daemon.environment.values())]
    tried = {one.what: one for one in try_across(daemon, None, LONG_S)}
    assert list(tried) == [apart.what for apart in APART]
    said = tried[PIDS.what]
    if said.works is None:
        pytest.skip(f"no PID namespaces here: {said.text}")
    assert said.works, said.text
    assert said.known
    assert "a client, 1 of the server; its work ends by that number" in said.text
    # The stand-in of the daemon holds no rule of NVIDIA's about the others.
    assert all(one.text for one in tried.values())
    after = [folder.stat().st_mode for folder in map(Path, daemon.environment.values())]
    assert after == modes, "another user is let in for his trial only"
    assert not any(daemon.clients().values()), "no trial is left"


def test_what_a_container_may_not_have_apart_is_not_tried(daemon, monkeypatch):
    refused = Separation(
        "something", ("sh", "-c", "echo Operation not permitted >&2; exit 1", "sh")
    )
    monkeypatch.setattr(mps_across, "APART", (refused, Separation("nothing", ("no-such-program",))))
    first, second = try_across(daemon, None, LONG_S)
    assert (first.works, first.text) == (None, "not tried: Operation not permitted")
    assert second.works is None
    assert "no-such-program" in second.text


def test_decodes_own_daemon_is_joined_from_where_it_can_be(daemon):
    note = DaemonNote.here(daemon.environment)
    said = try_decodes_daemon(note, daemon, LONG_S)
    assert (said.works, said.known) == (True, True), said.text
    elsewhere = DaemonNote(note.environment, note.uid + 1, note.shared_memory, note.pid_namespace)
    said = try_decodes_daemon(elsewhere, daemon, LONG_S)
    assert said.works is False
    assert Reason.OTHER_USER in said.text


def test_a_client_that_the_server_lets_wait_is_told_from_one_that_fails(daemon, monkeypatch):
    note = DaemonNote.here(daemon.environment)
    pipes = Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
    (pipes / "hang").touch()
    assert "did not initialise CUDA" in try_decodes_daemon(note, daemon, 1.0).text
    (pipes / "hang").unlink()
    monkeypatch.setenv("WINDROW_STANDIN_MPS", "0")
    said = try_decodes_daemon(note, daemon, LONG_S)
    assert said.works is False
    assert "did not connect" in said.text
