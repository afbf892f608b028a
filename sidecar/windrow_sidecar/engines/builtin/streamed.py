"""Weights of a model that memory does not hold: layers are streamed, all else stays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.weights import (
    Layout,
    Span,
    check_stored,
    load_weights,
    plan_streamed_layout,
    view,
)
from windrow_sidecar.engines.streaming.copying import Copier, Part, RateLimit
from windrow_sidecar.engines.streaming.streamed_layers import (
    HostPages,
    StreamedLayer,
    StreamedLayers,
)
from windrow_sidecar.engines.streaming.tensor_files import Stored, stored_tensors

_log = logging.getLogger(__name__)

BUDGET_FIELD = "--weights-budget"
# One layer computes while the next one comes; a finetune thread may wait in a third.
LEAST_LAYERS, LEAST_BESIDE_A_JOB = 2, 3


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """A model's weights, of which memory holds a part.

    Attributes:
        layout: of all parameters.
        pages: their memory.
        layers: what brings them.
        fingerprint: of the model's files.
    """

    layout: Layout
    pages: HostPages
    layers: StreamedLayers
    fingerprint: str


def stream_weights(
    folder: Path,
    config: LlamaConfig,
    dtype: torch.dtype,
    fingerprint: str,
    *,
    budget_bytes: int,
    bytes_per_s: float | None = None,
    beside_a_job: bool = False,
) -> StreamedWeights:
    """Read what stays in memory, and prepare to stream the layers of a checkpoint.

    Args:
        folder: of the checkpoint, whose weights are safetensors.
        config: of the model.
        dtype: that weights are computed in; stored ones are converted as they come.
        fingerprint: of the model's files.
        budget_bytes: of memory that weights may take.
        bytes_per_s: that layers come at, at most; None: as fast as files are read.
        beside_a_job: whether finetuning computes with the same layers.

    Raises:
        UserError: the budget is too small, or a parameter is missing, of another shape or type.
    """
    layout, spans = plan_streamed_layout(config, dtype)
    least = min(LEAST_BESIDE_A_JOB if beside_a_job else LEAST_LAYERS, config.layers)
    capacity = _capacity(spans, budget_bytes, least)
    pages = HostPages(layout.n_bytes)
    stays = {name: at for name, at in layout.parameters.items() if at.offset < spans[0].begin}
    load_weights(folder, replace(layout, parameters=stays), pages.storage)
    stored = stored_tensors(folder)
    layers = [_layer(layout, span, pages.storage, stored) for span in spans]
    _log.info(
        "%d of %d layers are in memory at a time, within %d MiB; the others are read from files",
        *(capacity, config.layers, budget_bytes >> 20),
    )
    streamed = StreamedLayers(
        layers, Copier(RateLimit(bytes_per_s)), capacity=capacity, release=pages.release
    )
    return StreamedWeights(layout, pages, streamed, fingerprint)


def _capacity(spans: Sequence[Span], budget_bytes: int, least: int) -> int:
    """Return how many layers fit beside what stays.

    Raises:
        UserError: fewer than `least`.
    """
    stays, largest = spans[0].begin, max(span.end - span.begin for span in spans)
    capacity = min(len(spans), max(0, budget_bytes - stays) // largest)
    if capacity < least:
        needed_mib = -(-(stays + least * largest) // (1 << 20))
        raise UserError(
            f"{budget_bytes >> 20} MiB hold {capacity} layers of {largest / (1 << 20):.1f} MiB "
            f"beside embeddings, norms and head ({stays / (1 << 20):.1f} MiB), and {least} are "
            "needed: one computes while the next one comes"
            + (", and finetuning may wait in a third" if least == LEAST_BESIDE_A_JOB else ""),
            field=BUDGET_FIELD,
            remedy=f"Give at least {needed_mib}MiB.",
            reason="NotEnoughMemory",
        )
    return capacity


def _layer(
    layout: Layout, span: Span, storage: torch.Tensor, stored: dict[str, Stored]
) -> StreamedLayer:
    parts = []
    for name, at in layout.parameters.items():
        if span.begin <= at.offset < span.end:
            found = stored.get(name)
            check_stored(name, at.shape, found.shape if found is not None else None)
            assert found is not None
            parts.append(Part(found, view(layout, storage, name)))
    return StreamedLayer(span.begin, span.end, tuple(parts))
