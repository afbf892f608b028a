"""Whether all of an adapter is where the backward of a step comes."""

from __future__ import annotations

from typing import Any

import torch

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.config import option_of
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.key_values import Prefix
from windrow_sidecar.finetune.model.structure import in_mode


def check_reach(tuned: Any, stack: DecoderStack) -> None:  # noqa: ANN401 - peft is untyped
    """Refuse an adapter that would get no gradients, or that layers would never look at.

    Raises:
        UserError: it lies ahead of the first layer, where a step's backward does not come; or it
            is a prefix of a model whose attention cannot be given one.
    """
    if tuned.active_peft_config.is_prompt_learning:
        if why := stack.prefix_refused or _prefix_fails(tuned, stack):
            raise UserError(
                f"{type(stack.model).__name__} cannot take a prefix: {why}",
                field="spec.adapter.type",
                remedy="Choose lora or ia3 for this model.",
                reason=Reason.INVALID_SPEC,
            )
        return
    reached = {id(p) for part in (*stack.layers, stack.norm) for p in part.parameters()}
    for name, parameter in stack.decoder.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            module, kind = name.split(".")[0], tuned.active_peft_config.peft_type.value.lower()
            raise UserError(
                f"{module} stands ahead of the first layer, and what does is frozen here",
                field=f"spec.adapter.{kind}.{option_of(name)}",
                remedy=f"Leave {module} out: by excludeModules, or by bias: lora_only.",
                reason=Reason.INVALID_SPEC,
            )


def _prefix_fails(tuned: Any, stack: DecoderStack) -> str:  # noqa: ANN401 - peft is untyped
    """Run the first layer behind the prefix, on the probe; returns what it says, "" if it runs."""
    try:
        with torch.no_grad(), in_mode(tuned, training=False):
            at = stack.begin(stack.probe, Prefix.of(tuned.get_prompt(1)))
            stack.forward(at, 0, at.whole, TorchBoundaries(), learn=False)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return f"peft makes none that its attention takes ({str(error).partition(chr(10))[0]})"
    return ""
