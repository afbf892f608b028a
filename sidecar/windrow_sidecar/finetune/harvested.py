"""A job in a slot: attached to decode's arena, over its weights, under its grants."""

from __future__ import annotations

import logging
import socket
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
from windrow_sidecar.finetune.stream import MicroLimits

log = logging.getLogger(__name__)

WEIGHTS = "weights"
# Until decode says otherwise: a quarter of an objective of 20 ms.
DEFAULT_BOUND_US = 5_000
_FP32_BYTES = 4


class HarvestedSlot:
    """Everything that one job needs of one slot.

    Args:
        job: what to do; its epoch owns what is lent.
        base: the frozen model.
        arena: attached.
        partition: of this process over the device.
        arena_socket: who answers there is decode.
        standing: is told how many chunks are held.
    """

    def __init__(
        self,
        job: Job,
        base: BaseModel,
        arena: Arena,
        partition: Partition,
        arena_socket: Path,
        standing: Standing,
    ) -> None:
        config = base.config
        self._standing = standing
        self._estimates = Estimates()
        self._boundaries = LentBoundaries(
            arena,
            job.epoch,
            boundaries=config.num_hidden_layers,
            bytes_per_token=config.hidden_size * _FP32_BYTES,
        )
        self._facts = OfferFacts(job.epoch)
        self.gate = GrantGate(
            arena.page,
            partition,
            self._estimates,
            self._offer_facts,
            decode_answers=lambda: answers(arena_socket),
        )
        self.session: Session = open_session(
            job, base, boundaries=self._boundaries, limits=self._limits
        )
        self.memory = LentMemory(self._boundaries, self.session.stream)

    def close(self) -> None:
        """Give all chunks back and offer nothing any more."""
        self.memory.release()
        self._facts = OfferFacts(job_epoch=0)
        self.gate.quiet(None)

    def _limits(self) -> MicroLimits:
        """As many tokens as keep the longest tasklet within the bound and lie in what is lent."""
        grant = self.gate.grant
        bound_us = grant.in_flight_bound_us or DEFAULT_BOUND_US
        tokens = self._estimates.tokens_within(bound_us, self.gate.units)
        wanted = self._boundaries.chunks_for(max(tokens, self.session.longest_row))
        # Never less than before: a wish that trembles would move chunks to and fro.
        self._facts = replace(self._facts, wanted_chunks=max(wanted, self._facts.wanted_chunks))
        return MicroLimits(min(tokens, self._boundaries.capacity_tokens()), grant.micro_batch)

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
    arena_socket = run_dir.arena_socket(slot)
    try:
        arena = Arena.attach(str(arena_socket))
    except AttachError as error:
        raise Transient(f"decode's arena cannot be attached: {error}") from error
    exported = _same_weights(arena, run_dir.weights_manifest(slot), model_dir)
    base = load_base(model_dir, exported)
    return HarvestedSlot(job, base, arena, partition, arena_socket, standing)


def answers(arena_socket: Path) -> bool:
    """Whether a process still serves the arena; its socket goes with it, however it ends."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(arena_socket))
        except OSError:
            return False
    return True


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
