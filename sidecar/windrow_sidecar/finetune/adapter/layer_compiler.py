"""Compile a decoder layer by AOTAutograd and Inductor: one code for all layers that compute alike.

A layer is traced as a function of its input, its own tensors and the tensors of its call. What it
computes is then code without any weight in it, so layers with equal code share what is compiled of
it. Nothing is tuned by trying on the device. Inductor keeps what it compiled in a folder, in which
the next process finds it.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windrow.rundir import ENV_RUN_DIR
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys

log = logging.getLogger(__name__)

# Of Inductor. Its pointwise kernels of Triton would be chosen by running several of them, on a
# device that nobody has granted by then; on the host threads are those that a grant gives.
_OPTIONS: Mapping[str, Any] = {
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,
    "cpp.dynamic_threads": True,
    "compile_threads": 1,
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
}
_DRAWS = ("dropout", "bernoulli", "rand", "multinomial", "normal_", "uniform", "exponential")
_CACHE, _ONE_PROCESS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
# What runs a layer: takes its input, tensors of its own, tensors of the call, and keys of its
# dropouts where it has any; returns its output.
Code = Callable[..., tuple[Tensor]]
# How often `alive` is called while something compiles.
_ALIVE_S = 1.0


class NotCompiled(Exception):
    """A layer that cannot be compiled; says why."""


class Places:
    """Places of a layer's tensors; each is looked up when it is asked for: buffers may move.

    Args:
        layer: whose modules stay the same.

    Attributes:
        names: of parameters and buffers.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.names: list[str] = []
        self._held: list[tuple[dict[str, Any], str]] = []
        for module_name, module in layer.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        self.names.append(f"{module_name}.{name}" if module_name else name)
                        self._held.append((held, name))

    def tensors(self) -> list[Tensor]:
        """Return them, [...] each."""
        return [held[name] for held, name in self._held]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a layer besides its input, taken apart.

    Attributes:
        tensors: among them, [...] each, in their order.
        rest: all of them in their order, None in the place of a tensor.
        names: of those that have one; the others come first.
    """

    tensors: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Take a call apart; of what it consists of, tuples are looked into and nothing else."""
        tensors: list[Tensor] = []
        rest = tuple(_apart(value, tensors) for value in (*args, *kwargs.values()))
        return cls(tuple(tensors), rest, tuple(kwargs))

    def fits(self, other: Call) -> bool:
        """Return whether code that was made for the other call runs this one."""
        return (
            self.names == other.names
            and self.rest == other.rest  # of the other one plain values, so this is an answer
            and all(
                a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
                for a, b in zip(self.tensors, other.tensors, strict=True)
            )
        )

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors, [...] each."""
        left = iter(tensors)
        values = tuple(_together(value, left) for value in self.rest)
        unnamed = len(values) - len(self.names)
        return values[:unnamed], dict(zip(self.names, values[unnamed:], strict=True))


class _Tensor:
    """Mark of the place of a tensor."""


_A_TENSOR = _Tensor()


def _apart(value: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401 - an argument of any model
    if isinstance(value, Tensor):
        tensors.append(value)
        return _A_TENSOR
    if type(value) is tuple:
        return tuple(_apart(inner, tensors) for inner in value)
    return value if value is None or isinstance(value, int | float | str) else _Other(value)


@dataclass(frozen=True, slots=True)
class _Other:
    """An argument that may hold anything: nothing is compiled for it."""

    value: Any


def _together(value: Any, tensors: Any) -> Any:  # noqa: ANN401
    if value is _A_TENSOR:
        return next(tensors)
    if isinstance(value, _Other):
        raise NotCompiled(f"is given a {type(value.value).__name__}")
    if type(value) is tuple:
        return tuple(_together(inner, tensors) for inner in value)
    return value


@dataclass(frozen=True, slots=True)
class Traced:
    """Computation of a layer for inputs of one shape.

    Attributes:
        text: equal for layers that compute the same.
        module: that computes it, of torch.fx.
        inputs: of the layer that was traced.
    """

    text: str
    module: Any
    inputs: tuple[Tensor, ...]


def trace(
    layer: nn.Module,
    forward: Callable[..., Any],
    hidden: Tensor,
    call: Call,
    keys: DropoutKeys | None,
) -> Traced:
    """Trace a layer on paper.

    Args:
        layer: of the decoder.
        forward: its own.
        hidden: an input, [rows, tokens, hidden].
        call: its other arguments.
        keys: of its dropouts, which know the tokens of `hidden`; None: nothing drops.

    Raises:
        NotCompiled: it cannot be.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    places = Places(layer)
    names, count = places.names, len(places.names)
    drawn = () if keys is None else (keys.tokens(hidden.device),)

    def run(read: Tensor, *flat: Tensor) -> tuple[Tensor]:
        own, given = flat[:count], flat[count : count + len(call.tensors)]
        args, kwargs = call.with_tensors(given)
        with nn.utils.stateless._reparametrize_module(layer, dict(zip(names, own, strict=True))):
            if keys is None:
                made = forward(read, *args, **kwargs)
            else:
                with keys.known(flat[-1]):
                    made = forward(read, *args, **kwargs)
        return (made[0] if isinstance(made, tuple) else made,)

    inputs = (hidden, *places.tensors(), *call.tensors, *drawn)
    try:
        with torch.enable_grad():
            module = make_fx(run, tracing_mode="fake", pre_dispatch=True)(*inputs)
    except Exception as error:
        # Code of any model, on tensors without values: it may raise anything.
        raise NotCompiled(f"cannot be traced ({_first_line(error)})") from error
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise NotCompiled("computes with a tensor that it is not given")
    if any(_draws(node) for node in module.graph.nodes):
        raise NotCompiled("drops units of its own")
    told = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in inputs[1:]]
    return Traced(f"{module.code}\n{told}", module, inputs)


def _draws(node: Any) -> bool:  # noqa: ANN401 - of torch.fx
    """Return whether an operator draws numbers; attention has a dropout that is mostly 0."""
    name = str(node.target)
    if "scaled_dot_product" in name:
        given = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return bool(given)
    return node.op == "call_function" and any(word in name for word in _DRAWS)


def compiled(traced: Traced) -> Code:
    """Compile what was traced, forward and backward, and run both once.

    Raises:
        NotCompiled: Inductor or what it needs fails.
    """
    from torch._inductor.compile_fx import compile_fx

    inputs = [_like(tensor) for tensor in traced.inputs]
    try:
        with torch.enable_grad():
            code: Any = compile_fx(traced.module, inputs, config_patches=dict(_OPTIONS))
            # A backward may be compiled when it runs first.
            made = code(*inputs)[0]
            made.backward(torch.zeros_like(made))
    except Exception as error:
        # A compiler of any version, run as a process: it may raise anything.
        raise NotCompiled(f"cannot be compiled ({_first_line(error)})") from error
    return code  # type: ignore[no-any-return]


def _like(tensor: Tensor) -> Tensor:
    """Return a leaf for an input: the same values, without a gradient of anybody else's."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _first_line(error: BaseException) -> str:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {said}"[:300]


def why_not(device: torch.device) -> str:
    """Return why nothing can be compiled for a device here; "" if it can."""
    if device.type == "cuda":
        from importlib.util import find_spec

        if find_spec("triton") is None:
            return "Triton is not installed"
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None or shutil.which(compiler) is None:
            return "there is no C compiler (gcc or clang), which Triton needs for its launches"
    else:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # noqa: BLE001 - torch's own, of several kinds
            return f"there is no C++ compiler, which Inductor needs ({_first_line(error)})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "the headers of Python are not installed, which compiled code needs"
    return ""


def use_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Have Inductor keep what it compiles where the next process of this kind finds it.

    That is below the pod's run directory, and without one in the user's cache; of torch's version
    and this kind of machine. Files there are code that this process runs, so a folder of
    another user, or that others may write, is not used.

    Returns:
        the folder; None: somebody chose another one, or it cannot be used.
    """
    os.environ.setdefault(_ONE_PROCESS, "1")
    if _CACHE in os.environ:
        return None
    root = environ.get(ENV_RUN_DIR)
    of_user = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    above = Path(root) if root and Path(root).is_dir() else Path(of_user, "windrow")
    folder = above / "compiled-layers" / f"torch-{torch.__version__}-{platform.machine()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        at = folder.stat()
    except OSError as error:
        log.info("compiled layers are not kept for later processes: %s", error)
        return None
    if at.st_uid != os.getuid() or at.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.info("compiled layers are not kept in %s, which others may write", folder)
        return None
    os.environ[_CACHE] = str(folder)
    return folder


def within(limit_s: float, work: Callable[[], Code], alive: Callable[[], None]) -> Code:
    """Compile on a thread of its own, and return what it has made within a time.

    The thread has the priority and the cores of the calling one: a worker beside decode runs behind
    everything else, and loads on the core that decode needs least.

    Args:
        limit_s: how long it may take.
        work: what to do; it touches nothing that a later tasklet uses, for it goes on where it is
            too late, and nobody takes what it makes.
        alive: called now and then meanwhile.

    Raises:
        NotCompiled: it takes longer, or is not possible.
    """
    found: list[Code] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - the calling thread raises it
            failed.append(error)

    thread = threading.Thread(target=run, name="compile-layers", daemon=True)
    thread.start()
    until_s = time.monotonic() + limit_s
    while thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
        thread.join(min(_ALIVE_S, left_s))
        alive()
    if failed:
        raise failed[0]
    if not found:
        raise NotCompiled("is still being compiled after the time that it may take")
    return found[0]
