"""Every order that the dependency check allows gives the same gradients; no other may run."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windrow_sidecar.finetune.adapter.adapters import Adapter, trainable
from windrow_sidecar.finetune.engine.group_progress import GroupProgress, tasklet_of
from windrow_sidecar.finetune.engine.micro_batch_group import MicroBatchGroup, ModelParts
from windrow_sidecar.finetune.engine.orders import ORDERS, next_of, unfold
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.tasklets import MicroBatch, TokenWindow
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import small_rows, small_spec, tuned_model
from windrow_sidecar.testing.rounding import ROUNDING, apart, in_type_of

ROWS = small_rows(4)
GROUP = tuple(
    MicroBatch(0, rows, tuple(ROWS[row].length for row in rows)) for rows in ((0,), (1, 2), (3,))
)
LABELS = sum(row.targets for row in ROWS)


@pytest.fixture(scope="module")
def parts():
    spec = small_spec({"lora": {"rank": 2, "alpha": 4, "dropout": 0.2}})
    tuned = tuned_model(random_model("Gemma2", num_hidden_layers=2).double(), spec)
    with in_type_of(tuned):
        stack = DecoderStack(tuned.get_base_model())
        adapter = Adapter(tuned)
        adapter.switch(on=True, training=True)
        yield ModelParts(stack, Head(stack), adapter)


def visit_of(parts) -> MicroBatchGroup:
    for parameter in trainable(parts.adapter.model).values():
        parameter.grad = None
    return MicroBatchGroup(parts, GROUP, ROWS, TorchBoundaries(), labels_in_batch=LABELS, seed=3)


def gradients(parts) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in trainable(parts.adapter.model).items()}


@pytest.fixture(scope="module")
def expected(parts):
    batch_group = visit_of(parts)
    for tasklet in unfold(ORDERS["layer-major"], batch_group.progress):
        batch_group.run(tasklet)
    return copy.deepcopy(gradients(parts)), batch_group.loss


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choices=st.randoms(use_true_random=False), cuts=st.sets(st.integers(1, 45), min_size=1))
def test_random_legal_orders_and_windows_give_equal_gradients(parts, expected, choices, cuts):
    batch_group = visit_of(parts)
    while not batch_group.progress.done:
        batch_group.run(choices.choice(list(batch_group.progress.allowed(sorted(cuts)))))
    assert apart(gradients(parts), expected[0]).by_rounding
    assert batch_group.loss == pytest.approx(expected[1], rel=ROUNDING)


def every_tasklet(depth):
    for micro in GROUP:
        ends = (1, micro.width // 2, micro.width)
        windows = [TokenWindow(b, e) for b in (0, *ends) for e in ends if b < e]
        for window in windows:
            yield tasklet_of(Phase.LOSS, micro, depth, window)
            for layer in range(depth):
                yield tasklet_of(Phase.FORWARD, micro, layer, window)
                yield tasklet_of(Phase.BACKWARD, micro, layer, window)


@given(choices=st.randoms(use_true_random=False), steps=st.integers(0, 40))
def test_what_is_not_listed_as_allowed_has_a_reason(choices, steps):
    progress = GroupProgress(GROUP, 2)
    for _ in range(steps):
        if progress.done:
            break
        progress.advance(choices.choice(list(progress.allowed([9]))))
    cuts = sorted({w.end - b for m in GROUP for w in [m.whole] for b in range(w.end)})
    allowed = set(progress.allowed(cuts))
    for tasklet in every_tasklet(2):
        try:
            progress.check(tasklet)
        except ValueError:
            assert tasklet not in allowed
        else:
            assert tasklet in allowed


def test_a_tasklet_out_of_turn_is_refused_and_nothing_has_run(parts):
    batch_group = visit_of(parts)
    with pytest.raises(ValueError, match="layer below"):
        batch_group.run(tasklet_of(Phase.FORWARD, GROUP[0], 1, GROUP[0].whole))
    assert batch_group.progress.untouched


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_orders_pass_every_layer_and_token_once_up_and_once_down(order, tokens):
    progress = GroupProgress(GROUP, 3)
    plan = list(unfold(order, progress, Windows(tokens)))
    assert progress.untouched, "a plan is only looked at"
    passed = {(phase, m): 0 for phase in (Phase.FORWARD, Phase.BACKWARD) for m in GROUP}
    for tasklet in plan:
        if tasklet.phase is not Phase.LOSS:
            passed[tasklet.phase, tasklet.micro] += tasklet.window.tokens
        progress.advance(tasklet)
    assert progress.done
    assert all(tokens == 3 * micro.width for (_, micro), tokens in passed.items())


def test_a_plan_goes_on_from_anywhere_with_other_windows():
    progress = GroupProgress(GROUP, 3)
    for _ in range(25):
        progress.advance(ORDERS["token-major"](progress, Windows(5)))
    for tasklet in unfold(ORDERS["layer-major"], progress, Windows(11)):
        progress.advance(tasklet)
    assert progress.done


class Roomy(Windows):
    """Windows of three layers at most."""

    def fits(self, tasklet):
        return tasklet.parts <= 3


def test_neighbour_layers_join_as_long_as_they_fit():
    micro = GROUP[0]
    progress, order = GroupProgress([micro], 5), ORDERS["layer-major"]
    sizes = []
    while (tasklet := next_of(order, progress, Roomy(99))) is not None:
        sizes.append((tasklet.phase.name, tasklet.layer, tasklet.layer_end))
        progress.advance(tasklet)
    assert sizes == [
        ("FORWARD", 0, 3),
        ("FORWARD", 3, 5),
        ("LOSS", 5, 5),
        ("BACKWARD", 2, 5),
        ("BACKWARD", 0, 2),
    ]
