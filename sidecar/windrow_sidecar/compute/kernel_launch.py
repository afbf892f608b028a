"""Launch a kernel of Triton's again and again at the least cost for the host.

Triton's own call looks up hooks, binds arguments and asks the driver for each tensor's address. A
kernel that has run with the same alignment and integers is launched by the function in C that its
call ends in.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

# Integers whose kernels are looked up at once; what is compiled is Triton's to keep.
_MOST_KNOWN = 512
# Versions of Triton whose function in C takes the arguments that are written here.
_LAUNCHED_DIRECTLY = "3.9."


class Kernel:
    """A kernel with its sizes.

    Args:
        kernel: decorated by `triton.jit`. Its parameters are tensors, integers, other numbers and
            compile-time constants, in this order.
        warps: of a program.
        constants: its compile-time arguments, by name.
    """

    def __init__(self, kernel: Any, warps: int = 4, **constants: Any) -> None:  # noqa: ANN401
        self._kernel, self._warps, self._constants = kernel, warps, constants
        # In the order of its parameters, which end with them.
        names = [name for name in kernel.arg_names if name in constants]
        self._values = tuple(constants[name] for name in names)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Any, ...]] = {}
        self._directly = version("triton").startswith(_LAUNCHED_DIRECTLY)

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        integers: tuple[int, ...] = (),
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Launch it on the current stream.

        Args:
            grid: programs.
            tensors: its first arguments, [...] each.
            integers: those behind them. Each other value is looked up apart.
            numbers: those behind these, which Triton compiles nothing for.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        # What Triton specialises for: alignment, and the values of integers.
        key = (together & 15, integers)
        found = self._known.get(key)
        if found is None:
            self._first(key, grid, tensors, numbers)
            return
        launch, before, behind, compiled = found
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
        if launch is None:
            arguments = (*tensors, *integers, *numbers, *self._values)
            compiled[grid](*arguments, stream=stream)
            return
        launch(*grid, stream, *before, *behind, (*addresses, *integers, *numbers))

    def _first(
        self,
        key: tuple[int, tuple[int, ...]],
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
    ) -> None:
        arguments = (*tensors, *key[1], *numbers)
        made = self._kernel[grid](*arguments, **self._constants, num_warps=self._warps)
        if made is None or key[0]:  # None: interpreted
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        run = made.run
        scratch = run.global_scratch_size or run.profile_scratch_size if self._directly else True
        if scratch or run.gsan_enabled:
            self._known[key] = (None, (), (), made)
            return
        # Of its annotations those of arguments that are passed: constants are not.
        passed = len(arguments)
        annotations = tuple(run.arg_annotations[:passed])
        before = (made.function, run.launch_cooperative_grid, run.launch_pdl, made.packed_metadata)
        # No hooks and what they are given, no scratch memory.
        behind = (None, None, None, None, None, annotations, run.kernel_signature)
        self._known[key] = (run.launch, before, behind, made)


@cache
def _shared(kernel: Any, warps: int, constants: frozenset[tuple[str, Any]]) -> Kernel:  # noqa: ANN401
    return Kernel(kernel, warps, **dict(constants))


def kernel_of(kernel: Any, warps: int = 4, **constants: Any) -> Kernel:  # noqa: ANN401
    """Return the kernel with these sizes, the same one for all who ask (see `Kernel`)."""
    return _shared(kernel, warps, frozenset(constants.items()))
