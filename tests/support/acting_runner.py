"""A job as a carrier takes it, its runner acted: no folder, no ledger, no agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from windrow.protocol import Ending
from windrow_sidecar.finetune.job.job_handle import JobHandle
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.memory.training_memory import TrainingMemory
from windrow_sidecar.finetune.training.optimizer import NotFinite
from windrow_sidecar.testing.tinyjob import TinyJob


class ActingRunner:
    """Stand-in for a `Runner`, as far as a carrier sees it.

    Args:
        name: of the job.
        job: whose tasklets run.
        order: where each tasklet that has run leaves the job's name.
        fails_at: after so many tasklets its loss is not finite; None: never.

    Attributes:
        fed: whether there is memory for the next tasklet.
        told_to_pause: by command; over with the first wait.
        ran: tasklets so far.
        waited: times that it waited for memory.
    """

    def __init__(
        self, name: str, job: TinyJob, order: list[str], *, fails_at: int | None = None
    ) -> None:
        self.name, self.stream, self._order, self._fails_at = name, job.stream, order, fails_at
        self.fed: Callable[[], bool] = lambda: True
        self.told_to_pause = self.starving = self._begun = False
        self.ran = self.waited = 0

    def begin(self) -> None:
        """The carrier calls it before anything else."""
        self._begun = True

    def obey(self) -> None:
        """Return None: no command comes."""
        assert self._begun

    def turn(self) -> Ending | None:
        """Run a tasklet, or see that there is none.

        Raises:
            NotFinite: where it was told to fail.
        """
        self.starving = not self.fed()
        if self.starving or self.told_to_pause:
            return None
        if (tasklet := self.stream.peek()) is None:
            return Ending.SUCCEEDED
        if self.ran == self._fails_at:
            raise NotFinite("the loss is not finite")
        self.stream.run(tasklet)
        self.ran += 1
        self._order.append(self.name)
        return None

    def wait(self) -> None:
        """Time passes: a pause is over, memory may have come."""
        self.told_to_pause = False
        self.waited += self.starving


def job_handle(
    runner: ActingRunner, memory: TrainingMemory, endings: dict[str, Ending]
) -> JobHandle:
    """Return the job for a carrier; how it ended is left in `endings` by its name."""
    return JobHandle(
        runner.name,
        runner.stream,
        memory,
        cast(Runner, runner),
        failed=lambda error: Ending.FAILED,
        ended=lambda ending: endings.update({runner.name: ending}),
    )
