"""Run the linear layers of one base model for the rows of several jobs, each with its own LoRA.

The base's product is one over all rows; A, B, scale and dropout are those of the job whose rows
they are. They are the very modules of the job's own model, so gradients are left in its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.finetune.adapter.adapters import ADAPTER
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack


class LineOwners:
    """The lines of the micro-batch that runs: whose they are, one job's below the other's."""

    def __init__(self) -> None:
        self.of: tuple[tuple[object, int], ...] = ()  # a job's key, and how many lines it has

    def tokens(self, n: int) -> list[int]:
        """Return how many of `n` tokens, line after line, are each job's.

        Raises:
            ValueError: the lines have not all as many.
        """
        lines = sum(count for _, count in self.of)
        if not lines or n % lines:
            raise ValueError(f"{n} tokens are not {lines} lines of equal length")
        return [count * (n // lines) for _, count in self.of]


class JointLinears:
    """The linear layers that any of several jobs adapts.

    Each computes as the base does where the running micro-batch is of no job that adapts it. No
    module of the model is replaced: hooks stay.

    Args:
        model: the base's own tree of modules, without an adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._owners = model, LineOwners()
        self._linears: dict[str, _JointLinear] = {}
        self._learning: dict[nn.Module, list[_JointLinear]] = {}

    def add(self, key: object, tuned: Any) -> None:  # noqa: ANN401 - peft is untyped
        """Let a job's adapter take part; `tuned`: peft's model over the same base (see `refused`).

        Raises:
            AttributeError: the base has no such module.
        """
        for name, layer in lora_layers(tuned.get_base_model()).items():
            linear = self._linears.get(name)
            if linear is None:
                linear = _JointLinear(self._model.get_submodule(name), self._owners)
                self._linears[name] = linear
            linear.add(key, layer)
        self._learning.clear()

    def remove(self, key: object) -> None:
        """Let go of a job's modules; without any a layer computes as before."""
        for linear in self._linears.values():
            linear.adapters.pop(key, None)

    def run_for(self, owners: Sequence[tuple[object, int]]) -> None:
        """Say whose lines run next: (key, lines) in their order."""
        self._owners.of = tuple(owners)

    def learning(self, layer: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that learn in a layer from the lines that run."""
        known = self._learning.get(layer)
        if known is None:
            inside = {id(module) for module in layer.modules()}
            known = [linear for linear in self._linears.values() if id(linear.module) in inside]
            self._learning[layer] = known
        keys = [key for key, _ in self._owners.of]
        return [p for linear in known for key in keys for p in linear.learning(key)]


class _JointLinear:
    """Takes the place of a linear layer's forward."""

    def __init__(self, module: nn.Module, owners: LineOwners) -> None:
        self.module, self._owners = module, owners
        self._base: Callable[..., Tensor] = module.forward
        self.adapters: dict[object, _LowRank] = {}
        module.forward = self

    def add(self, key: object, layer: Any) -> None:  # noqa: ANN401 - peft is untyped
        """Take the job's matrices in this layer."""
        self.adapters[key] = _LowRank(layer)

    def learning(self, key: object) -> tuple[nn.Parameter, ...]:
        """Return the job's parameters here."""
        return self.adapters[key].parameters if key in self.adapters else ()

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return the layer's output, [..., out], for an input [..., in]."""
        made = self._base(x, *args, **kwargs)
        adapters = [self.adapters.get(key) for key, _ in self._owners.of]
        if not any(adapters):
            return made
        rows = self._owners.tokens(x.shape[:-1].numel())
        ends = accumulate(rows)
        parts = [
            _Part(end - count, end, adapter)
            for adapter, count, end in zip(adapters, rows, ends, strict=True)
            if adapter is not None
        ]
        learns = [parameter for part in parts for parameter in part.adapter.parameters]
        added: Tensor = _Added.apply(made, x, _alike(parts), *learns)
        return added


class _LowRank:
    """A job's adapter of one linear layer, as peft made it."""

    def __init__(self, layer: Any) -> None:  # noqa: ANN401 - peft is untyped
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        self.parameters: tuple[nn.Parameter, nn.Parameter] = (a, b)
        dropout = layer.lora_dropout[ADAPTER]
        self._dropout: nn.Module | None = None if isinstance(dropout, nn.Identity) else dropout
        self.scale = float(layer.scaling[ADAPTER])

    @property
    def drops(self) -> bool:
        """True where it drops units in training."""
        return self._dropout is not None

    def dropped(self, x: Tensor) -> Tensor:
        """Return `x`, [tokens, in], without the units that are dropped; of a gradient the same."""
        if self._dropout is None:
            return x
        dropped: Tensor = self._dropout(x)
        return dropped


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens [begin, end) of a micro-batch, and the adapter of the job that has them."""

    begin: int
    end: int
    adapter: _LowRank

    @property
    def kind(self) -> tuple[object, ...]:
        """Parts of one kind can have their products in one call."""
        a, _ = self.adapter.parameters
        return (self.end - self.begin, a.shape, a.dtype)


class _Alike:
    """Neighbouring parts with as many tokens each, of one rank: each product is one for all.

    A batch of products, in which a job's numbers meet no other's: a NaN stays where it is. One by
    one, four jobs queue four thin products where these queue one, and pay for each call.

    Args:
        parts: one at least.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._adapters = [part.adapter for part in parts]
        self._tokens = slice(parts[0].begin, parts[-1].end)
        self._shape = (len(parts), parts[0].end - parts[0].begin, -1)
        self._scales = [adapter.scale for adapter in self._adapters]

    def __len__(self) -> int:
        return len(self._adapters)

    def of(self, x: Tensor) -> Tensor:
        """Return a view of their tokens of `x`, [tokens, units]: [parts, tokens of each, units]."""
        return x[self._tokens].view(self._shape)

    def dropped(self, x: Tensor) -> Tensor:
        """Return `x`, [parts, tokens, in], without the units that each job drops."""
        if not any(adapter.drops for adapter in self._adapters):
            return x
        pairs = zip(self._adapters, x.unbind(), strict=True)
        return torch.stack([adapter.dropped(of_part) for adapter, of_part in pairs])

    def scaled(self, x: Tensor) -> Tensor:
        """Multiply `x`, [parts, tokens, rank], by the scale of each; in place."""
        if len(set(self._scales)) == 1:
            return x.mul_(self._scales[0])
        torch._foreach_mul_(list(x.unbind()), self._scales)
        return x


def _alike(parts: Sequence[_Part]) -> list[_Alike]:
    """Return the parts in runs that have their products together, in their order."""
    runs: list[list[_Part]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and last.end == part.begin and last.kind == part.kind:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_Alike(run) for run in runs]


class _Added(torch.autograd.Function):
    """made + B(scale * A(dropout(x))), by the tokens of each part.

    One function for all parts, and sums in place: as many of torch's own ones, with a copy of all
    rows at their end, took a tenth of a layer of 256 tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        made: Tensor,
        x: Tensor,
        runs: Sequence[_Alike],
        *learns: Tensor,
    ) -> Tensor:
        ctx.mark_dirty(made)
        ctx.runs = runs
        read, sums, narrow = _flat(x), made.view(-1, made.shape[-1]), []
        for run, a, b in _matrices(runs, learns):
            dropped = run.dropped(run.of(read).to(a.dtype))
            narrow.append(run.scaled(torch.bmm(dropped, a.mT)))
            into = run.of(sums)
            if into.dtype == b.dtype:
                into.baddbmm_(narrow[-1], b.mT)
            else:  # as peft: added in the wider type
                into.copy_(torch.baddbmm(into.to(b.dtype), narrow[-1], b.mT))
        ctx.save_for_backward(x, *narrow, *learns)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, *kept = ctx.saved_tensors
        narrow, learns = kept[: len(ctx.runs)], kept[len(ctx.runs) :]
        read, come = _flat(x), _flat(gradient)
        wants_x = ctx.needs_input_grad[1]
        back = read.new_zeros(read.shape) if wants_x else None
        found: list[Tensor] = []
        for (run, a, b), up in zip(_matrices(ctx.runs, learns), narrow, strict=True):
            of_run = run.of(come).to(b.dtype)
            down = run.scaled(torch.bmm(of_run, b))
            dropped = run.dropped(run.of(read).to(a.dtype))
            of_a, of_b = torch.bmm(down.mT, dropped), torch.bmm(of_run.mT, up)
            for of_part in zip(of_a.unbind(), of_b.unbind(), strict=True):
                found += of_part
            if back is not None:
                run.of(back).copy_(run.dropped(torch.bmm(down, a)))
        return gradient, None if back is None else back.view(x.shape), None, *found


def _matrices(
    runs: Sequence[_Alike], learns: Sequence[Tensor]
) -> Iterator[tuple[_Alike, Tensor, Tensor]]:
    """Yield each run with its A, [parts, rank, in], and B, [parts, out, rank]."""
    at = 0
    for run in runs:
        end = at + 2 * len(run)
        yield run, _stacked(learns[at:end:2]), _stacked(learns[at + 1 : end : 2])
        at = end


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return [parts, ...] of matrices [...]: of one a view, of several copies, which are thin."""
    return matrices[0][None] if len(matrices) == 1 else torch.stack(list(matrices))


def _flat(x: Tensor) -> Tensor:
    """Return [..., units] as [tokens, units]; shares memory where it can."""
    return x.reshape(-1, x.shape[-1])


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the modules with an adapter by their names in a base model that peft has adapted."""
    from peft.tuners.lora import LoraLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and ADAPTER in module.scaling
    }


def adapts_head(tuned: Any, stack: DecoderStack) -> bool:  # noqa: ANN401 - peft is untyped
    """Return whether a job has an adapter outside of the decoder's layers."""
    inside = {id(module) for layer in stack.layers for module in layer.modules()}
    layers = lora_layers(tuned.get_base_model()).values()
    return any(id(layer) not in inside for layer in layers)


def refused(tuned: Any, learns: Mapping[str, nn.Parameter], stack: DecoderStack) -> str:  # noqa: ANN401 - peft is untyped
    """Return why a job's rows cannot pass beside those of others; "" if they can.

    Args:
        tuned: peft's model of the job.
        learns: what the job trains, by name.
        stack: the job's layers.
    """
    from peft.tuners.lora.layer import Linear

    config = tuned.active_peft_config
    if config.peft_type.value != "LORA":
        return f"its adapter is {config.peft_type.value.lower()}, not lora"
    if config.use_dora:
        return "its adapter decomposes weights (useDora)"
    ours: set[int] = set()
    for name, layer in lora_layers(tuned.get_base_model()).items():
        if not isinstance(layer, Linear) or ".experts." in f".{name}.":
            return f"its adapter of {name} is not that of a plain linear layer"
        if layer.lora_variant.get(ADAPTER) is not None or layer.lora_B[ADAPTER].bias is not None:
            return f"its adapter of {name} is more than two matrices"
        ours.update((id(layer.lora_A[ADAPTER].weight), id(layer.lora_B[ADAPTER].weight)))
    others = [name for name, parameter in learns.items() if id(parameter) not in ours]
    if others:
        return f"{others[0]} learns besides its low-rank matrices"
    if stack.own_dropout or stack.drops_embeddings:
        return "the model drops units of its own"
    if stack.follows_longest:
        return "the model's positions depend on the longest row of a step"
    return ""
