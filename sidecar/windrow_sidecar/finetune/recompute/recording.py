"""Record the operations of a layer's forward on fake tensors.

Operations are seen below autograd (a dispatch mode), what autograd saves by its pack hooks. Nothing
is computed and no memory is taken: real weights and arguments enter as stand-ins of their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from windrow_sidecar.finetune.model.layer_program import program_of
from windrow_sidecar.finetune.model.token_dropout import TokenDropout
from windrow_sidecar.finetune.model.window_attention import looking_on_paper
from windrow_sidecar.finetune.recompute.dropouts import AtDropouts
from windrow_sidecar.finetune.recompute.extraction import Extractor, TensorLayout, extractors_of
from windrow_sidecar.finetune.recompute.layer_graph import (
    LayerGraph,
    Op,
    OpKind,
    Value,
    flops_of,
    is_mutable,
    kind_of,
    moved_bytes_of,
    own_bytes,
)

# What operations raise, torch's own and those of libraries, that know no stand-ins.
_NOT_ON_PAPER = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


class CannotRecord(ValueError):
    """The layer's operations depend on its data, or on something that has no fake tensor."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument of a recorded call: the value with that index."""

    value: int


@dataclass(frozen=True, slots=True)
class OpCall:
    """A recorded call that can run again: `function` with flat arguments, some of them `Ref`s.

    `mutates`: it writes into its first argument, which must be a copy then. `random_point`: it
    draws numbers, and this dropout's generator state comes first.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    outputs: tuple[int | None, ...]  # by position among the results; None: no tensor
    mutates: bool
    random_point: int | None
    plain_args: bool = False  # the leaves are its arguments, in their order


@dataclass(frozen=True, slots=True)
class Recording:
    """A layer's graph, with the calls that run parts of it again.

    Attributes:
        graph: for the decision.
        calls: of `graph.ops`, in the same order. None: not an operation of torch but the taking of
            signs.
        there: values that need not be kept: (True, i) is the i-th tensor of the layer (parameters,
            then buffers), (False, i) the i-th leaf of its call's arguments.
        takes: how values that can be kept are had from what autograd hands over, by value.
        looks: of the tensors that autograd saves, in order: another forward must show the same.
        signs: of those of which backward reads just the sign: by position, the value of the bits.
        storages: the name of each value's storage, and how many bytes each has.
    """

    graph: LayerGraph
    calls: tuple[OpCall | None, ...]
    there: dict[int, tuple[bool, int]]
    takes: dict[int, Extractor]
    layouts: tuple[TensorLayout, ...]
    signs: dict[int, int]
    storages: tuple[int, ...]
    storage_bytes: dict[int, int]

    @property
    def constants(self) -> Hashable:
        """Operations with all that is written into them; layers that differ here are not alike."""
        return tuple(
            (op.name, *(str(x) for x in (call.leaves if call else ()) if not isinstance(x, Ref)))
            for op, call in zip(self.graph.ops, self.calls, strict=True)
        )


def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Record what `layer(*args, **kwargs)` computes with gradients enabled.

    Args:
        layer: in the mode (training) in which it will run.
        args: the first one is its input.
        kwargs: as the model calls it.

    Raises:
        CannotRecord: a mixture of experts, for example.
    """
    leaf = args[0].detach().requires_grad_(args[0].requires_grad)
    args = (leaf, *args[1:])
    for module in layer.modules():
        if isinstance(module, TokenDropout):
            module.prepare(leaf.device)  # else it would remember a stand-in of its keys
    if (program := program_of(layer)) is not None:
        program.refresh()  # else its copies would be made of stand-ins
    with closing(_Scribe(layer, args, kwargs)) as scribe:
        try:
            with (
                FakeTensorMode(allow_non_fake_inputs=True),
                torch.enable_grad(),
                looking_on_paper(),
                torch.random.fork_rng(devices=[]),
                AtDropouts(scribe.inside_dropout),
                torch.autograd.graph.saved_tensors_hooks(scribe.pack, scribe.unpack),
                scribe,
            ):
                out = layer(*args, **kwargs)
        except _NOT_ON_PAPER as error:
            raise CannotRecord((str(error) or type(error).__name__).splitlines()[0]) from error
        return scribe.finish(out[0] if isinstance(out, tuple) else out)


class _Scribe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that numbers every tensor and records every operation."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: list[Value] = []
        self._looks: list[TensorLayout] = []
        self._ops: list[Op] = []
        self._calls: list[OpCall | None] = []
        self._known: dict[TensorLayout, int] = {}
        self._alive: list[Tensor] = []  # so that no storage's name is used twice
        self._needs: list[int] = []
        self._there: dict[int, tuple[bool, int]] = {}
        self._unpacked: list[int] = []
        self._point: int | None = None
        self._drawn = False
        for i, tensor in enumerate(layer_tensors(layer)):
            self._there.setdefault(self._number(tensor, there=True), (True, i))
        for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, Tensor):
                self._there.setdefault(self._number(leaf, there=True), (False, i))

    @contextmanager
    def inside_dropout(self, point: int) -> Iterator[None]:
        """Know that numbers which are drawn belong to that dropout."""
        self._point, self._drawn = point, False
        yield
        self._point = None

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an OpOverload
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty_like.default:
            # Of its argument it needs the shape only: let it not hang on what computes that.
            func, args, kwargs = torch.ops.aten.empty_strided.default, *_as_strided(args[0], kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        used = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [self._number(tensor) for tensor in used]
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        made = [r for r in results if isinstance(r, Tensor)]
        if not made:
            return result
        mutates = is_mutable(func)
        if mutates:
            self._forget_storage(made[0])
        known = len(self._values)
        numbers = [self._number(r) if isinstance(r, Tensor) else None for r in results]
        fresh = tuple(n for n in numbers if n is not None and n >= known)
        if not fresh:  # the same tensor under another name
            return result
        point, kind = self._randomness(func, kind_of(func, used, made), made[0])
        self._ops.append(
            Op(
                str(func),
                kind,
                tuple(inputs),
                fresh,
                flops_of(func, kind, args, kwargs, result),
                moved_bytes_of(kind, used, made),
            )
        )
        refs = iter(inputs)
        flat = tuple(Ref(next(refs)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        is_plain = not kwargs and len(args) == len(flat) and not any(map(_has_parts, args))
        self._calls.append(OpCall(func, flat, spec, tuple(numbers), mutates, point, is_plain))
        return result

    def pack(self, tensor: Tensor) -> int:
        """Note that autograd saves `tensor`."""
        self._needs.append(self._number(tensor))
        return len(self._needs) - 1

    def unpack(self, position: int) -> Tensor:
        """Tell which one is asked for; its values do not matter here."""
        self._unpacked.append(position)
        return self._alive[self._needs[position]]

    def finish(self, out: Tensor) -> Recording:
        """Close the books: signs, and what can be kept."""
        layouts = tuple(self._looks[value] for value in self._needs)
        signs = self._add_signs(out)
        graph = LayerGraph(tuple(self._values), tuple(self._ops), tuple(self._needs))
        takes = extractors_of(graph, self._looks, {v: p for p, v in signs.items()}, layouts)
        values = tuple(
            Value(value.n_bytes, value.there, i in takes) for i, value in enumerate(self._values)
        )
        graph = LayerGraph(values, graph.ops, graph.needs)
        storage_bytes = {
            TensorLayout.of(t).storage: t.untyped_storage().nbytes() for t in self._alive
        }
        return Recording(
            graph,
            tuple(self._calls),
            self._there,
            takes,
            layouts,
            signs,
            tuple(layout.storage for layout in self._looks),
            storage_bytes,
        )

    def close(self) -> None:
        """Hold no tensor any more.

        Graphs of stand-ins hold this object by its hooks, and it holds them: a circle that Python's
        collector does not see, and in it the real arguments of the call.
        """
        self._alive.clear()

    def _number(self, tensor: Tensor, *, there: bool = False) -> int:
        layout = TensorLayout.of(tensor)
        if layout not in self._known:
            self._known[layout] = len(self._values)
            self._values.append(Value(own_bytes(tensor), there))
            self._looks.append(layout)
            self._alive.append(tensor)
        return self._known[layout]

    def _forget_storage(self, tensor: Tensor) -> None:
        """Forget this storage: later uses mean the new content."""
        storage = TensorLayout.of(tensor).storage
        self._known = {layout: v for layout, v in self._known.items() if layout.storage != storage}

    def _randomness(
        self,
        func: Any,  # noqa: ANN401
        kind: OpKind,
        made: Tensor,
    ) -> tuple[int | None, OpKind]:
        if torch.Tag.nondeterministic_seeded not in func.tags or kind is OpKind.GEMM:
            return None, kind
        # Only the host's generator is set back (`dropouts.random_state`).
        if self._point is None or self._drawn or made.device.type != "cpu":
            return None, OpKind.NEVER
        self._drawn = True
        return self._point, OpKind.CHEAP

    def _add_signs(self, out: Tensor) -> dict[int, int]:
        """Return results that only a ReLU's backward reads: one bit an element is enough."""
        signs: dict[int, int] = {}
        for position in self._read_by_relu(out):
            value = self._needs[position]
            bits = len(self._values)
            n_bytes = -(-self._alive[value].numel() // 8)
            self._values.append(Value(n_bytes))
            self._looks.append(self._looks[value])
            moved = self._values[value].n_bytes + n_bytes
            self._ops.append(Op("signs", OpKind.CHEAP, (value,), (bits,), 0, moved))
            self._calls.append(None)
            self._needs[position] = signs[position] = bits
        return signs

    def _read_by_relu(self, out: Tensor) -> list[int]:
        unseen, seen = [out.grad_fn], set()
        self._unpacked.clear()
        while unseen:
            node = unseen.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name() == "ReluBackward0":
                _ = node._saved_result  # type: ignore[attr-defined]
            unseen += [following for following, _ in node.next_functions]
        return sorted(set(self._unpacked))


def _has_parts(value: Any) -> bool:  # noqa: ANN401 - an argument
    return isinstance(value, tuple | list | dict)


def _as_strided(tensor: Tensor, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `empty_strided` that match `empty_like(tensor, **kwargs)`."""
    like = torch.ops.aten.empty_like.default(tensor, **kwargs)
    return (tuple(like.shape), like.stride()), {"dtype": like.dtype, "device": like.device}


def layer_tensors(layer: nn.Module) -> list[Tensor]:
    """Return parameters, buffers, then what its program has, [...] each, in order; not copied."""
    program = program_of(layer)
    own = () if program is None else program.tensors.values()
    return [*layer.parameters(), *layer.buffers(), *own]


class LayerTensors:
    """The tensors of a layer, as `layer_tensors` has them, each looked up when it is asked for.

    The walk through the modules is done once; what they hold may change (buffers that move).

    Args:
        layer: whose modules stay the same.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        modules = dict(layer.named_modules())
        for names, held in ((layer.named_parameters(), True), (layer.named_buffers(), False)):
            for path, _ in names:
                owner, _, name = path.rpartition(".")
                module = modules[owner]
                self._places.append((module._parameters if held else module._buffers, name))
        if (program := program_of(layer)) is not None:
            self._places += [(program.tensors, name) for name in program.tensors]

    def __getitem__(self, index: int) -> Tensor:
        """Return the tensor [...] of that place."""
        owner, name = self._places[index]
        tensor: Tensor = owner[name]
        return tensor
