"""The loss over a linear head equals torch's cross-entropy and its gradient, on each path."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from windrow_sidecar.finetune.data.split import IGNORED
from windrow_sidecar.finetune.model import linear_loss, loss
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.linear_loss import (
    LEAST_ROWS_OF_GPU,
    CrossEntropyOfLogits,
    rows_of_slice,
    wide_type,
)
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.rounding import ROUNDING, in_float64, no_farther, relative

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, WORDS = 7, 97  # not a multiple of any block
SCALE = 0.125


def drawn(dtype):
    torch.manual_seed(3)
    labels = torch.randint(0, WORDS, (TOKENS,))
    labels[2] = IGNORED
    return (4.0 * torch.randn(TOKENS, WORDS)).to(dtype), labels


def by_autograd(logits, labels):
    """Return the loss of each token and the gradient of their scaled sum, by torch itself."""
    leaf = logits.clone().requires_grad_()
    wide = leaf.to(wide_type(logits.dtype))
    losses = functional.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED)
    (SCALE * losses.sum()).backward()
    return losses.detach(), leaf.grad


def taken(logits, labels, *, kernel, scale=SCALE):
    made = CrossEntropyOfLogits(WORDS, logits.dtype)
    if kernel:
        pytest.importorskip("triton")  # interpreted: see conftest.py
        made.use_kernel()
    given = logits.clone()
    losses, gradient = made.take(given, labels, scale)
    assert not kernel or gradient.data_ptr() == given.data_ptr()
    return losses, gradient


@pytest.mark.parametrize("block", [16, 4096], ids=["blocks", "one block"])
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_losses_and_gradient_equal_those_of_autograd(kernel, block, monkeypatch):
    monkeypatch.setattr(linear_loss, "_BLOCK", block)
    given = drawn(torch.float64)
    losses, gradient = taken(*given, kernel=kernel)
    expected = by_autograd(*given)
    assert losses[2] == 0.0
    assert not gradient[2].any()
    assert relative(losses, expected[0]) <= ROUNDING
    assert relative(gradient, expected[1]) <= ROUNDING
    alone, _ = taken(*given, kernel=kernel, scale=None)
    assert relative(alone, expected[0]) <= ROUNDING


# Triton's interpreter has no bf16.
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)],
    ids=["torch fp32", "torch bf16", "triton fp32"],
)
def test_in_narrow_types_they_are_as_near_to_float64_as_autograds(kernel, dtype):
    given = drawn(dtype)
    truth = by_autograd(given[0].double(), given[1])
    found = zip(taken(*given, kernel=kernel), by_autograd(*given), truth, strict=True)
    for ours, theirs, true in found:
        assert ours.dtype == theirs.dtype
        assert no_farther([relative(ours, true)], [relative(theirs, true)], dtype)


def test_a_slice_on_a_gpu_has_at_least_512_rows_and_begins_at_an_aligned_place():
    gpu, host = torch.device("cuda"), torch.device("cpu")
    for words in (50257, 128256, 262144, 1 << 20):
        rows = rows_of_slice(words, 1 << 24, gpu, fused=True)
        assert rows >= LEAST_ROWS_OF_GPU
        assert rows % 16 == 0
    assert rows_of_slice(128256, 1 << 24, gpu, fused=False) == 130
    assert rows_of_slice(128256, 1 << 22, host, fused=True) == 32
    assert rows_of_slice(1 << 30, 1 << 22, host, fused=False) == 1


def head_of(architecture, dtype=torch.float64, **changed):
    model = random_model(architecture).to(dtype).requires_grad_(False)
    for name, value in changed.items():
        setattr(model.config, name, value)
        if hasattr(model, name):
            setattr(model, name, value)
    return Head(DecoderStack(model))


LINEAR = {"Llama": {}, "Qwen2": {}, "Gemma2": {"final_logit_softcapping": None}}
NOT_LINEAR = ("Gemma2", "Cohere")  # caps and scales logits


@pytest.mark.parametrize("architecture", LINEAR)
def test_a_head_of_one_linear_layer_is_found(architecture):
    assert head_of(architecture, **LINEAR[architecture])._by_hand is not None


@pytest.mark.parametrize("architecture", NOT_LINEAR)
def test_logits_that_are_changed_behind_the_head_take_the_models_own_code(architecture):
    assert head_of(architecture)._by_hand is None


def test_a_head_that_learns_takes_the_models_own_code():
    model = random_model("Llama").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    assert Head(DecoderStack(model))._by_hand is None


def test_slices_of_a_head_add_up_to_the_models_own_loss(monkeypatch):
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", 96 * 5)
    with in_float64():
        head = head_of("Llama")
        draw = torch.Generator().manual_seed(2)
        units = head._stack.config.hidden_size
        hidden = torch.randn(2, 9, units, dtype=torch.float64, generator=draw)
        targets = torch.randint(0, 90, (2, 9), generator=draw)
        targets[0, 3:] = IGNORED
        ours = head.loss_and_gradient(hidden, targets, labels_in_batch=12)
        row_of = torch.arange(2)[:, None].expand(-1, 9)
        rows = head.row_losses(hidden, targets, row_of, 2, learn=True)
        head._by_hand = None
        theirs = head.loss_and_gradient(hidden, targets, labels_in_batch=12)
        their_rows = head.row_losses(hidden, targets, row_of, 2, learn=True)
        total = head.loss(hidden, targets)
    for one, other in zip((*ours, *rows), (*theirs, *their_rows), strict=True):
        assert relative(one, other) <= ROUNDING
    assert relative(ours[0], total) <= ROUNDING
