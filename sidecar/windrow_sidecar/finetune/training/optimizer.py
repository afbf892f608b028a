"""Optimizer step of the adapter: AdamW with a schedule, over the gradients of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from windrow.crd import OptimizerSpec
from windrow.errors import UserError, WindrowError
from windrow.wheel import install_extra
from windrow_sidecar.compute.queued import Reading
from windrow_sidecar.finetune.training.flat_parameters import laid_out
from windrow_sidecar.finetune.training.snapshot import Spare, TensorSnapshot

# Kinds of tensors in a checkpoint, of which each name begins with one.
PARAMETER, STATE, SUM, BEST = "parameter", "state", "sum", "best"


class NotFinite(WindrowError):
    """Loss or gradient became NaN or infinite; the state is that of the step before."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Learning rate, gradient norm and loss of a finished step."""

    learning_rate: float
    gradient_norm: float  # before clipping


class SharedGradients(Protocol):
    """Sums gradients over ranks that train one adapter together."""

    def sum_gradients(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Complete, in place, the gradients [...] of parameters that several ranks have."""

    def norm(self, names: Sequence[str], gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm, [], of the whole adapter's gradient, from this rank's, [...] each."""


class AdapterOptimizer:
    """AdamW with schedule and clipping; owns the sum of the committed gradients.

    `.grad` of the parameters belongs to the micro-batch on its way. `commit` adds it to the sum,
    `discard` forgets it: a micro-batch that is interrupted leaves no trace and can run again.
    Gradients and sums are fp32, whatever the parameters are (a module that is trained as a whole
    has the base's type): added up in bf16, six windows cost a quarter of its precision.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        schedule: Schedule,
        spec: OptimizerSpec | None = None,
        shared: SharedGradients | None = None,
    ) -> None:
        """Make it over the adapter's parameters; `shared`: with other ranks, each having a part.

        Raises:
            UserError: the library that the spec asks for is not there.
        """
        self._parameters = list(parameters.values())
        self._schedule, self._spec = schedule, spec or OptimizerSpec()
        self._shared = shared
        self._flats = laid_out(self._parameters, alone=self._spec.type != "adamw")
        # As they are in memory: by type.
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = [parameter for flat in self._flats for parameter in flat.members]
        self._names = [names[id(parameter)] for parameter in self._parameters]
        self._sums: list[Tensor] | None = None  # of each of `_flats`
        self._views: list[Tensor] = []  # of them, of each parameter
        self._best: dict[str, Tensor] = {}
        self._snapshot: TensorSnapshot | None = None
        self._spare = Spare()
        self._adamw = adamw([flat.whole for flat in self._flats], self._spec)
        self._narrow = [p for p in self._parameters if p.dtype != torch.float32]
        self._collect(torch.float32)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that it changes, by name; [...] each."""
        return dict(self._named())

    @property
    def device(self) -> torch.device:
        """Device on which the adapter is now."""
        return self._parameters[0].device

    def commit(self) -> None:
        """Add the micro-batch's gradients to the sum."""
        given = zip(self._parameters, self._sum_views(), strict=True)
        learnt = [(view, p.grad) for p, view in given if p.grad is not None]
        if learnt:
            self._before_change(SUM)
            views, gradients = zip(*learnt, strict=True)
            torch._foreach_add_(list(views), list(gradients))
        self.discard()

    def _sum_views(self) -> list[Tensor]:
        """Return the sum of each parameter's gradients, [...]; zeros where there is none yet."""
        if self._sums is None:
            self._set_sums([flat.zeros(torch.float32) for flat in self._flats])
        return self._views

    def _set_sums(self, sums: list[Tensor] | None) -> None:
        flats = zip(self._flats, sums or [], strict=sums is not None)
        self._views = [view for flat, total in flats for view in flat.views(total)]
        self._sums = sums

    def discard(self) -> None:
        """Forget the gradients of the micro-batch on its way."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, number: int) -> StepMetrics:
        """Clip, update and clear the sum. `number`: of the step, from 0.

        Raises:
            NotFinite: a gradient is NaN or infinite; nothing has changed but that the sum is gone.
        """
        self._before_change(PARAMETER, STATE)
        views = self._sum_views()
        sums = self._sums or []
        self._set_sums(None)
        # The one figure of a step that the host waits for: of what is not finite nothing is learnt.
        norm = Reading(self._norm(sums, views)).value()
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient of step {number + 1} is not finite")
        scale = min(1.0, self._spec.max_gradient_norm / (norm + 1e-6))
        if scale < 1.0:
            self._before_change(SUM)
            torch._foreach_mul_(sums, scale)
        self._collect(None)
        for flat, total in zip(self._flats, sums, strict=True):
            flat.whole.grad = total.to(flat.whole.dtype)
        rate = self._schedule.rate(number)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad()
        # They change unseen, as parts of others: what is made of them is made again.
        torch.autograd.graph.increment_version(self._parameters)
        self.discard()
        self._collect(torch.float32)
        return StepMetrics(rate, norm)

    def _norm(self, sums: Sequence[Tensor], views: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradient, [], which is complete afterwards.

        `sums`: [elements] each; `views`: of them, of each parameter.
        """
        if self._shared is None:
            # A GPU's sum is a tree. On the host each of a few lanes adds up one number after the
            # other, which loses digits over tens of millions and hardly any over a parameter.
            return nn.utils.get_total_norm(sums if sums[0].is_cuda else views)
        self._before_change(SUM)
        self._shared.sum_gradients(self._names, views)
        return self._shared.norm(self._names, views)

    def _collect(self, dtype: torch.dtype | None) -> None:
        """Have autograd add gradients up in that type; None: in the parameter's own, for AdamW."""
        for parameter in self._narrow:
            parameter.grad_dtype = dtype or parameter.dtype

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: parameters, moments, sums; [...] each, not copied."""
        held = {f"{PARAMETER}/{n}": p.detach() for n, p in self._named()}
        names = iter(self._names)
        for flat in self._flats:
            of_flat = [name for _, name in zip(flat.members, names, strict=False)]
            for key, value in self._adamw.state.get(flat.whole, {}).items():
                parts = flat.of_members(torch.as_tensor(value))
                held |= {f"{STATE}/{key}/{n}": p for n, p in zip(of_flat, parts, strict=True)}
        if self._sums is not None:
            views = zip(self._names, self._sum_views(), strict=True)
            held |= {f"{SUM}/{name}": view for name, view in views}
        return held | {f"{BEST}/{name}": value for name, value in self._best.items()}

    def snapshot(self, beside: Mapping[str, Tensor] | None = None) -> TensorSnapshot:
        """Return `tensors` as they are now; they are copied before they change.

        `beside`: others of the checkpoint, [...] each, which nobody changes.
        """
        self._before_change(PARAMETER, STATE, SUM)
        self._snapshot = TensorSnapshot(self.tensors() | dict(beside or {}), self._spare)
        return self._snapshot

    def _before_change(self, *kinds: str) -> None:
        if self._snapshot is not None:
            self._snapshot.copy(kinds)

    def load(self, held: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned, [...] each, wherever it is; copied to the adapter.

        Raises:
            KeyError, RuntimeError: they belong to another adapter.
        """
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(held[f"{PARAMETER}/{name}"])
        self._load_state(held)
        self._best = {
            entry.removeprefix(f"{BEST}/"): self._taken(value)
            for entry, value in held.items()
            if entry.startswith(f"{BEST}/")
        }
        self._set_sums(None)
        if any(name.startswith(f"{SUM}/") for name in held):
            for name, view in zip(self._names, self._sum_views(), strict=True):
                view.copy_(held[f"{SUM}/{name}"])
        self.discard()

    def _load_state(self, held: Mapping[str, Tensor]) -> None:
        """Take over the optimizer's own, by parameter as `tensors` gives it, [...] each."""
        self._adamw.state.clear()
        keys = {entry.split("/", 2)[1]: None for entry in held if entry.startswith(f"{STATE}/")}
        names = iter(self._names)
        for flat in self._flats:
            of_flat = [name for _, name in zip(flat.members, names, strict=False)]
            for key in keys:
                # Of another adapter's entries one lacks.
                entries = [f"{STATE}/{key}/{name}" for name in of_flat]
                if flat.is_alone and entries[0] not in held:
                    continue  # of 8 bits, small parameters have others
                value = flat.joined([held[entry] for entry in entries], self.device)
                # The library counts its steps in a plain number, torch in a tensor.
                known = int(value) if value.dtype == torch.int64 else value
                self._adamw.state[flat.whole][key] = known

    def _taken(self, value: Tensor) -> Tensor:
        """Return a copy of one's own beside the adapter."""
        return value.to(self.device, copy=True)

    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """Let every tensor [...] that it owns lie where `to` puts it; nothing may be on its way.

        A snapshot that is being copied keeps reading where the tensors were.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        self.discard()
        for flat in self._flats:
            flat.move(to)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else to(gradient)
        for state in self._adamw.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = to(value)
        if self._sums is not None:
            self._set_sums([to(total) for total in self._sums])
        self._best = {name: to(value) for name, value in self._best.items()}

    def keep_best(self) -> None:
        """Remember the parameters as they are."""
        self._best = {name: p.detach().clone() for name, p in self._named()}

    def return_to_best(self) -> None:
        """Take the remembered parameters, where there are any."""
        self._before_change(PARAMETER)
        with torch.no_grad():
            for name, parameter in self._named():
                if name in self._best:
                    parameter.copy_(self._best[name])

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._parameters, strict=True))


def adamw(parameters: Sequence[nn.Parameter], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Return AdamW with the spec's options; its learning rate is set step by step.

    Raises:
        UserError: the library that the spec asks for is not there.
    """
    betas = (spec.beta1, spec.beta2)
    if spec.type == "adamw":
        return torch.optim.AdamW(
            parameters, betas=betas, weight_decay=spec.weight_decay, fused=True
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"adamw8bit needs bitsandbytes, which this worker has not ({error})",
            field="spec.training.optimizer.type",
            remedy=f"In the sidecar's image: {install_extra('quantized')}, or write adamw.",
        ) from error
    made: torch.optim.Optimizer = AdamW8bit(parameters, betas=betas, weight_decay=spec.weight_decay)
    return made


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up from zero, then constant, linear to zero, or half a cosine to zero.

    Step for step the values of transformers' `get_scheduler`: its first step has rate 0 where there
    is a warm-up.
    """

    kind: Literal["cosine", "linear", "constant"]
    peak: float
    total_steps: int
    warmup_ratio: float

    @property
    def warmup_steps(self) -> int:
        """Steps before the peak."""
        return math.ceil(self.total_steps * self.warmup_ratio)

    def rate(self, step: int) -> float:
        """Return the rate of step `step` (the first is 0)."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - done)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))
