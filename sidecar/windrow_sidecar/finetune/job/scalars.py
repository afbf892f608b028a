"""Write the figures of each step into the job's folder: JSON lines and TensorBoard files."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow.eventlog import append_whole
from windrow.outputs import open_without_links
from windrow.wheel import install_extra
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.data.private_folders import PrivateFolder
from windrow_sidecar.finetune.engine.stages import EvaluationDone, StepDone
from windrow_sidecar.finetune.job.mirrored_files import MirroredFiles
from windrow_sidecar.finetune.training.checkpoint import held

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class Scalars:
    """Write the figures of steps and evaluations; what the disk refuses is left out and logged.

    Args:
        folder: of the job.
        epoch: of this worker.
        tensorboard: write those files as well.
        memory_bytes: the most that the process has held of its device (default: of the host).
        also: gets each step and its figures as well; never waits.
        clock: monotonic seconds.

    Raises:
        UserError: TensorBoard's library is not there.
    """

    def __init__(
        self,
        folder: Path,
        epoch: int,
        *,
        tensorboard: bool,
        memory_bytes: Callable[[], int] | None = None,
        also: Callable[[int, dict[str, Any]], None] = lambda step, figures: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._also = also
        self._memory_bytes = memory_bytes or HostDevice().peak_bytes
        self._file, self._epoch, self._clock = folder / METRICS_FILE, epoch, clock
        self._tokens, self._at = 0, clock()
        self._board = _Board(folder) if tensorboard else None

    def begin(self, tokens: int) -> None:
        """Steps begin now; `tokens` are done already."""
        self._tokens, self._at = tokens, self._clock()

    def step(self, done: StepDone) -> None:
        """Write a step: loss, learning rate, gradient norm, tokens and tokens/s, memory."""
        position, now = done.position, self._clock()
        seconds = max(1e-9, now - self._at)
        figures = {
            "loss": position.loss,
            **asdict(done.facts),
            "tokens": position.tokens_done,
            "tokens_per_second": (position.tokens_done - self._tokens) / seconds,
            "memory_bytes": self._memory_bytes(),
        }
        self._tokens, self._at = position.tokens_done, now
        self._write(position.step, figures)

    def evaluation(self, step: int, done: EvaluationDone) -> None:
        """Write a loss on the held-out rows; its time is not that of the step that comes next."""
        self._write(step, {"eval_loss": done.loss, "stage": done.stage.value})
        self._at = self._clock()

    def _write(self, step: int, figures: dict[str, Any]) -> None:
        self._also(step, figures)
        line = {"step": step, **figures, "epoch": self._epoch, "unix_seconds": time.time()}
        try:
            with held(self._file.parent) as folder:
                append_whole(folder / self._file.name, json.dumps(line) + "\n")
            if self._board is not None:
                self._board.write(step, figures)
        except OSError as error:
            log.warning("the figures of step %d are not written down: %s", step, error)


class _Board:
    """TensorBoard's files in a job's folder.

    Its library makes them by names that can be guessed, so it writes into a private folder.

    Args:
        folder: of the job, without a link in its path.

    Raises:
        UserError: TensorBoard's library is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._job_folder, self._private = folder, PrivateFolder("tensorboard")
        self._writer = _writer(self._private.path / TENSORBOARD_FOLDER)
        self._mirror: MirroredFiles | None = None

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Write the figures of a step that are numbers.

        Raises:
            OSError: the job's folder does not take them.
        """
        for name, value in figures.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()
        if self._mirror is None:
            target = open_without_links(self._job_folder, os.O_RDONLY | os.O_DIRECTORY)
            self._mirror = MirroredFiles(self._private.path, target)
        self._mirror.sync()


def _writer(folder: Path) -> Any:  # noqa: ANN401 - torch's writer is untyped
    # It loads TensorFlow where that is there, which takes seconds and a GPU's memory.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"TensorBoard files need tensorboard, which this worker has not ({error})",
            field="spec.training.tensorboard",
            remedy=f"In the sidecar's image: {install_extra('tensorboard')}, or write false.",
        ) from error
    return SummaryWriter(str(folder))
