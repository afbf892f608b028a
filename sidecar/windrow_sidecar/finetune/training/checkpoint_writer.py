"""Write checkpoints on a thread while the job trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from windrow_sidecar.finetune.training.checkpoint import JobFolder, Position
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.snapshot import TensorSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that has been written."""

    position: Position
    path: str


class CheckpointWriter:
    """Write one checkpoint at a time on a thread of its own.

    Args:
        folder: the job's, claimed.
        origin: what the job is made of.
        keep: how many checkpoints stay.
        saved: called with each, on the thread that calls `settle` or `finish`.
        failed: called, on the same thread, with the step and the error of one that was not written.
    """

    def __init__(
        self,
        folder: JobFolder,
        origin: Origin,
        *,
        keep: int,
        saved: Callable[[Saved], None],
        failed: Callable[[int, OSError], None] = lambda step, error: None,
    ) -> None:
        self._folder, self._origin, self._keep = folder, origin, keep
        self._tell, self._failed, self._step = saved, failed, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    @property
    def is_writing(self) -> bool:
        """True where one is on its way, as of the last `settle`."""
        return self._writing is not None

    def begin(self, position: Position, snapshot: TensorSnapshot) -> None:
        """Write one meanwhile. Where the one before is not whole yet, that one is waited for.

        Raises:
            Fenced: another worker has the job; found with the one before.
        """
        self.settle(wait=True)
        self._step = position.step
        self._writing = self._thread.submit(self._write, position, snapshot)

    def settle(self, *, wait: bool = False) -> None:
        """Tell of what has become whole, or could not be written.

        Then the one before remains, and the job can go on: more work is lost by ending it.

        Raises:
            Fenced: another worker has the job.
        """
        try:
            self._collect(wait=wait)
        except OSError as error:
            log.warning("the checkpoint of step %d could not be written: %s", self._step, error)
            self._failed(self._step, error)

    def finish(self, position: Position, snapshot: TensorSnapshot) -> Saved:
        """Write a last one and wait for it.

        Raises:
            Fenced, OSError: it was not written.
        """
        self.begin(position, snapshot)
        found = self._collect(wait=True)
        assert found is not None
        return found

    def _collect(self, *, wait: bool) -> Saved | None:
        writing = self._writing
        if writing is None or not (wait or writing.done()):
            return None
        self._writing = None
        found = writing.result()
        self._tell(found)
        return found

    def _write(self, position: Position, snapshot: TensorSnapshot) -> Saved:
        try:
            path = self._folder.save(
                position, snapshot.take(), keep=self._keep, origin=self._origin
            )
        finally:
            snapshot.release()
        return Saved(position, path)
