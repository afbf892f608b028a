"""Report a job's figures to MLflow and Weights & Biases, by a process for each.

The clients of both are large, one of them is a native program, and either may hang: in a process of
its own such a client takes no turn of the job, holds the credentials of one job alone, and passes
the guard of the network with what this job may reach. A thread hands figures over; whatever goes
wrong from there on costs figures only, and these are counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from windrow.conditions import Reason
from windrow.crd.tracking import MlflowSpec, WandbSpec
from windrow.errors import UserError
from windrow.outputs import open_without_links, path_of
from windrow.redaction import redacted
from windrow.wheel import install_extra
from windrow_sidecar.finetune.job.assembly import JobSpec

log = logging.getLogger(__name__)

Outcome = Literal["succeeded", "stopped", "failed", "deleted"]
JOB_TAG: Final = "windrow.job_uid"
# Figures of so many steps wait at most; later ones are left out while they do.
_WAITING = 2000
_HANDED_OVER_WITHIN_S = 0.5
_ENDS_WITHIN_S = 120.0
_LONGEST_NEWS = 400
# What a confined job's client may not find in the environment of the pod.
_OWN_OF_POD = ("MLFLOW_", "WANDB_", "DATABRICKS_", "AWS_", "HF_", "HUGGING_FACE_", "GOOGLE_")
_NO_HOME = "/nonexistent"  # as Debian calls that of users who have none
_DEFAULT_WANDB = "https://api.wandb.ai"


@dataclass(frozen=True, slots=True)
class TrackingService:
    """A server that gets the figures of a job, as its client's process is started for it.

    Attributes:
        name: of the client's package, mlflow or wandb.
        document: what that process needs to know; it holds credentials and is never shown.
        environment: of that process.
        folder: of the job, where it gets files of the client; None: it gets none.
    """

    name: str
    document: Mapping[str, Any] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    folder: Path | None = None


def services_of(
    job: JobSpec, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> list[TrackingService]:
    """Return the servers that a job names, checked.

    Args:
        job: the job.
        folder: of the job, for files (default: none are written, this is a check).
        environ: of the sidecar (default: this process's).

    Raises:
        UserError: a client is not installed, a host may not be reached, a credential lacks.
    """
    if job.spec.tracking is None:
        return []
    environ = os.environ if environ is None else environ
    made = []
    if (mlflow := job.spec.tracking.mlflow) is not None:
        made.append(_of_mlflow(job, mlflow, environ))
    if (wandb := job.spec.tracking.wandb) is not None:
        made.append(_of_wandb(job, wandb, folder, environ))
    return made


def _of_mlflow(job: JobSpec, asked: MlflowSpec, environ: Mapping[str, str]) -> TrackingService:
    place = "spec.tracking.mlflow"
    _refuse_missing("mlflow", place)
    settings = _Settings(job, environ)
    uri = asked.uri or settings.value("MLFLOW_TRACKING_URI")
    if not uri:
        raise UserError(
            "MLflow has no address",
            field=f"{place}.uri",
            remedy="Write it here, or as MLFLOW_TRACKING_URI into the Secret of "
            "spec.tracking.secretRef.",
        )
    _refuse_host(job, uri, f"{place}.uri")
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    held = {name: value for name in names if (value := settings.credential(name))}
    if ("MLFLOW_TRACKING_USERNAME" in held) != ("MLFLOW_TRACKING_PASSWORD" in held):
        raise _lacks(job, "MLFLOW_TRACKING_USERNAME without MLFLOW_TRACKING_PASSWORD or reverse")
    experiment = asked.experiment or settings.value("MLFLOW_EXPERIMENT_NAME") or "Default"
    document = {
        "variables": {"MLFLOW_TRACKING_URI": uri, **held},
        "uri": uri,
        "experiment": experiment,
        "run": asked.run_name or job.name,
    }
    return TrackingService("mlflow", _document(job, document), settings.environment())


def _of_wandb(
    job: JobSpec, asked: WandbSpec, folder: Path | None, environ: Mapping[str, str]
) -> TrackingService:
    place = "spec.tracking.wandb"
    _refuse_missing("wandb", place)
    settings = _Settings(job, environ)
    base = asked.base_url or settings.value("WANDB_BASE_URL") or _DEFAULT_WANDB
    key = settings.credential("WANDB_API_KEY")
    if asked.mode == "online":
        _refuse_host(job, base, f"{place}.baseUrl")
        if not key:
            raise _lacks(job, "no WANDB_API_KEY")
    elif folder is not None and (folder / "wandb").is_symlink():
        raise UserError(
            f"{folder / 'wandb'} is a link",
            field=f"{place}.mode",
            remedy="Remove it from the destination.",
        )
    document = {
        "key": key,
        "base": base,
        "mode": asked.mode,
        "project": asked.project or settings.value("WANDB_PROJECT") or "windrow",
        "entity": asked.entity or settings.value("WANDB_ENTITY"),
        "run": asked.run_name or job.name,
        "tags": list(asked.tags),
    }
    files = folder if asked.mode == "offline" else None
    return TrackingService("wandb", _document(job, document), settings.environment(), files)


class _Settings:
    """Settings of a client, by the variables that it reads: of the Secret, else of the sidecar.

    A confined job gets addresses and names of the sidecar's environment, and no credential.
    """

    def __init__(self, job: JobSpec, environ: Mapping[str, str]) -> None:
        self._held, self._environ = job.tracking_credentials.values, environ
        self._confined = job.access.network is not None

    def value(self, name: str) -> str:
        return self._held.get(name) or self._environ.get(name) or ""

    def credential(self, name: str) -> str:
        own = "" if self._confined else self._environ.get(name)
        return self._held.get(name) or own or ""

    def environment(self) -> dict[str, str]:
        if not self._confined:
            return dict(self._environ)
        kept = {
            name: value
            for name, value in self._environ.items()
            if not name.upper().startswith(_OWN_OF_POD)
        }
        # Clients read credentials below the home directory as well (~/.mlflow, ~/.netrc).
        return kept | {"NETRC": os.devnull, "HOME": _NO_HOME}


def _refuse_missing(package: str, place: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"reports to {package} need its client, which this worker has not",
            field=place,
            remedy=f"In the sidecar's image: {install_extra(package)}, or leave it out.",
        )


def _refuse_host(job: JobSpec, url: str, place: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{redacted(url)!r} is not the address of a server",
            field=place,
            remedy="Write https://host.",
        )
    try:
        job.access.check_endpoint(url, place)
    except UserError as error:
        raise UserError(error.problem, field=place, remedy=error.remedy) from error


def _lacks(job: JobSpec, what: str) -> UserError:
    secret = job.tracking_credentials.secret
    where = f"Secret {secret!r} has" if secret else "the environment has"
    return UserError(
        f"{where} {what}",
        field="spec.tracking.secretRef",
        remedy="Name a Secret that holds it, by that key.",
        reason=Reason.CREDENTIALS_MISSING,
    )


def _document(job: JobSpec, about: Mapping[str, Any]) -> dict[str, Any]:
    network = job.access.network
    access = None
    if network is not None:
        access = {"sources": network.sources, "private": network.private}
    uid = _identity(job)
    tags = {JOB_TAG: uid, "windrow.job": f"{job.namespace}/{job.name}"}
    return {**about, "uid": uid, "tags_of_run": tags, "access": access, "params": _params(job)}


def _identity(job: JobSpec) -> str:
    """Return what a run is found by when its job resumes, on a server that many use."""
    if job.outputs is not None:
        return job.uid
    # A worker alone on a machine names its job after the manifest's file.
    place = f"{platform.node()}:{path_of(job.spec.output.destination)}"
    return f"{job.uid}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def _params(job: JobSpec) -> dict[str, str]:
    spec = job.spec
    shown: dict[str, Any] = {
        part: getattr(spec, part).model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude={"secret_ref"}
        )
        for part in ("model", "adapter", "training")
    }
    shown["dataset"] = {name.rpartition(".")[2]: redacted(p) for name, p in spec.dataset.sources}
    return dict(_flat(shown))


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value if isinstance(value, str) else json.dumps(value)


class Tracking:
    """Hands the figures of a job to the processes of its servers' clients; never waits for them.

    Args:
        services: that get them.
    """

    def __init__(self, services: Sequence[TrackingService] = ()) -> None:
        self._feeds = [ClientFeed(service) for service in services]

    def begin(self) -> None:
        """Start the processes."""
        for feed in self._feeds:
            feed.start()

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Hand over the figures of a step; what is not a number is left out."""
        if not self._feeds:
            return
        numbers = {
            name: float(value)
            for name, value in figures.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        line = {"step": step, "at": time.time(), "figures": numbers}
        for feed in self._feeds:
            feed.put(line)

    def news(self) -> Iterator[tuple[Reason, str]]:
        """Yield what has gone wrong, or goes well again, since the last call."""
        for feed in self._feeds:
            while feed.news:
                yield feed.news.popleft()

    def end(self, outcome: Outcome) -> str:
        """Tell the servers how the job has ended; return what to say of figures that they lack.

        The processes end after that, within a bounded time, also when this one has ended.
        """
        return "; ".join(filter(None, [feed.end(outcome) for feed in self._feeds]))


class ClientFeed:
    """Figures on their way to one server.

    Args:
        service: the server.
        command: that starts its client (default: `tracking_client`).
    """

    def __init__(self, service: TrackingService, command: Sequence[str] = ()) -> None:
        self._service = service
        self._command = command or (
            *(sys.executable, "-m", "windrow_sidecar.finetune.job.tracking_client"),
            service.name,
        )
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_WAITING)
        self._logged = self._acknowledged = 0
        self._trouble = ""
        self._thread: threading.Thread | None = None
        self._ended, self._handed_over = False, threading.Event()
        self.news: deque[tuple[Reason, str]] = deque(maxlen=16)

    def start(self) -> None:
        """Start the process and the thread that feeds it."""
        if self._thread is None:
            name = f"tracking-{self._service.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def put(self, line: Mapping[str, Any]) -> None:
        """Have a line sent; where too many wait it is left out, and counted as one that lacks."""
        self._logged += 1
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            log.debug("%s: figures are left out, the server is behind", self._service.name)

    @property
    def lacking(self) -> int:
        """Number of steps and evaluations whose figures the server has not taken."""
        return self._logged - self._acknowledged

    def end(self, outcome: Outcome) -> str:
        """See `Tracking.end`."""
        if self._thread is None or self._ended:
            return ""
        self._ended, name = True, self._service.name
        try:
            self._lines.put_nowait({"end": outcome})
            self._lines.put_nowait(None)
        except queue.Full:
            self._trouble = self._trouble or "the server is behind"
        if not self._trouble:
            # What waits here would go with this process; a pipe takes it in no time.
            self._handed_over.wait(_HANDED_OVER_WITHIN_S)
            late = f"{name} has yet to confirm the figures of {self.lacking} steps"
            return late if self.lacking else ""
        return f"{name} lacks the figures of {self.lacking} steps: {self._trouble}"

    def _run(self) -> None:
        try:
            process, document = self._started()
        except OSError as error:
            self._failed(f"its client cannot be started: {error}")
            return
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        listener.start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(document) + "\n")
            process.stdin.flush()
            while (line := self._lines.get()) is not None:
                process.stdin.write(json.dumps(line) + "\n")
                process.stdin.flush()
        except OSError as error:  # it has ended
            self._failed(f"its client has ended: {error}")
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._handed_over.set()
        self._reap(process, listener)

    def _started(self) -> tuple[subprocess.Popen[str], Mapping[str, Any]]:
        """Start the process; return it with what it needs to know.

        It gets the job's folder as a descriptor: by its name it could be another one by then.
        """
        service = self._service
        with contextlib.ExitStack() as opened:
            folders: tuple[int, ...] = ()
            if service.folder is not None:
                folders = (open_without_links(service.folder, os.O_RDONLY | os.O_DIRECTORY),)
                opened.callback(os.close, folders[0])
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(service.environment),
                pass_fds=folders,
            )
        return process, {**service.document, "folder": next(iter(folders), None)}

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a client's own words
            if not isinstance(said, dict):
                continue
            self._acknowledged += int(said.get("taken", 0))
            if "trouble" in said:
                self._failed(str(said["trouble"]))
            elif said.get("resumed"):
                self._trouble = ""
                self.news.append((Reason.TRACKING_RESUMED, f"{self._service.name} takes figures"))
        process.stdout.close()
        if not self._ended:
            self._failed("its client has ended")

    def _failed(self, why: str) -> None:
        if not self._trouble:
            self._trouble = redacted(" ".join(why.split()))[:_LONGEST_NEWS]
            told = f"{self._service.name} does not take the job's figures: {self._trouble}"
            log.warning("%s", told)
            self.news.append((Reason.TRACKING_FAILED, told))

    def _reap(self, process: subprocess.Popen[str], listener: threading.Thread) -> None:
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listener.join()
        if self.lacking:
            log.warning("%s lacks the figures of %d steps", self._service.name, self.lacking)
