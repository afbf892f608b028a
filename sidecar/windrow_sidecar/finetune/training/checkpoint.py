"""How a job's state survives: whole or not at all, newest good one first, one writer at a time.

Below `<destination>/.windrow/<job uid>/`: `fence` (highest epoch ever started), `holder-N` (whose
epoch N is), and
`checkpoints/step-NNNNNNNN-RRRRR/` (R: rows of the next step that are done), each with a manifest of
the SHA-256 of its files. A folder is written under another name, synced, and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from windrow.conditions import Reason
from windrow.errors import UserError, WindrowError
from windrow.holder import HOLDER, AlreadyHeld, hold
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.evaluation import Judged

log = logging.getLogger(__name__)

FORMAT = 4
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"


class Fenced(WindrowError):
    """Another worker has the job, with a higher epoch as a rule: this one may not write."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a job stands. Steps count from 0 to the job's total."""

    step: int  # finished ones
    committed_rows: tuple[int, ...] = ()  # of the step on its way, already in the gradient sums
    loss_sum: float = 0.0  # over their labels
    tokens_done: int = 0  # real tokens of finished steps
    loss: float | None = None  # of the last finished step
    base_eval_loss: float | None = None
    judged: Judged = field(default_factory=Judged)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A good checkpoint, read and verified."""

    path: Path
    position: Position
    tensors: dict[str, Tensor]
    origin: Origin = field(default_factory=Origin)

    def check(self, wanted: Origin) -> None:
        """Raise UserError unless it is of that origin."""
        if (differs := self.origin.differs(wanted)) is not None:
            raise UserError(
                f"{self.path} cannot be gone on from: {differs.problem}",
                field=differs.field,
                remedy=f"{differs.remedy}, or delete {self.path.parents[1]} and start anew.",
                reason=Reason.CHECKPOINT_MISMATCH,
            )


class JobFolder:
    """The folder of one job below its destination, as the worker of one epoch sees it."""

    def __init__(self, destination: Path, job_uid: str, epoch: int) -> None:
        self.destination, self.job_uid, self.epoch = destination, job_uid, epoch
        self.root = destination / ".windrow" / job_uid
        self.checkpoints = self.root / "checkpoints"

    def claim(self) -> None:
        """Make the folder and raise the fence to this epoch; the epoch is this process's then.

        Raises:
            UserError: the destination is not writable.
            Fenced: a higher epoch was here already, or another process has this very one: the same
                manifest is run twice.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._check()
                hold(self.root / f"{HOLDER}{self.epoch}")
                _write_file(self.root / "fence", str(self.epoch).encode())
        except AlreadyHeld as held:
            raise Fenced(
                f"{held} is training this job, in {self.root}. Wait until it ends, or stop it; "
                "another job needs a name and a destination of its own"
            ) from held
        except OSError as error:
            raise UserError(
                f"{self.destination} cannot be written: {error.strerror}",
                field="spec.output.destination",
                remedy="Name a directory on a volume that the worker may write.",
                reason=Reason.OUTPUT_NOT_WRITABLE,
            ) from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the fence: inside, no other epoch can claim or write.

        Raises:
            Fenced: a higher epoch has claimed the folder.
        """
        with self._locked():
            self._check()
            yield

    def save(
        self,
        position: Position,
        tensors: Mapping[str, Tensor],
        *,
        keep: int,
        origin: Origin | None = None,
    ) -> Path:
        """Write a checkpoint and forget all but the newest `keep`. Returns its path.

        Those of later positions go as well: the job has gone on from before them, since they could
        not be read. `tensors` must not share memory.

        Raises:
            Fenced: see `writing`.
            OSError: it could not be written; what was there stands.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        def fill(folder: Path) -> None:
            _write_file(folder / STATE, json.dumps(asdict(position)).encode())
            try:
                save_file(dict(tensors), folder / TENSORS)
            except SafetensorError as error:
                raise OSError(f"{folder / TENSORS}: {error}") from error
            _sync_file(folder / TENSORS)
            manifest = {
                "format": FORMAT,
                "job_uid": self.job_uid,
                "epoch": self.epoch,
                "origin": asdict(origin or Origin()),
                "sha256": {name: _sha256(folder / name) for name in (STATE, TENSORS)},
            }
            _write_file(folder / MANIFEST, json.dumps(manifest, indent=2).encode())

        rows = len(position.committed_rows)
        target = self.checkpoints / f"step-{position.step:08d}-{rows:05d}"
        self.replace(target, fill)
        later = [folder for folder in self._folders() if folder > target]
        for old in (*later, *self._folders()[len(later) + keep :]):
            shutil.rmtree(old)
        return target

    def replace(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Let `fill` write a folder, then put it in the place of `target` as a whole.

        Raises:
            Fenced: see `writing`.
        """
        draft = target.with_name(f".{target.name}.{self.epoch}")
        with self.writing():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            try:
                fill(draft)
                sync_folder(draft)
            except OSError:
                # A full disk: the half that was written would keep it full.
                shutil.rmtree(draft, ignore_errors=True)
                raise
            if target.exists():
                shutil.rmtree(target)
            draft.rename(target)
            sync_folder(target.parent)

    def newest(self) -> Checkpoint | None:
        """Return the newest good checkpoint; broken and foreign ones are passed over and logged."""
        for folder in self._folders():
            try:
                return _read(folder, self.job_uid)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning(
                    "checkpoint passed over", extra={"path": str(folder), "why": str(error)}
                )
        return None

    def _folders(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"), reverse=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _check(self) -> None:
        try:
            highest = int((self.root / "fence").read_text())
        except FileNotFoundError:
            return
        if highest > self.epoch:
            raise Fenced(f"epoch {highest} of the job has started; this worker has {self.epoch}")


def _read(folder: Path, job_uid: str) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load

    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    if manifest["job_uid"] != job_uid:
        raise ValueError(f"belongs to job {manifest['job_uid']}")
    contents = {name: (folder / name).read_bytes() for name in (STATE, TENSORS)}
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
            raise ValueError(f"{name} is not what was written")
    state: dict[str, Any] = json.loads(contents[STATE])
    state["committed_rows"] = tuple(state["committed_rows"])
    state["judged"] = Judged(**state["judged"])
    try:
        tensors = load(contents[TENSORS])
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return Checkpoint(folder, Position(**state), tensors, Origin(**manifest["origin"]))


def _write_file(path: Path, content: bytes) -> None:
    """Write, sync and rename, so that a reader sees the old content or the new."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    draft.rename(path)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as written:
        os.fsync(written.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames inside of `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
