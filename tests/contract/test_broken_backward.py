"""What autograd keeps of a backward that has ended in an error."""

from __future__ import annotations

import weakref

import pytest
import torch

from windrow_sidecar.finetune.model.decoder_stack import drop_broken_backward


class Kept:
    """What a node has saved."""


class Late(torch.autograd.Function):
    """A node that runs behind another one, and holds something until then."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Broken(torch.autograd.Function):
    """A node at which a backward is broken off."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("broken off")


@pytest.mark.parametrize("frees", [False, True])
def test_what_nodes_have_saved_is_freed_once_a_backward_is_broken_off(frees):
    kept = Kept()
    seen = weakref.ref(kept)
    x = torch.ones(2, requires_grad=True)
    late = Late.apply(x, kept)
    both = late + Broken.apply(x)  # the newer node runs first: the other one waits in the queue
    del kept, late
    with pytest.raises(RuntimeError, match="broken off"):
        both.sum().backward()
    del both
    if frees:
        drop_broken_backward()
    assert (seen() is None) == frees, "autograd keeps nodes of such a backward without this"
    drop_broken_backward()
