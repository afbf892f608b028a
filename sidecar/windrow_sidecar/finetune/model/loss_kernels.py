"""Triton kernel of the loss: cross-entropy of logits, and its gradient in their memory.

`TRITON_INTERPRET=1`, set before this module is imported, runs it on the host, slowly: there it is
compared with torch's operators in float64. Sums are in WIDE: float32, or float64 where the logits
are.
"""

# Triton compiles this function: annotations are types of its own, and no checker knows them.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits,  # [tokens, WORDS]; with LEARNS the gradient is written to it
    labels,  # int64 [tokens]; below 0: no loss, and a gradient of zero
    losses,  # [tokens] in WIDE, written
    scale,  # of the gradient
    WORDS: tl.constexpr,
    LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take the loss of one token, log(sum of exp) - logit of the label, and its gradient."""
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * WORDS
    label = tl.load(labels + at)
    words = tl.arange(0, BLOCK)
    # Of each place of a block on its own: one sum over the block at the end, not one for each.
    largest = tl.full([BLOCK], float("-inf"), WIDE)
    total = tl.zeros([BLOCK], WIDE)
    for begin in range(0, WORDS, BLOCK):
        inside = begin + words < WORDS
        read = tl.load(row + begin + words, mask=inside, other=float("-inf")).to(WIDE)
        larger = tl.maximum(largest, read)
        # A place that has seen nothing yet has no distance from itself.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(read - base)
        largest = larger
    most = tl.max(largest, 0)
    of_all = tl.sum(total * tl.exp(largest - most), 0)
    counts = label >= 0
    of_label = tl.load(row + label, mask=counts, other=0.0).to(WIDE)
    # Two small numbers, not two large ones that nearly cancel.
    tl.store(losses + at, tl.where(counts, tl.log(of_all) + (most - of_label), 0.0))
    if LEARNS:
        tl.debug_barrier()  # the label's logit has been read before it is written
        share = tl.where(counts, scale, 0.0).to(WIDE)
        for begin in range(0, WORDS, BLOCK):
            inside = begin + words < WORDS
            read = tl.load(row + begin + words, mask=inside, other=0.0).to(WIDE)
            of_word = tl.exp(read - most) / of_all
            of_word = tl.where(begin + words == label, of_word - 1.0, of_word) * share
            tl.store(row + begin + words, of_word.to(logits.dtype.element_ty), mask=inside)
