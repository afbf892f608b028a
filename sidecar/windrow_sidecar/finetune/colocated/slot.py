"""Attach a worker to its slot: decode's device, weights and memory."""

from __future__ import annotations

import logging
import os
import posixpath
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch.utils.dlpack import from_dlpack

from windrow.conditions import Reason
from windrow.errors import Transient
from windrow.protocol import WorkerEvent
from windrow.rundir import ENV_ONLY_GPU, RunDir
from windrow_sidecar._core import Arena, AttachError, DriverUnavailable
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.engines.streaming.streamed_layers import StreamedLayers
from windrow_sidecar.finetune.colocated.grants import GrantGate, GrantPace, OfferFacts
from windrow_sidecar.finetune.colocated.job_context import JobContext
from windrow_sidecar.finetune.colocated.joint_context import JointContext
from windrow_sidecar.finetune.colocated.pace import Shared
from windrow_sidecar.finetune.colocated.ranks import WEIGHTS, RankGroup
from windrow_sidecar.finetune.colocated.slot_device import SlotDevice, slot_device
from windrow_sidecar.finetune.data.held_models import HeldModel
from windrow_sidecar.finetune.data.readers import RowsWanted
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.engine.orders import Order, layer_major
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.job.assembly import JobSpec, rows_wanted
from windrow_sidecar.finetune.job.joint_turns import JointTurns
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.memory.allocated import AllocatedMemory, Residents
from windrow_sidecar.finetune.memory.lent import LentBoundaries
from windrow_sidecar.finetune.memory.lent_layers import LentLayers
from windrow_sidecar.finetune.memory.slot_memory import SlotMemory
from windrow_sidecar.finetune.model.claimed_size import check_claimed_size
from windrow_sidecar.finetune.model.hub_models import THIS_PROCESS, HubReader
from windrow_sidecar.finetune.model.loading import (
    BaseModel,
    ExportedWeights,
    find_model,
    load_base,
    read_manifest,
)
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.training.health import LOADING, LOADING_AFTER_S, READING

log = logging.getLogger(__name__)

_ANOTHER_MODEL = "decode serves another model than %s: it is loaded beside it"
# Decode plans what it lends every 20 ms; what has not come after so long does not come soon.
LENDING_SETTLES_S = 0.5
# After so long without the room that a further job needs it is not put beside the others.
ROOM_WITHIN_S = 10.0
# A job that has waited so long for its first chunk says so.
TELL_OF_WAIT_S = 10.0

Load = Callable[[JobSpec], BaseModel]
ReadRows = Callable[[RowsWanted], DataSplit]
# Makes the gate of a slot; takes what `GrantGate` takes.
MakeGate = Callable[..., GrantGate]


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """Weights of the engine whose process this is.

    Attributes:
        exported: all parameters, over the engine's memory.
        layers: what brings those that memory does not hold.
    """

    exported: ExportedWeights
    layers: StreamedLayers


class WorkerSlot:
    """A worker's slot: its gate, base model, lent memory, and a context for each job.

    Args:
        epoch: what is lent belongs to it, and offers are made under it, for as long as the worker
            lives: that of the job that it was started for.
        arena: attached.
        slot_device: what the slot's device is for this process.
        load: the frozen model of a job; called once memory is there.
        gate: makes the gate.
        order: of the tasklets of a job that passes its rows alone.
        group: ranks that train the one job together, where decode's model is cut; None: there are
            none.
    """

    def __init__(
        self,
        epoch: int,
        arena: Arena,
        slot_device: SlotDevice,
        load: Load,
        gate: MakeGate = GrantGate,
        order: Order = layer_major,
        group: RankGroup | None = None,
    ) -> None:
        self._order, self._group = order, group
        self._epoch, self._arena, self._slot_device, self._load = epoch, arena, slot_device, load
        self.estimates = Estimates()
        self._base: BaseModel | None = None
        self._base_of: JobSpec | None = None
        self._residents: Residents | None = None
        # On a GPU torch allocates from it before there is a model.
        self._memory: SlotMemory | None = slot_device.memory
        self._contexts: list[JobContext] = []
        self._joint: JointContext | None = None
        self._tokens_of_left = 0
        self._wanted_for_loading = 0
        self._offers = True
        self.gate = gate(
            arena.page,
            slot_device.partition,
            self.estimates,
            self._offer_facts,
            decode_lives=arena.owner_lives,
            device=slot_device.device,
            whole=slot_device.whole,
        )

    @property
    def has_base(self) -> bool:
        """True where the model is loaded, so that further jobs can join."""
        return self._base is not None

    def take(
        self,
        job: JobSpec,
        job_state: JobState,
        read: ReadRows | None = None,
        *,
        tell: Callable[[WorkerEvent], None] = lambda event: None,
    ) -> JobContext:
        """Load the model and the first job.

        Args:
            job: what to do.
            job_state: its own.
            read: has its rows read elsewhere; None: they are read here. Those of ranks are read by
                the first of them, into the file that all have open.
            tell: hears of a long wait for memory, and of its end.

        Raises:
            UserError: model, rows or adapter cannot be honoured.
            Transient: decode went away before it lent any memory.
        """
        if self._slot_device.memory is not None:
            self._await_memory(self._slot_device.memory, job_state, tell)
        try:
            with job_state.stall.during(LOADING, LOADING_AFTER_S):
                base = self._load_base(job)
            rows = None
            if self._group is None:
                rows = read(rows_wanted(job, base)) if read is not None else None
            else:
                with job_state.stall.during(READING):
                    rows = self._group.read(job, base, job_state.stall.renew)
            return self._context(job, base, job_state, rows)
        finally:
            self._wanted_for_loading = 0

    def explain(self, error: Exception) -> Exception:
        """Return why a job failed, where another rank knows better; else `error`."""
        return self._group.explain(error) if self._group is not None else error

    def rows_for(self, job: JobSpec) -> RowsWanted:
        """Return what to read of a further job, before it can join; any thread may ask.

        Raises:
            Transient: the job cannot share this worker.
            UserError: it may not read the model that the worker has loaded.
        """
        assert self._base is not None
        assert self._base_of is not None
        self._check_shares(job, self._base_of)
        if self._base.of_hub:
            check_shown(job, self._base)
        return rows_wanted(job, self._base)

    def pace(self) -> GrantPace:
        """Return what tells when to read a further job's rows; any thread may ask it."""
        return GrantPace(self._arena.page)

    def join(self, job: JobSpec, rows: DataSplit, job_state: JobState) -> JobContext:
        """Attach a further job, whose rows are there; decode has all of the device meanwhile.

        Raises:
            UserError: model or adapter cannot be honoured.
        """
        assert self._base is not None
        self._step_aside()
        try:
            self._prepare(job_state)
            return self._context(job, shallow_clone(self._base), job_state, rows)
        finally:
            self._offers, self._wanted_for_loading = True, 0

    def join_rows(self) -> JointTurns:
        """Return what runs jobs whose rows pass together; decode has all of the device meanwhile.

        Nothing of any job may be in the lent chunks. One that was returned before has ended.
        """
        assert self._base is not None
        self._step_aside()
        try:
            self._prepare(None)
            base = shallow_clone(self._base)
            self._joint = JointContext(base, self._shared(), lambda: self._contexts)
            return self._joint.turns
        finally:
            self._offers, self._wanted_for_loading = True, 0

    def idle(self) -> bool:
        """Wait a moment when no job trains; False: decode is gone."""
        if self._memory is not None and self._memory.holds_all:
            self._memory.settle()
        self.gate.quiet(None)
        self.gate.wait()
        return not self.gate.decode_gone()

    def leave(self, context: JobContext) -> None:
        """A job has ended; what it has learned from still counts. The last one leaves no chunk."""
        self._contexts.remove(context)
        if not self._contexts and self._memory is not None:
            self._memory.vacated()
        context.job_state.held_chunks = 0
        self._tokens_of_left += context.tokens_done

    def close(self) -> None:
        """Offer nothing any more and give all chunks back."""
        self._withdraw()
        if self._memory is not None:
            self._memory.give_all_back()
        self._slot_device.device.wait_idle()

    def idle_within(self, seconds: float) -> bool:
        """Return whether nothing runs on the device after so long at most; any thread may ask."""
        asking = threading.Thread(
            target=self._slot_device.device.wait_idle, name="wait-idle", daemon=True
        )
        asking.start()
        asking.join(seconds)
        return not asking.is_alive()

    def _step_aside(self) -> None:
        """Offer nothing, on the one core, or the fewest SMs, that decode needs least.

        Attaching is no tasklet: it has no bound, and no chunk comes back in it. So nothing is held,
        but where all that torch allocates is in chunks: a job is attached in those that are there.
        """
        assert self._memory is not None
        if self._memory.holds_all:
            self.gate.quiet(None)
        else:
            self._withdraw()
            self._memory.give_all_back()
        self._slot_device.partition.activate(self._slot_device.partition.levels()[0])

    def _prepare(self, job_state: JobState | None) -> None:
        """Have room for what a job, or the joint tree, is made of, where chunks hold all.

        Of `job_state` the end may be asked for meanwhile.

        Raises:
            MemoryError: decode has lent too little for long.
            Transient: it asks for memory that cannot be left.
        """
        memory = self._slot_device.memory
        if memory is None:
            return
        states = [one.activation_budget.memory_model.state_bytes for one in self._contexts]
        # Of the largest job that is here, of which gradients are two adapters: five are all of it.
        needed = 3 * max(states, default=0)
        self._wanted_for_loading = memory.chunks_that_hold(memory.budget.used_bytes() + needed, 0)
        began_s = time.monotonic()
        while True:
            memory.settle()
            free = memory.budget.free_bytes()
            if free and free >= needed:
                break
            stops = job_state is not None and job_state.stop_asked
            if stops or time.monotonic() - began_s > ROOM_WITHIN_S or self.gate.decode_gone():
                raise MemoryError(
                    f"decode lends no room to put the job beside others: {free} bytes are free"
                )
            self.gate.quiet(None)
            self.gate.wait()
        memory.prepare()

    def _withdraw(self) -> None:
        """Want no chunk any more, which decode sees; only then does it lend none after the last."""
        self._offers = False
        self.gate.quiet(None)

    def _check_shares(self, job: JobSpec, first: JobSpec) -> None:
        if self._is_alone(first) or _base_words(job) != _base_words(first):
            raise Transient(
                f"the worker has loaded {_base_words(first)} for {first.name}, and cannot carry "
                f"{job.name} beside it, which wants {_base_words(job)}"
            )

    def _is_alone(self, job: JobSpec) -> bool:
        """Return whether no other job can share this one's base, or the memory."""
        assert self._memory is not None
        return self._memory.one_job or job.spec.model.quantization != "none"

    def _load_base(self, job: JobSpec) -> BaseModel:
        """Return the base with modules of the job's own; as it is where nobody can share it."""
        self._base, self._base_of = self._load(job), job
        if self._base.frozen is not None:
            self._residents = Residents(self._base.frozen)
        if (allocated := self._slot_device.memory) is not None:
            allocated.residents = self._residents
            if not self._is_alone(job):
                allocated.share(self._base.model)
        elif self._group is not None:
            self._memory = self._group.memory(self._arena, self._base)
        else:
            self._memory = self._lent_boundaries(self._base)
        return self._base if self._is_alone(job) else shallow_clone(self._base)

    def _lent_boundaries(self, base: BaseModel) -> LentBoundaries:
        return LentBoundaries(
            self._arena,
            self._epoch,
            boundaries=base.config.num_hidden_layers,
            bytes_per_token=base.config.hidden_size * base.dtype.itemsize,
            layers=LentLayers(self._arena, base.frozen) if base.frozen is not None else None,
        )

    def _context(
        self, job: JobSpec, base: BaseModel, job_state: JobState, rows: DataSplit | None = None
    ) -> JobContext:
        context = JobContext(job, base, self._shared(), job_state, rows)
        self.gate.opened(context.session.stream.parts.stack)
        self._contexts.append(context)
        return context

    def _shared(self) -> Shared:
        assert self._memory is not None
        return Shared(
            *(self.gate, self.estimates, self._slot_device, self._memory),
            order=self._order,
            group=self._group,
        )

    def _await_memory(
        self, memory: AllocatedMemory, job_state: JobState, tell: Callable[[WorkerEvent], None]
    ) -> None:
        """Ask for all that decode lends, so that loading finds room, until no more comes."""
        self._wanted_for_loading = self._arena.geometry.chunks
        held, since_s = 0, time.monotonic()
        began_s, told = since_s, False
        while not held or time.monotonic() - since_s < LENDING_SETTLES_S:
            memory.settle()
            if memory.held_chunks != held:
                held, since_s = memory.held_chunks, time.monotonic()
            waited_s = time.monotonic() - began_s
            if not held and not told and waited_s >= TELL_OF_WAIT_S:
                told = True
                tell(WorkerEvent("PAUSED", Reason.PAUSED, _no_memory(self._arena)))
            elif held and told:
                told = False
                tell(WorkerEvent("RESUMED", Reason.RESUMED, f"after {waited_s:.1f} s"))
            self.gate.quiet(None)
            self.gate.wait()
            if job_state.stop_asked or self.gate.decode_gone():
                raise Transient("decode has lent no memory to load the job into")

    def _offer_facts(self) -> OfferFacts:
        if not self._offers:
            return OfferFacts(job_epoch=0)
        held = self._memory.held_chunks if self._memory else 0
        wanted = self._wanted_for_loading
        done = self._tokens_of_left
        joint = self._joint if self._joint is not None and self._joint.turns.jobs else None
        joint_turn = joint is not None and joint.has_turn
        present: JobContext | JointContext | None = joint if joint_turn else None
        wanted = max(wanted, joint.wanted_chunks if joint else 0)
        for context in self._contexts:
            has_turn = context.has_turn or (
                joint is not None and joint_turn and joint.carries(context)
            )
            context.job_state.held_chunks = held if has_turn else 0
            # The largest wish of all: chunks must not move to and fro with every turn.
            wanted = max(wanted, context.wanted_chunks)
            done += context.tokens_done
            if has_turn and present is None:
                present = context
        if self._memory and self._contexts:
            wanted += self._memory.wanted_by_layers
        if present is None:
            return OfferFacts(self._epoch, wanted, held, done)
        budget = present.activation_budget
        return OfferFacts(
            self._epoch,
            wanted,
            held,
            done,
            present.memory.is_starving,
            budget.held_bytes_per_token,
            budget.window_bytes_per_token,
            self._residents.layers if self._residents else present.depth,
        )


def open_slot(
    epoch: int,
    run_dir: RunDir,
    host: Partition,
    copy_rate: float | None = None,
    gate: MakeGate = GrantGate,
    order: Order = layer_major,
    group: RankGroup | None = None,
    own: EngineWeights | None = None,
) -> WorkerSlot:
    """Attach to decode; a job's model is decode's own weights where they are the same.

    The device is that of decode's arena. Where this process is shown that GPU alone, it is its
    first, whatever number decode has for it. `run_dir`: as the slot sees it. `host`: this process's
    share of the cores, which is its share of the device where that is the host. `copy_rate`: see
    `load_base`. `gate`, `order`, `group`: see `WorkerSlot`. `own`: of an engine that streams its
    layers and runs jobs itself.

    Raises:
        UserError: torch does not see decode's GPU.
        Transient: decode is not there.
    """
    shown = "cuda" if os.environ.get(ENV_ONLY_GPU) else None
    try:
        arena = Arena.attach(str(run_dir.arena_socket()), driver=shown)
    except (AttachError, DriverUnavailable) as error:
        raise Transient(f"decode's arena cannot be attached: {error}") from error
    opened = slot_device(arena, epoch, host)
    if group is not None:
        opened = replace(opened, whole=True)

    def load(job: JobSpec) -> BaseModel:
        held = held_model(job)
        if job.access.serves_model is False:  # decode's own was built by who runs the pod
            with held.named() as model_dir:
                check_claimed_size(model_dir)
        if group is not None:
            base = group.load(job, held.folder, of_hub=held.of_hub)
            weakref.finalize(base.model, held.close)
            return base
        with held.named() as model_dir:
            if own is None:
                exported = _same_weights(arena, run_dir.weights_manifest(), model_dir)
            else:
                exported = _same_model(own.exported, model_dir)
            form = WeightForm.of(job.spec, exported.dtype if exported else None)
            if exported is not None and form != WeightForm(exported.dtype):
                log.info("decode's weights are %s: it is loaded a second time", exported.dtype)
                exported = None
            base = load_base(model_dir, exported, form, device=opened.device, copy_rate=copy_rate)
            if own is not None and exported is not None:
                base = replace(base, streamed=own.layers)
        # Layers that take turns are read from its files as long as it trains.
        weakref.finalize(base.model, held.close)
        return replace(base, folder=str(held.folder), of_hub=held.of_hub)

    return WorkerSlot(epoch, arena, opened, load, gate, order, group)


def held_model(job: JobSpec) -> HeldModel:
    """Return the model that a job names, held where others can write to its volume.

    Raises:
        UserError, ModelSilent: see `HeldModel` and `find_model`.
    """
    model, access = job.spec.model, job.access
    held = HeldModel(Path(model.name), access)  # before anything of it is read, or said
    try:
        with held.named() as place:
            found = find_model(str(place), model.revision, hub_reader(job))
            of_hub = found != place
    except BaseException:
        held.close()
        raise
    # The Hub's cache may be on one of the job's volumes.
    return HeldModel(found, access, of_hub=True) if of_hub else held


def hub_reader(job: JobSpec) -> HubReader:
    """Return as whom the Hub is asked for the base model of a job."""
    if job.access.serves_model is not False:
        return THIS_PROCESS  # the model that decode serves is read as decode reads it
    if job.access.pod_credentials and not job.model_credentials.secret:
        return THIS_PROCESS
    named = (job.model_credentials, job.dataset_credentials, job.output_credentials)
    return HubReader.of_job(*named)


def check_shown(job: JobSpec, base: BaseModel) -> None:
    """Check that the Hub shows a job the model that another job had loaded.

    Raises:
        UserError, ModelSilent: see `held_model`.
        Transient: the name means other files by now.
    """
    held = held_model(job)
    held.close()
    if str(held.folder) != base.folder:
        raise Transient(
            f"the worker has loaded {Path(base.folder).name} of {job.spec.model.name}, and "
            f"{job.spec.model.revision} is {held.folder.name} by now"
        )


def _base_words(job: JobSpec) -> str:
    """Return the name of a job's base model; jobs with equal names can share it."""
    model = job.spec.model
    name = posixpath.normpath(model.name)
    return f"{name} ({model.revision}, {job.spec.training.precision}, {model.quantization})"


def _same_weights(arena: Arena, manifest_file: Path, model_dir: Path) -> ExportedWeights | None:
    manifest = read_manifest(manifest_file)
    if manifest is None:
        log.info("decode exports no weights: the model is loaded a second time")
        return None
    if manifest.get("ranks", 1) != 1:
        log.info("decode's model is cut over ranks: it is loaded a second time")
        return None
    if manifest["fingerprint"] != model_fingerprint(model_dir):
        log.info(_ANOTHER_MODEL, model_dir)
        return None
    log.info("sharing decode's weights")
    return ExportedWeights(manifest, from_dlpack(arena.imported(WEIGHTS)))


def _same_model(exported: ExportedWeights, model_dir: Path) -> ExportedWeights | None:
    if exported.fingerprint != model_fingerprint(model_dir):
        log.warning(_ANOTHER_MODEL, model_dir)
        return None
    log.info("sharing decode's weights, whose layers are streamed")
    return exported


def _no_memory(arena: Arena) -> str:
    """Say why a job that has no memory waits, and what helps where that does not end."""
    free, kv, lent, reserved, draining = arena.counts()
    total = free + kv + lent + reserved + draining
    return (
        f"decode lends no memory to load the model into: of {total} chunks its KV has {kv}, and "
        f"{free + reserved} are free or in reserve. It waits for fewer requests in decode; where "
        "that has no end, serve with more KV or raise spec.limits.maxMemoryPercent"
    )
