"""Keep a job's checkpoints and adapter in a bucket of object storage.

Objects are written whole, but there is no rename and no lock. So a checkpoint is made on the
worker's own disk, its files are uploaded, and its manifest comes last: a checkpoint without one is
not there. Of the adapter, its configuration comes last. Below `<destination>/.windrow/<job uid>/`
each worker puts `epochs/NNNNNNNN` when it claims the job, and looks for a higher one before each
manifest and adapter. A worker that was passed by between looking and writing leaves one more
checkpoint of the same job, which is as good as any. The figures of all steps, `metrics.jsonl`, go
along with each checkpoint and with the end of the job.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from windrow.conditions import Reason
from windrow.errors import Transient, UserError
from windrow.holder import HOLDER, AlreadyHeld, hold, wait_for_orphan
from windrow.outputs import OWN_FOLDER, is_bucket, path_of
from windrow.redaction import redacted
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.remote import (
    answers_later,
    is_of_client,
    lacks_credentials,
    open_file_system,
    remedy_of,
    storage_options,
)
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.scalars import METRICS_FILE
from windrow_sidecar.finetune.job.starting_point import (
    NamedCheckpoint,
    bucket_files,
    local_files,
)
from windrow_sidecar.finetune.training.checkpoint import (
    BEGUN,
    COMPLETED,
    MANIFEST,
    STATE,
    TENSORS,
    UNREADABLE,
    Checkpoint,
    Fenced,
    JobFolder,
    Position,
    StartingPoint,
    read_checkpoint,
)
from windrow_sidecar.finetune.training.checkpoint_origin import Origin

log = logging.getLogger(__name__)

_FIELD = "spec.output.destination"
_BY_SECRET = (
    "Name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in spec.output.secretRef."
)
_BY_ENVIRONMENT = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of AWS."


class BucketSilent(Transient):
    """The object storage of the destination does not answer."""


class NotUploaded(OSError):
    """Failed upload into the bucket; its earlier content remains."""


def open_folder(job: JobSpec) -> JobFolder:
    """Return the folder of a job that a worker beside decode runs.

    Raises:
        UserError: the job may not write there, or this worker has no client for it.
    """
    destination = job.spec.output.destination
    trees = job.access.trees if job.access.trees is not None else job.outputs
    confined = None if trees is None else ConfinedFiles(trees, job.access.never)
    if is_bucket(destination):
        url = path_of(destination)
        job.access.check_bucket(job.output_credentials.secret, "spec.output.secretRef")
        if endpoint := storage_options(url, job.output_credentials).get("endpoint_url"):
            job.access.check_endpoint(endpoint, "spec.output.secretRef")
        system = open_file_system(url, job.output_credentials)
        starts_from = _starting_point(job, confined, system)
        return BucketFolder(url, job.uid, job.epoch, system, starts_from=starts_from)
    starts_from = _starting_point(job, confined)
    return JobFolder(
        job.destination, job.uid, job.epoch, namespace=job.namespace, starts_from=starts_from
    )


def _starting_point(
    job: JobSpec,
    confined: ConfinedFiles | None,
    system: Any = None,  # noqa: ANN401 - fsspec's
) -> NamedCheckpoint | None:
    """Return the checkpoint that the job names; `system`: of a destination in a bucket."""
    place = job.spec.checkpoint.resume_from
    if place is None:
        return None
    if not is_bucket(place):
        own = confined is None  # a machine of one's own, where links are as good as names
        named = str(Path(path_of(place)).resolve()) if own else place
        return NamedCheckpoint(named, local_files(confined), "" if own else job.namespace)
    assert system is not None  # the spec names a bucket with a destination in one alone
    return NamedCheckpoint(place, bucket_files(system))


def open_own_folder(job: JobSpec, parent: int = 0, *, fresh: bool = False) -> JobFolder:
    """Return the folder of a job that a worker alone on a machine runs.

    Args:
        job: the job.
        parent: the process with whose end the worker ends; 0: there is none.
        fresh: True deletes what earlier runs left in a bucket, once it is claimed.

    Raises:
        UserError: the job may not write there, or this worker has no client for it.
    """
    place = job.spec.output.destination
    if not is_bucket(place):
        # On a machine of their own people may keep adapters behind links.
        folder = JobFolder(job.destination.resolve(), job.uid, job.epoch, parent, job.namespace)
        folder.starts_from = _starting_point(job, None)
        folder.place = str(job.destination)
        return folder
    url = path_of(place)
    system = open_file_system(url, job.output_credentials)
    own = OwnBucketFolder(url, job.uid, system, job.destination.resolve(), parent, fresh=fresh)
    own.starts_from = _starting_point(job, None, system)
    return own


class BucketFolder(JobFolder):
    """The folder of one job in a bucket, as the worker of one epoch sees it.

    Args:
        url: of the destination, `s3://bucket/folder`.
        job_uid: of the job.
        epoch: of the worker.
        system: fsspec's, which must not cache listings.
        scratch: a directory on this machine (default: below that for temporary files).
        here: of this folder on this machine (default: one of this epoch's below `scratch`).
        parent, starts_from: see `JobFolder`.
    """

    _credentials: ClassVar[str] = _BY_SECRET  # what to do where they lack

    def __init__(
        self,
        url: str,
        job_uid: str,
        epoch: int,
        system: Any,  # noqa: ANN401 - fsspec's
        scratch: Path | None = None,
        *,
        here: Path | None = None,
        parent: int = 0,
        starts_from: StartingPoint | None = None,
    ) -> None:
        self._jobs = (scratch or Path(tempfile.gettempdir())).resolve() / "windrow-jobs" / job_uid
        folder = here or self._jobs / str(epoch)
        super().__init__(folder, job_uid, epoch, parent, starts_from=starts_from)
        self.place, self._system = url, system
        self._url = f"{url}/{OWN_FOLDER}/{job_uid}"

    def claim(
        self,
        waits_for: Callable[[str], None] = lambda who: None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Raise the fence in the bucket to this epoch.

        Raises:
            UserError: the bucket is not there, or may not be written.
            BucketSilent: it does not answer.
            Fenced: a higher epoch was here already.
        """
        self._remove_older()
        super().claim(waits_for, alive)
        with self._asking():
            self._check_epochs()
            self._system.pipe_file(f"{self._url}/epochs/{self.epoch:08d}", b"")
            self.begun = self._begun_anywhere(self._first_begun())
            self._fetch_figures()

    def _check_start(self) -> None:
        with self._asking():
            super()._check_start()

    def _has_checkpoints(self) -> bool:
        return bool(self._names())

    def _begun_anywhere(self, now: datetime) -> datetime:
        """Return when the job first was, on whichever machine."""
        noted = f"{self._url}/{BEGUN}"
        try:
            return datetime.fromisoformat(self._system.cat_file(noted).decode())
        except (FileNotFoundError, ValueError):
            self._system.pipe_file(noted, now.isoformat().encode())
            return now

    def served_by(self, wanted: str, *, insisted: bool = False) -> str:
        """See `JobFolder.served_by`; the bucket keeps it.

        Raises:
            UserError, BucketSilent: see `claim`.
        """
        with self._asking():
            return super().served_by(wanted, insisted=insisted)

    def _noted(self, name: str) -> str:
        try:
            return str(self._system.cat_file(f"{self._url}/{name}").decode()).strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    def _note(self, name: str, line: str) -> None:
        if self._noted(name) != line:
            self._system.pipe_file(f"{self._url}/{name}", line.encode())

    def save(
        self,
        position: Position,
        tensors: Mapping[str, Tensor],
        *,
        keep: int,
        origin: Origin | None = None,
    ) -> str:
        """Write a checkpoint and upload it; forget all but the newest `keep`. Returns its URL.

        `tensors`: [...] each, see `JobFolder.save`.

        Raises:
            Fenced: a higher epoch has claimed the job.
            OSError: it could not be written or uploaded; what was there remains.
        """
        local = Path(super().save(position, tensors, keep=1, origin=origin))
        target = f"{self._url}/checkpoints/{local.name}"
        try:
            with self._uploading():
                for name in (STATE, TENSORS):
                    self._system.put_file(str(local / name), f"{target}/{name}")
                self._check_epochs()
                self._system.put_file(str(local / MANIFEST), f"{target}/{MANIFEST}")
                self._prune(local.name, keep)
            self.keep_figures()
        finally:
            shutil.rmtree(local, ignore_errors=True)
        return target

    def keep_figures(self) -> None:
        """Upload the figures of all steps so far; what the bucket refuses is logged."""
        figures = self.root / METRICS_FILE
        try:
            with self._uploading():
                if figures.exists():
                    self._check_epochs()
                    self._system.put_file(str(figures), f"{self._url}/{METRICS_FILE}")
        except (OSError, Fenced) as error:
            log.warning("%s is not uploaded: %s", METRICS_FILE, error)

    def _fetch_figures(self) -> None:
        """Have the figures that earlier workers uploaded, so that those of this one follow them."""
        source, figures = f"{self._url}/{METRICS_FILE}", self.root / METRICS_FILE
        if not figures.exists() and self._system.exists(source):
            self._system.get_file(source, str(figures))

    def newest(self) -> Checkpoint | None:
        """Download the newest good checkpoint; for broken and foreign ones see `passed_over`.

        Without one it is that which the job names.

        Raises:
            UserError, BucketSilent: see `claim`; nobody knows then whether there is one.
        """
        with self._asking():
            return super().newest()

    def _own_newest(self) -> Checkpoint | None:
        self.passed_over = ()
        with self._asking():
            for name in self._names():
                local, url = self.checkpoints / f".{name}", f"{self._url}/checkpoints/{name}"
                try:
                    self._download(url, local)
                    found = _read(local, self.job_uid)
                except (FileNotFoundError, ValueError) as error:
                    self.pass_over(url, error)
                    continue
                finally:
                    shutil.rmtree(local, ignore_errors=True)
                return replace(found, path=url)
        return None

    def forget_checkpoints(self) -> None:
        """Remove all of them: nobody goes on from them any more.

        Raises:
            Fenced: a higher epoch has claimed the job.
            OSError: the bucket refuses, or does not answer.
        """
        super().forget_checkpoints()
        with self._uploading():
            self._check_epochs()
            for name in self._names():
                self._remove(name)

    def _note_completion(self, content: bytes) -> None:
        with self._uploading():
            self._check_epochs()
            self._system.pipe_file(f"{self._url}/{COMPLETED}", content)

    def _completion_noted(self) -> bytes | None:
        with self._asking():
            noted = f"{self._url}/{COMPLETED}"
            return bytes(self._system.cat_file(noted)) if self._system.exists(noted) else None

    def _publish(self, draft: Path, last: str) -> None:
        with self._uploading():
            self._check_epochs()
            if self._system.exists(f"{self.place}/{last}"):
                self._system.rm_file(f"{self.place}/{last}")
            for file in sorted(draft.iterdir(), key=lambda file: file.name == last):
                self._system.put_file(str(file), f"{self.place}/{file.name}")

    def _remove_older(self) -> None:
        """Remove the files of workers that were killed here: an epoch ends all earlier ones."""
        for other in self._jobs.glob("*"):
            if other.name.isdigit() and int(other.name) < self.epoch:
                shutil.rmtree(other, ignore_errors=True)

    def _check_epochs(self) -> None:
        highest = max((int(name) for name in self._list("epochs")), default=0)
        if highest > self.epoch:
            raise Fenced(f"epoch {highest} of the job has started; this worker has {self.epoch}")

    def _names(self) -> list[str]:
        """Return the checkpoints that have a folder, the newest one first."""
        return sorted(self._list("checkpoints"), reverse=True)

    def _list(self, folder: str) -> list[str]:
        try:
            entries = self._system.ls(f"{self._url}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    def _download(self, url: str, local: Path) -> None:
        if not self._system.exists(f"{url}/{MANIFEST}"):
            raise ValueError("its upload was not finished")
        local.mkdir()
        for name in (MANIFEST, STATE, TENSORS):
            self._system.get_file(f"{url}/{name}", str(local / name))

    def _prune(self, newest: str, keep: int) -> None:
        """Remove checkpoints of later positions, and all but the newest `keep` (see `save`)."""
        names = self._names()
        later = [name for name in names if name > newest]
        for name in (*later, *names[len(later) + keep :]):
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: without one it is not there."""
        url = f"{self._url}/checkpoints/{name}"
        if self._system.exists(f"{url}/{MANIFEST}"):
            self._system.rm_file(f"{url}/{MANIFEST}")
        for file in self._list(f"checkpoints/{name}"):
            self._system.rm_file(f"{url}/{file}")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Hold while a job begins: a lasting error is for the job's author to fix."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, OSError) or is_of_client(error)):
                raise
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> UserError | BucketSilent:
        said = redacted(" ".join(str(error).split()))
        if answers_later(error):
            return BucketSilent(f"{self.place} does not answer: {said}")
        remedy = (
            self._credentials
            if lacks_credentials(error)
            else remedy_of(error)
            or "Name a bucket that there is, with credentials that may list, read, write and "
            "delete below the folder."
        )
        return UserError(
            f"{self.place} cannot be written: {said}",
            field=_FIELD,
            remedy=remedy,
            reason=Reason.OUTPUT_NOT_WRITABLE,
        )

    @contextmanager
    def _uploading(self) -> Iterator[None]:
        """Hold while a job runs: what is not uploaded is an error of the system."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, OSError) or is_of_client(error)):
                raise
            raise NotUploaded(f"{self.place} cannot be written: {redacted(str(error))}") from error


class OwnBucketFolder(BucketFolder):
    """The folder of one job in a bucket, as a worker alone on some machine sees it.

    Nobody hands out epochs there: a worker takes the next one, so that a run on another machine
    that was thought dead writes no more. On one machine a second run is refused, as with a disk.

    Args:
        url, job_uid, system: see `BucketFolder`.
        here: the directory on this machine for this bucket folder.
        parent: the process with whose end the worker ends; 0: there is none.
        fresh: True deletes what earlier runs left in the bucket, once it is claimed.
    """

    _credentials: ClassVar[str] = _BY_ENVIRONMENT

    def __init__(
        self,
        url: str,
        job_uid: str,
        system: Any,  # noqa: ANN401 - fsspec's
        here: Path,
        parent: int = 0,
        *,
        fresh: bool = False,
    ) -> None:
        super().__init__(url, job_uid, 0, system, here=here, parent=parent)
        self._fresh = fresh

    def claim(
        self,
        waits_for: Callable[[str], None] = lambda who: None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the job on this machine, and the next epoch in the bucket.

        Raises:
            UserError, BucketSilent: see `BucketFolder.claim`.
            Fenced: another process of this machine has the job.
        """
        holder = self.root / f"{HOLDER}here"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            wait_for_orphan(holder, waits_for, alive)
            hold(holder, parent=self._parent)
        except AlreadyHeld as held:
            raise Fenced(
                f"{held} is training this job, in {self.place}. Wait until it ends, or stop it"
            ) from held
        except OSError as error:
            raise UserError(
                f"{self.root} cannot be written: {error.strerror}",
                field=_FIELD,
                remedy="Name a directory that you may write in XDG_CACHE_HOME.",
                reason=Reason.OUTPUT_NOT_WRITABLE,
            ) from error
        with self._asking():
            self.epoch = 1 + max((int(name) for name in self._list("epochs")), default=0)
        super().claim(waits_for, alive)
        if self._fresh:
            self.forget_checkpoints()
            self.checkpoints.mkdir(exist_ok=True)

    def _begun_anywhere(self, now: datetime) -> datetime:
        if self._fresh:
            self._system.pipe_file(f"{self._url}/{BEGUN}", now.isoformat().encode())
        return super()._begun_anywhere(now)

    def _remove_older(self) -> None:
        """The directory is that of all runs on this machine."""

    def _fetch_figures(self) -> None:
        """Fetch the figures of all machines from the bucket, unless the run starts over."""
        (self.root / METRICS_FILE).unlink(missing_ok=True)
        if not self._fresh:
            super()._fetch_figures()


def _read(folder: Path, job_uid: str) -> Checkpoint:
    """Read a checkpoint that was downloaded; a ValueError says what is wrong with it."""
    try:
        return read_checkpoint(folder, job_uid)
    except UNREADABLE as error:
        raise ValueError(f"it lacks {error}" if isinstance(error, KeyError) else error) from error
