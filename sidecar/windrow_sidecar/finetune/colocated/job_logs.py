"""Keep the log of each job of a worker apart from those of the others.

A worker with one job writes all it has to say to standard error, which is that job's log. With the
second job begins the time of separate logs: each record goes to the log of the job that the thread
is at work for, and standard output and error, where libraries write, to the log of the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from windrow.rundir import WORKER_LOG, RunDir

LOG_FORMAT = "%(asctime)s %(name)s %(message)s"


class JobLogs(logging.Handler):
    """Writes records to the logs of their jobs. Any thread may log.

    Args:
        run_dir: of the decode pod, as the worker's slot sees it.
    """

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__()
        self._run_dir, self._apart = run_dir, False
        self._thread = threading.local()

    def path_of(self, job_uid: str) -> Path:
        """Return the log of a job."""
        return self._run_dir.job_dir(job_uid) / WORKER_LOG

    def about(self, job_uid: str) -> None:
        """Note the job that this thread is at work for from now on; empty: the whole process."""
        self._thread.job_uid = job_uid

    def separate(self) -> None:
        """Keep logs apart from now on. Harmless the second time."""
        if self._apart:
            return
        self._apart = True
        sys.stdout.flush()
        sys.stderr.flush()
        with self._run_dir.worker_log().open("ab") as out:
            os.dup2(out.fileno(), sys.stdout.fileno())
            os.dup2(out.fileno(), sys.stderr.fileno())

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            line = self.format(record) + "\n"
            job_uid = getattr(self._thread, "job_uid", "")
            if self._apart and job_uid:
                with self.path_of(job_uid).open("a", encoding="utf-8") as log:
                    log.write(line)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler does: a log ends no job
            self.handleError(record)
