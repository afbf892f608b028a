"""A job in a slot: attached to decode's arena, over its weights, under its grants."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from torch.utils.dlpack import from_dlpack

from windrow.errors import Transient
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, AttachError
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.finetune.estimates import Estimates
from windrow_sidecar.finetune.grants import GrantGate, OfferFacts
from windrow_sidecar.finetune.job import Job, Session, open_session
from windrow_sidecar.finetune.ledger import Standing
from windrow_sidecar.finetune.memory import LentBoundaries, LentMemory
from windrow_sidecar.finetune.model import (
    BaseModel,
    ExportedWeights,
    find_model,
    load_base,
    read_manifest,
)
from windrow_sidecar.finetune.plan.grain import Paced
from windrow_sidecar.finetune.precision import WeightForm
from windrow_sidecar.finetune.residency.schedule import layers_granted
from windrow_sidecar.finetune.stream import MicroLimits
from windrow_sidecar.finetune.suspension import Suspension
from windrow_sidecar.qos.view import Phase

log = logging.getLogger(__name__)

WEIGHTS = "weights"
# Until decode says otherwise: a quarter of an objective of 20 ms.
DEFAULT_BOUND_US = 5_000


class HarvestedSlot:
    """Everything that one job needs of one slot.

    Args:
        job: what to do; its epoch owns what is lent.
        base: the frozen model.
        arena: attached.
        partition: of this process over the device.
        standing: is told how many chunks are held.
    """

    def __init__(
        self,
        job: Job,
        base: BaseModel,
        arena: Arena,
        partition: Partition,
        standing: Standing,
    ) -> None:
        config = base.config
        self._standing = standing
        self._frozen = base.frozen
        self._most_layers = base.frozen.capacity if base.frozen else 0
        self._estimates = Estimates()
        self._boundaries = LentBoundaries(
            arena,
            job.epoch,
            boundaries=config.num_hidden_layers,
            bytes_per_token=config.hidden_size * base.dtype.itemsize,
        )
        self._facts = OfferFacts(job.epoch)
        self.gate = GrantGate(
            arena.page,
            partition,
            self._estimates,
            self._offer_facts,
            decode_lives=arena.owner_lives,
        )
        suspension = Suspension(self.gate, standing.stall, self._give_up)
        self.session: Session = open_session(
            job,
            base,
            boundaries=self._boundaries,
            limits=self._limits,
            grain=self._grain,
            between=suspension.point,
        )
        self.memory = LentMemory(
            self._boundaries, self.session.stream, follow_residency=self._follow_residency
        )

    def close(self) -> None:
        """Give all chunks back and offer nothing any more."""
        self.memory.release()
        self._facts = OfferFacts(job_epoch=0)
        self.gate.quiet(None)

    def _limits(self) -> MicroLimits:
        """As many rows as keep a layer's backward within the bound and lie in what is lent."""
        tokens = self._grain().tokens(Phase.BACKWARD)
        wanted = self._boundaries.chunks_for(max(tokens, self.session.longest_row))
        # Never less than before: a wish that trembles would move chunks to and fro.
        self._facts = replace(self._facts, wanted_chunks=max(wanted, self._facts.wanted_chunks))
        rows = self.gate.grant.micro_batch
        return MicroLimits(min(tokens, self._boundaries.capacity_tokens()), rows)

    def _grain(self) -> Paced:
        """What the newest grant leaves time for."""
        grant = self.gate.latest()
        bound_us = grant.in_flight_bound_us or DEFAULT_BOUND_US
        if grant.budget_us:
            bound_us = min(bound_us, grant.budget_us)
        windows = not self.session.stream.windows_refused
        return Paced(self._estimates, bound_us, grant.finetune_units, windows, grant.window_tokens)

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
        held = self._boundaries.held_chunks
        self._standing.held_chunks = held
        if not self._facts.job_epoch:
            return self._facts
        return replace(
            self._facts,
            held_chunks=held,
            tokens_done=self.session.stream.position.tokens_done,
            starving=self.memory.is_starving,
            bytes_per_token=self.session.keeping.held_bytes_per_token,
            resident_layers=self._resident_layers(),
        )


def open_slot(
    job: Job, run_dir: RunDir, slot: int, partition: Partition, standing: Standing
) -> HarvestedSlot:
    """Attach to decode, load the job's model (decode's own weights where they are the same).

    Raises:
        UserError: model, rows or adapter cannot be honoured.
        Transient: decode is not there.
    """
    model_dir = find_model(job.spec.model.name, job.spec.model.revision)
    try:
        arena = Arena.attach(str(run_dir.arena_socket(slot)))
    except AttachError as error:
        raise Transient(f"decode's arena cannot be attached: {error}") from error
    exported = _same_weights(arena, run_dir.weights_manifest(slot), model_dir)
    form = WeightForm.of(job.spec, exported.dtype if exported else None)
    if exported is not None and form != WeightForm(exported.dtype):
        log.info("decode's weights are %s: the model is loaded a second time", exported.dtype)
        exported = None
    base = load_base(model_dir, exported, form)
    return HarvestedSlot(job, base, arena, partition, standing)


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
