"""Attention of a window over everything up to its end, through the model's own attention function.

While `looking_back` holds, transformers' dispatch finds our function in place of the model's. It
remembers the window's keys and values, and calls the model's function on all that came before.
Backward runs that function once more on the same views, so that a window keeps its queries only:
one cache serves all windows of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.finetune.model.key_values import KeyValues
from windrow_sidecar.finetune.tasklets import TokenWindow

NAME, ALONE = "windrow_windows", "windrow_alone"
# The others want their masks in forms of their own.
SUPPORTED = ("sdpa", "eager")

# Of keys, copied for each head of queries; a backward takes about four times as much at a time.
# Small enough to count for nothing, and large enough that a call is worth its launch.
PIECE_BYTES = 4 << 20

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Looking:
    """Which window runs, and what transformers would have called."""

    config: Any
    window: TokenWindow
    key_values: KeyValues
    implementation: str


_looking: ContextVar[_Looking] = ContextVar("looking")


@contextmanager
def looking_back(config: Any, window: TokenWindow, key_values: KeyValues) -> Iterator[None]:  # noqa: ANN401
    """Let the layer that runs inside attend to `key_values` and its own window."""
    _register()
    implementation = config._attn_implementation
    token = _looking.set(_Looking(config, window, key_values, implementation))
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = implementation
        _looking.reset(token)


@contextmanager
def looking_at_itself(config: Any) -> Iterator[None]:  # noqa: ANN401
    """Let each token of a layer that runs inside attend to none but itself."""
    _register()
    implementation = config._attn_implementation
    config._attn_implementation = ALONE
    try:
        yield
    finally:
        config._attn_implementation = implementation


def is_looking_back() -> bool:
    """Whether a layer that runs now runs on a window."""
    return _looking.get(None) is not None


def looking_as_now() -> Callable[[], AbstractContextManager[None]]:
    """Return what lets a layer look back later as it does now: for running it a second time."""
    at = _looking.get(None)
    if at is None:
        return nullcontext
    return lambda: looking_back(at.config, at.window, at.key_values)


@contextmanager
def looking_on_paper() -> Iterator[None]:
    """Let a layer run on stand-ins for tensors: nothing of them gets into the real cache."""
    at = _looking.get(None)
    if at is None:
        yield
        return
    width = at.window.end
    token = _looking.set(replace(at, key_values=KeyValues(width, at.key_values.prefix)))
    try:
        yield
    finally:
        _looking.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Stand in for an attention function of transformers; shapes are theirs."""
    at = _looking.get()
    function = _function_of(module, at.implementation)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # A mask that is plain is made again for the backward: kept, those of all windows would take
        # half of a row's width for each token and layer.
        mask = _causal(at, q) if attention_mask is None else attention_mask
        out: Tensor = function(module, q, k, v, mask, **options)[0]
        return out

    prefix = at.key_values.prefix or (None, None)
    # What the function is given beside the mask may belong to heads (the sinks of GPT-OSS do).
    by_heads = (attention_mask is None or attention_mask.shape[1] == 1) and not any(
        isinstance(option, Tensor) for option in options.values()
    )
    out: Tensor = _OverWindow.apply(query, key, value, *prefix, at, attention, by_heads)
    return out, None


def _attend_alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Return each token's own value, as an attention function of transformers would."""
    del module, key, attention_mask, options
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


class _OverWindow(torch.autograd.Function):
    """Attention of one window; see `KeyValues.settle` for the gradients of keys and values."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
        at: _Looking,
        attention: Attention,
        by_heads: bool,
    ) -> Tensor:
        del prefix_key, prefix_value  # inputs of the graph only: `key_values` has them
        at.key_values.append(key, value, at.window)
        ctx.save_for_backward(query)
        ctx.at, ctx.attention, ctx.by_heads = at, attention, by_heads
        return attention(query, *at.key_values.upto(at.window))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        at: _Looking = ctx.at
        (query,) = ctx.saved_tensors
        key, value = at.key_values.upto(at.window)
        d_query, d_key, d_value = (torch.empty_like(t) for t in (query, key, value))
        for heads, kv_heads in _pieces(query, key, ctx.by_heads):
            inputs = query[:, heads], key[:, kv_heads], value[:, kv_heads]
            leaves = [t.detach().requires_grad_() for t in inputs]
            with torch.enable_grad():
                out = ctx.attention(*leaves)
            found = torch.autograd.grad(out, leaves, d_out[:, :, heads])
            del out, leaves
            into = d_query[:, heads], d_key[:, kv_heads], d_value[:, kv_heads]
            for room, gradient in zip(into, found, strict=True):
                room.copy_(gradient)
        own, prefix = at.key_values.settle(d_key, d_value, at.window)
        return (d_query, *own, *(prefix or (None, None)), None, None, None)


def _pieces(query: Tensor, key: Tensor, by_heads: bool) -> Iterator[tuple[slice, slice]]:
    """Cut attention into heads of queries and those of keys that they share.

    Attention functions copy keys and values for each head of queries, and so do their gradients:
    at 64 heads over 8 and 1,024 tokens that is most of what a window's backward takes.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    expanded = key[:, :1].nbytes * heads
    at_once = max(1, kv_heads * PIECE_BYTES // expanded) if by_heads else kv_heads
    for begin in range(0, kv_heads, at_once):
        end = min(kv_heads, begin + at_once)
        each = heads // kv_heads
        yield slice(begin * each, end * each), slice(begin, end)


def _causal(at: _Looking, query: Tensor) -> Tensor:
    """The mask that transformers leaves out where it is plainly causal: True where one may look."""
    seen = at.key_values.before + at.window.end
    full = torch.ones(at.window.tokens, seen, dtype=torch.bool, device=query.device)
    return full.tril(seen - at.window.tokens)[None, None]


def _function_of(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """Find what transformers would have called: every model file brings its own eager one."""
    from transformers import AttentionInterface

    own = sys.modules[type(module).__module__]
    registry = getattr(own, "ALL_ATTENTION_FUNCTIONS", None) or AttentionInterface()
    eager = getattr(own, "eager_attention_forward", None)
    function: Callable[..., Any] = registry.get_interface(implementation, eager)
    return function


def _register() -> None:
    from transformers import AttentionInterface

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attend)
        AttentionInterface.register(ALONE, _attend_alone)
