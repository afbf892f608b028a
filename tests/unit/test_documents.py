"""Files that people and programs write are read with the numbers that they hold."""

from __future__ import annotations

import json

import pytest

from windrow.documents import parse_document, read_document
from windrow.errors import UserError
from windrow.proto import attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import write_job
from windrow_sidecar.finetune.job.assembly import read_job

SPEC = {
    "model": {"name": "/m"},
    "dataset": {"source": "/d/rows.jsonl", "evalFraction": 0.00005},
    "training": {"maxSteps": 100, "learningRate": 5e-5},
    "output": {"destination": "/out"},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-05", 5e-05),
        ("5e-5", 5e-5),
        ("1E3", 1000),
        (".5", 0.5),
        ("-2.5e+1", -25),
        ("-2.5e-1", -0.25),
        ("1.", 1),
        (".inf", float("inf")),
        ("17", 17),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("'5e-5'", "5e-5"),
        ("yes", True),
        ("{a: 5e-5, b: [1.0]}", {"a": 5e-5, "b": [1]}),
        ('{"a": 5e-05, "b": "1"}', {"a": 5e-05, "b": "1"}),
    ],
)
def test_numbers_are_those_of_kubectl(text, value):
    found = parse_document(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["a: {b: 1, b: 2}", '{"a": {"b": 1, "b": 2}}', "b: 1\nb: 2"])
def test_a_key_that_is_written_twice_is_refused(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match=r"job\.yaml: cannot be read: .*'b' is written twice"):
        read_document(tmp_path / "job.yaml", "Fix it.")


def test_a_key_that_overrules_a_merged_one_is_written_once():
    assert parse_document("a: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}")["b"] == {"x": 2, "y": 1}


def test_what_is_wrong_is_said_in_one_line_with_the_place(tmp_path):
    (tmp_path / "job.yaml").write_text("a: 1\nb: [1,\nc: }\n")
    with pytest.raises(
        UserError, match=r"job\.yaml: cannot be read: .* \(line 3\)\. Fix it\.$"
    ) as no:
        read_document(tmp_path / "job.yaml", "Fix it.")
    assert "\n" not in str(no.value)
    with pytest.raises(UserError, match=r"none: cannot be read: No such file or directory\. "):
        read_document(tmp_path / "none", "Name another.")


@pytest.mark.parametrize("text", ["a: 1\n---\nb: 2", "[1]", "", "{", "[" * 100_000])
def test_what_is_not_one_object_is_refused(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError):
        read_document(tmp_path / "job.yaml", "Fix it.")


def test_an_object_may_have_marks_before_and_behind_it(tmp_path):
    (tmp_path / "job.yaml").write_text("---\n# made\n---\na: 1\n---\n")
    assert read_document(tmp_path / "job.yaml", "Fix it.") == {"a": 1}
    (tmp_path / "job.yaml").write_text("a: 1\n---\nb: 2\n")
    with pytest.raises(UserError, match="it holds 2 documents"):
        read_document(tmp_path / "job.yaml", "Fix it.")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps({"a": 1}), encoding="utf-8-sig")
    assert read_document(tmp_path / "job.json", "Fix it.") == {"a": 1}


def test_a_job_is_the_same_in_what_the_agent_writes_and_in_a_manifest(tmp_path):
    settings = AgentSettings(run_dir=RunDir(tmp_path))
    assign = attach_pb2.Assign(job_uid="u", job_name="j", epoch=2, spec_json=json.dumps(SPEC))
    job = read_job(write_job(settings, assign) / "job.json")
    assert (job.spec.dataset.eval_fraction, job.spec.training.learning_rate) == (5e-05, 5e-05)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        "metadata: {name: j}\nspec:\n  model: {name: /m}\n"
        "  dataset: {source: /d/rows.jsonl, evalFraction: 5e-5}\n"
        "  training: {maxSteps: 1e2, learningRate: 5e-5}\n  output: {destination: /out}\n"
    )
    assert read_job(manifest).spec == job.spec
