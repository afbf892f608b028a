"""Identify what a checkpoint belongs to: base model, rows, adapter and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from windrow.crd import FinetuneJobSpec

# How rows become tokens; 0: as checkpoints say that were written before there was a number.
READING = 3
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# Where the job has a setting.
_SETTINGS = {
    "eval_fraction": "spec.dataset.evalFraction",
    "batch_size": "spec.training.batchSize",
    "seed": "spec.training.seed",
    "quantization": "spec.model.quantization",
    "optimizer": "spec.training.optimizer.type",
    "method": "spec.training.method",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a job and its checkpoint: the field, and what to do."""

    problem: str
    field: str
    remedy: str

    @classmethod
    def of_setting(cls, name: str, found: object, wanted: object) -> Difference:
        """Return that of two values."""
        return cls(f"{found} was trained with, the job says {wanted}", name, f"Write {found}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Digests, "" where one is not known, and settings as they act.

    What a job leaves out counts as its default: one that begins to spell it out goes on.
    """

    base: str = ""  # the frozen weights
    rows: str = ""  # their tokens and labels
    eval_fraction: float = 0.0  # with the next two: in which order rows come
    batch_size: int = 0
    seed: int = 0
    adapter: dict[str, Any] = field(default_factory=dict)  # its type and all of its settings
    precision: str = ""  # that is computed in
    open_precision: bool = False  # the job leaves it to the slot (`auto`)
    quantization: str = ""
    optimizer: str = ""  # whose moments are kept
    template: str = ""  # digest of the chat template; "": there is none
    reading: int = 0  # by which rules the rows became tokens (`READING`)
    unlike_before: str = ""  # what other rules made of these rows
    method: str = "sft"  # that checkpoints have which name none

    @classmethod
    def of(
        cls,
        spec: FinetuneJobSpec,
        *,
        base: str,
        rows: str,
        computed_in: torch.dtype,
        template: str = "",
        unlike_before: str = "",
    ) -> Origin:
        """Return that of a job.

        Args:
            spec: the job's.
            base: digest of the base's files.
            rows: digest of the tokens.
            template: digest of the chat template.
            computed_in: the type of activations.
            unlike_before: see `DataSplit`.
        """
        training, adapter = spec.training, spec.adapter
        settings = adapter.settings.model_dump(mode="json", by_alias=True)
        begins = {"from": adapter.start_from} if adapter.start_from is not None else {}
        return cls(
            base=base,
            rows=rows,
            eval_fraction=spec.dataset.eval_fraction,
            batch_size=training.batch_size,
            seed=training.seed,
            adapter={"type": adapter.type, **settings, **begins},
            precision=_PRECISIONS.get(computed_in, str(computed_in)),
            open_precision=training.precision == "auto",
            quantization=spec.model.quantization,
            optimizer=training.optimizer.type,
            method=training.method,
            template=template,
            reading=READING,
            unlike_before=unlike_before,
        )

    def differs(self, wanted: Origin) -> Difference | None:
        """Return what is another one in `wanted`; None: nothing."""
        return None if self == Origin() else next(self._differences(wanted), None)

    def moved(self, wanted: Origin) -> str:
        """Say what is another one without harm.

        The precision that a job leaves to its slot, and tokens that an earlier version made
        otherwise of the same rows.
        """
        told = ""
        if self._reads_otherwise(wanted):
            told = (
                "; its rows have other tokens than those of the version that wrote the checkpoint "
                f"({wanted.unlike_before})"
            )
        if self.precision and self.precision != wanted.precision:
            told += f"; in {wanted.precision}, until now in {self.precision}"
        return told

    def _reads_otherwise(self, wanted: Origin) -> bool:
        """Return whether an earlier version wrote this, with other tokens of the same rows."""
        other = bool(self.rows) and self.rows != wanted.rows
        return other and self.reading < wanted.reading and bool(wanted.unlike_before)

    def _differences(self, wanted: Origin) -> Iterator[Difference]:
        if self.base and self.base != wanted.base:
            yield Difference(
                "the base model has other weights",
                "spec.model.revision",
                "Name the model that the job began with",
            )
        if self.rows and self.rows != wanted.rows and not self._reads_otherwise(wanted):
            if self.template and self.template != wanted.template:
                yield Difference(
                    "the model has another chat template, so the rows have other tokens",
                    "spec.model.name",
                    "Restore the model's chat template",
                )
            yield Difference(
                "the rows have other tokens",
                "spec.dataset",
                "Restore dataset, the model's tokenizer, training.maxSequenceLength and "
                "training.loss",
            )
        for part, name in _SETTINGS.items():
            found, other = getattr(self, part), getattr(wanted, part)
            if found != other:
                yield Difference.of_setting(name, found, other)
        if self.precision != wanted.precision and not wanted.open_precision:
            name = "spec.training.precision"
            yield Difference.of_setting(name, self.precision, wanted.precision)
        yield from self._of_adapter(wanted)

    def _of_adapter(self, wanted: Origin) -> Iterator[Difference]:
        kind, other = self.adapter.get("type"), wanted.adapter.get("type")
        if kind != other:
            yield Difference.of_setting("spec.adapter.type", kind, other)
        for setting in self.adapter:
            found, other = self.adapter[setting], wanted.adapter.get(setting)
            if found != other:
                yield Difference.of_setting(f"spec.adapter.{kind}.{setting}", found, other)
