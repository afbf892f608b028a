"""Process that reports the figures of one job to one server by the server's own client.

`python -m windrow_sidecar.finetune.job.tracking_client mlflow`: the first line of standard input
says what to report to and as what, further ones are figures, the last one how the job has ended.
Lines on standard output say how many were taken, and what is wrong. See `tracking`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TextIO

from windrow.access import NetworkAccess
from windrow.redaction import redacted
from windrow_sidecar.finetune.data import network_guard
from windrow_sidecar.finetune.data.guarded_proxy import GuardedProxy
from windrow_sidecar.finetune.data.private_folders import PrivateFolder
from windrow_sidecar.finetune.job.mirrored_files import MirroredFiles

log = logging.getLogger(__name__)

Line = Mapping[str, Any]

_BATCH = 200
_WAITING = 2000
_LOOK_EVERY_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Once the job has ended, or its worker.
_ENDS_WITHIN_S = 20.0
# What a client imports, on a node that is busy.
_LOADS_WITHIN_S = 90.0
# The clients' own waits: what is tried again is tried from here.
_REQUEST_WITHIN_S = 30
_ANSWERS_LATER: Final = (408, 425, 429)
_MLFLOW_STATUS: Final = {
    "succeeded": "FINISHED",
    "stopped": "SCHEDULED",  # it may go on elsewhere
    "failed": "FAILED",
    "deleted": "KILLED",
}
_MOST_PARAMS, _LONGEST_PARAM, _LONGEST_TAG = 100, 500, 5000
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class RunClient(Protocol):
    """A run on a server."""

    def begin(self) -> None:
        """Open the run, or go on with the one of the same job."""

    def send(self, lines: Sequence[Line]) -> None:
        """Report figures."""

    def end(self, outcome: str) -> None:
        """Close the run."""

    def stays(self, error: Exception) -> bool:
        """Return whether the server would say the same whenever it is asked."""


class MlflowRun:
    """A run of MLflow.

    Args:
        about: first line of the process.
    """

    def __init__(self, about: Line) -> None:
        self._about = about
        os.environ.update(about["variables"])
        for name, value in (
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_WITHIN_S)),
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("MLFLOW_ENABLE_ASYNC_LOGGING", "false"),
        ):
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=about["uri"])
        self._run_id = ""

    def begin(self) -> None:
        """Open the run, or go on with the one of the same job."""
        from mlflow.entities import Param

        about = self._about
        experiment = self._experiment(about["experiment"])
        tag, uid = next(iter(about["tags_of_run"].items()))
        found = self._client.search_runs([experiment], f"tags.`{tag}` = '{uid}'", max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(
                experiment, tags=about["tags_of_run"], run_name=about["run"]
            )
        )
        run_id = run.info.run_id
        if not run.data.params:
            params = [Param(k, v[:_LONGEST_PARAM]) for k, v in about["params"].items()]
            self._client.log_batch(run_id, params=params[:_MOST_PARAMS])
        if found:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)  # another job's was first
        if found is None or found.lifecycle_stage != "active":
            raise LookupError(f"experiment {name!r} is deleted: restore it, or name another one")
        return str(found.experiment_id)

    def send(self, lines: Sequence[Line]) -> None:
        """Report figures."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(line["at"] * 1000), line["step"])
            for line in lines
            for name, value in line["figures"].items()
        ]
        for begin in range(0, len(metrics), 1000):  # as many as a call may have
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + 1000])

    def end(self, outcome: str) -> None:
        """Close the run."""
        if outcome == "stopped":
            self._client.update_run(self._run_id, status=_MLFLOW_STATUS[outcome])
        else:
            self._client.set_terminated(self._run_id, status=_MLFLOW_STATUS[outcome])

    def stays(self, error: Exception) -> bool:
        """Return whether the server would say the same whenever it is asked."""
        from mlflow.exceptions import MlflowException

        if not isinstance(error, MlflowException):
            return isinstance(error, LookupError)
        status = error.get_http_status_code()
        return 400 <= status < 500 and status not in _ANSWERS_LATER


class WandbRun:
    """A run of Weights & Biases.

    Args:
        about: first line of the process.
    """

    def __init__(self, about: Line) -> None:
        self._about, self._run, self._proxy = about, None, None
        # Its settings files and its caches are this process's own, and so is its log.
        self._scratch = PrivateFolder("wandb")
        for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
            os.environ[f"WANDB_{name}"] = str(self._scratch.path)
        self._files = self._scratch.path / "files"
        self._files.mkdir()
        self._mirror: MirroredFiles | None = None
        if about["folder"] is not None:
            self._mirror = MirroredFiles(self._files, about["folder"])
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        if about["access"] is not None:
            # Its native part resolves and dials on its own.
            if not any(name.lower() in _PROXIES and value for name, value in os.environ.items()):
                self._proxy = GuardedProxy()
            for name in ("no_proxy", "NO_PROXY"):
                os.environ.pop(name, None)
        import wandb

        self._wandb: Any = wandb

    def begin(self) -> None:
        """Open the run, or go on with the one of the same job."""
        about = self._about
        settings = {
            "api_key": about["key"] or None,
            "base_url": about["base"],
            "console": "off",
            "silent": True,
            "disable_code": True,
            "disable_git": True,
            "save_code": False,
            "init_timeout": 2.0 * _REQUEST_WITHIN_S,
            "x_service_wait": 2.0 * _REQUEST_WITHIN_S,
            "finish_timeout": 0.75 * _ENDS_WITHIN_S,
            "finish_timeout_raises": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
        }
        if self._proxy is not None:
            settings |= {"http_proxy": self._proxy.url, "https_proxy": self._proxy.url}
        self._run = self._wandb.init(
            project=about["project"],
            entity=about["entity"] or None,
            name=about["run"],
            id=about["uid"],
            tags=about["tags"],
            config={**about["params"], **about["tags_of_run"]},
            dir=str(self._files),
            mode=about["mode"],
            resume="allow" if about["mode"] == "online" else None,
            reinit="create_new",
            settings=self._wandb.Settings(**settings),
        )

    def send(self, lines: Sequence[Line]) -> None:
        """Hand figures to the client's native part, which tries again."""
        assert self._run is not None
        for line in lines:
            self._run.log(line["figures"], step=line["step"])
        if self._mirror is not None:
            self._mirror.sync()

    def end(self, outcome: str) -> None:
        """Close the run."""
        assert self._run is not None
        if outcome == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "succeeded" else 1)
        if self._mirror is not None:
            self._wandb.teardown()  # its native part writes the last block as it ends
            self._mirror.sync()

    def stays(self, error: Exception) -> bool:
        """Return whether the server would say the same whenever it is asked."""
        words = str(error).lower()
        refused = any(word in words for word in ("401", "403", "404", "permission", "api key"))
        return refused or not isinstance(error, self._wandb.errors.CommError | TimeoutError)


class Inbox:
    """Lines that a thread reads, and the job's end; a writer that is faster than the server waits.

    Args:
        source: of the lines.
        clock: monotonic seconds.
    """

    def __init__(self, source: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._lines: queue.Queue[Line] = queue.Queue(_WAITING)
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._ends_at: float | None = None
        self.outcome: str | None = None
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        for text in self._source:
            line = json.loads(text)
            if "end" in line:
                self.outcome = line["end"]
                break
            self._lines.put(line)
        self._closed.set()

    def take(self) -> list[Line]:
        """Return some lines, as soon as there are any; none after a while, or after the last."""
        taken = []
        try:
            wait_s = 0.0 if self._closed.is_set() else _LOOK_EVERY_S
            taken.append(self._lines.get(timeout=wait_s) if wait_s else self._lines.get_nowait())
            while len(taken) < _BATCH:
                taken.append(self._lines.get_nowait())
        except queue.Empty:
            pass
        return taken

    @property
    def is_done(self) -> bool:
        """Return whether all lines were taken and no further one comes."""
        return self._closed.is_set() and self._lines.empty()

    @property
    def has_ended(self) -> bool:
        """Return whether the job has ended, or its worker."""
        return self._closed.is_set() or os.getppid() != self._parent

    @property
    def is_late(self) -> bool:
        """Return whether the job, or its worker, ended too long ago to go on."""
        if self._ends_at is None and self.has_ended:
            self._ends_at = self._clock() + _ENDS_WITHIN_S
        return self._ends_at is not None and self._clock() >= self._ends_at


def deliver(
    inbox: Inbox,
    run: RunClient,
    say: Callable[[Line], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Report all lines to a server, in their order, until the job has ended.

    A server that does not answer is asked again, ever later. One that refuses is not.
    """
    batch: list[Line] = []
    begun = troubled = False
    pause_s = _FIRST_PAUSE_S
    while not inbox.is_late:
        try:
            if not begun:
                run.begin()
                begun = True
            batch = batch or inbox.take()
            if batch:
                run.send(batch)
                say({"taken": len(batch)})
                batch = []
            if troubled:
                say({"resumed": True})
            troubled, pause_s = False, _FIRST_PAUSE_S
            if inbox.is_done:
                if inbox.outcome is not None:
                    run.end(inbox.outcome)
                return
        except Exception as error:
            # A client's own, whatever it is: it costs figures, and nothing else.
            log.debug("figures are not reported", exc_info=True)
            if not troubled:
                say({"trouble": _told(error)})
            troubled = True
            if run.stays(error):
                _pass_over(inbox)
                return
            _pause(inbox, pause_s, sleep)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _pass_over(inbox: Inbox) -> None:
    while not inbox.is_done and not inbox.is_late:
        inbox.take()


def _pause(inbox: Inbox, pause_s: float, sleep: Callable[[float], None]) -> None:
    while pause_s > 0 and not inbox.is_late:
        sleep(min(pause_s, _LOOK_EVERY_S))
        pause_s -= _LOOK_EVERY_S


def _told(error: Exception) -> str:
    return redacted(" ".join(str(error).split())) or type(error).__name__


_RUNS: Final[Mapping[str, Callable[[Line], RunClient]]] = {"mlflow": MlflowRun, "wandb": WandbRun}


def main(arguments: Sequence[str]) -> None:
    """Report to the server of that name until standard input ends."""
    # Nothing but our lines is on standard output: what a client prints goes to the job's log.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.nice(10)

    def say(line: Line) -> None:
        with contextlib.suppress(OSError):  # the worker has ended, and this run has its end to tell
            print(json.dumps(line), file=out, flush=True)

    about = json.loads(sys.stdin.readline())
    if about["access"] is not None:
        access = NetworkAccess(about["access"]["sources"], private=about["access"]["private"])
        network_guard.install().admit("job", access)
    inbox = Inbox(sys.stdin)
    watchdog = threading.Timer(0, _end_late, (inbox,))
    watchdog.daemon = True
    watchdog.start()
    try:
        deliver(inbox, _RUNS[arguments[0]](about), say)
    except Exception as error:
        log.debug("the client cannot be loaded", exc_info=True)
        say({"trouble": _told(error)})


def _end_late(inbox: Inbox) -> None:
    """End the process where its client hangs, also while it is loaded."""
    while not inbox.has_ended:
        time.sleep(_LOOK_EVERY_S)
    time.sleep(_LOADS_WITHIN_S + _ENDS_WITHIN_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
