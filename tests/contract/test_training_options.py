"""Options of a training change what they say and nothing else."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from windrow.crd import OptimizerSpec, parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.adapters import add_adapter, save_adapter, trainable
from windrow_sidecar.finetune.adapter.beginning import begin_with
from windrow_sidecar.finetune.data.source_access import SourceAccess
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.engine.stages import EvaluationDone, JobStage
from windrow_sidecar.finetune.model.loading import load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy, Judged
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_float64, in_type_of, no_farther
from windrow_sidecar.testing.tinyjob import adapter_of, bit_equal, tiny_job, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


def run(job, *, until=None) -> list:
    """Run a job to its end, or until so many steps are done; returns what came."""
    came = []
    while (tasklet := job.stream.peek()) is not None:
        if until is not None and job.stream.position.step >= until:
            break
        if (outcome := job.stream.run(tasklet)) is not None:
            came.append(outcome)
    return came


def learnt(**options) -> dict[str, torch.Tensor]:
    """The adapter of a tiny job in float64."""
    base = tiny_llama().double()
    with in_type_of(base):
        job = tiny_job(base=base, **options)
        run(job)
    return adapter_of(job)


@pytest.fixture(scope="module")
def padded():
    return learnt()


@pytest.mark.parametrize("max_tokens", [8, 24, 1000])
def test_packed_rows_learn_what_padded_rows_learn_dropout_included(padded, max_tokens):
    assert apart(
        learnt(max_tokens=max_tokens, evaluation_policy=EvaluationPolicy(packed=True)), padded
    ).by_rounding


def test_packed_rows_hold_no_padding():
    job = tiny_job(max_tokens=1000, evaluation_policy=EvaluationPolicy(packed=True))
    tasklet = job.stream.peek()
    assert tasklet.micro.lines == 1
    assert tasklet.micro.padded_tokens == tasklet.micro.tokens == sum(tasklet.micro.lengths)


def test_small_micro_batches_accumulate_to_the_same_step(padded):
    one_row = {"max_tokens": 1000, "evaluation_policy": EvaluationPolicy(max_rows=1)}
    assert len(tiny_job(**one_row).stream.peek().micro.rows) == 1
    assert apart(learnt(**one_row), padded).by_rounding


def test_the_adapter_is_judged_every_so_many_steps():
    job = tiny_job(steps=5, evaluation_policy=EvaluationPolicy(eval_every=2))
    came = run(job)
    stages = [o.stage for o in came if isinstance(o, EvaluationDone)]
    held_out = JobStage.HELD_OUT_EVALUATION
    assert stages == [JobStage.BASE_EVALUATION, held_out, held_out, JobStage.TUNED_EVALUATION]
    assert job.stream.position.judged.step == 4


def test_evaluations_between_steps_change_nothing_of_what_is_learnt(padded):
    assert bit_equal(learnt(evaluation_policy=EvaluationPolicy(eval_every=1)), padded)


def test_a_job_that_gets_no_better_ends_early_with_its_best_adapter():
    # So large a margin is never reached: the first evaluation is the best, the third ends the job.
    evaluation_policy = EvaluationPolicy(eval_every=1, patience=2, min_delta=100.0)
    first = tiny_job(steps=1)
    run(first)
    job = tiny_job(steps=1000, evaluation_policy=evaluation_policy)
    came = run(job)
    assert job.stream.position.step == 3
    assert isinstance(came[-1], EvaluationDone)
    assert came[-1].stage is JobStage.TUNED_EVALUATION
    assert came[-1].loss == job.stream.position.judged.best_loss
    assert job.stream.told == (
        "3 of 1000 steps: no better loss for 2 evaluations; the adapter is that of step 1"
    )


def test_a_job_that_is_judged_to_its_end_says_of_which_step_its_adapter_is():
    job = tiny_job(
        steps=3, evaluation_policy=EvaluationPolicy(eval_every=1, patience=9, min_delta=100.0)
    )
    run(job)
    assert job.stream.told == "3 steps; the adapter is that of step 1"
    unjudged = tiny_job(steps=3)
    run(unjudged)
    assert unjudged.stream.told == "3 steps"


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_job_that_ends_early_does_so_wherever_it_was_interrupted(cuts):
    evaluation_policy = EvaluationPolicy(eval_every=1, patience=2, min_delta=0.02)
    whole = tiny_job(steps=8, evaluation_policy=evaluation_policy)
    run(whole)
    position, tensors = None, {}
    for cut in (*cuts, 100_000):
        job = tiny_job(steps=8, evaluation_policy=evaluation_policy)
        if position is not None:
            job.stream.restore(position, tensors)
        for _ in range(cut):
            if (tasklet := job.stream.peek()) is not None:
                job.stream.run(tasklet)
        position = job.stream.position
        tensors = {name: t.clone() for name, t in job.stream.tensors().items()}
    assert job.stream.position == whole.stream.position
    assert bit_equal(adapter_of(job), adapter_of(whole))


def test_only_a_loss_that_is_lower_by_the_margin_is_better():
    evaluation_policy = EvaluationPolicy(eval_every=1, patience=2, min_delta=0.1)
    judged = evaluation_policy.judge(Judged(), 1, 2.0)
    judged = evaluation_policy.judge(judged, 2, 1.95)
    assert (judged.best_loss, judged.since_best) == (2.0, 1)
    assert not evaluation_policy.ends(judged)
    assert evaluation_policy.ends(evaluation_policy.judge(judged, 3, 1.91))
    assert evaluation_policy.judge(judged, 3, 1.89).is_best


def optimizer(parameter, **spec):
    schedule = Schedule("constant", 1e-1, 10, 0.0)
    return AdapterOptimizer({"w": parameter}, schedule, OptimizerSpec(**spec))


def step(made, parameter, number: int) -> None:
    parameter.grad = torch.full_like(parameter, 0.5)
    made.commit()
    made.step(number)


@pytest.mark.parametrize("kind", ["adamw", pytest.param("adamw8bit", marks=pytest.mark.quantized)])
def test_an_optimizer_goes_on_from_its_tensors_bit_for_bit(kind):
    if kind == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    start = torch.randn(128, 64)
    whole = torch.nn.Parameter(start.clone())
    made = optimizer(whole, type=kind)
    for number in range(2):
        step(made, whole, number)
    held = {name: t.clone() for name, t in made.tensors().items()}
    resumed = torch.nn.Parameter(torch.zeros_like(start))
    other = optimizer(resumed, type=kind)
    other.load(held)
    step(made, whole, 2)
    step(other, resumed, 2)
    assert torch.equal(whole, resumed)


def test_decay_betas_and_clipping_are_those_of_the_spec():
    options = {"weight_decay": 0.5, "beta1": 0.5, "beta2": 0.5, "max_gradient_norm": 1e-3}
    with in_float64():
        ours, theirs = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        made = optimizer(ours, **options)
        reference = torch.optim.AdamW([theirs], lr=1e-1, betas=(0.5, 0.5), weight_decay=0.5)
        for number in range(3):
            step(made, ours, number)
            theirs.grad = torch.full_like(theirs, 0.5)
            torch.nn.utils.clip_grad_norm_([theirs], 1e-3)
            reference.step()
    assert apart({"w": ours.data}, {"w": theirs.data}).by_rounding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.quantized
@pytest.mark.parametrize(
    ("quantization", "lora", "option"),
    [
        ("nf4", {"modulesToSave": "norm,gate_proj"}, "modulesToSave"),
        ("int8", {"modulesToSave": "mlp"}, "modulesToSave"),
        ("int8", {"useDora": True}, "useDora"),
    ],
)
def test_what_a_quantised_base_cannot_do_is_refused_by_its_option(
    checkpoint, quantization, lora, option
):
    pytest.importorskip("bitsandbytes")
    model = load_base(checkpoint, form=WeightForm(torch.float32, quantization)).model

    def spec(**options):
        job = small_spec({"lora": {"rank": 4, "targetModules": "q_proj", **options}})
        kept = job.model.model_copy(update={"quantization": quantization})
        return job.model_copy(update={"model": kept})

    with pytest.raises(UserError) as refused:
        add_adapter(model, spec(**lora))
    assert refused.value.field == f"spec.adapter.lora.{option}"
    add_adapter(model, spec(modulesToSave="norm,lm_head"))


@pytest.mark.parametrize(
    "form",
    [
        WeightForm(torch.bfloat16),
        pytest.param(WeightForm(torch.float32, "int8"), marks=pytest.mark.quantized),
        pytest.param(WeightForm(torch.float32, "nf4"), marks=pytest.mark.quantized),
    ],
    ids=["bf16", "int8", "nf4"],
)
def test_over_a_base_in_fewer_bits_an_adapter_in_fp32_learns_what_pefts_does(checkpoint, form):
    if form.quantization != "none":
        pytest.importorskip("bitsandbytes")
    narrow, whole = (
        tuned_model(load_base(checkpoint, form=this).model, small_spec())
        for this in (form, WeightForm())
    )
    assert all(p.dtype == torch.float32 for p in trainable(narrow).values())
    rows = small_rows()
    truth = pefts_gradients(whole.double(), rows)
    theirs = apart(pefts_gradients(narrow, rows), truth).of_norm
    cuts = (Cut(), Cut(Windows(7)), Cut(max_tokens=64))
    ours = [apart(our_gradients(narrow, rows, cut), truth).of_norm for cut in cuts]
    assert theirs > torch.finfo(torch.bfloat16).eps / 2, "it is in fewer bits"
    assert no_farther(ours, [theirs], torch.bfloat16)


LORA = {"rank": 2, "alpha": 4, "targetModules": "q_proj,v_proj"}


def lora_of(job):
    """The adapter's weights, learning or not: a job begins by judging the base without it."""
    found = {n: p.detach().clone() for n, p in job.model.named_parameters() if "lora_" in n}
    assert len(found) == 8
    return found


def beginning(folder, **lora):
    return tiny_job(adapter={"from": str(folder), "lora": {**LORA, **lora}})


def test_a_job_begins_with_the_weights_of_an_adapter_that_it_names(tmp_path):
    earlier = tiny_job(adapter={"lora": LORA})
    run(earlier)
    save_adapter(earlier.model, tmp_path)
    learnt_there = lora_of(earlier)
    assert not bit_equal(learnt_there, lora_of(tiny_job(adapter={"lora": LORA})))
    assert bit_equal(lora_of(beginning(tmp_path)), learnt_there)
    later = beginning(tmp_path)
    run(later)
    assert not bit_equal(lora_of(later), learnt_there)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 4}, "r 2 and not 4"),
        ({"alpha": 8}, "lora_alpha 4 and not 8"),
        ({"useDora": True}, "use_dora None and not True"),
        ({"targetModules": "q_proj"}, "which this job would not train"),
        ({"targetModules": "q_proj,v_proj,o_proj"}, "has no weights for"),
    ],
)
def test_an_adapter_of_another_form_is_not_begun_with(tmp_path, lora, said):
    save_adapter(tiny_job(adapter={"lora": LORA}).model, tmp_path)
    with pytest.raises(UserError, match=said) as refused:
        beginning(tmp_path, **lora)
    assert refused.value.field == "spec.adapter.from"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("config is a pipe", "not a regular file"),
        ("config is nested without end", "not JSON"),
        ("weights are a pipe", "not a regular file"),
        ("weights take no room on the disk", "more than the .* that this job's adapter takes"),
    ],
)
def test_a_folder_made_to_hold_up_a_worker_or_to_fill_its_memory_is_refused(tmp_path, harm, said):
    save_adapter(tiny_job(adapter={"lora": LORA}).model, tmp_path)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    harmed = config if harm.startswith("config") else weights
    harmed.unlink()
    if harm.endswith("pipe"):
        os.mkfifo(harmed)
    elif harmed == config:
        config.write_text("[" * 100_000)
    else:
        with weights.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(UserError, match=said) as refused:
        beginning(tmp_path)
    assert refused.value.field == "spec.adapter.from"


def test_an_adapter_that_cannot_be_read_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="cannot be read") as refused:
        beginning(tmp_path)
    assert refused.value.field == "spec.adapter.from"
    save_adapter(tiny_job(adapter={"lora": LORA}).model, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="is damaged"):
        beginning(tmp_path)
    inside = SourceAccess((tmp_path / "own",))
    tuned = tiny_job(adapter={"lora": LORA}).model
    spec = parse_job_spec(
        {
            "model": {"name": "tiny"},
            "dataset": {"source": "/rows.jsonl"},
            "adapter": {"from": str(tmp_path), "lora": LORA},
            "training": {"maxSteps": 1},
            "output": {"destination": "/out"},
        }
    )
    with pytest.raises(UserError, match="is not on a volume that this job may read"):
        begin_with(tuned, "default", spec, inside)
