"""Comparison of two runs of the same arithmetic: do they differ by more than rounding?

Equality is a statement about arithmetic, so it is tested in float64, where a mistake cannot hide
behind rounding. Two right runs in fp32 or bf16 may differ by any multiple of their precision that
the model amplifies it to, on each processor by another one: there the distance of a run from the
same run in float64 is measured, against the distance of the ordinary way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Below it nothing but rounding tells two float64 runs apart. A value of the small models passes at
# most 2**20 roundings on its way: 5 steps x 3 passes (forward, again, backward) x 3 layers x 40
# operations x 96 terms of a sum, each of at most 2**-53 of the value, is 2e-11; four times that for
# what amplifies on the way. A single fp32 result among them is 2**-24, 500 times as much.
ROUNDING = 2.0**20 * 2.0**-53
# A tensor whose true value is zero (the gradient of a key's bias, which the softmax cancels) holds
# rounding alone: of 2**3 roundings of the whole, one a layer and pass. What is smaller than that,
# over ROUNDING, cannot be distinguished from it.
NOISE = 2.0**3 * 2.0**-53


@dataclass(frozen=True, slots=True)
class Apart:
    """Distance of tensors from what they should be, in L2."""

    of_norm: float  # all together, against the norm of all together
    of_tensor: float  # the worst one, against its own norm

    @property
    def by_rounding(self) -> bool:
        """True where nothing but rounding in float64 separates them."""
        return self.of_norm <= ROUNDING and self.of_tensor <= ROUNDING


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Apart:
    """Compare by name; [...] each, of any dtype.

    A tensor whose norm is below NOISE / ROUNDING (8e-6) of all of them counts against that share of
    it: its values are rounding themselves.
    """
    if ours.keys() != theirs.keys():
        raise KeyError(sorted(ours.keys() ^ theirs.keys()))
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
    off = {name: float((ours[name].double() - theirs[name].double()).norm()) for name in theirs}
    floor = NOISE / ROUNDING * norm
    worst = max(off[name] / max(floor, float(theirs[name].double().norm())) for name in off)
    return Apart(math.sqrt(sum(value**2 for value in off.values())) / norm, worst)


def relative(found: Tensor, truth: Tensor) -> float:
    """Return how far [...] is from the truth of that shape, in L2, against the truth's own norm."""
    return float((found.double() - truth).norm() / truth.norm())


def no_farther(ours: Iterable[float], theirs: Iterable[float], dtype: torch.dtype) -> bool:
    """Return whether ours in `dtype` come as near to float64 as the ordinary way in `dtype`.

    Both are judged by the root of their mean square, since rounding falls elsewhere in each run.
    Half as much again is allowed: were every value of ours rounded once more than theirs, by an
    error of that same size, it would be sqrt(2). Besides, the result is rounded to be held.
    """
    return _typical(ours) <= 1.5 * _typical(theirs) + torch.finfo(dtype).eps / 2


def _typical(distances: Iterable[float]) -> float:
    squares = [distance**2 for distance in distances]
    return math.sqrt(sum(squares) / len(squares))


class _InFloat64(TorchFunctionMode):
    """Context in which code that asks torch for fp32 by name gets float64."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is torch.zeros and args and args[0] == ():
            # AdamW's count of steps: the fused kernel of a GPU reads four bytes of it.
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            return args[0].double()
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **(kwargs or {}))
        if kwargs and any(value is torch.float32 for value in kwargs.values()):
            kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()}
        if any(value is torch.float32 for value in args):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **(kwargs or {}))


@contextmanager
def in_float64() -> Iterator[None]:
    """Let code inside, ours and others', compute in float64 whatever would be in fp32.

    Models widen to fp32 where a narrow type would not do (norms, rotations, routers, the loss), and
    so do our sums: over float64 that would narrow.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def in_type_of(model: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - peft is untyped
    """Let code inside compute in float64 throughout if the model is in float64."""
    wide = all(p.dtype == torch.float64 for p in model.parameters())
    return in_float64() if wide else nullcontext()


class LogitDistances:
    """Distances of fp32 logits from float64: an engine's, and transformers' own of the same.

    Attributes:
        ours, theirs: one of each token.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers is untyped
        """Compare with a causal model of transformers in fp32."""
        self._model, self._wide = model, copy.deepcopy(model).double()
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def add(self, tokens: Sequence[int], logits: Sequence[Tensor]) -> None:
        """Take an engine's logits, [vocabulary] each, of the last tokens of a line."""
        ids, last = torch.tensor([tokens]), slice(-len(logits), None)
        with torch.inference_mode():
            narrow = self._model(ids).logits[0, last]
            with in_float64():
                truth = self._wide(ids).logits[0, last]
        self.ours += map(relative, logits, truth)
        self.theirs += map(relative, narrow, truth)

    @property
    def equal(self) -> bool:
        """True where the engine's are as near to float64 as transformers' own."""
        return no_farther(self.ours, self.theirs, torch.float32)


def _grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor, **_: object) -> Tensor:
    """Multiply each group of rows by its matrix: torch has no float64 kernel for that.

    Args:
        rows: [rows, in].
        weights: [groups, in, out].
        offs: [groups], where each group ends.
    """
    begins = [0, *offs.tolist()]
    groups = zip(begins, begins[1:], weights, strict=False)
    return torch.cat([rows[begin:end] @ weight for begin, end, weight in groups])
