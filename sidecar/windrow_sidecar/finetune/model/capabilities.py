"""Try whether a model's layers can run on token windows, on one layer of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.layer_calls import LayerCall, UnknownMask
from windrow_sidecar.finetune.model.structure import has_own_dropout, in_mode
from windrow_sidecar.finetune.model.window_attention import SUPPORTED, looking_at_itself
from windrow_sidecar.finetune.tasklets import TokenWindow

if TYPE_CHECKING:
    from windrow_sidecar.finetune.model.decoder_stack import DecoderStack

_ATTENTION = "transformers' attention functions"
# Windows of the probe's tokens.
_WINDOWS = (TokenWindow(0, 4), TokenWindow(4, 5), TokenWindow(5, 6))


def try_windows(stack: DecoderStack, probe: Tensor) -> tuple[bool, str]:
    """Return (whether layers apply dropout of their own, why they cannot run on windows or "").

    `probe`: token ids, int64 [1, tokens], on the model's device. The second leaves the first out of
    account. Hybrids mix layers of attention with others that carry a state from token to token, so
    what is true of one layer says nothing about one of another kind.
    """
    kinds = one_of_each_kind(stack.layers)
    own_dropout = any(_drops_units(stack, probe, index) for index in kinds)
    if stack.config._attn_implementation not in SUPPORTED:
        return own_dropout, f"its attention is {stack.config._attn_implementation}"
    why = next(filter(None, (_refused(stack, probe, index) for index in kinds)), "")
    return own_dropout, why


def one_of_each_kind(layers: Sequence[nn.Module]) -> list[int]:
    """Return the first layer of each kind: of those that consist of the same modules."""
    first: dict[tuple[tuple[str, type[nn.Module]], ...], int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(tuple((name, type(m)) for name, m in layer.named_modules()), index)
    return list(first.values())


def _drops_units(stack: DecoderStack, probe: Tensor, index: int) -> bool:
    layer = stack.layers[index]
    at = stack.begin(probe)
    call, hidden = at.calls[index], at.inputs[0]
    with (
        stack.around_layer.forward(index),
        in_mode(layer, training=True),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        return has_own_dropout(lambda: layer(hidden, *call.args, **call.kwargs))


def sees_before(
    stack: DecoderStack, index: int, hidden: Tensor, call: LayerCall, begin: int
) -> bool:
    """Return whether a layer's output from token `begin` on depends on earlier tokens.

    Its gradient tells: it is exactly zero behind a mask, in any type, so nothing has to be judged
    by a tolerance, in which a layer that changes little would hide.

    Args:
        stack: of the layer.
        index: of the layer.
        hidden: that it reads, [1, tokens, hidden].
        call: what else it is given.
        begin: a token.
    """
    draw = torch.Generator().manual_seed(1)
    rows = hidden.detach().clone().requires_grad_()
    with torch.enable_grad(), stack.around_layer.forward(index):
        out = stack.layers[index](rows, *call.args, **call.kwargs)
        made = (out[0] if isinstance(out, tuple) else out)[:, begin:]
        noise = torch.randn(made.shape, generator=draw).to(made)
        (seen,) = torch.autograd.grad(made, rows, noise)
    return bool(seen[:, :begin].count_nonzero())


def _refused(stack: DecoderStack, probe: Tensor, index: int) -> str:
    """Return why a layer cannot run on windows: tokens mix outside attention, or results differ."""
    store = TorchBoundaries()
    whole, parts = stack.begin(probe), stack.begin(probe)
    hidden = whole.inputs[0]
    assert hidden is not None
    with looking_at_itself(stack.config):
        if sees_before(stack, index, hidden, whole.calls[index], _WINDOWS[0].end):
            return f"layer {index} looks at tokens other than by {_ATTENTION}"
    for at in (whole, parts):
        at.inputs[index] = hidden
    stack.forward(whole, index, whole.whole, store, learn=False)
    try:
        for window in _WINDOWS:
            stack.forward(parts, index, window, store, learn=False)
    except (UnknownMask, RuntimeError, ValueError, TypeError, LookupError) as error:
        return f"a layer does not run on a part of a row ({error})"
    expected, found = whole.inputs[index + 1], parts.inputs[index + 1]
    assert expected is not None
    assert found is not None
    same = torch.allclose(expected, found, rtol=1e-2, atol=1e-3)
    return "" if same else f"layer {index} makes something else of parts of a row"
