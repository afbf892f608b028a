"""A worker reduced to its talk with the agent: reports, obeys, ends as its job's spec says.

The same command line as the real worker's. `spec.behave`: `run` until told otherwise, `succeed`
after a few steps, `fail` with a user error, `crash` without a word, `stubborn` (ignores STOP and
ABORT), `deaf` (ignores ADD_JOB), `busy` (takes further jobs once it is told to RESUME), `at-work`
(as `run`, and notes that it is its turn), `lingering` (outlives its agent by a second, as one that
writes a checkpoint does), `silent` (lives, and says nothing after a few steps), `telling` (answers
credentials with their digest). Jobs that it is told to take run on threads of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from windrow.conditions import Reason
from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.rundir import PROTOCOL_VERSION, WORKER_LOG, RunDir
from windrow_sidecar.turn import TurnNote

_STEP_S, _LINGER_S = 0.05, 1.0
_PR_SET_PDEATHSIG = 1
_STEPS = 1000


class JobWorker:
    """One run."""

    def __init__(self, run_dir: RunDir, job_uid: str, epoch: int, behave: str = "") -> None:
        job = json.loads((run_dir.job_dir(job_uid) / "job.json").read_text(encoding="utf-8"))
        self._behave = behave or str(job["spec"].get("behave", "run"))
        self._run_dir, self._job_uid, self._epoch = run_dir, job_uid, epoch
        self._out: queue.Queue[agent_pb2.WorkerReport | None] = queue.Queue()
        self._told_to_end, self._aborted = threading.Event(), False
        self._forgets = False
        self._put_off: list[tuple[str, int]] = []  # jobs
        self._taken: list[threading.Thread] = []

    def run(self) -> int:
        """Report to the agent until the end; the exit code."""
        with grpc.insecure_channel(f"unix:{self._run_dir.agent_socket}") as channel:
            stub = agent_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Worker(self._reports())
            listener = threading.Thread(target=self._listen, args=(call,), daemon=True)
            listener.start()
            code = self._work()
            self._out.put(None)
            listener.join(timeout=5)
        for job in self._taken:
            job.join()
        return code

    def _take(self, job_uid: str, epoch: int) -> None:
        other = JobWorker(self._run_dir, job_uid, epoch)
        self._taken.append(threading.Thread(target=other.run))
        self._taken[-1].start()

    def _linger(self) -> None:
        """Outlive the agent, and a polite request."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: None)

    def _work(self) -> int:
        if self._behave == "lingering":
            self._linger()
        if self._behave == "at-work":
            TurnNote(self._run_dir.turn_note()).of(self._job_uid, self._epoch)()
        # To its own log, which is the process's output for the first job.
        log = self._run_dir.job_dir(self._job_uid) / WORKER_LOG
        with log.open("a", encoding="utf-8") as own:
            own.write(f"{self._job_uid} begins\n")
        self._event("STARTED", "Started", "from the beginning")
        if self._behave == "crash":
            os.abort()
        for step in range(1, _STEPS):
            self._progress(step)
            if self._told_to_end.wait(_STEP_S) and self._behave == "lingering":
                time.sleep(_LINGER_S)
                return 0
            if self._told_to_end.is_set() and self._behave != "stubborn":
                how = "aborted" if self._aborted else f"checkpoint of step {step}"
                how = "its checkpoints are removed" if self._forgets else how
                self._event("STOPPED", "Stopped", how)
                return 0
            if step == 5 and self._behave == "succeed":
                self._event("SUCCEEDED", "Completed", "", adapter_path="/adapters/1")
                return 0
            if step == 5 and self._behave == "silent":
                threading.Event().wait()
            if step == 5 and self._behave == "fail":
                self._event(
                    "FAILED",
                    "DatasetInvalid",
                    "rows.jsonl:3",
                    user_error=True,
                    field="rows.jsonl:3",
                    remedy="Write chat rows.",
                )
                return 3
        return 1

    def _listen(self, call: Iterator[agent_pb2.WorkerCommand]) -> None:
        try:
            for command in call:
                if command.action == "ADD_JOB" and self._behave == "busy":
                    self._put_off.append((command.job_uid, command.epoch))
                elif command.action == "ADD_JOB" and self._behave != "deaf":
                    self._take(command.job_uid, command.epoch)
                elif command.action == "RESUME":
                    for job in self._put_off:
                        self._take(*job)
                elif command.action in ("STOP", "ABORT"):
                    self._aborted = command.action == "ABORT"
                    self._forgets = command.reason == Reason.DELETED
                    self._told_to_end.set()
                elif command.action == "CREDENTIALS" and self._behave == "telling":
                    held = command.dataset_secret, command.output_secret
                    held = *held, command.tracking_secret, command.model_secret
                    self._event("PAUSED", "Paused", digest_of(*map(dict, held)))
                elif command.action == "PAUSE":
                    self._event("PAUSED", "Paused", command.reason)
        except grpc.RpcError:
            self._told_to_end.set()

    def _reports(self) -> Iterator[agent_pb2.WorkerReport]:
        yield agent_pb2.WorkerReport(
            hello=agent_pb2.WorkerHello(
                protocol_version=PROTOCOL_VERSION,
                pid=os.getpid(),
                job_uid=self._job_uid,
                epoch=self._epoch,
            )
        )
        while (report := self._out.get()) is not None:
            yield report

    def _progress(self, step: int) -> None:
        progress = agent_pb2.WorkerProgress(
            step=step,
            total_steps=_STEPS,
            loss=3.0 - step / _STEPS,
            tokens=100 * step,
            checkpoint_step=step,
            checkpoint_path=f"/checkpoints/{step}",
            allocator_held_bytes=3 << 20,
            allocator_requested_bytes=2 << 20,
            graph_bytes=5 << 20,
        )
        self._out.put(agent_pb2.WorkerReport(progress=progress))

    def _event(
        self,
        kind: str,
        reason: str,
        detail: str,
        *,
        user_error: bool = False,
        field: str = "",
        remedy: str = "",
        adapter_path: str = "",
    ) -> None:
        event = agent_pb2.WorkerEvent(
            kind=kind,
            reason=reason,
            detail=detail,
            user_error=user_error,
            field=field,
            remedy=remedy,
            adapter_path=adapter_path,
        )
        self._out.put(agent_pb2.WorkerReport(event=event))


def digest_of(*secrets: dict[str, str]) -> str:
    """Return a digest of what Secrets hold."""
    return hashlib.sha256(json.dumps(secrets, sort_keys=True).encode()).hexdigest()


def main(behave: str = "") -> int:
    """Parse the worker's command line and run.

    Args:
        behave: in place of what the job's spec says; a FinetuneJob of an API server says nothing.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--job-uid", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    args = parser.parse_args()
    worker = JobWorker(RunDir(args.run_dir), args.job_uid, args.epoch, behave)
    return worker.run()


if __name__ == "__main__":
    raise SystemExit(main())
