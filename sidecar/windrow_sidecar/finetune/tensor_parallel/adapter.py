"""The adapter of a model that is cut over ranks: which part of each parameter a rank trains.

The whole adapter is made by peft on a stand-in of the whole model, from the job's seed and as on
one device, and each rank takes its parts; so weights begin alike whatever the number of ranks. A
parameter that is whole on several ranks gets a part of its gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windrow.crd import FinetuneJobSpec, Ia3Spec, LoraSpec
from windrow.errors import UserError, WindrowError
from windrow_sidecar.compute.communicator import Communicator, flat, unflat
from windrow_sidecar.engines.shard_cuts import (
    BY_COLUMNS,
    BY_WORDS,
    ShardSizes,
    TensorPart,
    refused,
)
from windrow_sidecar.finetune.adapter.adapters import add_adapter, trainable
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.model.token_dropout import TokenDropout
from windrow_sidecar.finetune.tensor_parallel.shard import stand_in
from windrow_sidecar.finetune.training.optimizer import PARAMETER, STATE, SUM

LAYERS_ALONE = "layers of attention and MLP"


def check_adapter(spec: FinetuneJobSpec) -> None:
    """Refuse adapters that are not trained over several ranks, by name.

    Raises:
        UserError: names the field.
    """
    settings, kind = spec.adapter.settings, spec.adapter.type
    if not isinstance(settings, LoraSpec | Ia3Spec):
        raise _not_yet(f"an adapter of type {kind}", "type", "lora or ia3")
    if isinstance(settings, LoraSpec):
        if settings.use_dora:
            raise _not_yet("a weight-decomposed adapter", "lora.useDora", "false")
        if settings.modules_to_save:
            raise _not_yet("a module as a whole", "lora.modulesToSave", "none")
        if settings.bias != "none":
            raise _not_yet("a bias", "lora.bias", "none")
    if spec.training.optimizer.type != "adamw":
        raise refused(
            f"{spec.training.optimizer.type} keeps moments that are not cut over ranks",
            "Write adamw, or train on one rank.",
            field="spec.training.optimizer.type",
        )


def _not_yet(what: str, option: str, instead: str) -> UserError:
    return refused(
        f"{what} is not trained over several ranks yet",
        f"Write {instead}, or train on one rank.",
        field=f"spec.adapter.{option}",
    )


def add_sharded_adapter(
    base: nn.Module,
    whole_config: Any,  # noqa: ANN401 - of transformers
    spec: FinetuneJobSpec,
    ranks: Communicator,
    access: SourceAccess = UNCONFINED,
) -> tuple[Any, AdapterParts]:
    """Return (a rank's model with its parts of a fresh adapter, all of the adapter).

    Args:
        base: the rank's shard.
        whole_config: of the model that is cut.
        spec: the job's.
        ranks: that share it.
        access: what the job may read, for the adapter that it begins with.

    Raises:
        UserError: see `check_adapter` and `add_adapter`.
    """
    check_adapter(spec)
    whole = add_adapter(stand_in(whole_config, base_dtype(base)), spec, access=access)
    fresh = spec.adapter.model_copy(update={"start_from": None})
    tuned = add_adapter(base, spec.model_copy(update={"adapter": fresh}))
    if ends := [name for name in trainable(whole) if set(name.split(".")) & set(BY_WORDS)]:
        raise _not_yet(ends[0], f"{spec.adapter.type}.targetModules", LAYERS_ALONE)
    parts = AdapterParts(ShardSizes.of(whole_config, ranks.ranks), ranks, tuned, whole)
    parts.begin()
    return tuned, parts


def base_dtype(base: nn.Module) -> torch.dtype:
    """Return the dtype of a base model's weights."""
    return next(base.parameters()).dtype


class RanksApart(WindrowError):
    """Ranks that make the same steps with the same gradients have come apart."""


class AdapterParts:
    """The parts of an adapter's parameters that each rank trains; all ranks call its methods.

    Args:
        sizes: of the shards.
        ranks: that share the adapter.
        tuned: the rank's model, with its parts.
        whole: the stand-in, with all of the adapter.

    Attributes:
        whole: see there; on rank 0 it has the adapter's values after `assemble`.
    """

    def __init__(self, sizes: ShardSizes, ranks: Communicator, tuned: Any, whole: Any) -> None:  # noqa: ANN401
        self.whole, self._sizes, self._ranks, self._tuned = whole, sizes, ranks, tuned
        self._mine, self._all = trainable(tuned), trainable(whole)
        if self._mine.keys() != self._all.keys():
            raise ValueError("the shard and its stand-in have different adapters")
        self._shared = [name for name in self._mine if self.part(name).copies > 1]

    def part(self, name: str, rank: int | None = None) -> TensorPart:
        """Return what a rank (default: this one) has of a parameter of the adapter."""
        rank = self._ranks.rank if rank is None else rank
        mine, whole = self._mine[name].shape, self._all[name].shape
        cut = [dim for dim in range(len(whole)) if mine[dim] != whole[dim]]
        if not cut:
            return TensorPart(None, 0, 0, 0, self._ranks.ranks)
        base = self._sizes.part(f"{_module_of(name)}.weight", rank)
        return TensorPart(cut[0], base.begin, base.end, base.first, base.copies)

    def begin(self) -> None:
        """Take this rank's parts of the stand-in's values."""
        with torch.no_grad():
            for name, parameter in self._mine.items():
                parameter.copy_(_cut(self._all[name], self.part(name)))

    def align_dropouts(self) -> None:
        """Let dropouts in front of cut columns drop the units that they would drop on one device.

        To be called once they go by tokens (`Adapter`).
        """
        for name, module in self._tuned.named_modules():
            if name.rpartition(".")[2] not in BY_COLUMNS:
                continue
            first = self._sizes.part(f"{_module_of(name)}.weight", self._ranks.rank).begin
            for child in module.modules():
                if isinstance(child, TokenDropout):
                    child.first_unit = first

    def sum_gradients(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Sum, in place, what the ranks have of gradients of parameters that several of them have.

        One collective. Of a part that some ranks have, the message holds all of the parameter.

        Args:
            names: of all parameters.
            gradients: of each, [...] in this rank's shape; all of one dtype.
        """
        by_name = dict(zip(names, gradients, strict=True))
        if not self._shared:
            return
        wholes = []
        for name in self._shared:
            part, mine = self.part(name), by_name[name]
            whole = mine if part.dim is None else mine.new_zeros(self._all[name].shape)
            if part.dim is not None:
                _cut(whole, part).copy_(mine)
            wholes.append(whole)
        summed = unflat(self._ranks.sum(flat(wholes, wholes[0].dtype)), wholes)
        for name, whole in zip(self._shared, summed, strict=True):
            by_name[name].copy_(_cut(whole, self.part(name)))

    def norm(self, names: Sequence[str], gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of the whole gradient, float64 [], the same bits on every rank.

        What several ranks have counts once. To be asked after `sum_gradients`, with this rank's
        gradients, [...] each as its parameter.
        """
        norms = torch._foreach_norm(list(gradients))
        squares = torch.stack([norm.double() for norm in norms]).square_()
        parts = [self.part(name) for name in names]
        cut = torch.tensor([0.0 if p.dim is None else 1.0 / p.copies for p in parts])
        whole = torch.tensor([1.0 if p.dim is None else 0.0 for p in parts])
        of_cut = self._ranks.sum((squares * cut.to(squares)).sum())
        return (of_cut + (squares * whole.to(squares)).sum()).sqrt()

    def assemble(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return on rank 0 the whole tensors of a checkpoint; elsewhere none.

        Args:
            held: what this rank has, [...] each, by the names of `AdapterOptimizer.tensors`.

        Raises:
            RanksApart: two ranks that have the same part of a matrix have other numbers there.
        """
        found: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for entry, tensor in held.items():
            if self._is_of_parameter(entry, tensor):
                by_dtype.setdefault(tensor.dtype, []).append(entry)
            elif self._ranks.rank == 0:
                found[entry] = tensor.clone()  # the same on every rank
        for dtype, entries in by_dtype.items():
            mine = [held[entry] for entry in entries]
            pieces = [unflat(of, mine) for of in self._ranks.gathered(flat(mine, dtype))]
            for n, entry in enumerate(entries if pieces else ()):
                found[entry] = self._joined(entry, [of[n] for of in pieces])
        return found

    def whole_bytes(self, held: Mapping[str, Tensor]) -> int:
        """Return the bytes that `assemble` would return for `held`, [...] each."""
        return sum(
            tensor.element_size() * self._all[_parameter_of(entry)].numel()
            if self._is_of_parameter(entry, tensor)
            else tensor.nbytes
            for entry, tensor in held.items()
        )

    def fill(self, found: Mapping[str, Tensor]) -> None:
        """Give the stand-in the parameters of `found`, [...] each, that `assemble` returned."""
        with torch.no_grad():
            for name, parameter in self._all.items():
                parameter.copy_(found[f"{PARAMETER}/{name}"])

    def spread(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the `tensors` of rank 0, [...] each; the others give some of the same shapes."""
        return {
            name: self._ranks.from_first(tensor.to(self._ranks.device, copy=True))
            for name, tensor in tensors.items()
        }

    def taken(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what this rank has of a whole checkpoint, [...] each: undoes `assemble`.

        Raises:
            RuntimeError: it is of another adapter.
        """
        mine = {}
        for entry, tensor in found.items():
            name = _parameter_of(entry)
            if name not in self._all or tensor.shape != self._all[name].shape:
                mine[entry] = tensor
                continue
            part = self.part(name)
            taken = _cut(tensor, part)
            # Sums are of what each rank has added: the first one goes on from what all had.
            begins = self._ranks.rank == part.first or not entry.startswith(f"{SUM}/")
            mine[entry] = taken if begins else torch.zeros_like(taken)
        return mine

    def _is_of_parameter(self, entry: str, tensor: Tensor) -> bool:
        name = _parameter_of(entry)
        return name in self._mine and tensor.shape == self._mine[name].shape

    def _joined(self, entry: str, pieces: Sequence[Tensor]) -> Tensor:
        """Put the ranks' pieces of an entry together."""
        name, sums = _parameter_of(entry), entry.startswith(f"{SUM}/")
        whole = pieces[0].new_zeros(self._all[name].shape)
        for rank, piece in enumerate(pieces):
            part = self.part(name, rank)
            if sums:
                _cut(whole, part).add_(piece)
            elif rank == part.first:
                _cut(whole, part).copy_(piece)
            elif not torch.equal(_cut(whole, part), piece):
                raise RanksApart(f"ranks {part.first} and {rank} have different values of {entry}")
        return whole


def _cut(whole: Tensor, part: TensorPart) -> Tensor:
    """Return a part of a tensor [...]: a view."""
    if part.dim is None:
        return whole
    return whole.narrow(part.dim, part.begin, part.end - part.begin)


def _parameter_of(entry: str) -> str:
    """Return the parameter that a checkpoint's entry belongs to (`state/exp_avg/NAME`)."""
    kind, _, rest = entry.partition("/")
    return rest.partition("/")[2] if kind == STATE else rest


def _module_of(name: str) -> str:
    """Return the base model's name of the module that an adapter's parameter or module is of."""
    return name.removeprefix("base_model.model.").partition(".lora_")[0].partition(".ia3_")[0]
