"""Find the parts of a causal language model (layers, norm, head) by running it.

The layers are the one list of modules as long as the configuration says. How the model calls each
of them is recorded while it runs its own forward with layers that only listen; so rotary tables,
masks, scaled embeddings and learned positions come from the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.compute.host_device import out_of_memory
from windrow_sidecar.finetune.model.around import AroundLayer
from windrow_sidecar.finetune.model.layer_calls import LayerCall


def find_layers(decoder: nn.Module, config: Any) -> Sequence[nn.Module]:  # noqa: ANN401
    """Return the decoder's layers.

    Raises:
        UserError: there is no such list, or more than one.
    """
    depth = getattr(config, "num_hidden_layers", None)
    lists = [c for c in decoder.children() if isinstance(c, nn.ModuleList) and len(c) == depth]
    if len(lists) != 1:
        raise unsupported(decoder, f"no single list of {depth} layers was found")
    return list(lists[0])


def what_layers_return(
    decoder: nn.Module, layers: Sequence[nn.Module], probe: Tensor, around: AroundLayer
) -> int:
    """Return the length of the tuple that the first layer returns; 0: a tensor.

    It runs once, on `probe` ([rows, width]). All layers are called by the same loop of the model's,
    so all of them return the same.
    """
    first: list[tuple[Tensor, LayerCall]] = []

    def listen(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.append((hidden, LayerCall(args, kwargs)))
        raise _Heard

    with suppress(_Heard), _listening(layers, listen):
        decoder(input_ids=probe, use_cache=False)
    if not first:
        raise unsupported(decoder, f"0 of {len(layers)} layers are called")
    hidden, call = first[0]
    with around.forward(0):
        made = layers[0](hidden, *call.args, **call.kwargs)
    return len(made) if isinstance(made, tuple) else 0


class _Heard(Exception):
    """Raised once the first layer was called, to end the forward."""


def follows_longest(config: Any) -> bool:  # noqa: ANN401
    """Return whether position tables depend on the longest row (dynamic RoPE, LongRoPE)."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind_of_layer = [value for value in rope.values() if isinstance(value, dict)]
    kinds = {each.get("rope_type") for each in (rope, *by_kind_of_layer)}
    return not kinds.isdisjoint({"dynamic", "longrope"})


def find_norm(
    decoder: nn.Module, layers: Sequence[nn.Module], probe: Tensor, returned: int = 0
) -> tuple[nn.Module, type[Any]]:
    """Return the module between the last layer and the head, and the decoder's output type.

    A norm, as a rule; an identity where there is none, and several modules as a chain of them. The
    decoder may give what comes out another shape. `probe`: token ids, int64 [1, tokens].

    Raises:
        UserError: there is more than such modules.
    """
    seen: list[tuple[nn.Module, Any, Any]] = []
    last: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:  # noqa: ANN401
        if last:
            seen.append((module, args[0] if args else None, made))

    def listen(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == len(layers) - 1:
            last.append(hidden)

    children = (c for c in decoder.children() if not isinstance(c, nn.ModuleList))
    hooks = [child.register_forward_hook(note) for child in children]
    try:
        with _listening(layers, listen, returned):
            out = decoder(input_ids=probe, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    at, chain = last[-1] if last else None, []
    for module, given, made in seen:
        if _same_memory(given, at):
            chain.append(module)
            at = made
    if not _same_memory(at, out.last_hidden_state):
        raise unsupported(decoder, "there is more than a chain of modules between layers and head")
    norm = chain[0] if len(chain) == 1 else nn.Sequential(*chain)
    return norm, type(out)


def _same_memory(one: Any, other: Any) -> bool:  # noqa: ANN401 - what modules take and return
    """Return whether two tensors share their memory, perhaps in another shape."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def record(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    ids: Tensor,
    past: Any = None,  # noqa: ANN401 - a Cache of transformers
    positions: Tensor | None = None,
    returned: int = 0,
) -> tuple[Tensor, tuple[LayerCall, ...]]:
    """Return the first layer's input for `ids` ([rows, width]), and each layer's arguments.

    Args:
        decoder: what the layers stand in.
        layers: as found.
        ids: the tokens.
        past: keys and values that stand before the first token; calls are recorded without them.
        positions: of the tokens, where they do not count from the first of a line.
        returned: by a layer (see `what_layers_return`).

    Raises:
        UserError: not every layer is called once.
    """
    calls: list[LayerCall] = []
    first: list[Tensor] = []

    def listen(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == 0:
            first.append(hidden)

        def free(value: Any) -> Any:  # noqa: ANN401
            return None if past is not None and value is past else value

        named = {name: free(value) for name, value in kwargs.items()}
        calls.append(LayerCall(tuple(map(free, args)), named))

    with _listening(layers, listen, returned):
        asked = {} if positions is None else {"position_ids": positions}
        decoder(input_ids=ids, use_cache=False, past_key_values=past, **asked)
    if len(calls) != len(layers):
        raise unsupported(decoder, f"{len(calls)} of {len(layers)} layers are called")
    return first[0], tuple(calls)


def has_own_dropout(layer: Callable[[], Any]) -> bool:
    """Return whether a layer's output depends on torch's random state. Advances that state.

    What a router draws may change nothing of a few tokens, so drawing numbers is enough.
    """
    torch.manual_seed(1)
    with _Drawing() as drawing:
        once = layer()
    if drawing.found:
        return True
    torch.manual_seed(2)
    again = layer()
    if isinstance(once, tuple):
        once, again = once[0], again[0]
    return not torch.equal(once, again)


# Of torch and of its tensors; dropouts show in what a layer makes.
_DRAW = {
    *("bernoulli", "bernoulli_", "exponential_", "gumbel_softmax", "multinomial", "normal_"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "uniform_"),
}


class _Drawing(TorchFunctionMode):
    """Notes whether numbers are drawn inside."""

    found = False

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.found = self.found or getattr(func, "__name__", "") in _DRAW
        return func(*args, **(kwargs or {}))


def logits_of(
    model: nn.Module, layers: Sequence[nn.Module], ids: Tensor, returned: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the model's logits for its embeddings with all layers skipped, and the embeddings.

    Norm, head, scaling and caps of the model, without the price of a layer. `ids`: int64 [rows,
    tokens]; logits [rows, tokens, vocab], embeddings [rows, tokens, hidden], both without graph.
    """
    embedded: list[Tensor] = []

    def listen(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        embedded.append(hidden)

    with torch.no_grad(), _listening(layers, listen, returned):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits, embedded[0]


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set train or eval mode of all modules inside, and restore each afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


@contextmanager
def standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward by `forward` inside."""
    before = module.__dict__.get("forward")  # of a library that wraps modules
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def unsupported(model: nn.Module, why: str, remedy: str = "") -> UserError:
    """Return the error for a model that cannot be run layer by layer."""
    return UserError(
        f"architecture {type(model).__name__} cannot be trained here: {why}",
        field="spec.model.name",
        remedy=remedy
        or "Use a decoder-only model that is one stack of layers (Llama, Qwen, Mistral, ...).",
        reason=Reason.MODEL_UNSUPPORTED,
    )


@contextmanager
def asking(model: nn.Module) -> Iterator[None]:
    """Turn errors of a model that is being inspected into one UserError.

    Raises:
        UserError: instead of what its own code raises.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Code of any model: it may raise anything.
        if out_of_memory(error):
            raise
        why = str(error).partition("\n")[0]
        raise unsupported(
            model,
            f"it fails when its layers are called one by one ({type(error).__name__}: {why})",
        ) from error


@contextmanager
def _listening(
    layers: Sequence[nn.Module],
    listen: Callable[[int, Tensor, tuple[Any, ...], Any], None],
    returned: int = 0,
) -> Iterator[None]:
    """Make every layer return its input inside, and pass its arguments to `listen`."""

    def listener(index: int) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            listen(index, hidden_states, args, kwargs)
            return (hidden_states, *[None] * (returned - 1)) if returned else hidden_states

        return forward

    with ExitStack() as listening:
        for index, layer in enumerate(layers):
            listening.enter_context(standing_in(layer, listener(index)))
        yield
