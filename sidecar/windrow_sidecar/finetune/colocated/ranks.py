"""The ranks of a worker beside an engine whose model is cut over ranks, one for each of these.

Each rank maps the weights of decode's rank of its number. The first one is the worker: it reads
decode's grants, tells the others which tasklet to run on how many units, and counts a tasklet as
landed when all of them have run it. So nothing of any rank runs where the first says that it rests.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from windrow.errors import Transient
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, AttachError, DriverUnavailable, Inspection
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.finetune.data.held_models import HeldModel
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.data.store import TokenFile
from windrow_sidecar.finetune.engine.sharded_stream import Act, FollowChunks, ShardedStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.job.assembly import (
    JobSpec,
    TaskletRuntime,
    TrainingSession,
    open_session,
    read_examples,
)
from windrow_sidecar.finetune.job.rank_watch import RankWatch, late_after_s
from windrow_sidecar.finetune.job.ranks import (
    LATE_AFTER_S,
    Leader,
    LoadBase,
    OpenJob,
    fork_rank,
    import_ahead,
    obey,
)
from windrow_sidecar.finetune.memory.own_slot import OwnSlotMemory
from windrow_sidecar.finetune.memory.ranked import (
    AgreedChunks,
    FollowingMemory,
    LedBoundaries,
    RankTables,
)
from windrow_sidecar.finetune.memory.slot_memory import SlotMemory
from windrow_sidecar.finetune.model.boundaries import Boundaries, TorchBoundaries
from windrow_sidecar.finetune.model.loading import (
    BaseModel,
    ExportedWeights,
    load_base,
    read_manifest,
)
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.tensor_parallel.adapter import check_adapter
from windrow_sidecar.finetune.tensor_parallel.shard import over_parts, read_shard
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding
from windrow_sidecar.finetune.training.health import StallWatch

log = logging.getLogger(__name__)

WEIGHTS = "weights"
_RAN = "ran"


def threads_of_rank(ranks: int) -> Callable[[int], None]:
    """Return what sets torch's threads for a number of cores that so many ranks share."""
    return lambda cores: torch.set_num_threads(max(1, cores // ranks))


class RankGroup:
    """The ranks of a worker, as its first one leads them.

    Forked when it is made, so this process has no second thread yet; `join` comes before any use.

    Args:
        run_dir: of the slot.
        ranks: of its engine.
        cores: of the slot's device.
        epoch: of the job that the worker is for: chunks are lent to it.
    """

    def __init__(self, run_dir: RunDir, ranks: int, cores: tuple[int, ...], epoch: int) -> None:
        self._run_dir, self.ranks, self._epoch = run_dir, ranks, epoch
        import_ahead()
        self._meet = Path(tempfile.mkdtemp(prefix="windrow-ranks-"))
        # Every rank has it open by the same number; it has no name, so nothing of the rows stays.
        self._tokens = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rows
        self._sharding: Sharding | None = None
        self._watch: RankWatch | None = None

        def follow(rank: int, pipe: Connection) -> None:
            partition = HostPartition("finetune", cores, set_threads=threads_of_rank(ranks))
            os.sched_setaffinity(0, cores[-1:])
            partition.activate(1)
            joined = self._join(rank)
            following = FollowingRank(run_dir, joined, epoch)

            def begin(stream: ShardedStream) -> None:
                stream.take_units = partition.activate
                stream.ran = lambda: pipe.send(_RAN)

            obey(
                pipe,
                self._tokens,
                following.load,
                following.open,
                begin,
            )

        others = [fork_rank(rank, follow) for rank in range(1, ranks)]
        self._leader = Leader(others, self._tokens)

    def _join(self, rank: int) -> Communicator:
        return Communicator.joined(
            self._meet / "meet",
            rank,
            self.ranks,
            device=torch.device("cpu"),
            late_after_s=LATE_AFTER_S,
        )

    def join(self) -> None:
        """Meet the others."""
        try:
            self._leader.communicator = self._join(0)
        finally:
            shutil.rmtree(self._meet, ignore_errors=True)

    @property
    def sharding(self) -> Sharding:
        """The cut of the base model, once that is loaded."""
        assert self._sharding is not None
        return self._sharding

    def load(self, job: JobSpec, folder: Path, *, of_hub: bool) -> BaseModel:
        """Load every rank's shard of a job's base model, decode's own where it serves that model.

        `folder`, `of_hub`: of the model, as for `HeldModel`.

        Raises:
            UserError: it cannot be had or cut, or the job asks for what several ranks cannot do.
            Transient: decode has gone.
        """
        check_adapter(job.spec)
        order = LoadBase(job, folder, of_hub)
        self._leader.tell(order)
        assert self._leader.communicator is not None
        base, self._sharding, _ = load_rank(order, self._run_dir, self._leader.communicator)
        return base

    def memory(self, arena: Arena, base: BaseModel) -> SlotMemory:
        """Return the memory of the slot: chunks of every rank's arena, or torch's own.

        Args:
            arena: of decode's rank 0, attached.
            base: the model, for which activations are kept.

        Raises:
            Transient: decode's rank is not there.
        """
        if not _decode_lends(self._run_dir):
            return OwnSlotMemory()
        sockets = [self._run_dir.of_rank(n).arena_socket() for n in range(1, self.ranks)]
        try:
            others = [Inspection.open(str(socket)) for socket in sockets]
        except AttachError as error:
            raise Transient(f"the chunks of decode's ranks cannot be seen: {error}") from error
        return LedBoundaries(
            AgreedChunks(arena),
            RankTables([arena, *others], self._epoch),
            self._epoch,
            self._leader.tell,
            boundaries=base.config.num_hidden_layers,
            bytes_per_token=boundary_bytes(base),
        )

    def read(self, job: JobSpec, base: BaseModel, alive: Callable[[], None]) -> DataSplit:
        """Read the job's rows, and have every other rank put the job together over them.

        This one has to do so next. `alive`: called at each row.

        Raises:
            UserError, Transient: see `read_examples`.
        """
        tokens = TokenFile(self._tokens)
        rows = read_examples(job, base, alive, tokens)
        tokens.flush()
        self._leader.tell(OpenJob(job, rows, tokens))
        return rows

    def lead(
        self,
        stream: TaskletStream,
        units: Callable[[], int],
        bound_us: Callable[[], int],
        stall: StallWatch,
    ) -> None:
        """Have the others run each tasklet of the job.

        Args:
            stream: of the job.
            units: of the device, for the next tasklet.
            bound_us: what decode's policy allows to be in flight.
            stall: hears of a rank that is late.
        """
        assert isinstance(stream, ShardedStream)
        leader = self._leader
        watch = RankWatch(leader.processes, lambda: late_after_s(bound_us()), stall.found)

        def tell(act: Act) -> None:
            if not isinstance(act, FollowChunks):
                watch.begin()
            leader.tell(act)

        stream.tell, stream.await_ranks, stream.acted = tell, leader.await_ranks, watch.end
        stream.units = units
        self._watch = watch
        watch.watch()

    def explain(self, error: Exception) -> Exception:
        """Return what a rank says of its end, where that is why `error` came; else `error`."""
        return self._leader.explain(error)

    def end(self) -> None:
        """End the other ranks, and wait for them."""
        if self._watch is not None:
            self._watch.close()
        self._leader.end()


class FollowingRank:
    """A rank that follows the first one: what it loads, and the memory of its part of the job.

    Args:
        run_dir: of the slot.
        ranks: collectives of all ranks.
        epoch: that chunks are lent to.
    """

    def __init__(self, run_dir: RunDir, ranks: Communicator, epoch: int) -> None:
        self._run_dir, self._ranks, self._epoch = run_dir, ranks, epoch
        self._arena: Arena | None = None

    def load(self, order: LoadBase) -> tuple[BaseModel, Sharding]:
        """Load this rank's shard (see `load_rank`)."""
        base, sharding, self._arena = load_rank(order, self._run_dir, self._ranks)
        return base, sharding

    def open(
        self, job: JobSpec, base: BaseModel, rows: DataSplit, sharding: Sharding
    ) -> TrainingSession:
        """Put a job together: the first rank says how large groups are, and in which chunks."""
        memory: FollowingMemory | None = None
        boundaries: Boundaries = TorchBoundaries()
        if self._arena is not None and _decode_lends(self._run_dir):
            memory = FollowingMemory(
                *(self._arena, self._epoch),
                boundaries=base.config.num_hidden_layers,
                bytes_per_token=boundary_bytes(base),
            )
            boundaries = memory.tenancy
        limits = MicroLimits(1)
        runtime = TaskletRuntime(boundaries, lambda: limits, device=HostDevice())
        session = open_session(job, base, runtime, rows=rows, sharding=sharding)
        if memory is not None:
            assert isinstance(session.stream, ShardedStream)
            memory.serve(session.stream, session.activation_budget)
            session.stream.follow_chunks = memory.follow
        return session


def load_rank(
    order: LoadBase, run_dir: RunDir, ranks: Communicator
) -> tuple[BaseModel, Sharding, Arena]:
    """Load a rank's shard of a job's base model: decode's own memory, or from the files.

    Returns:
        it, how the model is cut, and the arena of decode's rank.

    Raises:
        UserError: it cannot be had, or cannot be cut so.
        Transient: decode's rank is not there.
    """
    of_rank = run_dir.of_rank(ranks.rank)
    try:
        arena = Arena.attach(str(of_rank.arena_socket()))
    except (AttachError, DriverUnavailable) as error:
        which = f"the arena of decode's rank {ranks.rank}"
        raise Transient(f"{which} cannot be attached: {error}") from error
    assert order.folder is not None
    held = HeldModel(order.folder, order.job.access, of_hub=order.of_hub)
    whole: list[Any] = []

    def build(directory: Path, config: Any, form: WeightForm) -> nn.Module:  # noqa: ANN401
        whole.append(config)
        if exported is not None and shared:
            return over_parts(exported.tensors(), config, ranks, form.dtype, str(directory))
        return read_shard(directory, config, form, ranks)

    with held.named() as directory:
        exported = _decodes_shard(arena, of_rank, directory, ranks.ranks)
        form = WeightForm.of(order.job.spec, exported.dtype if exported else None)
        shared = exported is not None and form == WeightForm(exported.dtype)
        base = load_base(directory, form=form, device=HostDevice(), build=build)
    weakref.finalize(base.model, held.close)
    how = "sharing decode's weights" if shared else "read its weights from files"
    log.info("rank %d of %d: %s", ranks.rank, ranks.ranks, how)
    # Rows are read for the whole model: its vocabulary, its positions.
    found = replace(
        base, config=whole[0], shared=shared, folder=str(order.folder), of_hub=order.of_hub
    )
    return found, Sharding(ranks, whole[0]), arena


def _decodes_shard(
    arena: Arena, run_dir: RunDir, directory: Path, ranks: int
) -> ExportedWeights | None:
    """Return the weights of decode's rank, where it serves that model cut over so many ranks."""
    manifest = read_manifest(run_dir.weights_manifest())
    if manifest is None or manifest.get("ranks") != ranks:
        return None
    if manifest["fingerprint"] != model_fingerprint(directory):
        return None
    return ExportedWeights(manifest, from_dlpack(arena.imported(WEIGHTS)))


def _decode_lends(run_dir: RunDir) -> bool:
    """Return whether decode's ranks lend memory; an engine that does not say so lends none."""
    manifest = read_manifest(run_dir.weights_manifest())
    return manifest is not None and bool(manifest.get("lends"))


def boundary_bytes(base: BaseModel) -> int:
    """Bytes of a token between two layers."""
    return int(base.config.hidden_size * base.dtype.itemsize)
