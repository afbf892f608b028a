"""A model of its own for each job, over the same frozen weights.

Only the tree of modules is copied, a few thousand Python objects. So each job puts its adapter in,
whatever its kind, and no switch ever touches a module: what one job does to its tree no other sees.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from windrow.errors import UserError
from windrow_sidecar.finetune.model.loading import BaseModel


def shallow_clone(base: BaseModel) -> BaseModel:
    """Return `base` with modules of its own; no weight is copied.

    Frozen parameters are the very same objects, since layers that take turns in memory are moved by
    them. Biases, which an adapter may train, are objects of their own over the same values; not
    where layers take turns, which refuse to have them trained.

    Raises:
        UserError: its weights are quantised. Such parameters hand parts of themselves to the module
            that first computes with them, so two trees cannot share them.
    """
    if any(type(parameter) is not nn.Parameter for parameter in base.model.parameters()):
        raise UserError(
            "jobs of one worker cannot share a quantised base",
            field="spec.model.quantization",
            remedy="Write none, or run them one by one.",
        )
    memo: dict[int, Any] = {}
    for name, parameter in base.model.named_parameters():
        own = name.endswith("bias") and base.frozen is None
        memo[id(parameter)] = (
            nn.Parameter(parameter.detach(), requires_grad=False) if own else parameter
        )
    for buffer in base.model.buffers():
        memo[id(buffer)] = buffer
    return replace(base, model=copy.deepcopy(base.model, memo))


def check_shared(wanted: dict[str, tuple[Any, ...]]) -> None:
    """Refuse jobs that need different base models.

    Args:
        wanted: by a job's name: its base (name, revision, and the form of its weights).

    Raises:
        UserError: names two jobs that differ.
    """
    (first, base), *others = wanted.items()
    for name, other in others:
        if other != base:
            raise UserError(
                f"jobs of one worker share a base model: {first} wants {_words(base)}, "
                f"{name} wants {_words(other)}",
                field="spec.model",
                remedy="Give them the same model, revision, precision and quantization, "
                "or run them one by one.",
            )


def _words(base: tuple[Any, ...]) -> str:
    return ", ".join(str(part) for part in base)
