"""The first rank of a job says which of the others has ended or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from multiprocessing import Pipe
from pathlib import Path

import pytest
from waiting import wait_until

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.job.ranks import Leader, RankLost
from windrow_sidecar.finetune.training.health import Unhealthy


@pytest.fixture
def ranks():
    """Leader of two ranks that wait, their processes, and their ends of the pipes."""
    others, theirs = [], []
    for _ in range(2):
        ours, end = Pipe()
        process = os.fork()
        if not process:
            while True:
                signal.pause()
        others.append((process, ours))
        theirs.append(end)
    leader = Leader(others, tempfile.TemporaryFile())  # noqa: SIM115 - ends with the leader
    yield leader, [process for process, _ in others], theirs
    for process, _ in others:
        with contextlib.suppress(ProcessLookupError):  # a test may have ended it
            os.kill(process, signal.SIGKILL)
    leader.end()
    leader.tokens.close()
    for end in theirs:
        end.close()


def test_a_collective_that_fails_is_explained_by_the_rank_that_was_killed(ranks):
    leader, (_, second), _ = ranks
    os.kill(second, signal.SIGKILL)
    said = leader.explain(RuntimeError("Connection closed by peer"))
    assert isinstance(said, RankLost)
    assert str(said) == "rank 2 was ended by SIGKILL"


def test_what_a_rank_says_itself_counts_more(ranks):
    leader, (first, _), (end, _) = ranks
    end.send(UserError("the weights are torn", field="spec.model.name", remedy="Copy them again."))
    os.kill(first, signal.SIGKILL)
    said = leader.explain(RuntimeError("Connection closed by peer"))
    assert isinstance(said, UserError)
    assert (said.problem, said.field) == ("the weights are torn", "spec.model.name")


def test_a_rank_that_was_killed_counts_more_than_one_that_failed_for_that(ranks):
    leader, (_, second), (end, _) = ranks
    end.send(RankLost("rank 1: OSError: it has lost its neighbour"))
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    said = leader.explain(RuntimeError("Connection closed by peer"))
    assert str(said) == "rank 2 was ended by SIGKILL"


def test_work_that_does_not_end_is_explained_by_the_rank_that_is_stopped(ranks):
    leader, (_, second), _ = ranks
    os.kill(second, signal.SIGSTOP)
    stat = Path(f"/proc/{second}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "its stop")
    said = leader.explain(Unhealthy(Reason.NO_PROGRESS, "a tasklet has not ended within 60 s"))
    assert isinstance(said, Unhealthy)
    assert str(said) == "a tasklet has not ended within 60 s: rank 2 is stopped"


def test_an_error_of_the_job_itself_stays(ranks):
    leader, _, _ = ranks
    error = UserError("no rows", field="spec.dataset.source", remedy="Write some.")
    assert leader.explain(error) is error
