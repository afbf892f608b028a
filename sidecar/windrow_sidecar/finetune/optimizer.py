"""How a step changes the adapter: AdamW over gradients that micro-batches commit as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windrow.errors import WindrowError
from windrow_sidecar.finetune.schedule import Schedule

# transformers' Trainer has the same: no decay, and clipping at 1.
WEIGHT_DECAY = 0.0
MAX_GRADIENT_NORM = 1.0


class NotFinite(WindrowError):
    """Loss or gradient became NaN or infinite; the state is that of the step before."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a finished step was like."""

    learning_rate: float
    gradient_norm: float  # before clipping


class AdapterOptimizer:
    """AdamW with schedule and clipping; owns the sum of the committed gradients.

    `.grad` of the parameters belongs to the micro-batch on its way. `commit` adds it to the sum,
    `discard` forgets it: a micro-batch that is interrupted leaves no trace and can run again.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], schedule: Schedule) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._schedule = schedule
        self._sums: list[Tensor] | None = None
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=schedule.peak, weight_decay=WEIGHT_DECAY, fused=True
        )

    def commit(self) -> None:
        """Add the micro-batch's gradients to the sum."""
        gradients = [
            p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters
        ]
        if self._sums is None:
            self._sums = gradients
        else:
            torch._foreach_add_(self._sums, gradients)
        self.discard()

    def discard(self) -> None:
        """Forget the gradients of the micro-batch on its way."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, number: int) -> StepFacts:
        """Clip, update and clear the sum. `number`: of the step, from 0.

        Raises:
            NotFinite: a gradient is NaN or infinite; nothing has changed but that the sum is gone.
        """
        sums = self._sums or [torch.zeros_like(p) for p in self._parameters]
        self._sums = None
        norm = nn.utils.get_total_norm(sums)
        if not math.isfinite(float(norm)):
            raise NotFinite(f"the gradient of step {number + 1} is not finite")
        scale = min(1.0, MAX_GRADIENT_NORM / (float(norm) + 1e-6))
        if scale < 1.0:
            torch._foreach_mul_(sums, scale)
        for parameter, gradient in zip(self._parameters, sums, strict=True):
            parameter.grad = gradient
        rate = self._schedule.rate(number)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.discard()
        return StepFacts(rate, float(norm))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold: parameters, moments, sums. Not copied."""
        held = {f"parameter/{n}": p.detach() for n, p in self._named()}
        for name, parameter in self._named():
            for key, value in self._adamw.state.get(parameter, {}).items():
                held[f"{key}/{name}"] = value
        for name, total in zip(self._names, self._sums or [], strict=False):
            held[f"sum/{name}"] = total
        return held

    def load(self, held: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned.

        Raises:
            KeyError, RuntimeError: they belong to another adapter.
        """
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(held[f"parameter/{name}"])
        self._adamw.state.clear()
        for name, parameter in self._named():
            if f"step/{name}" in held:
                self._adamw.state[parameter] = {
                    key: held[f"{key}/{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
                }
        has_sums = any(name.startswith("sum/") for name in held)
        self._sums = [held[f"sum/{name}"].clone() for name in self._names] if has_sums else None
        self.discard()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._parameters, strict=True))
