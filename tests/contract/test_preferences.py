"""Direct preference optimization: TRL's loss and gradients, however the work is cut."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from windrow.crd import DatasetSpec, parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.adapters import Adapter, trainable
from windrow_sidecar.finetune.data.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.data.split import IGNORED, BatchPlan, DataSplit, Example
from windrow_sidecar.finetune.data.tokens import RowTokenizer
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.orders import interleaved, token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.engine.stages import EvaluationDone, JobStage, StepDone
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.tasklets import MicroLimits, by_length, next_micro_batch
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.finetune.training.preference import PreferenceLoss
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import Cut, small_spec, tuned_model
from windrow_sidecar.testing.models import save_random_llama
from windrow_sidecar.testing.rounding import ROUNDING, apart, in_float64
from windrow_sidecar.testing.tinyjob import bit_equal

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS, BATCH, STEPS, SEED, RATE = 6, 3, 4, 17, 1e-2
LOSS = PreferenceLoss(beta=0.3, label_smoothing=0.1)
WHOLE = Cut()
CUTS = {
    "whole batch": Cut(),
    "one pair": Cut(max_tokens=1),
    "windows of 7": Cut(Windows(7)),
    "token-major": Cut(Windows(7), token_major),
    "interleaved": Cut(Windows(16), interleaved, max_tokens=64, micro_batches=2),
    "in one line": Cut(packed=True),
    "windows in one line": Cut(Windows(7), packed=True),
}


def pairs(n: int) -> tuple[Example, ...]:
    """Chosen and rejected answers to prompts of a third of their length."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        prompt = tuple(torch.randint(3, 96, (5,), generator=draw).tolist())
        for _ in range(2):
            length = int(torch.randint(2, 25, (), generator=draw))
            answer = tuple(torch.randint(3, 96, (length,), generator=draw).tolist())
            rows.append(Example(prompt + answer, (IGNORED,) * 5 + answer, f"rows:{i}"))
    return tuple(rows)


@pytest.fixture(scope="module")
def tuned():
    return tuned_model(random_model("Llama").double(), small_spec())


def stream_of(model, cut: Cut = WHOLE, *, held_out: int = 0, steps: int = STEPS, every: int = 0):
    rows = pairs(PAIRS + held_out)
    split = DataSplit(rows[: 2 * PAIRS], rows[2 * PAIRS :], together=2)
    return stream_over(model, split, cut, batch=BATCH, steps=steps, every=every, loss=LOSS)


def stream_over(model, rows: DataSplit, cut: Cut, *, batch: int, steps: int, every: int, loss):
    stack = DecoderStack(model.get_base_model(), cut.around_layer)
    return TaskletStream(
        ModelParts(stack, Head(stack), Adapter(model)),
        AdapterOptimizer(trainable(model), Schedule("cosine", RATE, steps, 0.0)),
        rows,
        BatchPlan(rows.train_rows, batch, SEED),
        total_steps=steps,
        boundaries=TorchBoundaries(),
        limits=lambda: MicroLimits(cut.max_tokens, micro_batches=cut.micro_batches),
        sizing=lambda: cut.sizing,
        order=cut.order,
        seed=SEED,
        evaluation_policy=EvaluationPolicy(packed=cut.packed, eval_every=every),
        preference=loss,
    )


def run(stream, until=lambda: False) -> list:
    came = []
    while not until() and (tasklet := stream.peek()) is not None:
        if (outcome := stream.run(tasklet)) is not None:
            came.append(outcome)
    return came


def log_probability(model, example: Example) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([example.ids]), use_cache=False).logits[0, :-1]
    labels = torch.tensor(example.labels[1:])
    return -functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def plain_training(model, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of each step and the weights at the end, the ordinary way."""
    model, rows, plan = copy.deepcopy(model), pairs(PAIRS), BatchPlan(PAIRS, BATCH, SEED)
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=RATE, weight_decay=0.0)
    schedule, losses = Schedule("cosine", RATE, steps, 0.0), []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for pair in plan.rows_of(step):
            both = rows[2 * pair : 2 * pair + 2]
            with torch.no_grad(), model.disable_adapter():
                reference = [log_probability(model, row) for row in both]
            ours = [log_probability(model, row) for row in both]
            margin = LOSS.beta * (ours[0] - ours[1] - reference[0] + reference[1])
            total = (
                total - 0.9 * functional.logsigmoid(margin) - 0.1 * functional.logsigmoid(-margin)
            )
        loss = total / len(plan.rows_of(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable(model).values(), 1.0)
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in trainable(model).items()}


@pytest.fixture(scope="module")
def plainly(tuned):
    with in_float64():
        return plain_training(tuned)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_losses_and_weights_of_some_steps_equal_the_ordinary_way(tuned, plainly, cut):
    model = copy.deepcopy(tuned)
    with in_float64():
        came = run(stream_of(model, cut))
    losses, weights = plainly
    ours = torch.tensor([o.position.loss for o in came if isinstance(o, StepDone)])
    assert apart({"loss": ours}, {"loss": torch.tensor(losses)}).by_rounding
    assert apart({n: p.detach() for n, p in trainable(model).items()}, weights).by_rounding


def test_references_are_computed_once_and_go_with_a_checkpoint(tuned):
    whole = stream_of(copy.deepcopy(tuned), held_out=2)
    run(whole)
    interrupted = stream_of(copy.deepcopy(tuned), held_out=2)
    run(interrupted, lambda: interrupted.position.step == 2)
    known = {n: t.clone() for n, t in interrupted.tensors().items()}
    assert not torch.isnan(known["reference/held_out"]).any()
    resumed = stream_of(copy.deepcopy(tuned), held_out=2)
    resumed.restore(interrupted.position, known)
    stages = set()
    while (tasklet := resumed.peek()) is not None:
        stages.add(resumed.stage)
        resumed.run(tasklet)
    assert stages == {JobStage.TRAINING, JobStage.TUNED_EVALUATION}
    assert bit_equal(resumed.tensors(), whole.tensors())


def test_an_evaluation_is_the_mean_loss_of_held_out_pairs(tuned):
    model = copy.deepcopy(tuned)
    with in_float64():
        came = run(stream_of(model, held_out=2, every=1, steps=2))
        rows, margins = pairs(PAIRS + 2)[2 * PAIRS :], []
        for at in (0, 2):
            tuned_now = [log_probability(model, row) for row in rows[at : at + 2]]
            with model.disable_adapter():
                base = [log_probability(model, row) for row in rows[at : at + 2]]
            margins.append(LOSS.beta * (tuned_now[0] - tuned_now[1] - base[0] + base[1]).detach())
        wanted = -0.9 * functional.logsigmoid(torch.stack(margins)) - 0.1 * functional.logsigmoid(
            -torch.stack(margins)
        )
    evaluations = [o for o in came if isinstance(o, EvaluationDone)]
    assert [o.stage for o in evaluations] == [
        JobStage.BASE_EVALUATION,
        JobStage.HELD_OUT_EVALUATION,
        JobStage.TUNED_EVALUATION,
    ]
    # The base prefers nothing over itself.
    assert evaluations[0].loss == pytest.approx(0.6931471805599453, rel=1e-12)
    assert evaluations[-1].loss == pytest.approx(float(wanted.mean()), rel=1e-9)


def test_both_answers_of_a_pair_are_in_one_micro_batch():
    lengths = (3, 9, 12, 2, 9, 9)
    ordered = by_length(range(6), lengths, 2)
    assert ordered == (2, 3, 0, 1, 4, 5)
    sizes = [(1, 2), (24, 2), (47, 2), (48, 4), (1000, 6)]
    for tokens, rows in sizes:
        micro = next_micro_batch(0, ordered, lengths, max_tokens=tokens, together=2)
        assert len(micro.rows) == rows, tokens
    assert next_micro_batch(0, ordered, lengths, max_tokens=1000, max_rows=4, together=2).rows == (
        *(2, 3, 0, 1),
    )


SPEC = {
    "model": {"name": "m"},
    "dataset": {"source": "/rows.jsonl", "format": "preference"},
    "training": {"maxSteps": 2, "method": "dpo"},
    "output": {"destination": "/out"},
}


@pytest.mark.parametrize(
    ("part", "changed", "said"),
    [
        ("dataset", {"format": "chat"}, "format: preference with training.method: dpo"),
        ("training", {"method": "sft"}, "format: preference with training.method: dpo"),
        ("training", {"method": "sft", "dpo": {}}, "Write method: dpo, or drop dpo"),
        ("training", {"loss": "all"}, "Write loss: completion"),
        ("training", {"dpo": {"labelSmoothing": 0.6}}, "labelSmoothing"),
        ("training", {"dpo": {"beta": 0}}, "beta"),
        ("adapter", {"lora": {"bias": "all"}}, "Write none"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused_by_field(part, changed, said):
    assert parse_job_spec(SPEC).training.preferences.beta == 0.1
    with pytest.raises(UserError) as refused:
        parse_job_spec({**SPEC, part: {**SPEC.get(part, {}), **changed}})
    assert said in str(refused.value)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
AS_TEXT = [
    {"prompt": "Two plus two is ", "chosen": "four.", "rejected": "five, I think."},
    {"prompt": "The sky is", "chosen": " blue", "rejected": " green"},
]
AS_TURNS = [
    {
        "prompt": ASKED,
        "chosen": [{"role": "assistant", "content": "Paris."}],
        "rejected": [{"role": "assistant", "content": "It may be Lyon."}],
    },
    {
        "prompt": [{"role": "system", "content": "Be short."}, *ASKED],
        "chosen": [{"role": "assistant", "content": "Paris."}],
        "rejected": [{"role": "assistant", "content": "The capital is Paris, on the Seine."}],
    },
]
TRL = Path(sys.prefix) / "trl"


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory):
    """Return by the form of rows: (rows as we read them, our model, TRL's folder)."""
    if not TRL.is_dir():
        pytest.skip("TRL is not beside the environment: make test installs it there")
    model_folder, made = tmp_path_factory.mktemp("model") / "model", {}
    save_random_llama(model_folder)
    (model_folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|eos|>",
                "pad_token": "<|bos|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    spec = small_spec({"lora": {"rank": 2, "targetModules": "q_proj,v_proj"}})
    for form, rows in (("text", AS_TEXT), ("turns", AS_TURNS)):
        folder = tmp_path_factory.mktemp(form)
        (folder / "model").symlink_to(model_folder)
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        read = read_dataset(
            DatasetSpec(source=str(folder / "rows.jsonl"), format="preference", eval_fraction=0),
            RowTokenizer(tokenizer, max_length=500),
            ModelLimits(264, 1024),
            seed=1,
        )
        with in_float64():  # its table of rotations too
            base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
        tuned = tuned_model(base.requires_grad_(requires_grad=False), spec)
        tuned.peft_config["default"].save_pretrained(folder / "adapter")
        parameters = {n: p.detach().contiguous() for n, p in trainable(tuned).items()}
        save_file(parameters, folder / "adapter" / "parameters.safetensors")
        made[form] = (read, tuned, folder)
    subprocess.run(
        [
            *(sys.executable, Path(__file__).with_name("trl_losses.py"), "0.3"),
            *(folder for _, _, folder in made.values()),
        ],
        env={**os.environ, "PYTHONPATH": str(TRL), "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return made


@pytest.mark.extended
@pytest.mark.parametrize("form", ["text", "turns"])
def test_tokens_loss_and_gradients_are_those_of_trl(by_trl, form):
    rows, tuned, folder = by_trl[form]
    theirs = json.loads((folder / "trl.json").read_text())
    ours = [[list(e.ids) for e in rows.train[at : at + 2]] for at in (0, 2)]
    assert ours == theirs["ids"]
    with in_float64():
        stream = stream_over(
            tuned, rows, Cut(Windows(7)), batch=2, steps=1, every=0, loss=PreferenceLoss(beta=0.3)
        )
        run(stream, lambda: stream.before_optimizer)
        sums = {n: t.clone() for n, t in stream.tensors().items() if n.startswith("sum/")}
        (done,) = run(stream)
    assert done.position.loss == pytest.approx(theirs["loss"], rel=ROUNDING)
    gradients = load_file(folder / "trl.safetensors")
    assert apart({n.removeprefix("sum/"): t for n, t in sums.items()}, gradients).by_rounding
