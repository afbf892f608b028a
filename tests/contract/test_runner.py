"""Check how a job runs to its end: what holds it up, what does not, and what is told of it."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time

import pytest

from windrow.crd import CheckpointSpec
from windrow.eventlog import EventLog
from windrow.protocol import Ending
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.job.assembly import JobSpec, TrainingSession
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.job.ledger import CheckpointUnreachable, JobState, Ledger
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.job.starting_point import NamedCheckpoint, local_files
from windrow_sidecar.finetune.memory.training_memory import NoRoom, OwnMemory
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.health import StallWatch
from windrow_sidecar.testing.equality import small_spec
from windrow_sidecar.testing.tinyjob import (
    SpoilingHome,
    adapter_of,
    bit_equal,
    tiny_job,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Told:
    """A reporter with commands to give, who remembers."""

    def __init__(self, *commands) -> None:
        self.commands, self.kinds, self.details, self.events = list(commands), [], [], []

    def event(self, event) -> None:
        self.kinds.append(event.kind)
        self.details.append(event.detail)
        self.events.append(event)

    def take_command(self):
        return self.commands.pop(0) if self.commands else None


class Gate(OpenGate):
    """Closed while the test wants it; a wait lasts a second of the test's clock."""

    def __init__(self) -> None:
        super().__init__(1)
        self.is_open, self.now_s = True, 0.0

    def launch(self, tasklet) -> bool:
        return self.is_open and super().launch(tasklet)

    def wait(self) -> None:
        self.now_s += 1.0


class Started:
    """A tiny job with everything that runs it; a checkpoint is due after each step."""

    def __init__(
        self, root, *commands, notes=(), forgets=False, epoch=1, starts_from=None, known=""
    ) -> None:
        self.tiny, self.told, self.gate, self.home = (
            tiny_job(),
            Told(*commands),
            Gate(),
            SpoilingHome(),
        )
        self.folder = JobFolder(root, "a-job", epoch, starts_from=starts_from)
        self.folder.claim()
        every = {"checkpoint": CheckpointSpec(everySteps=1)}
        spec = small_spec().model_copy(update=every)
        job = JobSpec("default", "tiny", "a-job", 1, spec, checkpoint=known)
        stream, job_state = self.tiny.stream, JobState(stall=StallWatch(after_s=0))
        self.job_state = job_state
        rows = DataSplit((), ())
        session = TrainingSession(
            job, self.tiny.model, stream, 16, False, Origin(), None, HostDevice(), rows, notes
        )
        events = EventLog(root / "log.jsonl", source="test")
        ledger = Ledger(session, self.folder, self.told, events, job_state, forgets=forgets)
        memory = OwnMemory(stream, self.home)
        self.runner = Runner(
            *(stream, self.gate, memory, ledger, self.told, job_state),
            clock=lambda: self.gate.now_s,
        )
        self.ended = self.runner.begin()


def test_what_is_not_learnt_of_the_rows_stands_in_the_first_event_also_after_a_checkpoint(tmp_path):
    notes = ("2 rows are cut", "1 row is wrong")
    job = Started(tmp_path, "STOP", notes=notes)
    assert job.told.details[0] == "from the beginning; 2 rows are cut; 1 row is wrong"
    job.runner.cycle()
    again = Started(tmp_path, notes=notes)
    assert again.told.details[0].startswith("from step 0, ")
    assert again.told.details[0].endswith("; 2 rows are cut; 1 row is wrong")


def test_a_job_goes_on_from_another_jobs_checkpoint_and_writes_its_own_first(
    tmp_path, uninterrupted
):
    first = Started(tmp_path / "first")
    while first.tiny.stream.position.step < 2:
        first.runner.cycle()
    while first.folder.newest() is None or first.folder.newest().position.step < 2:
        first.runner.obey()  # settles: the writer's thread may be slower than a step
    named = NamedCheckpoint(str(first.folder.root), local_files(None))
    job = Started(tmp_path / "second", starts_from=named)
    assert job.told.details[0].startswith(f"from step 2, {first.folder.checkpoints}")
    assert job.job_state.progress.checkpoint_path == ""  # another job's is none of its own
    while "CHECKPOINTED" not in job.told.kinds:
        job.runner.obey()
    assert job.folder.newest().position.step == 2
    assert job.tiny.stream.position.step == 2
    shutil.rmtree(first.folder.root)
    while (ending := job.runner.cycle()) is None:
        pass
    assert ending is Ending.SUCCEEDED
    assert bit_equal(adapter_of(job.tiny), uninterrupted)


def test_a_job_that_had_got_further_does_not_fall_back_to_the_checkpoint_that_it_names(tmp_path):
    first = Started(tmp_path / "first")
    while first.folder.newest() is None:
        first.runner.cycle()
    named = NamedCheckpoint(str(first.folder.root), local_files(None))
    with pytest.raises(CheckpointUnreachable, match="step-7 is not there"):
        Started(tmp_path / "second", starts_from=named, known="step-7")


def test_the_stream_does_not_wait_for_a_slow_disk(tmp_path, uninterrupted):
    job = Started(tmp_path, "CHECKPOINT")
    with (job.folder.root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a disk that does not answer
        while job.tiny.stream.position.step < 3:
            assert job.runner.cycle() is None
        assert job.told.kinds == ["STARTED", "EVALUATED"]
    while (ending := job.runner.cycle()) is None:
        pass
    assert ending is Ending.SUCCEEDED
    assert "CHECKPOINTED" in job.told.kinds
    assert job.told.kinds[-1] == "SUCCEEDED"
    assert bit_equal(adapter_of(job.tiny), uninterrupted)


def test_a_last_checkpoint_that_hangs_is_noticed(tmp_path):
    job = Started(tmp_path)
    while job.tiny.stream.position.step < 2:
        job.runner.cycle()
    job.job_state.stop_asked = "a test"
    with (job.folder.root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a disk that does not answer
        stopping = threading.Thread(target=job.runner.cycle)
        stopping.start()
        deadline = time.monotonic() + 60
        while "the last checkpoint has not ended" not in str(job.job_state.stall.stalled()):
            assert time.monotonic() < deadline
    stopping.join()
    assert job.job_state.stall.stalled() is None
    assert job.told.kinds[-1] == "STOPPED"


def test_a_checkpoint_is_not_begun_where_the_optimizers_step_would_wait_for_it(tmp_path):
    job = Started(tmp_path)
    while not job.tiny.stream.before_optimizer:
        job.runner.cycle()
    job.told.commands.append("CHECKPOINT")
    job.runner.obey()
    job.runner.turn()
    assert not job.tiny.stream.before_optimizer
    while "CHECKPOINTED" not in job.told.kinds:
        job.runner.obey()
    assert job.folder.newest().position.step == 1


def test_a_long_pause_leaves_no_state_on_the_device_and_changes_nothing(tmp_path, uninterrupted):
    job = Started(tmp_path)
    for _ in range(30):  # into the middle of a step
        job.runner.cycle()
    job.gate.is_open = False
    for second in range(12):
        assert not job.home.away
        assert ("PAUSED" in job.told.kinds) == (second > 2)
        job.runner.cycle()
    assert job.home.away
    job.gate.is_open = True
    while (ending := job.runner.cycle()) is None:
        pass
    assert ending is Ending.SUCCEEDED
    assert not job.home.away
    kinds = [kind for kind in job.told.kinds if kind in ("PAUSED", "RESUMED")]
    assert kinds == ["PAUSED", "RESUMED"]
    assert bit_equal(adapter_of(job.tiny), uninterrupted)


def test_a_job_whose_room_is_gone_as_it_comes_back_waits_for_it(
    tmp_path, uninterrupted, monkeypatch
):
    job, refused = Started(tmp_path), []
    job.gate.is_open = False
    for _ in range(12):
        job.runner.cycle()
    assert job.home.away
    restore = OwnMemory.restore

    def without_room(memory) -> bool:
        if len(refused) < 3:
            refused.append(job.home.away)
            raise NoRoom("decode lends less")
        return restore(memory)

    monkeypatch.setattr(OwnMemory, "restore", without_room)
    job.gate.is_open = True
    job.runner.turn()
    assert job.runner.starving
    assert run_to_the_end(job) is Ending.SUCCEEDED
    assert refused == [True] * 3
    assert bit_equal(adapter_of(job.tiny), uninterrupted)


def test_a_job_that_is_told_to_pause_says_so_and_when_it_goes_on_though_others_have_the_turns(
    tmp_path,
):
    job = Started(tmp_path, "PAUSE")
    for _ in range(4):  # what a carrier asks of those whose turn it is not
        job.runner.obey()
        job.gate.now_s += 1.0
    assert job.told.kinds == ["STARTED", "PAUSED"]
    job.told.commands.append("RESUME")
    job.runner.obey()
    job.runner.turn()
    assert job.told.kinds == ["STARTED", "PAUSED", "RESUMED"]


def run_to_the_end(job) -> Ending:
    while (ending := job.runner.cycle()) is None:
        pass
    return ending


def test_damaged_checkpoints_that_are_passed_over_are_told_with_path_and_reason(tmp_path):
    before = Started(tmp_path)
    for step in (1, 2, 3):
        while before.tiny.stream.position.step < step:
            before.runner.cycle()
        before.runner._ledger._writer.settle(wait=True)  # none is left out for one being written
    newest, older = sorted(before.folder.checkpoints.glob("step-*"), reverse=True)
    (newest / "tensors.safetensors").write_bytes(b"")
    told = Started(tmp_path).told.events
    assert [event.kind for event in told] == ["WARNED", "STARTED"]
    assert told[0].reason == "CheckpointUnreadable"
    assert (
        f"{newest}: tensors.safetensors does not have the checksum that was written"
        in told[0].detail
    )
    assert f"goes on from {older}" in told[0].detail
    (older / "manifest.json").write_text("[]")
    told = Started(tmp_path).told.events
    assert f"{newest}: tensors" in told[0].detail
    assert f"; {older}: " in told[0].detail
    assert "goes on from the beginning" in told[0].detail


def test_checkpoints_go_once_the_adapter_is_written_where_nobody_can_go_on_from_them(tmp_path):
    kept, forgotten = Started(tmp_path / "kept"), Started(tmp_path / "gone", forgets=True)
    for job in (kept, forgotten):
        assert run_to_the_end(job) is Ending.SUCCEEDED
        assert (job.folder.destination / "adapter_model.safetensors").is_file()
    assert kept.folder.newest().position.step == 4
    assert not forgotten.folder.checkpoints.exists()
    assert (forgotten.folder.root / "metrics.jsonl").is_file()


def test_a_success_that_nobody_heard_of_is_told_by_the_next_worker(tmp_path):
    first = Started(tmp_path, forgets=True)
    run_to_the_end(first)
    written = (tmp_path / "adapter_model.safetensors").read_bytes()
    second = Started(tmp_path, forgets=True, epoch=2)
    assert second.ended is Ending.SUCCEEDED
    (told,) = second.told.events
    assert told.kind == "SUCCEEDED"
    assert told.detail.endswith("; an earlier worker wrote the adapter")
    heard = first.told.events[-1]
    assert (told.adapter_path, told.base_eval_loss, told.tuned_eval_loss) == (
        heard.adapter_path,
        heard.base_eval_loss,
        heard.tuned_eval_loss,
    )
    before, now = first.job_state.progress, second.job_state.progress
    assert (now.step, now.total_steps, now.tokens, now.loss) == (
        before.step,
        before.total_steps,
        before.tokens,
        before.loss,
    )
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == written


def test_a_worker_that_ends_between_adapter_and_note_is_followed_by_one_that_writes_it_again(
    tmp_path, monkeypatch
):
    first = Started(tmp_path, forgets=True)

    def ends(self, completion):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JobFolder, "complete", ends)
        with pytest.raises(KeyboardInterrupt):
            run_to_the_end(first)
    second = Started(tmp_path, forgets=True, epoch=2)
    assert second.ended is None
    assert second.told.events[0].reason == "Resumed"
    assert run_to_the_end(second) is Ending.SUCCEEDED


def test_checkpoints_that_cannot_be_removed_are_told_with_the_success(tmp_path):
    job = Started(tmp_path, forgets=True)
    (job.folder.root / "completed.json.draft").mkdir()  # the note cannot be written
    assert run_to_the_end(job) is Ending.SUCCEEDED
    assert "its checkpoints stay: " in job.told.events[-1].detail
    assert job.folder.newest().position.step == 4


@pytest.mark.parametrize("commands", [["FORGET"], ["STOP", "FORGET"]])
def test_a_job_that_was_deleted_stops_without_a_checkpoint_and_leaves_none(tmp_path, commands):
    job = Started(tmp_path)
    while "CHECKPOINTED" not in job.told.kinds:
        job.runner.cycle()
    job.told.commands += commands
    assert run_to_the_end(job) is Ending.STOPPED
    assert "its checkpoints are removed" in job.told.events[-1].detail
    assert not job.folder.checkpoints.exists()


def test_an_adapter_that_fits_though_the_last_checkpoint_does_not_is_a_success(tmp_path):
    job = Started(tmp_path)
    while job.tiny.stream.peek() is not None:
        job.runner.cycle()
    job.runner._ledger._writer.settle(wait=True)
    job.folder.checkpoints.rename(tmp_path / "moved")
    job.folder.checkpoints.write_text("")  # no folder can be made in it
    assert run_to_the_end(job) is Ending.SUCCEEDED
    warned = next(event for event in job.told.events if event.kind == "WARNED")
    assert warned.reason == "CheckpointNotWritten"
    assert "the checkpoint of step 4 is not written, the last good one is" in warned.detail
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_an_adapter_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path):
    job = Started(tmp_path)
    while job.tiny.stream.peek() is not None:
        job.runner.cycle()
    (tmp_path / "adapter_config.json").write_text("earlier")
    (job.folder.root / "adapter").write_text("")  # no folder can be made in its place
    with pytest.raises(OSError, match="adapter"):
        run_to_the_end(job)
    assert (tmp_path / "adapter_config.json").read_text() == "earlier"
    assert not (tmp_path / "adapter_model.safetensors").exists()
