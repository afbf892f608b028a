"""Write a LoRA adapter so that servers which know rank and alpha alone compute what was trained.

SGLang multiplies by `lora_alpha / r`, whatever `use_rslora`, `rank_pattern` and `alpha_pattern`
say, and reads a pattern of targets as names. An adapter of one rank and scale says the same
by alpha. One of several is filled up with zeros to the largest rank, and what its modules are
scaled by besides is in their matrices: peft computes the same of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec
from windrow.errors import UserError
from windrow_sidecar.engine_facts import NO_LIMITS, AdapterLimits


def as_served(
    model: Any,  # noqa: ANN401 - peft's
    adapter: str,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an adapter's tensors and configuration in the form that servers honour.

    Args:
        model: peft's, with the adapter in it.
        adapter: its name there.
        state: the adapter's tensors by peft's names, [...] each.
        config: peft's configuration of it.
    """
    # peft keeps names in sets: targets, and those of experts that it takes as parameters.
    said: dict[str, Any] = {
        key: sorted(v) if isinstance(v, set) else v for key, v in config.items()
    }
    tensors = dict(state)
    layers = _lora_layers(model, adapter)
    if not layers or said.get("use_dora") or said.get("target_parameters"):
        return tensors, said
    if isinstance(said["target_modules"], str):
        said["target_modules"] = _named(model, set(layers)) or said["target_modules"]
    if not any(said[of] for of in ("use_rslora", "rank_pattern", "alpha_pattern")):
        return tensors, said
    ranks = {int(layer.r[adapter]) for layer in layers.values()}
    scales = {float(layer.scaling[adapter]) for layer in layers.values()}
    if len(ranks) == len(scales) == 1:
        (rank,), (scale,) = ranks, scales
    elif set(tensors) == {name for prefix in layers for name in _names(prefix)}:
        rank, scale = max(ranks), said["lora_alpha"] / max(ranks)
        for prefix, layer in layers.items():
            a, b = _names(prefix)
            tensors[a], tensors[b] = _filled(
                tensors[a], tensors[b], rank, float(layer.scaling[adapter]) / scale
            )
    else:
        return tensors, said  # experts, or modules that are trained as a whole
    alpha = scale * rank
    whole = round(alpha)
    said |= {
        "r": rank,
        "lora_alpha": whole if math.isclose(alpha, whole, rel_tol=1e-12) else alpha,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return tensors, said


def not_served(
    model: Any,  # noqa: ANN401
    spec: FinetuneJobSpec,
    limits: AdapterLimits = NO_LIMITS,
) -> UserError | None:
    """Return why servers would leave out a part of an adapter that is to be loaded; None: nothing.

    Experts that lie in one tensor are adapted as parts of it, under names that SGLang passes over.
    Modules that it computes as one it loads as one: it fails over the others of `_STACKED` where
    the needed ones are not adapted, some of them at the first request, which ends the server.

    Args:
        model: peft's, with the adapter in it.
        spec: the job's.
        limits: of the server beside, which is one of those that get the adapter.
    """
    if not spec.output.deploy.enabled:
        return None
    if limits.off:
        return _not_served(
            "the server beside loads no adapters",
            "Start it with --enable-lora",
            "spec.output.deploy",
        )
    if getattr(model.active_peft_config, "target_parameters", None):
        return _not_served(
            "servers leave out an adapter of experts that lie in one tensor",
            "Name modules outside of the experts",
        )
    layers = _lora_layers(model, model.active_adapter)
    if refused := _beyond(layers, model.active_adapter, limits):
        return refused
    found = sorted(layers)
    beside: dict[str, set[str]] = {}
    for name in found:
        parent, _, last = name.rpartition(".")
        beside.setdefault(parent, set()).add(last)
    for parent, adapted in beside.items():
        there = {name for name, _ in model.get_submodule(parent).named_children()}
        for stacked, needed in _STACKED:
            alone, lacking = stacked & adapted, needed - adapted
            if not alone or not lacking or (alone == {"up_proj"} and "gate_proj" not in there):
                continue
            remedy = (
                f"Name {_listed(lacking)} as well"
                if lacking <= there
                else f"Leave {_listed(alone)} out of the targets"
            )
            problem = f"servers load {_listed(alone)} only together with {_listed(lacking)}"
            return _not_served(problem, remedy)
    return None


# Linear layers that SGLang computes as one, and those of them that an adapter of any has to have.
_STACKED: Final = (
    (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"q_proj", "v_proj"})),
    (frozenset({"gate_proj", "up_proj"}), frozenset({"gate_proj"})),
    *((frozenset({"q_a_proj", "kv_a_proj_with_mqa"}),) * 2,),
)


def _beyond(layers: Mapping[str, Any], adapter: str, limits: AdapterLimits) -> UserError | None:
    """Return which limit of a server an adapter is beyond; None: none."""
    rank = max((int(layer.r[adapter]) for layer in layers.values()), default=0)
    if limits.rank and rank > limits.rank:
        return _not_served(
            f"the server beside loads adapters of rank {limits.rank} at most, and this has {rank}",
            f"Write {limits.rank}, or start the server with --max-lora-rank {rank}",
            "spec.adapter.lora.rank",
        )
    taken = set(map(_loaded_as, limits.targets))
    last = {name.rpartition(".")[2] for name in layers}
    if taken and (others := {name for name in last if _loaded_as(name) not in taken}):
        return _not_served(
            f"the server beside loads adapters of {_listed(limits.targets)}, and this has "
            f"{_listed(others)}",
            "Name its targets, or start the server with --lora-target-modules all",
        )
    return None


def _loaded_as(name: str) -> str:
    """Return the name of the layer that SGLang computes a module by."""
    return next((min(stacked) for stacked, _ in _STACKED if name in stacked), name)


def _not_served(
    problem: str, remedy: str, field: str = "spec.adapter.lora.targetModules"
) -> UserError:
    return UserError(
        problem,
        field=field,
        remedy=f"{remedy}, or leave out spec.output.deploy.",
        reason=Reason.INVALID_SPEC,
    )


def _listed(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def _named(model: Any, adapted: set[str]) -> list[str]:  # noqa: ANN401
    """Return last names that mean just the modules which are adapted; []: no names do."""
    names = {module.rpartition(".")[2] for module in adapted}
    meant = {name for name in _targets(model) if name.rpartition(".")[2] in names}
    return sorted(names) if meant == adapted else []


def _filled(a: Tensor, b: Tensor, rank: int, factor: float) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank], filled up with zeros, B times `factor`."""
    more = rank - a.shape[0]
    return (
        torch.cat([a, a.new_zeros(more, *a.shape[1:])]),
        torch.cat([b * factor, b.new_zeros(b.shape[0], more, *b.shape[2:])], dim=1),
    )


def _lora_layers(model: Any, adapter: str) -> dict[str, Any]:  # noqa: ANN401
    """Return the modules with the adapter by their names in peft's model."""
    from peft.tuners.lora import LoraLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter in module.scaling
    }


def _targets(model: Any) -> set[str]:  # noqa: ANN401
    """Return the names of modules that names in `target_modules` may mean."""
    return {name for name, module in model.named_modules() if _could_be_target(name, module)}


def _could_be_target(name: str, module: Any) -> bool:  # noqa: ANN401
    return not any(
        part in ("base_layer", "lora_A", "lora_B", "lora_dropout") for part in name.split(".")
    ) and (hasattr(module, "weight") or hasattr(module, "base_layer"))


def _names(prefix: str) -> tuple[str, str]:
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"
