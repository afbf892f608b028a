"""What a checkpoint is worthless without: base, rows, adapter, and how they are trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from windrow.crd import FinetuneJobSpec

# Where the mistake stands in the job, and what to do.
_FIELDS = {
    "base": ("spec.model.revision", "Name the model that the job began with"),
    "rows": (
        "spec.dataset",
        "Restore dataset, evalFraction, batchSize, maxSequenceLength, loss and seed",
    ),
    "adapter": ("spec.adapter", "Restore the adapter's settings"),
    "precision": ("spec.training.precision", "Restore training.precision and model.quantization"),
    "optimizer": ("spec.training.optimizer.type", "Restore the type of the optimizer"),
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Digests; "" where one is not known. A checkpoint of another origin is refused by name."""

    base: str = ""  # the frozen weights
    rows: str = ""  # their tokens and labels, and the order in which they come
    adapter: str = ""  # its kind and shape
    precision: str = ""  # as the job asks for it; what `auto` means differs from slot to slot
    optimizer: str = ""  # whose moments are kept

    @classmethod
    def of(cls, spec: FinetuneJobSpec, *, base: str, rows: str) -> Origin:
        """Return that of a job; `base`, `rows`: digests of the base's files and of the tokens."""
        training = spec.training
        order = (rows, spec.dataset.eval_fraction, training.batch_size, training.seed)
        return cls(
            base=base,
            rows=_digest(order),
            adapter=_digest(spec.adapter.model_dump_json()),
            precision=_digest((training.precision, spec.model.quantization)),
            optimizer=_digest(training.optimizer.type),
        )

    def differs(self, wanted: Origin) -> tuple[str, str, str] | None:
        """Return what is another one in `wanted`, its field and what to do; None: nothing."""
        for part, (field, remedy) in _FIELDS.items():
            found = getattr(self, part)
            if found and found != getattr(wanted, part):
                return part, field, remedy
        return None


def _digest(of: Any) -> str:  # noqa: ANN401 - plain data
    return hashlib.sha256(repr(of).encode()).hexdigest()
