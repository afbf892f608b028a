"""Runs tiny jobs, each of which is killed in the middle of another phase, after two good steps.

Prints a line for each: phase and exit code. `python killed_in_each_phase.py FOLDER`
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.training import checkpoint
from windrow_sidecar.testing.tinyjob import tiny_job

UID, GOOD_STEPS = "a-job", 2
# What a phase cannot do without; the process dies after that has been done and before it is noted.
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (DecoderStack, "_run"),
    "loss": (Head, "loss_and_gradient"),
    "backward": (torch.autograd, "backward"),
    "optimizer": (torch.optim.AdamW, "step"),
    "evaluation": (Head, "loss"),
    "checkpoint": (checkpoint, "sync_file"),
}


def live_and_die(phase: str, destination: Path) -> None:
    job, folder = tiny_job(), checkpoint.JobFolder(destination, UID, 1)
    folder.claim()
    while job.stream.position.step < GOOD_STEPS:
        job.stream.run(job.stream.peek())
    folder.save(job.stream.position, job.stream.tensors(), keep=2)
    owner, name = PLACES[phase]
    whole = getattr(owner, name)

    def die(*args, **kwargs):
        whole(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)
    while (tasklet := job.stream.peek()) is not None:
        job.stream.run(tasklet)
        if phase == "checkpoint":
            folder.save(job.stream.position, job.stream.tensors(), keep=2)


def main() -> None:
    torch.set_num_threads(1)
    tiny_job()  # so that its libraries are loaded here, not in each child: 4 s of a core
    for phase in PLACES:
        if (child := os.fork()) == 0:
            live_and_die(phase, Path(sys.argv[1]) / phase)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(phase, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
