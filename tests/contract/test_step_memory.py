"""No group is formed that memory does not hold; what can never fit is refused with its bytes."""

from __future__ import annotations

import pytest

from windrow.errors import UserError
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget, JobMemory
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.testing.tinyjob import HIDDEN, LAYERS, tiny_job

LONGEST, ADAPTER = 16, 3_000
# Embeddings' output and the gradient on its way down; gradient, sum and two moments of what learns.
BESIDE_GRAPHS = (LAYERS + 2) * LONGEST * HIDDEN * 4 + 4 * ADAPTER


@pytest.fixture(scope="module")
def stack():
    return DecoderStack(tiny_job().model.get_base_model())


def activation_budget(stack, free_bytes, **needs):
    planned = PlannedLayers(stack.layers)
    of_job = JobMemory(LONGEST, ADAPTER, **needs)
    return planned, ActivationBudget(
        stack, planned, of_job, least=False, free_bytes=lambda: free_bytes
    )


def needed_bytes(stack, **needs) -> int:
    with pytest.raises(UserError, match="bytes at least") as caught:
        activation_budget(stack, 0, **needs)
    assert caught.value.field == "spec.training.maxSequenceLength"
    assert caught.value.reason == "OutOfMemory"
    return int(caught.value.problem.split(" takes ")[1].split()[0])


def test_a_budget_too_small_for_one_layer_says_how_many_bytes_are_needed(stack):
    needed = needed_bytes(stack)
    assert needed > BESIDE_GRAPHS
    activation_budget(stack, needed)
    with pytest.raises(UserError, match=f"{needed} bytes at least"):
        activation_budget(stack, needed - 1)


def test_boundaries_that_lie_in_lent_chunks_are_not_counted_twice(stack):
    boundaries = LAYERS * LONGEST * HIDDEN * 4
    assert needed_bytes(stack) - needed_bytes(stack, own_boundaries=False) == boundaries


def test_a_group_is_made_smaller_before_it_is_formed_and_keeps_less(stack):
    _, plenty = activation_budget(stack, 1 << 40)
    asked = MicroLimits(max_tokens=4096, micro_batches=2)
    assert plenty.before(asked) == asked
    planned, tight = activation_budget(stack, 4 * needed_bytes(stack))
    given = tight.before(asked)
    assert LONGEST <= given.max_tokens < 4096
    assert given.micro_batches == 2
    tight.keep_for(given.micro_batches * given.max_tokens)
    assert planned.bytes_per_token is not None  # not everything


def test_what_layers_keep_is_made_for_the_rows_there_are_and_not_for_the_largest_group(stack):
    """A bound in time may allow thousands of tokens where a step has two short rows."""
    planned, roomy = activation_budget(stack, 4 * needed_bytes(stack))
    given = roomy.before(MicroLimits(max_tokens=4096))
    roomy.keep_for(given.max_tokens)
    assert planned.bytes_per_token is not None, "the largest group that fits keeps a part"
    roomy.keep_for(LONGEST)
    assert planned.bytes_per_token is None, "one row keeps everything"


def test_a_job_keeps_what_fits_the_groups_that_it_forms(stack):
    formed = []
    job = tiny_job(keep_for=formed.append, steps=1)
    groups = []
    while (tasklet := job.stream.peek()) is not None:
        group = job.stream.group_to_begin
        if group and not (groups and groups[-1] is group):
            groups.append(group)
        job.stream.run(tasklet)
    assert formed == [sum(micro.padded_tokens for micro in group) for group in groups]
    assert max(formed) < 24, "the rows are fewer tokens than the limit"


def test_fewer_micro_batches_visit_a_layer_together_where_memory_is_short(stack):
    _, tight = activation_budget(stack, 4 * needed_bytes(stack))
    given = tight.before(MicroLimits(max_tokens=4096, micro_batches=50))
    assert 1 <= given.micro_batches < 50
    assert tight.fits(given.micro_batches * given.max_tokens)
