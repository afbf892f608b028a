"""Keep what a process writes for itself its own; it reaches a job's folder through no link."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from windrow.access import NetworkAccess
from windrow_sidecar.finetune.data.held_models import HeldModel
from windrow_sidecar.finetune.data.private_folders import PrivateFolder
from windrow_sidecar.finetune.data.source_access import SourceAccess
from windrow_sidecar.finetune.job.mirrored_files import MirroredFiles
from windrow_sidecar.finetune.job.scalars import Scalars


def test_the_folder_of_a_killed_worker_goes_with_the_next_one_and_that_of_a_living_one_stays(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    access = SourceAccess((tmp_path,), network=NetworkAccess(sources=()))
    ours, theirs = os.pipe()
    if (worker := os.fork()) == 0:
        held = HeldModel(model, access)
        os.write(theirs, str(held.path).encode())
        signal.pause()
    left = Path(os.read(ours, 4096).decode())
    try:
        HeldModel(model, access).close()
        assert (left / "config.json").is_symlink()
        PrivateFolder("other").close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.close(ours)
        os.close(theirs)
    (tmp_path / "windrow-model-link").symlink_to(model)  # of nobody: it leads elsewhere
    held = HeldModel(model, access)
    assert not left.exists()
    assert held.path.is_dir()
    held.close()
    assert not held.path.exists()
    assert (model / "config.json").is_file()


@pytest.fixture
def folders(tmp_path):
    """(what a library writes to, the job's folder, a folder of another tenant)."""
    made = [tmp_path / name for name in ("private", "job", "bank")]
    for folder in made:
        (folder / "run").mkdir(parents=True)
    return made


def opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def test_files_of_a_library_are_copied_as_they_grow_and_as_they_change(folders):
    private, job, _ = folders
    mirror = MirroredFiles(private, opened(job))
    grows, changes = private / "run" / "run.wandb", private / "summary.json"
    for written in (b"a", b"ab", b"abc" * 1000):
        grows.write_bytes(written)
        changes.write_bytes(written[::-1])
        (private / "latest").unlink(missing_ok=True)
        (private / "latest").symlink_to("run")
        mirror.sync()
        assert (job / "run" / "run.wandb").read_bytes() == written
        assert (job / "summary.json").read_bytes() == written[::-1]
    mirror.close()
    assert sorted(path.name for path in job.rglob("*")) == ["run", "run.wandb", "summary.json"]


@pytest.mark.parametrize("name", ["run.wandb", ".summary.json.draft", "summary.json", "run"])
def test_what_a_library_writes_follows_no_link_of_the_jobs_folder(folders, name):
    """Links at the names that it takes, before its files are made and after that."""
    private, job, bank = folders
    theirs = bank / "run" if name == "run" else bank / "theirs"
    if name != "run":
        theirs.write_bytes(b"card 4111")
    (private / "run.wandb").write_bytes(b"figures")
    (private / "summary.json").write_bytes(b"figures")
    mirror = MirroredFiles(private, opened(job))
    (job / "run").rmdir()
    (job / name).symlink_to(theirs)
    mirror.sync()
    (job / name).unlink(missing_ok=True)
    (job / name).symlink_to(theirs)
    (private / "run.wandb").write_bytes(b"figures of a step")
    (private / "summary.json").write_bytes(b"figures of a step")
    mirror.sync()
    (private / "run" / "config.yaml").write_bytes(b"config")
    if name == "run":
        with pytest.raises(OSError, match=r"."):
            mirror.sync()
    else:
        mirror.sync()
        assert theirs.read_bytes() == b"card 4111"
    mirror.close()
    assert not list((bank / "run").iterdir())


@pytest.mark.parametrize("what", ["tensorboard", "metrics.jsonl", "."])
def test_figures_of_steps_follow_no_link_of_the_jobs_folder(folders, what, caplog):
    _, job, bank = folders
    scalars = Scalars(job, 1, tensorboard=True)
    if what == ".":  # the job's folder as a whole
        (job / "run").rmdir()
        job.rmdir()
        job.symlink_to(bank)
    else:
        theirs = bank / "run" if what == "tensorboard" else bank / "theirs"
        (job / what).symlink_to(theirs)
    scalars._write(1, {"loss": 1.0})
    assert "are not written down" in caplog.text
    assert [path.name for path in bank.rglob("*")] == ["run"]
