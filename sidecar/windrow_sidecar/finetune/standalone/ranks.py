"""Run one job over several ranks of this machine: processes that are forked and end together.

The first rank is the worker itself: it reads, reports and writes as a job of one rank does. It
tells the others what to do through pipes; tensors go by torch.distributed. A rank that ends before
the job does ends it, and the job goes on from its checkpoint with the next run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from windrow.errors import UserError
from windrow.protocol import Ending
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.finetune.data.store import TokenFile
from windrow_sidecar.finetune.engine.sharded_stream import ShardedStream
from windrow_sidecar.finetune.job.assembly import (
    JobSpec,
    TrainingSession,
    read_examples,
    read_job,
)
from windrow_sidecar.finetune.job.ranks import (
    LATE_AFTER_S,
    Leader,
    LoadBase,
    OpenJob,
    fork_rank,
    import_ahead,
    obey,
)
from windrow_sidecar.finetune.model.loading import BaseModel, find_model, load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.standalone.dedicated import open_alone
from windrow_sidecar.finetune.standalone.run import JobGroup
from windrow_sidecar.finetune.tensor_parallel.adapter import check_adapter
from windrow_sidecar.finetune.tensor_parallel.shard import read_shard
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding


def run_over_ranks(options: argparse.Namespace) -> int:
    """Run the job that `--job` names over `--tp` ranks to its end; returns an `Ending`.

    Raises:
        UserError: the manifest cannot be read, or asks for what several ranks cannot do.
    """
    if len(options.job) > 1:
        raise UserError(
            f"{len(options.job)} jobs cannot share a model that is cut over ranks yet",
            field="--tp",
            remedy="Run them one by one, or on one rank.",
        )
    job = read_job(options.job[0], options.output)
    check_adapter(job.spec)
    if not options.device.startswith("cuda"):  # a process that has asked CUDA cannot be forked
        import_ahead()
    meet = Path(tempfile.mkdtemp(prefix="windrow-ranks-"))
    # Every rank has it open by the same number; it has no name, so nothing of the rows stays.
    tokens = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rows

    def follow(rank: int, pipe: Connection) -> None:
        device, _ = _place(options, rank)
        ranks = _join(options, meet / "meet", rank, device)
        obey(
            pipe,
            tokens,
            lambda order: load_sharded(order.job, device, ranks),
            lambda job, base, rows, sharding: open_alone(
                job, device, base, rows=rows, sharding=sharding
            ),
        )

    leader = Leader([fork_rank(rank, follow) for rank in range(1, options.tp)], tokens)
    try:
        try:
            device, units = _place(options, 0)
            leader.communicator = _join(options, meet / "meet", 0, device)
        finally:
            shutil.rmtree(meet, ignore_errors=True)
        ranked = RankedJob(
            [job], units, options.log_dir, device, options.parent, fresh=options.fresh
        )
        return int(ranked.over(leader))
    finally:
        leader.end()


class RankedJob(JobGroup):
    """One job, reported as any other (see `JobGroup`), whose model is cut over ranks."""

    _leader: Leader
    _sharding: Sharding

    def over(self, leader: Leader) -> Ending:
        """Run it to its end with the ranks of `leader`."""
        self._leader = leader
        return self.run()

    def _base(self) -> BaseModel:
        job = self._jobs[0]
        self._leader.tell(LoadBase(job))
        assert self._leader.communicator is not None
        base, self._sharding = load_sharded(job, self._device, self._leader.communicator)
        return base

    def _open(self, job: JobSpec, base: BaseModel, alive: Callable[[], None]) -> TrainingSession:
        tokens = TokenFile(self._leader.tokens)
        rows = read_examples(job, base, alive, tokens)
        tokens.flush()
        self._leader.tell(OpenJob(job, rows, tokens))
        session = open_alone(
            job, self._device, base, self._estimates, rows=rows, sharding=self._sharding
        )
        assert isinstance(session.stream, ShardedStream)
        session.stream.tell = self._leader.tell
        return session

    def _failed(self, n: int, reporter: Any, error: Exception, *rest: Any) -> Ending:  # noqa: ANN401
        return super()._failed(n, reporter, self._leader.explain(error), *rest)


def load_sharded(
    job: JobSpec, device: ComputeDevice, ranks: Communicator
) -> tuple[BaseModel, Sharding]:
    """Load this rank's shard of the base model that a job names.

    Raises:
        UserError: it cannot be had, or cannot be cut so.
    """
    whole: list[Any] = []

    def build(directory: Path, config: Any, form: WeightForm) -> torch.nn.Module:  # noqa: ANN401
        whole.append(config)
        return read_shard(directory, config, form, ranks)

    directory = find_model(job.spec.model.name, job.spec.model.revision)
    base = load_base(directory, form=WeightForm.of(job.spec), device=device, build=build)
    # Rows are read for the whole model: its vocabulary, its positions.
    return replace(base, config=whole[0]), Sharding(ranks, whole[0])


def _place(options: argparse.Namespace, rank: int) -> tuple[ComputeDevice, int]:
    """Find a rank's device and take its share of it; returns it and its units."""
    name = options.device
    if not name.startswith("cuda"):
        device = find_device(name)
        cores = sorted(os.sched_getaffinity(0))
        cores = cores[-options.units :] if options.units else cores
        share = max(1, len(cores) // options.tp)
        own = {cores[(rank * share + n) % len(cores)] for n in range(share)}
        os.sched_setaffinity(0, own)
        torch.set_num_threads(share)
        return device, share
    first = int(name.partition(":")[2] or 0)
    device = find_device(f"cuda:{first + rank}")
    torch.cuda.set_device(device.torch)
    return device, device.total_units()


def _join(
    options: argparse.Namespace, meet: Path, rank: int, device: ComputeDevice
) -> Communicator:
    return Communicator.joined(
        meet, rank, options.tp, device=device.torch, late_after_s=LATE_AFTER_S
    )
