"""Layer by layer, micro-batch by micro-batch: the same training as peft's own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers

from windrow.crd import parse_job_spec
from windrow_sidecar.finetune.adapters import add_adapter, trainable
from windrow_sidecar.finetune.data import BatchPlan, Example, Split
from windrow_sidecar.finetune.layerwise import DecoderStack, TorchBoundaries
from windrow_sidecar.finetune.loss import Head
from windrow_sidecar.finetune.optimizer import AdapterOptimizer
from windrow_sidecar.finetune.schedule import Schedule
from windrow_sidecar.finetune.stream import MicroLimits, StepDone, TaskletStream

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Olmo2"]
STEPS, BATCH = 4, 5


def make_model(architecture: str) -> torch.nn.Module:
    torch.manual_seed(5)
    config = getattr(transformers, f"{architecture}Config")(**COMMON)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # larger than the defaults, so that errors show
        torch.nn.init.normal_(parameter, std=0.1)
    return model.requires_grad_(False)


def make_rows(n: int = 12) -> tuple[Example, ...]:
    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        length = int(torch.randint(5, 40, (), generator=draw))
        ids = tuple(torch.randint(3, 96, (length,), generator=draw).tolist())
        prompt = length // 3
        rows.append(Example(ids, (-100,) * prompt + ids[prompt:], f"rows:{i}"))
    return tuple(rows)


def make_spec(dropout: float = 0.0):
    return parse_job_spec(
        {
            "model": {"name": "random"},
            "dataset": {"source": "/rows.jsonl"},
            "adapter": {"lora": {"rank": 4, "alpha": 8, "dropout": dropout}},
            "training": {"maxSteps": STEPS, "batchSize": BATCH, "learningRate": "1e-2"},
            "output": {"destination": "/out"},
        }
    )


def make_stream(model, rows, *, max_tokens: int, dropout: float = 0.0, held_out=()):
    spec = make_spec(dropout)
    tuned = add_adapter(model, spec)
    for name, parameter in trainable(tuned).items():
        if "lora_B" in name:  # else gradients of A are zero in the first step
            torch.nn.init.normal_(
                parameter, std=0.05, generator=torch.Generator().manual_seed(len(name))
            )
    stack = DecoderStack(model)
    optimizer = AdapterOptimizer(
        trainable(tuned), Schedule("cosine", spec.training.learning_rate, STEPS, 0.0)
    )
    stream = TaskletStream(
        tuned,
        stack,
        Head(stack.norm, stack.head, stack.config),
        optimizer,
        Split(rows, held_out),
        BatchPlan(len(rows), BATCH, 17),
        total_steps=STEPS,
        boundaries=TorchBoundaries(),
        limits=lambda: MicroLimits(max_tokens),
        seed=17,
    )
    return stream, tuned


def run(stream) -> list[StepDone]:
    done = []
    while (tasklet := stream.peek()) is not None:
        outcome = stream.run(tasklet)
        if isinstance(outcome, StepDone):
            done.append(outcome)
    return done


def train_with_peft(tuned, rows) -> tuple[list[float], list[float]]:
    """The ordinary way: padded batch with mask, the model's own loss, torch's AdamW."""
    plan = BatchPlan(len(rows), BATCH, 17)
    parameters = list(trainable(tuned).values())
    adamw = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    scheduler = transformers.get_scheduler("cosine", adamw, 0, STEPS)
    tuned.train()
    losses, norms = [], []
    for step in range(STEPS):
        batch = [rows[i] for i in plan.rows_of(step)]
        width = max(row.length for row in batch)
        pad = [width - row.length for row in batch]
        out = tuned(
            input_ids=torch.tensor([r.ids + (0,) * n for r, n in zip(batch, pad, strict=True)]),
            attention_mask=torch.tensor(
                [[1] * r.length + [0] * n for r, n in zip(batch, pad, strict=True)]
            ),
            labels=torch.tensor([r.labels + (-100,) * n for r, n in zip(batch, pad, strict=True)]),
            use_cache=False,
        )
        adamw.zero_grad()
        out.loss.backward()
        losses.append(float(out.loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        adamw.step()
        scheduler.step()
    return losses, norms


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("max_tokens", [1, 64, 4096])
def test_steps_equal_those_of_peft(architecture, max_tokens):
    model, rows = make_model(architecture), make_rows()
    stream, tuned = make_stream(copy.deepcopy(model), rows, max_tokens=max_tokens)
    reference = copy.deepcopy(tuned)
    start = {n: p.detach().clone() for n, p in trainable(reference).items()}

    steps = run(stream)
    losses, norms = train_with_peft(reference, rows)

    assert [s.position.loss for s in steps] == pytest.approx(losses, rel=1e-5)
    assert [s.facts.gradient_norm for s in steps] == pytest.approx(norms, rel=1e-5)
    ours, theirs = trainable(tuned), trainable(reference)
    moved = math.sqrt(sum(float((theirs[n] - start[n]).detach().square().sum()) for n in theirs))
    apart = math.sqrt(sum(float((theirs[n] - ours[n]).detach().square().sum()) for n in theirs))
    assert moved > 0.1
    # AdamW divides by the root of tiny second moments, which enlarges rounding.
    assert apart <= 1e-3 * moved


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_equal_those_of_peft(architecture):
    model, rows = make_model(architecture), make_rows()
    stream, tuned = make_stream(copy.deepcopy(model), rows, max_tokens=64)
    reference = copy.deepcopy(tuned)
    while stream.peek().micro is not None:
        stream.run(stream.peek())
    ours = {k[4:]: v for k, v in stream.tensors().items() if k.startswith("sum/")}

    batch = [rows[i] for i in BatchPlan(len(rows), BATCH, 17).rows_of(0)]
    labels = sum(row.targets for row in batch)
    for row in batch:
        out = reference(input_ids=torch.tensor([row.ids]), labels=torch.tensor([row.labels]))
        (out.loss * row.targets / labels).backward()
    theirs = {n: p.grad for n, p in trainable(reference).items()}

    norm = math.sqrt(sum(float(g.square().sum()) for g in theirs.values()))
    apart = math.sqrt(sum(float((theirs[n] - ours[n]).detach().square().sum()) for n in theirs))
    assert norm > 1e-3
    assert apart <= 1e-5 * norm


def test_dropout_is_the_same_for_the_same_seed_and_is_there():
    rows = make_rows()
    losses = []
    for dropout in (0.5, 0.5, 0.0):
        stream, _ = make_stream(make_model("Llama"), rows, max_tokens=64, dropout=dropout)
        losses.append([s.position.loss for s in run(stream)])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
