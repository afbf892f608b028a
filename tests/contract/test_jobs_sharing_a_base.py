"""Jobs that share a base model in one worker: each learns what it learns alone, and ends alone."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.acting_runner import ActingRunner, job_handle

from windrow.errors import UserError
from windrow.protocol import Ending
from windrow_sidecar.finetune.adapter.adapters import add_adapter, trainable
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.job_handle import JobShare
from windrow_sidecar.finetune.job.multiplexer import (
    JobMultiplexer,
    next_turn,
    turn_is_over,
)
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.shallow_clone import check_shared, shallow_clone
from windrow_sidecar.finetune.standalone.run import check_apart
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import small_spec
from windrow_sidecar.testing.tinyjob import (
    SpoilingHome,
    TinyJob,
    adapter_of,
    bit_equal,
    finish,
    tiny_job,
    tiny_llama,
)

LORA = {"lora": {"rank": 4, "alpha": 4, "dropout": 0.1, "targetModules": "q_proj,up_proj"}}
IA3 = {"type": "ia3"}


pytestmark = pytest.mark.usefixtures("one_thread")


def base_model(model=None) -> BaseModel:
    return BaseModel(model or tiny_llama(), None, None, shared=False)


def jobs_of(sizing, base=None) -> list[TinyJob]:
    """Three kinds of training over one base, or each over its own."""
    make = [
        {},
        {"adapter": LORA, "seed": 5, "micro_batches": 2},
        {"adapter": IA3, "seed": 7, "steps": 3},
    ]
    return [
        tiny_job(base=shallow_clone(base).model if base else None, **{"sizing": sizing, **options})
        for options in make
    ]


@pytest.fixture(scope="module", params=[Windows(1000), Windows(5)], ids=["rows", "windows"])
def alone(request):
    """Return how the work is cut, and what each job learns alone."""
    jobs = jobs_of(request.param)
    for job in jobs:
        finish(job)
    return request.param, [adapter_of(job) for job in jobs]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.randoms(use_true_random=False))
def test_jobs_that_switch_at_any_tasklet_learn_bit_for_bit_what_each_learns_alone(alone, draw):
    sizing, expected = alone
    jobs, home = jobs_of(sizing, base_model()), SpoilingHome()
    memories = [OwnMemory(job.stream, home) for job in jobs]
    live = list(range(len(jobs)))
    while live:
        n = draw.choice(live)
        memories[n].restore()
        for _ in range(draw.randint(1, 12)):
            if (tasklet := jobs[n].stream.peek()) is None:
                live.remove(n)
                break
            jobs[n].stream.run(tasklet)
        if n in live:
            memories[n].offload()
    assert home.moved
    for job, theirs in zip(jobs, expected, strict=True):
        assert bit_equal(adapter_of(job), theirs)


def test_a_job_that_is_away_can_be_checkpointed_and_resumed():
    job, home = tiny_job(), SpoilingHome()
    memory = OwnMemory(job.stream, home)
    for _ in range(30):
        job.stream.run(job.stream.peek())
    before = {name: t.clone() for name, t in job.stream.tensors().items()}
    memory.offload()
    assert bit_equal(job.stream.snapshot().take(), before)
    memory.restore()
    assert bit_equal(dict(job.stream.tensors()), before)


def test_a_twin_shares_every_weight_but_the_biases_may_be_trained_apart():
    base = base_model(random_model("Qwen2", num_hidden_layers=2))
    one, other = shallow_clone(base).model, shallow_clone(base).model
    at = {name: p.data_ptr() for name, p in base.model.named_parameters()}
    assert {name: p.data_ptr() for name, p in one.named_parameters()} == at
    biased = small_spec({"lora": {"rank": 2, "bias": "all"}})
    tuned = add_adapter(one, biased)
    assert any(name.endswith("bias") for name in trainable(tuned))
    add_adapter(other, small_spec())
    assert any(name.endswith("bias") for name in trainable(tuned))
    for parameter in trainable(tuned).values():
        parameter.data.fill_(9.0)
    assert all(not p.eq(9.0).any() for p in other.parameters() if p.numel())
    assert not any(p.requires_grad for p in base.model.parameters())


def test_jobs_of_different_bases_are_refused_by_name():
    with pytest.raises(UserError, match=r"tone wants llama.*code wants qwen"):
        check_shared({"tone": ("llama", "main"), "same": ("llama", "main"), "code": ("qwen", "1")})


def test_a_quantised_base_is_not_shared():
    class Quantised(torch.nn.Parameter):
        """Parameter of the class that bitsandbytes would make."""

    model = tiny_llama()
    head = model.get_output_embeddings()
    head.weight = Quantised(head.weight.detach(), requires_grad=False)
    with pytest.raises(UserError, match="cannot share a quantised base"):
        shallow_clone(base_model(model))


def test_jobs_that_would_write_into_one_folder_are_refused():
    jobs = [JobSpec("default", name, name, 1, small_spec()) for name in ("tone", "code")]
    with pytest.raises(UserError, match="tone and code would both write to /out") as caught:
        check_apart(jobs)
    assert caught.value.field == "spec.output.destination"


@given(
    steps=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
)
def test_shares_differ_by_one_turn_at_most(steps, weights):
    tokens = [0] * len(steps)
    for _ in range(200):
        chosen = next_turn([JobShare(t, w) for t, w in zip(tokens, weights, strict=False)])
        tokens[chosen] += steps[chosen]
    shares = [t / w for t, w in zip(tokens, weights, strict=False)]
    most = max(s / w for s, w in zip(steps, weights, strict=False))
    # Each share is one division, rounded.
    assert max(shares) - min(shares) <= most + 2 * sys.float_info.epsilon * max(shares)


def test_who_may_not_run_has_no_turn_and_a_turn_is_long_beside_its_switch():
    assert next_turn([JobShare(0, may_run=False), JobShare(9)]) == 1
    assert next_turn([JobShare(0, may_run=False)]) is None
    assert turn_is_over(1.0, 0.05)
    assert not turn_is_over(0.9, 0.05)
    assert turn_is_over(0.0, 0.0)


def acted(runner: ActingRunner, endings):
    """A job that a carrier takes, in memory of its own."""
    return job_handle(runner, OwnMemory(runner.stream, SpoilingHome()), endings)


def test_one_that_fails_ends_alone_and_the_others_learn_what_they_learn_alone(alone):
    sizing, expected = alone
    jobs, order, endings = jobs_of(sizing, base_model()), [], {}
    acting = [
        ActingRunner("first", jobs[0], order),
        ActingRunner("broken", jobs[1], order, fails_at=17),
        ActingRunner("third", jobs[2], order),
    ]
    JobMultiplexer([acted(a, endings) for a in acting], clock=lambda: 0.0).run()
    assert endings == {
        "first": Ending.SUCCEEDED,
        "broken": Ending.FAILED,
        "third": Ending.SUCCEEDED,
    }
    assert bit_equal(adapter_of(jobs[0]), expected[0])
    assert bit_equal(adapter_of(jobs[2]), expected[2])
    turns = sum(a != b for a, b in pairwise(order))
    assert turns > 6


def test_one_that_is_told_to_pause_in_the_middle_of_a_step_leaves_the_device_to_the_others():
    base = base_model()
    jobs, order, endings = [tiny_job(base=shallow_clone(base).model) for _ in range(2)], [], {}
    acting = [ActingRunner("first", jobs[0], order), ActingRunner("second", jobs[1], order)]
    acting[0].told_to_pause = True
    JobMultiplexer([acted(a, endings) for a in acting], clock=lambda: 0.0).run()
    assert order[: acting[1].ran] == ["second"] * acting[1].ran
    assert endings == {"first": Ending.SUCCEEDED, "second": Ending.SUCCEEDED}
    assert bit_equal(adapter_of(jobs[0]), adapter_of(jobs[1]))
