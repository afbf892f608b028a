"""Rows of several jobs in one micro-batch: each job learns what it learns alone, and ends alone."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windrow_sidecar.finetune.adapter import joint_linears
from windrow_sidecar.finetune.adapter.adapters import add_adapter, trainable
from windrow_sidecar.finetune.adapter.joint_linears import refused
from windrow_sidecar.finetune.engine.joint_stream import (
    FREE_TOKENS,
    MOST_PADDING,
    JointStream,
    Member,
    Offered,
    fair_rows,
)
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows, Windows
from windrow_sidecar.finetune.engine.stages import JobStage, StepDone
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.optimizer import NotFinite
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    Recipe,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    tuned_model,
    what_is_learnt,
)
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Kind:
    """A job: its adapter, its rows and what it trains with."""

    lora: dict
    rows: tuple = field(default_factory=small_rows)
    recipe: Recipe = field(default_factory=Recipe)

    def spec(self):
        return small_spec({"lora": self.lora})


# Of different ranks, targets, scales, dropouts, rows, batches, rates and numbers of steps.
KINDS = {
    "plain": Kind({"rank": 4, "alpha": 8}, recipe=Recipe(steps=3)),
    "queries": Kind(
        {"rank": 3, "alpha": 5, "targetModules": "q_proj,down_proj", "dropout": 0.3},
        small_rows(17),
        Recipe(steps=5, batch=3, seed=5, rate=3e-3),
    ),
    "stabilised": Kind(
        {"rank": 6, "alpha": 2, "useRslora": True, "layersToTransform": [1]},
        small_rows(9),
        Recipe(steps=3, batch=8, seed=2, rate=2e-2),
    ),
    "head": Kind(
        {"rank": 2, "alpha": 9, "targetModules": "v_proj,lm_head", "dropout": 0.1},
        small_rows(14),
        Recipe(steps=3, batch=6, seed=8, most_rows=2),
    ),
}
FOUR = tuple(KINDS)
# As many rows of the same rank as the plain one.
KINDS["twin"] = Kind(
    {"rank": 4, "alpha": 3, "targetModules": "q_proj,up_proj,lm_head", "dropout": 0.2},
    recipe=Recipe(steps=3, seed=4, rate=2e-3),
)


class Jobs:
    """Jobs over one base, joined.

    Args:
        architecture: of the base.
        names: of `KINDS`.
        max_tokens: padded, of a joint micro-batch.
        sizing: of its tasklets.
        least: whether layers keep nothing of their forward.
        held_out: rows of evaluations.
        dtype: of the base.
    """

    def __init__(
        self,
        architecture: str,
        names: tuple[str, ...],
        max_tokens: int = 400,
        sizing: TaskletSizing | None = None,
        *,
        least: bool = False,
        held_out: tuple = (),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._architecture, self._held_out = architecture, held_out
        self._base = BaseModel(random_model(architecture).to(dtype), None, None, shared=False)
        stack = DecoderStack(shallow_clone(self._base).model)
        if least:
            stack.around_layer = planned = PlannedLayers(stack.layers)
            planned.bytes_per_token = 0
        self.joint = JointStream(
            stack,
            boundaries=TorchBoundaries(),
            limits=lambda: MicroLimits(max_tokens),
            sizing=lambda: sizing or WholeRows(),
        )
        self.tuned, self.members, self.steps, self.evaluated = {}, {}, {}, {}
        self.failed, self.together, self.paused = {}, [], set()
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        kind = KINDS[name]
        self.tuned[name] = tuned_model(shallow_clone(self._base).model, kind.spec())
        with in_type_of(self.tuned[name]):
            stream = stream_of(
                self.tuned[name], kind.rows, Cut(), self._held_out, recipe=kind.recipe
            )
        self.steps[name], self.evaluated[name] = [], []
        start = min((one.had() for one in self.members.values()), default=0)
        self.members[name] = Member(
            name,
            stream,
            had=lambda: start + stream.tokens_seen,
            may_run=lambda: name not in self.paused,
        )
        self.joint.join(self.members[name])

    def now(self, tasklet) -> list[str]:
        """The jobs of a tasklet."""
        return [part.member.name for part in self.joint.parts_of(tasklet)]

    def run(self, *, most: int = 100_000, until=lambda tasklet: False) -> None:
        """Run tasklets until all is done, so many have run, or `until` says so of the next."""
        with in_type_of(self._base.model):
            while most and (tasklet := self.joint.peek()) is not None and not until(tasklet):
                most -= 1
                if tasklet.phase is Phase.FORWARD and tasklet.layer == 0:
                    self.together.append(self.now(tasklet))
                for happened in self.joint.run(tasklet):
                    self._note(happened)

    def _note(self, happened) -> None:
        name = happened.member.name
        if isinstance(happened.what, Exception):
            self.failed[name] = happened.what
            self.joint.leave(happened.member)
        elif isinstance(happened.what, StepDone):
            self.steps[name].append(happened.what)
        else:
            self.evaluated[name].append(happened.what.loss)

    def check(self, name: str) -> None:
        """Hold weights, moments, losses and norms of a job against peft's run of it alone."""
        begun, theirs = alone(self._architecture, name)
        ours = what_is_learnt(self.members[name].stream, self.steps[name])
        assert ours.keys() == theirs.keys()
        assert apart(begun, theirs["parameter"]).of_norm > 0.001
        for of in theirs:
            assert apart(ours[of], theirs[of]).by_rounding, (name, of)


@functools.cache
def alone(architecture: str, name: str) -> tuple[dict, dict]:
    """Return what a job of `KINDS` begins with, and what peft learns of it."""
    kind = KINDS[name]
    tuned = tuned_model(random_model(architecture).double(), kind.spec())
    begun = {n: p.detach().clone() for n, p in trainable(tuned).items()}
    return begun, pefts_training(tuned, kind.rows, recipe=kind.recipe)


@pytest.mark.parametrize(
    ("max_tokens", "sizing", "together"),
    [(400, None, 4), (60, None, 3), (400, Windows(7), 4)],
    ids=["whole", "few rows", "windows"],
)
def test_each_of_four_jobs_learns_what_peft_learns_of_it_alone(max_tokens, sizing, together):
    jobs = Jobs("Qwen2", FOUR, max_tokens, sizing)
    jobs.run()
    assert max(map(len, jobs.together)) == together
    for name in FOUR:
        jobs.check(name)


def test_jobs_of_one_rank_with_as_many_tokens_have_their_products_in_one_call(monkeypatch):
    sizes = set()
    alike = joint_linears._alike

    def counted(parts):
        runs = alike(parts)
        sizes.add(tuple(map(len, runs)))
        return runs

    monkeypatch.setattr(joint_linears, "_alike", counted)
    jobs = Jobs("Qwen2", ("plain", "twin", "queries"))
    jobs.run(most=20)
    with torch.no_grad():
        next(iter(trainable(jobs.tuned["queries"]).values())).fill_(torch.nan)
    jobs.run()
    assert any(2 in runs for runs in sizes)
    assert isinstance(jobs.failed.pop("queries"), NotFinite)
    jobs.check("plain")
    jobs.check("twin")


def test_two_jobs_over_another_architecture_learn_what_peft_learns_of_each():
    jobs = Jobs("Gemma3Text", ("plain", "stabilised"))
    jobs.run()
    assert ["plain", "stabilised"] in map(sorted, jobs.together)
    jobs.check("plain")
    jobs.check("stabilised")


def test_in_bf16_the_error_is_that_of_pefts_own_run():
    """Adapters are in fp32 there, and their products are added in it."""
    jobs = Jobs("Llama", ("plain", "stabilised"), dtype=torch.bfloat16)
    begun = {name: copy.deepcopy(tuned) for name, tuned in jobs.tuned.items()}
    sums: dict[str, dict] = {}
    for _ in begun:
        jobs.run(until=lambda t: t.phase is Phase.OPTIMIZER and jobs.now(t)[0] not in sums)
        (name,) = jobs.now(jobs.joint.peek())
        held = jobs.members[name].stream.tensors()
        sums[name] = {n.removeprefix("sum/"): t.clone() for n, t in held.items() if "sum/" in n}
    for name, tuned in begun.items():
        kind = KINDS[name]
        truth = pefts_gradients(copy.deepcopy(tuned).double(), kind.rows, recipe=kind.recipe)
        theirs = [pefts_gradients(tuned, kind.rows, pads, kind.recipe) for pads in (0, 1)]
        far = [apart(of, truth).of_norm for of in theirs]
        assert no_farther([apart(sums[name], truth).of_norm], far, torch.bfloat16)


def test_layers_that_run_a_second_time_in_their_backward_learn_the_same():
    jobs = Jobs("Qwen2", ("plain", "queries"), least=True)
    jobs.run()
    jobs.check("plain")
    jobs.check("queries")


def test_a_job_whose_loss_is_no_number_fails_alone_with_the_rows_named():
    jobs = Jobs("Qwen2", ("plain", "queries", "stabilised"))
    jobs.run(most=20)
    with torch.no_grad():
        next(iter(trainable(jobs.tuned["queries"]).values())).fill_(torch.inf)
    jobs.run()
    assert isinstance(jobs.failed.pop("queries"), NotFinite)
    assert not jobs.failed
    jobs.check("plain")
    jobs.check("stabilised")


def test_a_job_whose_gradient_is_no_number_fails_alone(monkeypatch):
    jobs = Jobs("Qwen2", ("plain", "queries", "stabilised"))
    stream = jobs.members["queries"].stream
    parameter = next(iter(trainable(jobs.tuned["queries"]).values()))
    commit = stream.commit

    def spoilt(*args) -> None:
        parameter.grad.fill_(torch.nan)
        commit(*args)

    monkeypatch.setattr(stream, "commit", spoilt)
    jobs.run()
    assert "gradient of step 1 is not finite" in str(jobs.failed.pop("queries"))
    assert not jobs.failed
    jobs.check("plain")
    jobs.check("stabilised")


@pytest.mark.parametrize("phase", [Phase.LOSS, Phase.BACKWARD], ids=str)
def test_a_job_that_leaves_in_the_middle_of_a_micro_batch_leaves_the_others_as_they_are(phase):
    jobs = Jobs("Qwen2", ("plain", "queries", "stabilised"))
    jobs.run(most=30)
    jobs.run(until=lambda tasklet: tasklet.phase is phase and "queries" in jobs.now(tasklet))
    before = jobs.members["queries"].stream.position
    jobs.joint.leave(jobs.members["queries"])
    jobs.run()
    assert jobs.members["queries"].stream.position == before
    jobs.check("plain")
    jobs.check("stabilised")


def test_a_job_that_leaves_while_only_others_have_rows_on_their_way_is_let_go_of():
    jobs = Jobs("Qwen2", ("plain", "queries"))
    jobs.run(until=lambda t: t.phase is Phase.LOSS)
    jobs.paused.add("queries")
    jobs.run(until=lambda t: t.phase is Phase.FORWARD and t.layer == 0)
    jobs.run(most=1)  # of a micro-batch without its rows
    gone = weakref.ref(jobs.members["queries"].stream)
    jobs.joint.leave(jobs.members.pop("queries"))
    del jobs.tuned["queries"]
    gc.collect()
    assert gone() is None
    jobs.run()
    jobs.check("plain")


def test_a_job_that_pauses_gives_its_rows_back_and_runs_them_later():
    jobs = Jobs("Qwen2", ("plain", "queries"))
    jobs.run(until=lambda tasklet: tasklet.phase is Phase.BACKWARD)
    jobs.paused.add("queries")
    jobs.run()
    assert jobs.members["queries"].stream.position.step == 0
    jobs.check("plain")
    jobs.paused.clear()
    jobs.run()
    jobs.check("queries")


def test_what_is_dropped_or_spilled_changes_nothing():
    jobs = Jobs("Qwen2", ("plain", "queries"))
    for n in range(12):
        jobs.run(most=5 + n)
        jobs.joint.spill((n % 3 > 0) * (1 << 30))
        if n % 4 == 3:
            jobs.joint.drop()
    jobs.run()
    jobs.check("plain")
    jobs.check("queries")


def test_jobs_join_in_the_middle_and_go_on_from_their_own_checkpoints():
    jobs = Jobs("Qwen2", ("plain",))
    jobs.run(most=15)
    jobs.add("stabilised")
    jobs.run(until=lambda _: len(jobs.steps["stabilised"]) == 2)
    assert ["plain", "stabilised"] in map(sorted, jobs.together)
    # Another worker goes on with one of them, from what the checkpoint holds.
    stream = jobs.members["stabilised"].stream
    held = {name: t.clone() for name, t in stream.tensors().items()}
    there = Jobs("Qwen2", ("queries", "stabilised"))
    there.members["stabilised"].stream.restore(stream.position, held)
    restored = there.members["stabilised"].stream.tensors()
    assert all(torch.equal(restored[name], tensor) for name, tensor in held.items())
    there.steps["stabilised"] = jobs.steps["stabilised"][:]
    there.run()
    there.check("stabilised")
    there.check("queries")
    jobs.joint.leave(jobs.members["stabilised"])
    jobs.run()
    jobs.check("plain")


def test_jobs_are_evaluated_before_and_after_by_their_own_tasklets():
    held_out = small_rows(5)
    jobs = Jobs("Llama", ("plain", "stabilised"), held_out=held_out)
    jobs.run()
    for name in ("plain", "stabilised"):
        jobs.check(name)
        base, tuned = jobs.evaluated[name]
        assert base > 0.0
        assert tuned != base


def test_tokens_of_jobs_that_have_all_work_differ_by_a_micro_batch_at_most():
    jobs = Jobs("Llama", ("plain", "queries", "stabilised"), max_tokens=120)
    apart_by = []
    for _ in range(40):
        jobs.run(most=7)
        had = [m.stream.tokens_seen for m in jobs.members.values()]
        if any(m.stream.stage is JobStage.FINISHED for m in jobs.members.values()):
            break
        apart_by.append(max(had) - min(had))
    assert len(apart_by) > 10
    assert max(apart_by) <= 120


ROWS = st.lists(st.integers(1, 200), min_size=1, max_size=12).map(
    lambda lengths: tuple(sorted(lengths, reverse=True))
)


@given(
    lengths=st.lists(ROWS, min_size=1, max_size=5),
    had=st.lists(st.integers(0, 5000), min_size=5, max_size=5),
    max_tokens=st.integers(1, 4000),
)
def test_a_micro_batch_is_fair_and_within_its_limits(lengths, had, max_tokens):
    offered = [Offered(rows, float(n)) for rows, n in zip(lengths, had, strict=False)]
    takes = fair_rows(offered, max_tokens)
    first = min(range(len(offered)), key=lambda n: (offered[n].had, n))
    assert takes[first] >= 1  # so nobody waits for ever
    widths = [rows[0] if n else 0 for rows, n in zip(lengths, takes, strict=True)]
    padded = max(widths) * sum(takes)
    assert padded <= max_tokens or sum(takes) == 1
    own = sum(width * n for width, n in zip(widths, takes, strict=True))
    assert padded <= max(FREE_TOKENS, MOST_PADDING * own)


@given(
    rows=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    had=st.lists(st.integers(0, 300), min_size=5, max_size=5),
    length=st.integers(1, 40),
    max_tokens=st.integers(1, 2000),
)
def test_rows_of_one_length_go_to_the_job_that_is_furthest_behind(rows, had, length, max_tokens):
    offered = [Offered((length,) * n, float(at)) for n, at in zip(rows, had, strict=False)]
    takes = fair_rows(offered, max_tokens)
    after = [one.had + length * n for one, n in zip(offered, takes, strict=True)]
    assert all(at - length <= min(after) for at, n in zip(after, takes, strict=True) if n)


def test_a_job_with_few_rows_a_step_is_not_left_behind():
    few, many = Offered((10, 10), 0.0), Offered((10,) * 16, 0.0)
    assert fair_rows([few, many], 4000) == [2, 2]
    assert fair_rows([few, Offered((10,) * 16, 0.0, weight=3.0)], 4000) == [2, 6]
    assert fair_rows([few, Offered((10,) * 16, 0.0, most_rows=1)], 4000) == [2, 1]


APART = {
    "ia3": ("Llama", {"type": "ia3"}, "its adapter is ia3, not lora"),
    "prefix": ("Qwen3", {"type": "prefix"}, "its adapter is prefix_tuning, not lora"),
    "decomposed": ("Llama", {"lora": {"useDora": True}}, "decomposes weights"),
    "biases": ("OPT", {"lora": {"bias": "all"}}, "learns besides its low-rank matrices"),
    "a whole norm": ("Qwen2", {"lora": {"modulesToSave": "norm"}}, "learns besides"),
    "experts": ("Mixtral", {"lora": {"targetModules": "w1,w2,w3"}}, "not that of a plain linear"),
}


@pytest.mark.parametrize(("architecture", "adapter", "why"), APART.values(), ids=APART)
def test_jobs_that_cannot_be_joined_are_refused_with_the_reason(architecture, adapter, why):
    if "lora" in adapter:
        adapter = {"lora": {"rank": 4, "alpha": 8, **adapter["lora"]}}
    tuned = add_adapter(random_model(architecture), small_spec(adapter))
    learns = trainable(tuned)
    assert why in refused(tuned, learns, DecoderStack(tuned.get_base_model()))


def test_a_model_whose_layers_drop_units_is_refused():
    tuned = add_adapter(random_model("Llama", attention_dropout=0.2), small_spec())
    assert "drops units of its own" in refused(
        tuned, trainable(tuned), DecoderStack(tuned.get_base_model())
    )
