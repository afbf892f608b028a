"""A job in a slot: on the device of decode's arena, over its weights, under its grants."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.utils.dlpack import from_dlpack

from windrow.errors import Transient
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, AttachError
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.finetune.base.model import (
    BaseModel,
    ExportedWeights,
    find_model,
    load_base,
    read_manifest,
)
from windrow_sidecar.finetune.base.precision import WeightForm
from windrow_sidecar.finetune.beside.allocations import AllocatedMemory, Loaded
from windrow_sidecar.finetune.beside.grants import DEFAULT_BOUND_US, GrantGate, OfferFacts
from windrow_sidecar.finetune.beside.memory import LentBoundaries, LentMemory
from windrow_sidecar.finetune.beside.slotdevice import SlotDevice, slot_device
from windrow_sidecar.finetune.job import Job, Session, open_session
from windrow_sidecar.finetune.layers.boundaries import TorchBoundaries
from windrow_sidecar.finetune.layers.suspension import Suspension
from windrow_sidecar.finetune.ledger import Standing
from windrow_sidecar.finetune.plan.estimates import Estimates
from windrow_sidecar.finetune.plan.grain import Paced
from windrow_sidecar.finetune.residency.schedule import layers_granted
from windrow_sidecar.finetune.stream import MicroLimits
from windrow_sidecar.qos.view import Phase

log = logging.getLogger(__name__)

WEIGHTS = "weights"
# Decode plans what it lends every 20 ms; what has not come after so long does not come soon.
LENDING_SETTLES_S = 0.5


class HarvestedSlot:
    """Everything that one job needs of one slot.

    Args:
        job: what to do; its epoch owns what is lent.
        arena: attached.
        ground: what the slot's device is for this process.
        standing: is told how many chunks are held.
        load: the frozen model; called once memory is there.

    Raises:
        UserError: model, rows or adapter cannot be honoured.
        Transient: decode went away before it lent any memory.
    """

    def __init__(
        self,
        job: Job,
        arena: Arena,
        ground: SlotDevice,
        standing: Standing,
        load: Callable[[], BaseModel],
    ) -> None:
        self._standing, self._device = standing, ground.device
        self._estimates = Estimates()
        self._facts = OfferFacts(job.epoch)
        self._room: LentBoundaries | AllocatedMemory | None = ground.memory
        self._memory: LentMemory | AllocatedMemory | None = None  # once the job is loaded
        self.gate = GrantGate(
            arena.page,
            ground.partition,
            self._estimates,
            self._offer_facts,
            decode_lives=arena.owner_lives,
            device=ground.device,
        )
        if ground.memory is not None:
            self._await_memory(ground.memory, arena.geometry.chunks)
        base = load()
        self._frozen = base.frozen
        self._most_layers = base.frozen.capacity if base.frozen else 0
        lent = LentBoundaries(
            arena,
            job.epoch,
            boundaries=base.config.num_hidden_layers,
            bytes_per_token=base.config.hidden_size * base.dtype.itemsize,
        )
        suspension = Suspension(self.gate, standing.stall, self._give_up)
        self.session: Session = open_session(
            job,
            base,
            boundaries=TorchBoundaries() if ground.memory else lent,
            limits=self._limits,
            grain=self._grain,
            between=suspension.point,
            device=ground.device,
            units=ground.units_of(self.gate),
        )
        stream = self.session.stream
        if ground.memory is not None:
            self._memory = ground.memory
            ground.memory.serve(Loaded(stream, self.session.keeping))
            self._facts = replace(self._facts, wanted_chunks=0)
        else:
            self._room = lent
            keeping = self.session.keeping
            self._memory = LentMemory(
                lent, stream, keeping, follow_residency=self._follow_residency
            )

    @property
    def memory(self) -> LentMemory | AllocatedMemory:
        """Of the job."""
        assert self._memory is not None
        return self._memory

    def close(self) -> None:
        """Give all chunks back and offer nothing any more."""
        self.memory.release()
        self._facts = OfferFacts(job_epoch=0)
        self.gate.quiet(None)

    def _limits(self) -> MicroLimits:
        """As many rows as keep a layer's backward within the bound and lie in what is lent."""
        assert self._room is not None
        tokens = self._grain().tokens(Phase.BACKWARD)
        wanted = self._room.chunks_for(max(tokens, self.session.longest_row))
        # Never less than before: a wish that trembles would move chunks to and fro.
        self._facts = replace(self._facts, wanted_chunks=max(wanted, self._facts.wanted_chunks))
        rows = self.gate.grant.micro_batch
        return MicroLimits(min(tokens, self._room.capacity_tokens()), rows)

    def _grain(self) -> Paced:
        """What the newest grant leaves time for."""
        grant = self.gate.latest()
        bound_us = grant.in_flight_bound_us or DEFAULT_BOUND_US
        if self._device.queues:
            bound_us //= 2  # while one runs, the next is queued behind it
        if grant.budget_us:
            bound_us = min(bound_us, grant.budget_us)
        windows = not self.session.stream.windows_refused
        return Paced(self._estimates, bound_us, grant.finetune_units, windows, grant.window_tokens)

    def _await_memory(self, memory: AllocatedMemory, most: int) -> None:
        """Ask for all that decode lends, so that loading finds room, until no more comes."""
        self._facts = replace(self._facts, wanted_chunks=most)
        held, since_s = 0, time.monotonic()
        while not held or time.monotonic() - since_s < LENDING_SETTLES_S:
            memory.settle()
            if memory.held_chunks != held:
                held, since_s = memory.held_chunks, time.monotonic()
            self.gate.quiet(None)
            self.gate.wait()
            if self._standing.stop_asked or self.gate.decode_gone():
                raise Transient("decode has lent no memory to load the job into")

    def _give_up(self) -> bool:
        """Whether a layer that is held up in its middle had better be given up."""
        return bool(self._standing.stop_asked) or self.memory.asked_back()

    def _resident_layers(self) -> int:
        frozen = self._frozen
        return self.session.stream.depth if frozen is None else len(frozen.resident)

    def _follow_residency(self) -> None:
        """Hold no more layers than decode grants (0: as many as fit), where they take turns."""
        if self._frozen is not None:
            wanted = layers_granted(self.gate.grant.resident_layers, self._most_layers)
            if wanted != self._frozen.capacity:
                self._frozen.resize(wanted)

    def _offer_facts(self) -> OfferFacts:
        held = self._room.held_chunks if self._room is not None else 0
        self._standing.held_chunks = held
        if not self._facts.job_epoch or self._memory is None:
            return replace(self._facts, held_chunks=held)
        return replace(
            self._facts,
            held_chunks=held,
            tokens_done=self.session.stream.position.tokens_done,
            starving=self._memory.is_starving,
            bytes_per_token=self.session.keeping.held_bytes_per_token,
            resident_layers=self._resident_layers(),
        )


def open_slot(
    job: Job, run_dir: RunDir, slot: int, host: Partition, standing: Standing
) -> HarvestedSlot:
    """Attach to decode, load the job's model (decode's own weights where they are the same).

    The device is that of decode's arena. `host`: this process's share of the cores, which is its
    share of the device where that is the host.

    Raises:
        UserError: model, rows or adapter cannot be honoured, or torch does not see decode's GPU.
        Transient: decode is not there.
    """
    model_dir = find_model(job.spec.model.name, job.spec.model.revision)
    try:
        arena = Arena.attach(str(run_dir.arena_socket(slot)))
    except AttachError as error:
        raise Transient(f"decode's arena cannot be attached: {error}") from error
    ground = slot_device(arena, job.epoch, host)

    def load() -> BaseModel:
        exported = _same_weights(arena, run_dir.weights_manifest(slot), model_dir)
        form = WeightForm.of(job.spec, exported.dtype if exported else None)
        if exported is not None and form != WeightForm(exported.dtype):
            log.info("decode's weights are %s: the model is loaded a second time", exported.dtype)
            exported = None
        return load_base(model_dir, exported, form, device=ground.device)

    return HarvestedSlot(job, arena, ground, standing, load)


def _same_weights(arena: Arena, manifest_file: Path, model_dir: Path) -> ExportedWeights | None:
    manifest = read_manifest(manifest_file)
    if manifest is None:
        log.info("decode exports no weights: the model is loaded a second time")
        return None
    if manifest["fingerprint"] != model_fingerprint(model_dir):
        log.info("decode serves another model than %s: it is loaded beside it", model_dir)
        return None
    log.info("sharing decode's weights")
    return ExportedWeights(manifest, from_dlpack(arena.imported(WEIGHTS)))
