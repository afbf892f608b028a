"""Which parts a causal language model has, found by how it behaves and not by its name.

The layers are the one list of modules as long as the configuration says. How the model calls each
of them is recorded while it runs its own forward with layers that only listen; so rotary tables,
masks, scaled embeddings and learned positions come from the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.windows.calls import LayerCall


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


def find_norm(decoder: nn.Module, layers: Sequence[nn.Module], probe: Tensor) -> nn.Module:
    """Return the one module between the last layer and the head; an identity where there is none.

    Raises:
        UserError: there is more than one.
    """
    seen: list[tuple[nn.Module, Tensor, Any]] = []
    hooks = [
        child.register_forward_hook(lambda m, args, out: seen.append((m, args[0], out)))
        for child in decoder.children()
        if not isinstance(child, nn.ModuleList)
    ]
    last: list[Tensor] = []
    try:
        with _listening(layers, lambda i, hidden, a, k: last.append(hidden)):
            out = decoder(input_ids=probe, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    if last and out is last[-1]:
        return nn.Identity()
    norms = [m for m, given, made in seen if last and given is last[-1] and made is out]
    if len(norms) != 1:
        raise unsupported(decoder, "no single norm stands between layers and head")
    return norms[0]


def record(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    ids: Tensor,
    past: Any = None,  # noqa: ANN401 - a Cache of transformers
    positions: Tensor | None = None,
) -> tuple[Tensor, tuple[LayerCall, ...]]:
    """Return what the first layer would get for `ids` ([rows, width]), and how each is called.

    Args:
        decoder: what the layers stand in.
        layers: as found.
        ids: the tokens.
        past: keys and values that stand before the first token; calls are recorded without them.
        positions: of the tokens, where they do not count from the first of a line.

    Raises:
        UserError: not every layer is called once.
    """
    calls: list[LayerCall] = []
    first: list[Tensor] = []

    def listen(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == 0:
            first.append(hidden)
        free = {k: None if past is not None and v is past else v for k, v in kwargs.items()}
        calls.append(LayerCall(args, free))

    with _listening(layers, listen):
        asked = {} if positions is None else {"position_ids": positions}
        decoder(input_ids=ids, use_cache=False, past_key_values=past, **asked)
    if len(calls) != len(layers):
        raise unsupported(decoder, f"{len(calls)} of {len(layers)} layers are called")
    return first[0], tuple(calls)


def has_own_dropout(layer: Callable[[], Any]) -> bool:
    """Whether a layer computes something else with other random numbers. Uses up torch's seed."""
    torch.manual_seed(1)
    once = layer()
    torch.manual_seed(2)
    again = layer()
    if isinstance(once, tuple):
        once, again = once[0], again[0]
    return not torch.equal(once, again)


def logits_of(model: nn.Module, layers: Sequence[nn.Module], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits that the model makes of its embeddings, past all layers, and those.

    Norm, head, scaling and caps of the model, without the price of a layer.
    """
    embedded: list[Tensor] = []
    with torch.no_grad(), _listening(layers, lambda i, hidden, a, k: embedded.append(hidden)):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits, embedded[0]


def unsupported(model: nn.Module, why: str) -> UserError:
    """Return the error for a model that cannot be run layer by layer."""
    return UserError(
        f"architecture {type(model).__name__} cannot be trained here: {why}",
        field="spec.model.name",
        remedy="Use a decoder-only model that is one stack of layers (Llama, Qwen, Mistral, ...).",
        reason=Reason.MODEL_UNSUPPORTED,
    )


@contextmanager
def asking(model: nn.Module) -> Iterator[None]:
    """Hold while a model is asked for its structure: one that fails then cannot be trained here.

    Raises:
        UserError: instead of what its own code raises.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        why = str(error).partition("\n")[0]
        raise unsupported(
            model, f"it fails when its layers are called one by one ({why})"
        ) from error


@contextmanager
def _listening(
    layers: Sequence[nn.Module], listen: Callable[[int, Tensor, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Let every layer hand its input through and tell `listen` how it was called."""

    def listener(index: int) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            listen(index, hidden_states, args, kwargs)
            return hidden_states

        return forward

    for index, layer in enumerate(layers):
        layer.forward = listener(index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
