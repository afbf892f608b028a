"""Refuse weights that are not exactly those of a model, or no numbers: no base to learn on."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windrow_sidecar.engines.weight_files import (
    COPY_AGAIN,
    FLOATING_POINT,
    read_header,
    unusable,
    weight_files,
)
from windrow_sidecar.engines.weight_formats import PLAIN_REMEDY
from windrow_sidecar.finetune.model.coded import CodedExperts, CodedLinear

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(
    model: nn.Module,
    where: str,
    *,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
    misshaped: Collection[tuple[str, Any, Any]] = (),
) -> None:
    """Refuse weights that are not exactly those of the model.

    Args:
        model: what was built.
        where: the weights are from.
        missing: parameters without a tensor; none that is tied to another one.
        unexpected: tensors without a parameter; buffers that the model makes itself may be there.
        misshaped: names, with the shape that was found and the one that the model has.

    Raises:
        UserError: names the tensors.
    """
    kind, buffers = type(model).__name__, {name for name, _ in model.named_buffers()}
    says = (getattr(model.config, "architectures", None) or [kind])[0]
    of_another = f" (config.json says {says})" if says != kind else ""
    if misshaped:
        (name, found, wanted), *more = sorted(misshaped)
        raise unusable(
            f"{where}: {_some([name], len(more))} has shape {tuple(found)}, {kind} by its "
            f"config.json has {tuple(wanted)}",
            "Use the config.json that belongs to these weights.",
        )
    problems = []
    if missing:
        problems.append(f"it lacks {_some(sorted(missing))}")
    if extra := sorted(set(unexpected) - buffers):
        problems.append(f"it holds {_some(extra)}, which is not a tensor of this model")
    if problems:
        raise unusable(
            f"{where} is not a whole {kind}{of_another}: {'; '.join(problems)}",
            "Use a checkpoint of a causal language model." if of_another else COPY_AGAIN,
        )


def check_types(
    directory: Path, model: nn.Module, method: str = "", known: Collection[str] = ()
) -> None:
    """Refuse weights that are stored as other numbers than floating-point ones of 16 bits or more.

    They are the codes of some quantisation, of which transformers has made no plain weights.

    Args:
        directory: of the model.
        model: what was built.
        method: by which config.json says that weights are stored; "": it says nothing.
        known: tensors that belong to weights which are computed with as codes.

    Raises:
        UserError: names the tensors.
    """
    if method and not known and all(weight.dtype in PLAIN for weight in model.parameters()):
        return  # of codes it has made numbers again
    buffers = {name for name, _ in model.named_buffers()}
    found = {
        name: at["dtype"]
        for path in weight_files(directory)
        for name, at in read_header(path).tensors.items()
        if at["dtype"] not in FLOATING_POINT and name not in buffers and name not in known
    }
    if found:
        why = (
            f"which is not a weight that {method} has"
            if known
            else f"of which transformers makes no plain weights though config.json names {method}"
            if method
            else "and its config.json names no quantisation"
        )
        raise unusable(
            f"{directory} holds {_some(sorted(found))} as {found[min(found)]}, {why}", PLAIN_REMEDY
        )


def check_numbers(model: nn.Module) -> None:
    """Refuse frozen weights that hold NaN or infinity: to be asked once a result is not finite.

    Raises:
        UserError: names the tensors.
    """
    broken = [
        name
        for name, weight in model.named_parameters()
        if not weight.requires_grad
        and weight.dtype in PLAIN
        and weight.device.type != "meta"
        and weight.numel()
        and not all(torch.isfinite(end) for end in torch.aminmax(weight))
    ]
    broken += [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, CodedLinear | CodedExperts)
        and not all(bool(torch.isfinite(weight).all()) for weight in module.numbers())
    ]
    if broken:
        raise unusable(
            f"the base model's {_some(broken)} holds numbers that are not finite", COPY_AGAIN
        )


def _some(names: list[str], more: int = 0) -> str:
    more += len(names) - 1
    return f"{names[0]} and {more} more" if more else names[0]
