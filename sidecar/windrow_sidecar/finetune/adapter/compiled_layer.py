"""Run decoder layers by compiled code where there is some for a micro-batch, and eagerly elsewhere.

Code is made before a job's first tasklet, for the shapes of its micro-batches. It runs whole rows
with the adapter. Token windows, layers under a plan that keeps a part of their activations, and
layers without their adapter run the model's own modules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.compute.queued import to_device
from windrow_sidecar.finetune.adapter.layer_compiler import (
    Call,
    Code,
    NotCompiled,
    Places,
    Traced,
    compiled,
    trace,
    use_cache,
    why_not,
    within,
)
from windrow_sidecar.finetune.model.boundaries import Activations
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import ProgramName, install_program
from windrow_sidecar.finetune.model.structure import in_mode
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys, TokenDropout, places
from windrow_sidecar.finetune.model.window_attention import is_looking_back
from windrow_sidecar.finetune.tasklets import PackedLines, TokenWindow

log = logging.getLogger(__name__)

# Compiling is given up after so long: a code takes half a minute of one core, and there are one or
# two kinds of layers in a model.
LIMIT_S = 600.0
# Kinds of layers of a model, and shapes of a job's micro-batches.
MOST_KINDS, MOST_SHAPES = 4, 4
# Code of this process, by what it computes: jobs of one adapter share it.
_made: dict[str, Code] = {}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a micro-batch.

    Attributes:
        lines: of its tensors.
        width: tokens of a line.
        packed: whether rows stand one after the other in a line, kept apart by a mask.
    """

    lines: int
    width: int
    packed: bool


@dataclass(slots=True)
class _Made:
    """Code of one layer for one shape, and the call that it was made for."""

    code: Code
    call: Call


@dataclass(slots=True, eq=False)
class CompiledLayer:
    """Runs one layer (see `LayerProgram`).

    Args:
        layer: of transformers, with its adapter.
        own: its own forward.
        disabled: whether the adapter is switched off now.
        keys: of its dropouts; None: it has none.

    Attributes:
        codes: by the shape of its input.
        ran: how often compiled code has run it forward.
    """

    layer: nn.Module
    own: Callable[..., Any]
    disabled: Callable[[], bool]
    keys: DropoutKeys | None
    name: ProgramName = "compiled"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[torch.Size, _Made] = field(default_factory=dict)
    ran: int = 0
    _places: Places = field(init=False)

    def __post_init__(self) -> None:
        """Look up where its tensors are."""
        self._places = Places(self.layer)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the layer's output, [rows, tokens, hidden], for its input of the same shape."""
        made = self.codes.get(hidden_states.shape)
        if made is None or type(hidden_states) is not Tensor or self._runs_otherwise():
            return self.own(hidden_states, *args, **kwargs)
        call = Call.of(args, kwargs)
        if not call.fits(made.call):
            return self.own(hidden_states, *args, **kwargs)
        self.ran += 1
        drawn = () if self.keys is None else (self.keys.tokens(hidden_states.device),)
        return made.code(hidden_states, *self._places.tensors(), *call.tensors, *drawn)[0]

    def _runs_otherwise(self) -> bool:
        """Return whether what runs now is not what was compiled."""
        return (
            is_looking_back()
            or self.disabled()
            or (self.keys is not None and not self.layer.training)
            # A plan says what is kept of the model's own operators, one by one.
            or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        )

    def refresh(self) -> None:
        """Do nothing: it has no tensors of its own."""

    def release(self) -> None:
        """Do nothing: it has no memory of its own."""


def use_compiled(
    stack: DecoderStack,
    shapes: Sequence[Shape],
    *,
    in_turns: bool = False,
    limit_s: float = LIMIT_S,
    alive: Callable[[], None] = lambda: None,
) -> str:
    """Let the stack's layers run by compiled code for micro-batches of these shapes.

    Called before a job's first tasklet; compiles what no process of this kind has compiled yet.

    Args:
        stack: its model has the adapter already, and nothing runs.
        shapes: the one that most micro-batches have first.
        in_turns: whether weights are not where they are before a layer runs.
        limit_s: how long compiling may take.
        alive: called now and then meanwhile.

    Returns:
        for which shapes, and why, layers run eagerly; "": for none of these.
    """
    why = why_not(stack.device) or _refused(in_turns=in_turns)
    if why:
        return _told(f"layers run eagerly, not compiled: {why}")
    use_cache()
    programs = [_program(layer) for layer in stack.layers]
    compiling = _Compiling(stack, programs, limit_s, alive)
    done: list[str] = []
    try:
        for shape in shapes[:MOST_SHAPES]:
            compiling.compile(shape)
            done.append(f"{shape.lines} x {shape.width}")
    except NotCompiled as error:
        why = str(error)
    except Exception as error:
        # Code of any model, which runs on other shapes than the probe here.
        log.exception("layers are not compiled")
        why = f"{type(error).__name__}: {error}"
    if not done:
        return _told(f"layers run eagerly, not compiled: {why}")
    for layer, program in zip(stack.layers, programs, strict=True):
        install_program(layer, program)
    sizes = ", ".join(done)
    log.info("layers run compiled for micro-batches of %s tokens", sizes)
    if not why:
        return ""
    return _told(f"layers run compiled for {sizes} tokens, eagerly for others: {why}")


def _told(why: str) -> str:
    log.info("%s", why)
    return why


class _Compiling:
    """Compiles the layers of a stack, one shape after the other.

    Args:
        stack: whose layers.
        programs: of its layers; they get the code.
        limit_s: how long all of it may take.
        alive: called now and then meanwhile.
    """

    def __init__(
        self,
        stack: DecoderStack,
        programs: Sequence[CompiledLayer],
        limit_s: float,
        alive: Callable[[], None],
    ) -> None:
        self._stack, self._programs, self._alive = stack, programs, alive
        self._until_s = time.monotonic() + limit_s

    def compile(self, shape: Shape) -> None:
        """Give all layers code for a shape, or none of them.

        Raises:
            NotCompiled: a layer cannot have any, or the time is over.
        """
        at, kinds = self._began(shape), 0
        found: list[_Made] = []
        hidden = at.inputs[0]
        assert hidden is not None
        read = hidden.detach().requires_grad_()
        with in_mode(self._stack.model, training=True):
            for n, program in enumerate(self._programs):
                call = Call.of(at.calls[n].args, at.calls[n].kwargs)
                try:
                    traced = trace(program.layer, program.own, read, call, program.keys)
                    key = f"{self._stack.device} {call.rest} {traced.text}"
                    if key not in _made:
                        kinds += 1
                        _made[key] = self._new(program, traced, read, call, kinds)
                except NotCompiled as error:
                    raise NotCompiled(f"layer {n} {error}") from error
                found.append(_Made(_made[key], call))
                self._alive()
        for program, made in zip(self._programs, found, strict=True):
            program.codes[read.shape] = made

    def _new(
        self, program: CompiledLayer, traced: Traced, read: Tensor, call: Call, kinds: int
    ) -> Code:
        if kinds > MOST_KINDS:
            raise NotCompiled(f"is of a kind more than {MOST_KINDS}")
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise NotCompiled("comes after the time that compiling may take")
        code = within(left_s, lambda: compiled(traced), self._alive)
        if why := self._differs(program, code, read, call):
            raise NotCompiled(why)
        return code

    def _began(self, shape: Shape) -> Activations:
        """Return a micro-batch of that shape, of rows that fill its lines."""
        stack = self._stack
        ids = torch.arange(shape.lines * shape.width).view(shape.lines, shape.width)
        ids = to_device(ids % int(stack.config.vocab_size), stack.device)
        half = shape.width // 2
        lines = PackedLines(((half, shape.width - half),) * shape.lines, shape.width)
        rows = 2 * shape.lines if shape.packed else shape.lines
        for keys in {p.keys for p in self._programs if p.keys is not None}:
            window = TokenWindow(0, shape.width)
            keys.at(0, 0, range(rows), window, lines if shape.packed else None)
        with in_mode(stack.model, training=True):
            if not shape.packed:
                return stack.begin(ids)
            row_of, positions = (to_device(tensor, stack.device) for tensor in places(lines))
            return stack.begin(ids, positions=positions, row_of=row_of)

    def _differs(self, program: CompiledLayer, code: Code, read: Tensor, call: Call) -> str:
        """Run a layer forward and back both ways; return how they differ, or ""."""
        own = Places(program.layer).tensors()
        drawn = () if program.keys is None else (program.keys.tokens(read.device),)
        learns = [read, *(tensor for tensor in own if tensor.requires_grad)]
        found = []
        for is_compiled in (True, False):
            with torch.enable_grad():
                if is_compiled:
                    made = code(read, *own, *call.tensors, *drawn)[0]
                else:
                    args, kwargs = call.with_tensors(call.tensors)
                    out = program.own(read, *args, **kwargs)
                    made = out[0] if isinstance(out, tuple) else out
                grads = torch.autograd.grad(made, learns, made.detach(), allow_unused=True)
            found.append([made.detach(), *(g for g in grads if g is not None)])
        ours, theirs = found
        # Gradients of an adapter in fp32 are of activations in the type of the layer's input.
        close = partial(_close, rounds=torch.finfo(read.dtype).eps)
        if len(ours) != len(theirs) or not all(map(close, ours, theirs)):
            return "gives another result compiled than as the model computes it"
        return ""


def _refused(*, in_turns: bool) -> str:
    """Return why layers are not compiled; "" where nothing is against it.

    Compiling is Python for the most part: in a thread of the engine's process it would hold up
    decode, whatever its priority.
    """
    if threading.current_thread() is not threading.main_thread():
        return "they are compiled in a process of the worker's own, and this is decode's"
    if in_turns:
        return "layers take turns in memory, or their weights are made when they run"
    return ""


def _program(layer: nn.Module) -> CompiledLayer:
    modules = list(layer.modules())
    adapted = next((m for m in modules if hasattr(m, "disable_adapters")), None)
    disabled = (lambda: False) if adapted is None else lambda: bool(adapted.disable_adapters)
    keys = {m._keys for m in modules if isinstance(m, TokenDropout)}
    return CompiledLayer(layer, layer.forward, disabled, next(iter(keys), None))


def _close(ours: Tensor, theirs: Tensor, *, rounds: float) -> bool:
    """Return whether two results, [...] each, differ by rounding: half of the digits are equal."""
    largest = float(theirs.abs().max())
    return torch.allclose(ours, theirs, rtol=0.0, atol=rounds**0.5 * max(largest, 1e-30))
