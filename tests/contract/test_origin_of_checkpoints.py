"""A job that is resumed with something else than it began with is refused, by field."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

import pytest
from safetensors.torch import load_file, save_file

from windrow.errors import UserError
from windrow_sidecar.finetune.job.assembly import TaskletRuntime, open_session, read_job
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.loading import load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.testing.models import save_random_llama

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [{"prompt": f"what comes after {i}?", "completion": f"{i + 1} does"} for i in range(6)]
SHAPE = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 2}


def write_rows(folder, rows) -> None:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    save_random_llama(tmp_path / "model", **SHAPE)
    write_rows(tmp_path, ROWS)
    return tmp_path


LORA = {"rank": 2, "targetModules": "q_proj"}


def session_of(folder, *, lora=LORA, **training):
    """The job as a worker loads it: from its manifest, over the model's own files."""
    spec = {
        "model": {"name": str(folder / "model")},
        "dataset": {"source": str(folder / "rows.jsonl"), "format": "completion"},
        "adapter": {"type": "lora", "lora": lora},
        "training": {"maxSteps": 2, "batchSize": 2, "learningRate": "1e-3", **training},
        "output": {"destination": str(folder / "out")},
    }
    (folder / "job.json").write_text(json.dumps({"name": "j", "uid": "j", "spec": spec}))
    job = read_job(folder / "job.json")
    return open_session(
        job,
        load_base(folder / "model", form=WeightForm.of(job.spec)),
        TaskletRuntime(TorchBoundaries(), lambda: MicroLimits(1024)),
    )


@pytest.fixture
def checkpoint(folder):
    """Return a checkpoint of the job after its first tasklets."""
    session = session_of(folder)
    of_job = JobFolder(session.job.destination, session.job.uid, 1)
    of_job.claim()
    stream = session.stream
    of_job.save(
        stream.position,
        {k: t.clone() for k, t in stream.tensors().items()},
        keep=1,
        origin=session.origin,
    )
    return of_job.newest()


def test_the_same_job_goes_on_wherever_its_rows_lie_and_however_fast(folder, checkpoint):
    (folder / "rows.jsonl").rename(folder / "moved.jsonl")
    write_rows(folder, ROWS)
    checkpoint.check(session_of(folder, learningRate="1e-4", packing=True).origin)


def test_a_job_goes_on_once_it_spells_out_what_held_anyway(folder, checkpoint):
    spelled_out = {**LORA, "alpha": 32, "dropout": 0.0, "bias": "none"}
    checkpoint.check(session_of(folder, lora=spelled_out, precision="fp32").origin)


def test_another_setting_of_the_adapter_is_refused_by_its_name(folder, checkpoint):
    with pytest.raises(UserError, match="32 was trained with, the job says 64") as refused:
        checkpoint.check(session_of(folder, lora={**LORA, "alpha": 64}).origin)
    assert refused.value.field == "spec.adapter.lora.alpha"


def reversed_rows(folder):
    write_rows(folder, ROWS[::-1])


def one_answer_changed(folder):
    write_rows(folder, [*ROWS[:-1], {**ROWS[-1], "completion": "7"}])


def other_weights(folder):
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (reversed_rows, "spec.dataset"),
        (one_answer_changed, "spec.dataset"),
        (other_weights, "spec.model.revision"),
    ],
)
def test_other_files_are_refused(folder, checkpoint, change, field):
    change(folder)
    with pytest.raises(UserError) as refused:
        checkpoint.check(session_of(folder).origin)
    assert refused.value.field == field
    assert refused.value.reason == "CheckpointMismatch"


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"seed": 3}, "spec.training.seed"),
        ({"loss": "all"}, "spec.dataset"),
        ({"batchSize": 3}, "spec.training.batchSize"),
        ({"maxSequenceLength": 20}, "spec.dataset"),
        ({"precision": "bf16"}, "spec.training.precision"),
    ],
)
def test_other_settings_are_refused(folder, checkpoint, training, field):
    with pytest.raises(UserError) as refused:
        checkpoint.check(session_of(folder, **training).origin)
    assert refused.value.field == field


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{i}"}]}
    for i in range(6)
]


def origin_of(folder, begun: str, *, template: str = TEMPLATE, rows=CHATS) -> Origin:
    """Return what a job that began then is made of."""
    write_rows(folder, rows)
    base = load_base(folder / "model")
    base.tokenizer.chat_template = template
    spec = {
        "model": {"name": str(folder / "model")},
        "dataset": {"source": str(folder / "rows.jsonl"), "format": "chat"},
        "training": {"maxSteps": 2, "batchSize": 2},
        "output": {"destination": str(folder / "out")},
    }
    (folder / "job.json").write_text(json.dumps({"name": "j", "uid": "j", "spec": spec}))
    job = replace(read_job(folder / "job.json"), begun=datetime.fromisoformat(begun))
    runtime = TaskletRuntime(TorchBoundaries(), lambda: MicroLimits(1024))
    return open_session(job, base, runtime).origin


MONDAY, TUESDAY = "2024-01-01T23:50:00+00:00", "2024-01-02T00:10:00+00:00"
DATED = "{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE


def test_a_folder_says_when_its_job_began_to_every_worker(tmp_path):
    first = JobFolder(tmp_path, "j", 1)
    first.claim()
    later = JobFolder(tmp_path, "j", 2)
    later.claim()
    assert first.begun == later.begun
    assert first.begun.tzinfo is not None


def test_a_job_whose_template_writes_the_date_goes_on_on_another_day(folder):
    begun = origin_of(folder, MONDAY, template=DATED)
    assert begun.differs(origin_of(folder, MONDAY, template=DATED)) is None
    assert begun.differs(origin_of(folder, TUESDAY, template=DATED)).field == "spec.dataset"


def test_a_checkpoint_of_an_older_version_goes_on_where_it_read_rows_otherwise(folder):
    """It noted no rules of reading; where they make no difference rows have to be the same."""
    older = replace(origin_of(folder, MONDAY, template=DATED), reading=0)
    now = origin_of(folder, TUESDAY, template=DATED)
    assert older.differs(now) is None
    assert "other tokens" in older.moved(now)
    plain = replace(origin_of(folder, MONDAY), reading=0)
    assert plain.differs(origin_of(folder, TUESDAY)) is None
    assert plain.moved(origin_of(folder, TUESDAY)) == ""
    others = origin_of(folder, TUESDAY, rows=CHATS[::-1])
    assert plain.differs(others).field == "spec.dataset"


def test_another_chat_template_is_told_as_what_it_is(folder):
    begun, other = origin_of(folder, MONDAY), origin_of(folder, MONDAY, template="x" + TEMPLATE)
    assert begun.differs(other).field == "spec.model.name"
    assert "chat template" in begun.differs(other).problem
