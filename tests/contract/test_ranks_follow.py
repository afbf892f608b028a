"""Ranks that follow the first one train as peft does, however that sizes groups and tasklets.

The first rank chooses limits, sizes and units before each tasklet, as it does beside decode; what
it gives up is begun again on every rank.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace

import pytest

from windrow_sidecar.finetune.adapter.adapters import trainable
from windrow_sidecar.finetune.engine.sharded_stream import RanksDiffer, RunTasklet, ShardedStream
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.tasklets import MicroBatch, MicroLimits, Tasklet
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    training_of,
    tuned_model,
)
from windrow_sidecar.testing.ranks import broadcast, on_ranks, shard_of, told
from windrow_sidecar.testing.rounding import apart, in_type_of

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTER = {"lora": {"rank": 4, "alpha": 8}}
RANKS = 2


@dataclass
class Erratic:
    """Sizes that change with each look: parts of a loss, and sometimes several layers at once."""

    draw: random.Random

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        return self.draw.randint(3, micro.width) if phase is Phase.LOSS else micro.width

    def fits(self, tasklet: Tasklet) -> bool:
        del tasklet
        return self.draw.random() < 0.5


def lead(stream: ShardedStream, draw: random.Random):
    """Run all tasklets; now and then form a group again before it has begun."""
    stream.tell, sizes = broadcast, set()
    stream.units = lambda: draw.randint(1, 4)
    steps = []
    while (tasklet := stream.peek()) is not None:
        if draw.random() < 0.3:
            stream.replan()
            tasklet = stream.peek()
        sizes.add((tasklet.phase, tasklet.parts, len(tasklet.micro.rows) if tasklet.micro else 0))
        if isinstance(done := stream.run(tasklet), StepDone):
            steps.append(done)
    return steps, sizes


def train(base, values, ranks):
    """Return what a rank ends with; on the first one, how it has cut the work as well."""
    draw = random.Random(11)
    sharding, tuned, parts = shard_of(base, ADAPTER, values, ranks)
    cut = Cut(sizing=Erratic(draw))
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), cut, sharded=(sharding, parts))
        if ranks.rank:
            # Whatever this rank would choose itself.
            stream._own_limits = lambda: MicroLimits(1)
            units, ran = [], []
            stream.take_units, stream.ran = units.append, lambda: ran.append(1)
            stream.follow(told())
            parts.assemble(stream.tensors())
            return {"units": set(units), "ran": len(ran) == len(units)}
        stream._own_limits = lambda: MicroLimits(draw.choice([20, 60, 120, 4096]))
        steps, sizes = lead(stream, draw)
        broadcast(None)
        held = training_of(parts.assemble(stream.tensors()), steps)
        return {"held": held, "sizes": sizes}


def differ(base, values, ranks):
    """Return what a rank says of a tasklet that is not next."""
    sharding, tuned, parts = shard_of(base, ADAPTER, values, ranks)
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), Cut(), sharded=(sharding, parts))
        mine = stream.peek()
        wrong = replace(mine, layer=mine.layer + 1, layer_end=mine.layer_end + 1)
        try:
            stream.follow([RunTasklet(wrong)])
        except RanksDiffer as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def reference():
    base = random_model("Llama").double()
    tuned = tuned_model(copy.deepcopy(base), small_spec(ADAPTER))
    values = {n: p.detach().clone() for n, p in trainable(tuned).items()}
    return base, values, pefts_training(tuned, small_rows())


@pytest.fixture(scope="module")
def ranked(reference):
    base, values, _ = reference
    return on_ranks(RANKS, lambda ranks: (train(base, values, ranks), differ(base, values, ranks)))


def test_five_steps_of_changing_sizes_equal_those_of_peft(ranked, reference):
    ours, theirs = ranked[0][0]["held"], reference[2]
    assert ours.keys() == theirs.keys()
    for kind in theirs:
        assert apart(ours[kind], theirs[kind]).by_rounding, kind


def test_groups_and_tasklets_were_of_several_sizes(ranked):
    sizes = ranked[0][0]["sizes"]
    assert len({rows for phase, _, rows in sizes if phase is Phase.FORWARD}) > 1
    assert len({parts for phase, parts, _ in sizes if phase is Phase.BACKWARD}) > 1


def test_units_come_with_each_tasklet_and_each_is_answered(ranked):
    followed = ranked[1][0]
    assert followed["units"] == {1, 2, 3, 4}
    assert followed["ran"]


def test_a_tasklet_that_is_not_next_ends_the_rank(ranked):
    for _, said in ranked:
        assert said.startswith("the first rank runs Tasklet(")
