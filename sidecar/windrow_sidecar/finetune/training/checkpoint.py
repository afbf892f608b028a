"""Write and read checkpoints: whole or not at all, by one writer at a time.

Below `<destination>/.windrow/<job uid>/`: `fence` (highest epoch ever started), `holder-N` (whose
epoch N is), `begun` (when the job first was), `checkpoints/step-NNNNNNNN-RRRRR/` (R: rows of the
next step that are done), each with a manifest of the SHA-256 of its files, and `completed.json`
once the adapter is written, where checkpoints go then. A folder is written under another name,
synced, and renamed. Beside the folders of jobs, `owner.json` says whose work is in the
destination.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from windrow.conditions import Reason
from windrow.errors import UserError, WindrowError
from windrow.holder import HOLDER, AlreadyHeld, hold, wait_for_orphan
from windrow.outputs import HELD_DIRECTORIES, OWN_FOLDER, open_without_links
from windrow.served_chats import PLAIN
from windrow_sidecar.compute.host_device import available_bytes
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.evaluation import Judged

log = logging.getLogger(__name__)

FORMAT = 4
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
COMPLETED = "completed.json"
BEGUN = "begun"
SERVED_BY = "served-by"  # holds the name of a server, of `windrow.served_chats`
FENCE = "fence"  # in the job's folder
OWNER = "owner.json"  # beside the folders of jobs: whose work is in the destination
ADAPTER_DRAFT = "adapter"  # in the job's folder
_OWNER_BYTES = 4096
# What reading a damaged checkpoint raises.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Of a disk, a quota, or the largest file that is allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def owner_of(content: bytes) -> tuple[str, str]:
    """Return the UID and the namespace of the job that OWNER names; empty: it is damaged."""
    try:
        held = json.loads(content[:_OWNER_BYTES])
        return str(held["uid"]), str(held["namespace"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def is_disk_full(error: BaseException) -> bool:
    """Return whether something could not be written for want of room."""
    return isinstance(error, OSError) and error.errno in _FULL


def no_room(error: OSError) -> str:
    """Say where a disk is full, and what to do."""
    where = error.filename or "the destination"
    return f"{where} cannot be written: {error.strerror or error}. Free space there"


@contextmanager
def told_by_system(file: Path) -> Iterator[None]:
    """Raise what safetensors says of `file` as the error of the system that it is.

    Raises:
        OSError: with the number of the system's error, where it has one.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{file}: {error}") from error
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(file)) from error


class Fenced(WindrowError):
    """Another worker owns the job's folder; this one may not write."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a job in its training. Steps count from 0 to the job's total.

    Attributes:
        packed: whether its rows are packed; None: nothing has begun yet. It is how the job runs and
            not where it is, so two positions are equal without it.
    """

    step: int  # finished ones
    committed_rows: tuple[int, ...] = ()  # of the step on its way, already in the gradient sums
    loss_sum: float = 0.0  # over their labels
    tokens_done: int = 0  # real tokens of finished steps
    loss: float | None = None  # of the last finished step
    base_eval_loss: float | None = None
    judged: Judged = field(default_factory=Judged)
    packed: bool | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """Outcome of a job, for a worker that is started again because the end was not reported."""

    step: int
    tokens: int
    detail: str
    loss: float | None = None
    base_eval_loss: float | None = None
    tuned_eval_loss: float | None = None
    adapter_digest: str = ""  # see `windrow.adapter_files`; empty: of an older worker


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A good checkpoint, read and verified.

    Attributes:
        path: its directory, or its URL.
        position: in its job.
        tensors: [...] each.
        origin: what it belongs to.
        is_named: whether it is the one that the job names, and not its own.
    """

    path: str
    position: Position
    tensors: dict[str, Tensor]
    origin: Origin = field(default_factory=Origin)
    is_named: bool = False

    def check(self, wanted: Origin) -> None:
        """Raise UserError unless it is of that origin."""
        if (differs := self.origin.differs(wanted)) is not None:
            otherwise = (
                "leave out spec.checkpoint.resumeFrom"
                if self.is_named
                else f"delete {_job_of(self.path)} and start again"
            )
            raise UserError(
                f"cannot resume from {self.path}: {differs.problem}",
                field=differs.field,
                remedy=f"{differs.remedy}, or {otherwise}.",
                reason=Reason.CHECKPOINT_MISMATCH,
            )


class StartingPoint(Protocol):
    """A checkpoint that a job names to go on from while it has none of its own."""

    def check(self) -> None:
        """Look for it, before anything is loaded.

        Raises:
            UserError: it is not there, or the job may not read it.
        """

    def begun(self) -> datetime | None:
        """Return when its job first was; None: nobody has noted it."""

    def served_by(self) -> str:
        """Return the server that its rows were rendered for; "": nobody has noted it."""

    def read(self) -> Checkpoint:
        """Read and verify it.

        Raises:
            UserError: see `check`, or it is damaged.
        """


class JobFolder:
    """The folder of one job below its destination, as the worker of one epoch sees it.

    Args:
        destination: of the adapter.
        job_uid: of the job.
        epoch: of the worker.
        parent: the process with whose end the worker ends; 0: there is none.
        namespace: of the job: later jobs of it may replace the adapter; empty: it is not known.
        starts_from: what the job goes on from while it has no checkpoint of its own.

    Attributes:
        place: the destination, as people name it.
        passed_over: checkpoints that `newest` could not use, newest first, each with the reason.
        begun: when the folder was claimed for the first time, on the clock of that machine; known
            once it is claimed.
    """

    def __init__(
        self,
        destination: Path,
        job_uid: str,
        epoch: int,
        parent: int = 0,
        namespace: str = "",
        starts_from: StartingPoint | None = None,
    ) -> None:
        self.starts_from = starts_from
        self.destination, self.job_uid, self.epoch = destination, job_uid, epoch
        self.root = destination / OWN_FOLDER / job_uid
        self.checkpoints = self.root / "checkpoints"
        self.place = str(destination)
        self.passed_over: tuple[str, ...] = ()
        self.begun: datetime | None = None
        self._parent, self._namespace = parent, namespace

    def claim(
        self,
        waits_for: Callable[[str], None] = lambda who: None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the folder and raise the fence to this epoch; the epoch is this process's then.

        A worker whose parent is gone writes its last checkpoint: it is waited for.

        Args:
            waits_for: called with the holder, where it has to wait.
            alive: called now and then while it waits.

        Raises:
            UserError: the destination is not writable, or holds what another namespace's job left.
            UserError: the checkpoint that the job names cannot be read (see `StartingPoint`).
            Fenced: a higher epoch was here already, or another process has this very one: the same
                manifest is run twice.
            OSError: the disk is full.
        """
        self._claim(waits_for, alive)
        self._check_start()

    def _claim(self, waits_for: Callable[[str], None], alive: Callable[[], None]) -> None:
        holder = self.root / f"{HOLDER}{self.epoch}"
        self._refuse_folders()
        try:
            self._refuse_others()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            wait_for_orphan(holder, waits_for, alive)
            with self._locked():
                self._check()
                hold(holder, parent=self._parent)
                self._own()
                self._remove_drafts()
                _write_file(self.root / "fence", str(self.epoch).encode())
            self.begun = self._begun(self._first_begun())
        except AlreadyHeld as held:
            raise Fenced(
                f"{held} is training this job, in {self.root}. Wait until it ends, or stop it; "
                "another job needs a name and a destination of its own"
            ) from held
        except OSError as error:
            if is_disk_full(error):
                raise
            raise UserError(
                f"{self.destination} cannot be written: {error.strerror}",
                field="spec.output.destination",
                remedy="Name a directory on a volume that the worker may write.",
                reason=Reason.OUTPUT_NOT_WRITABLE,
            ) from error

    def _check_start(self) -> None:
        """Look for the checkpoint that the job names, while it has none of its own."""
        if self.starts_from is not None and not self._has_checkpoints():
            self.starts_from.check()

    def _has_checkpoints(self) -> bool:
        """Return whether the job has any of its own."""
        return bool(self._folders())

    def _first_begun(self) -> datetime:
        """Return when the job first was where nobody has noted it: as what it goes on from."""
        of_other = self.starts_from.begun() if self.starts_from is not None else None
        return of_other or datetime.now().astimezone()

    def _begun(self, now: datetime) -> datetime:
        """Return when the job first was; that is `now` where nobody has noted it yet."""
        noted = self.root / BEGUN
        try:
            return datetime.fromisoformat(_read(noted).decode())
        except (FileNotFoundError, ValueError):
            _write_file(noted, now.isoformat().encode())
            return now

    def served_by(self, wanted: str, *, insisted: bool = False) -> str:
        """Return the server whose requests the job's rows are rendered as, and note it.

        What has been learnt of them was: a job that goes on keeps the one that it began with. Rows
        of a job that began before there was a note were rendered as they are.

        Args:
            wanted: for a job that has no checkpoint.
            insisted: the job's spec names it.

        Raises:
            OSError: the folder cannot be read or written.
        """
        found = wanted
        if not insisted and self._has_checkpoints():
            return self._noted(SERVED_BY) or PLAIN
        if not insisted and self.starts_from is not None:
            found = self.starts_from.served_by() or PLAIN
        self._note(SERVED_BY, found)
        return found

    def _noted(self, name: str) -> str:
        """Return a line that the folder keeps; "": it keeps none."""
        try:
            return _read(self.root / name).decode().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    def _note(self, name: str, line: str) -> None:
        if self._noted(name) != line:
            _write_file(self.root / name, line.encode())

    def _refuse_folders(self) -> None:
        """Refuse a destination where a directory has the name of one of an adapter's files."""
        for taken in self.destination.glob("adapter_*.*"):
            if taken.is_dir():
                raise UserError(
                    f"{taken} is a directory, where a file of the adapter goes",
                    field="spec.output.destination",
                    remedy="Remove it, or name another directory.",
                    reason=Reason.OUTPUT_NOT_WRITABLE,
                )

    def _refuse_others(self) -> None:
        """Refuse a destination that holds the work of another namespace's job, ended or not."""
        around = (self.destination, *self.destination.parents)
        if any(at.parent.name == OWN_FOLDER and (at / FENCE).exists() for at in around):
            problem = f"{self.destination} is within the folder that a job keeps its own things in"
        elif self._is_taken():
            problem = f"{self.destination} holds the work of a job of another namespace"
        else:
            return
        raise UserError(
            problem,
            field="spec.output.destination",
            remedy="Name another directory.",
            reason=Reason.DESTINATION_IN_USE,
        )

    def _is_taken(self) -> bool:
        owner = self.root.parent / OWNER
        try:
            if owner.is_symlink():
                return True
            uid, namespace = owner_of(owner.read_bytes())
        except FileNotFoundError:
            return False  # nobody was here, or a version that kept no owner
        return uid != self.job_uid and not (namespace and namespace == self._namespace)

    def _own(self) -> None:
        """Note whose work is in the destination; it stays when the job has ended."""
        words = {"uid": self.job_uid, "namespace": self._namespace}
        _write_file(self.root.parent / OWNER, json.dumps(words).encode())

    def _remove_drafts(self) -> None:
        """Remove what killed workers left half written: as large as a checkpoint each."""
        with held(self.root) as root, held(self.checkpoints) as checkpoints:
            for draft in (*checkpoints.glob(".step-*"), root / ADAPTER_DRAFT):
                shutil.rmtree(draft, ignore_errors=True)

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
    ) -> str:
        """Write a checkpoint and forget all but the newest `keep`. Returns its path.

        Checkpoints of later positions are deleted as well: they could
        not be read, so the job resumed before them. `tensors`: [...] each, of any device; no two
        may share memory, and none may change meanwhile.

        Raises:
            Fenced: see `writing`.
            OSError: it could not be written; what was there remains.
        """
        from safetensors.torch import save_file

        def fill(folder: Path) -> None:
            state = asdict(position)
            packed = bool(state.pop("packed"))  # earlier versions know of no such state
            _write_file(folder / STATE, json.dumps(state).encode())
            with told_by_system(folder / TENSORS):
                save_file(dict(tensors), folder / TENSORS)
            sync_file(folder / TENSORS)
            manifest = {
                "format": FORMAT,
                "job_uid": self.job_uid,
                "epoch": self.epoch,
                "origin": asdict(origin or Origin()),
                "packed": packed,
                "sha256": {name: _sha256(folder / name) for name in (STATE, TENSORS)},
            }
            _write_file(folder / MANIFEST, json.dumps(manifest, indent=2).encode())

        rows = len(position.committed_rows)
        target = self.checkpoints / f"step-{position.step:08d}-{rows:05d}"
        self.replace(target, fill)
        later = [folder for folder in self._folders() if folder > target]
        with held(self.checkpoints) as checkpoints:
            for old in (*later, *self._folders()[len(later) + keep :]):
                shutil.rmtree(checkpoints / old.name)
        return str(target)

    def put_adapter(self, fill: Callable[[Path], None], last: str) -> None:
        """Let `fill` write the adapter's files into a folder, then put them at the destination.

        What is there stays until all of them are on the disk. The file named `last` makes a folder
        an adapter for everyone who looks: an earlier one goes first, the new one comes last.

        Raises:
            Fenced: see `writing`.
            OSError: they were not written.
        """
        with self.writing(), held(self.root) as root:
            draft = root / ADAPTER_DRAFT
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                fill(draft)
                for file in draft.iterdir():
                    sync_file(file)
            except OSError:
                # A full disk: the half that was written would keep it full.
                shutil.rmtree(draft, ignore_errors=True)
                raise
            self._publish(draft, last)
            shutil.rmtree(draft, ignore_errors=True)

    def _publish(self, draft: Path, last: str) -> None:
        with held(self.destination) as destination:
            (destination / last).unlink(missing_ok=True)
            for file in sorted(draft.iterdir(), key=lambda file: file.name == last):
                file.replace(destination / file.name)
            sync_folder(destination)

    def replace(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Let `fill` write a folder, then put it in the place of `target` as a whole.

        Raises:
            Fenced: see `writing`.
        """
        with self.writing(), held(target.parent) as parent:
            whole, draft = parent / target.name, parent / f".{target.name}.{self.epoch}"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                fill(draft)
                sync_folder(draft)
            except OSError:
                # A full disk: the half that was written would keep it full.
                shutil.rmtree(draft, ignore_errors=True)
                raise
            if whole.exists():
                shutil.rmtree(whole)
            draft.rename(whole)
            sync_folder(parent)

    def check_room(self, n_bytes: int) -> None:
        """Check that the disk takes a checkpoint of so many bytes, before anything is trained.

        Raises:
            OSError: it does not.
        """
        disk = os.statvfs(self.checkpoints)
        if (free := disk.f_bavail * disk.f_frsize) < n_bytes:
            why = f"{free} bytes are free, a checkpoint takes {n_bytes}"
            raise OSError(errno.ENOSPC, why, str(self.checkpoints))

    def forget_checkpoints(self) -> None:
        """Remove all of them: nobody goes on from them any more.

        Raises:
            Fenced: see `writing`.
        """
        with self.writing(), held(self.root) as root:
            shutil.rmtree(root / self.checkpoints.name, ignore_errors=True)

    def complete(self, completion: Completion) -> None:
        """Note that the adapter is written, before the checkpoints go that led to it.

        Raises:
            Fenced: see `writing`.
            OSError: it is not noted.
        """
        with self.writing():
            self._note_completion(json.dumps(asdict(completion)).encode())

    def _note_completion(self, content: bytes) -> None:
        _write_file(self.root / COMPLETED, content)

    def completion(self) -> Completion | None:
        """Return what the job came to; None: its adapter is not written.

        Raises:
            OSError, ValueError, TypeError: nobody can tell.
        """
        content = self._completion_noted()
        return None if content is None else Completion(**json.loads(content))

    def _completion_noted(self) -> bytes | None:
        try:
            return _read(self.root / COMPLETED)
        except FileNotFoundError:
            return None

    def keep_figures(self) -> None:
        """Have the figures of all steps so far last; those of a directory do already."""

    def newest(self) -> Checkpoint | None:
        """Return the newest good checkpoint; for broken and foreign ones see `passed_over`.

        Without one it is that which the job names.

        Raises:
            UserError: see `StartingPoint.read`.
        """
        return self._own_newest() or (self.starts_from.read() if self.starts_from else None)

    def _own_newest(self) -> Checkpoint | None:
        self.passed_over = ()
        for folder in self._folders():
            try:
                return read_checkpoint(folder, self.job_uid)
            except UNREADABLE as error:
                self.pass_over(str(folder), error)
        return None

    def pass_over(self, folder: str, error: Exception) -> None:
        """Note that a checkpoint cannot be used."""
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        log.warning("checkpoint %s is skipped: %s", folder, why)
        self.passed_over += (f"{folder}: {why}",)

    def _folders(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"), reverse=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with held(self.root) as root, _opened(root / "lock", os.O_WRONLY | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _check(self) -> None:
        try:
            highest = int(_read(self.root / "fence"))
        except FileNotFoundError:
            return
        if highest > self.epoch:
            raise Fenced(f"epoch {highest} of the job has started; this worker has {self.epoch}")


def read_checkpoint(folder: Path, job_uid: str) -> Checkpoint:
    """Read and verify one.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is not whole, or not the job's.
    """
    return verify_checkpoint(str(folder), lambda name: _read(folder / name), job_uid)


def verify_checkpoint(
    place: str, read: Callable[[str], bytes], job_uid: str | None = None
) -> Checkpoint:
    """Read and verify a checkpoint, from wherever its files are.

    Args:
        place: its directory or URL.
        read: returns what a file of it holds.
        job_uid: of its job; None: it may be of any.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is not whole, or not the job's.
    """
    from safetensors.torch import load

    manifest = json.loads(read(MANIFEST))
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    if job_uid is not None and manifest["job_uid"] != job_uid:
        raise ValueError(f"belongs to job {manifest['job_uid']}")
    contents = {name: read(name) for name in (STATE, TENSORS)}
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
            raise ValueError(f"{name} does not have the checksum that was written")
    state: dict[str, Any] = json.loads(contents[STATE])
    state["committed_rows"] = tuple(state["committed_rows"])
    state["judged"] = Judged(**state["judged"])
    state["packed"] = bool(manifest.get("packed", False))  # False: as earlier versions were
    with told_by_system(Path(place, TENSORS)):
        tensors = load(contents[TENSORS])
    return Checkpoint(place, Position(**state), tensors, Origin(**manifest["origin"]))


def _job_of(checkpoint: str) -> str:
    """Return the job's folder that holds a checkpoint."""
    return posixpath.dirname(posixpath.dirname(checkpoint))


def _write_file(path: Path, content: bytes) -> None:
    """Write, sync and rename, so that a reader sees the old content or the new.

    No link is followed: those who can write to the volume could place one at any name.
    """
    named = path.with_name(path.name + ".draft")
    with held(path.parent) as folder:
        draft = folder / named.name
        try:
            draft.unlink(missing_ok=True)
            with _opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            error.filename = str(named)
            raise
        draft.rename(folder / path.name)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[IO[bytes]]:
    """Yield a file to write that is not reached by a link."""
    with open(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb") as found:
        yield found


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Yield a name of a directory that stays the same directory whatever is renamed meanwhile.

    Args:
        folder: without a link in it.

    Raises:
        OSError: ELOOP where a part of its path is a link.
    """
    found = open_without_links(folder, os.O_RDONLY | os.O_DIRECTORY)
    name = f"{HELD_DIRECTORIES}/{found}"
    try:
        yield Path(name)
    except OSError as error:
        # People know the directory by its own name.
        if str(error.filename or "").startswith(f"{name}/"):
            error.filename = str(error.filename).replace(name, str(folder), 1)
        raise
    finally:
        os.close(found)


def _read(path: Path) -> bytes:
    """Return the content of a file that is not reached by a link.

    Raises:
        OSError: ELOOP where it is.
    """
    # A pipe would hold the open itself until somebody writes.
    with open(open_without_links(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as found:
        check_room(found.fileno(), str(path))
        return found.read()


def check_room(file: int, name: str) -> None:
    """Refuse a file that would fill the memory of this machine: it may take no room on its disk.

    Raises:
        ValueError: it is larger than half of what is available, or not a regular file.
    """
    about, room = os.fstat(file), available_bytes() // 2
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if about.st_size > room:
        raise ValueError(
            f"{name} has {about.st_size >> 20} MiB, and this machine has memory for {room >> 20}"
        )


def sync_file(path: Path) -> None:
    """Make the contents of a file last; a disk may only now find that it is full.

    Raises:
        OSError: they do not.
    """
    with path.open("rb+") as written:
        os.fsync(written.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync `folder`, so that renames inside it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
