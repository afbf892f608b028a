"""torch's operators on CUDA tensors, computed by the CPU's kernels over the same memory.

With the shim of cudart, device memory is the host's, and CUDA's kernels compute nothing. Once
`install` has been called, every operator that has a kernel for CUDA gives the CPU's result instead:
memory, streams, events, copies of whole tensors and autograd stay torch's own for CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Memory and views: torch's own for CUDA do what they say without a kernel.
KEPT = {
    "_local_scalar_dense",
    "_reshape_alias",
    "_to_copy",
    "as_strided",
    "empty",
    "empty_strided",
    "is_pinned",
    "_pin_memory",
    "record_stream",
    "resize_",
    "set_",
    "unfold",
    "view",
}
# Where an operator has a kernel that the CPU may use.
# CUDA's kernels that make the host wait: the size of their result depends on their values.
WAITING = {"_unique2", "equal", "masked_select", "nonzero", "repeat_interleave", "unique_dim"}
BY_MASK = {"index", "index_put_", "_index_put_impl_"}
OF_THE_HOST = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_library: torch.library.Library | None = None
# What is captured now, by graph: calls over memory that stays where it is.
_captured: dict[int, list[Callable[[], None]]] = {}
_capturing: list[Callable[[], None]] | None = None


def host_alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    n_bytes = (reach + 1) * tensor.itemsize if tensor.numel() else 0
    if not n_bytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_uint8 * n_bytes).from_address(tensor.data_ptr())
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """A CUDA tensor of the same values."""
    there = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device)
    if made.numel():
        host_alias(there).copy_(made)
    return there


def waits(packet: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether CUDA's kernel would make the host wait for the device."""
    masks = (torch.bool, torch.uint8)
    by_mask = packet in BY_MASK and any(
        isinstance(index, Tensor) and index.dtype in masks for index in arguments[1]
    )
    return by_mask or packet in WAITING


def on_host(call: Callable[..., Any], packet: str = "") -> Callable[..., Any]:
    """Let an operator run over aliases of its arguments."""
    note_wait = ctypes.CDLL(None).windrow_shim_wait

    def run(*arguments: Any, **named: Any) -> Any:
        if waits(packet, arguments):
            note_wait()
        originals: dict[int, tuple[Tensor, Tensor]] = {}
        devices: list[torch.device] = []

        def there(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_cuda:
                devices.append(value.device)
                alias = host_alias(value)
                originals[id(alias)] = (alias, value)
                return alias
            if isinstance(value, torch.device) and value.type == "cuda":
                devices.append(value)
                return torch.device("cpu")
            if isinstance(value, torch.Generator) and value.device.type == "cuda":
                return None
            return value

        def back(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in originals:
                return to_device(value, devices[0])
            alias, original = originals[id(value)]
            if alias.shape != original.shape:  # an `out=` of another size
                original.resize_(alias.shape)
                host_alias(original).copy_(alias)
            return original

        arguments, named = tree_map(there, (arguments, named))
        made = tree_map(back, call(*arguments, **named))
        if _capturing is not None:
            results = [host_alias(t) for t in tree_leaves(made) if isinstance(t, Tensor)]

            def again() -> None:
                for old, new in zip(results, tree_leaves(call(*arguments, **named)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

            _capturing.append(again)
        return made

    return run


def install() -> None:
    """Do so for the rest of the process."""
    global _library
    # Of torch's attentions, the one that is made of plain operators.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    _library = torch.library.Library("aten", "IMPL")
    whole = torch.library.get_kernel("aten::copy_", "CUDA")
    elementwise = on_host(torch.ops.aten.copy_.default)

    def copy(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        same = to.dtype == source.dtype and to.shape == source.shape
        if _capturing is None and same and to.is_contiguous() and source.is_contiguous():
            return whole.call_boxed(keys, to, source, non_blocking)
        if to.device != source.device and not non_blocking:
            ctypes.CDLL(None).windrow_shim_wait()
        elementwise(to, source, non_blocking)
        return to

    _replay_graphs()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not has(name, "CUDA"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet in KEPT:
            continue
        call = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if name == "aten::histc":
            call = histogram_of_any
        if name in ("aten::_softmax", "aten::_log_softmax"):
            call = of_half(call)
        if name in ("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"):
            call = backward_to_half(call)
        if any(has(name, key) for key in OF_THE_HOST):
            implementation = on_host(call, packet)
        else:
            implementation = refused(name)
        _library.impl(name, implementation, "CUDA", allow_override=True)
    _library.impl("aten::copy_", copy, "CUDA", with_keyset=True, allow_override=True)


def histogram_of_any(numbers: Tensor, *arguments: Any) -> Tensor:
    """CUDA counts integers too (experts of tokens), the CPU only floats."""
    return torch.histc(numbers.float(), *arguments).to(numbers.dtype)


def of_half(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CUDA has a float result of numbers of 16 bits in one call, the CPU in two."""

    def run(numbers: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return softmax(numbers.float() if half_to_float else numbers, dim, False)

    return run


def backward_to_half(backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same call's gradient, of the type that its numbers had."""

    def run(gradient: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return backward(gradient, result, dim, gradient.dtype).to(dtype)

    return run


def interpret(modules: str) -> None:
    """Let Triton's kernels of modules that begin so compute; every other one computes nothing.

    For kernels that say which memory is whose: what they leave out is whatever was there before,
    and a page number of that kind ends up in a list of free pages.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    compiled = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if warmup or not self.fn.__module__.startswith(modules):
            return compiled(self, *arguments, grid=grid, warmup=warmup, **named)
        kernel = InterpretedFunction(self.fn)
        return on_host(lambda *a, **n: kernel.run(*a, grid=grid, warmup=False, **n))(
            *arguments, **named
        )

    JITFunction.run = run  # type: ignore[method-assign]
    # What such a kernel calls, as Triton's own sum and cdiv.
    JITFunction.__call__ = lambda self, *a, **n: InterpretedFunction(self.fn)(*a, **n)  # type: ignore[method-assign]


def _replay_graphs() -> None:
    """Let a graph do again what was called while it was captured."""
    plain = torch.cuda.CUDAGraph

    class Graph(plain):  # type: ignore[misc, valid-type]
        def capture_begin(self, *arguments: Any, **named: Any) -> None:
            global _capturing
            super().capture_begin(*arguments, **named)
            _capturing = _captured[id(self)] = []

        def capture_end(self) -> None:
            global _capturing
            _capturing = None
            super().capture_end()

        @torch.inference_mode()
        def replay(self) -> None:
            super().replay()
            for again in _captured[id(self)]:
                again()

    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = Graph


def refused(name: str) -> Callable[..., Any]:
    """An operator that the CPU does not have."""

    def run(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} has no kernel for the CPU")

    return run
