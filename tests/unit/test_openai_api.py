"""The endpoint of `windrow serve-api`, called by OpenAI's own client."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import itertools
import json
import os
import runpy
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from support.openai_endpoint import GROUP, HeldObjects, served, serving_chat

from windrow.conditions import set_condition
from windrow_operator.openai_api import jobs, server
from windrow_operator.openai_api.files import StorageLimits
from windrow_operator.openai_api.keyring import keys_of
from windrow_operator.openai_api.refusals import CallRefused
from windrow_operator.openai_api.stores import DirectoryStore

MODEL = "/models/chat"
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
ROWS = b"".join(json.dumps(ROW).encode() + b"\n" for _ in range(40))
BLUE, RED, OTHER = "sk-blue", "sk-red", "sk-other"


def entry(namespace, key):
    line = f"{namespace} {hashlib.sha256(key.encode()).hexdigest()}"
    return base64.b64encode(line.encode()).decode()


@pytest.fixture
def held():
    return held_objects()


def held_objects():
    held = HeldObjects()
    secret = {"blue": entry("blue", BLUE), "red": entry("red", RED), "other": entry("blue", OTHER)}
    held.put("/api/v1/namespaces/windrow-system/secrets/keys", data=secret)
    for namespace in ("blue", "red"):
        held.put(f"/api/v1/namespaces/{namespace}", meta={"labels": {"team": namespace}})
    held.put(
        f"{GROUP}/namespaces/serving/harvestpolicies/chat",
        spec={
            "selector": {"matchLabels": {"app": "chat"}},
            "objective": {"tpot": "30ms"},
            "access": {"namespaceSelector": {"matchLabels": {"team": "blue"}}},
        },
    )
    held.put(
        f"{GROUP}/namespaces/serving/harvestslots/decode-0",
        spec={"podName": "decode-0", "model": MODEL},
        status={"policy": "chat"},
    )
    return held


TEMPLATE = {"policies": ["serving/chat"], "adapter": {"lora": {"rank": 8}}}


@pytest.fixture
def endpoint(held, tmp_path):
    with served(held, str(tmp_path), template=TEMPLATE) as url:
        yield url


@pytest.fixture
def blue(endpoint):
    with openai.OpenAI(base_url=endpoint, api_key=BLUE, max_retries=0) as client:
        yield client


def client_of(endpoint, key):
    return openai.OpenAI(base_url=endpoint, api_key=key, max_retries=0)


def upload(client, content=ROWS, name="rows.jsonl"):
    return client.files.create(file=(name, content), purpose="fine-tune")


def refusal(call, *args, **kwargs):
    """The error object that a call is answered with, and its status."""
    with pytest.raises(openai.APIStatusError) as refused:
        call(*args, **kwargs)
    answer = refused.value
    assert {"message", "type", "param", "code"} == set(answer.body)
    return answer.status_code, answer.body


def left_over(root):
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def await_empty(root):
    """Wait until the server has noticed that a caller is gone."""
    deadline_s = time.monotonic() + 60
    while left_over(root):
        assert time.monotonic() < deadline_s, left_over(root)
        time.sleep(0.01)


def say(held, body, *facts, **status):
    conditions = (body.get("status") or {}).get("conditions") or []
    now = datetime(2026, 1, 2, 3, 6, tzinfo=UTC)
    for type_, value, reason, message in facts:
        conditions = set_condition(conditions, type_, value, reason, message, 1, now)
    body["status"] = {**(body.get("status") or {}), "conditions": conditions, **status}


def test_preferences_are_learnt_by_dpo(held, blue):
    answers = {
        f"{name}_output": [{"role": "assistant", "content": said}]
        for name, said in (("preferred", "Paris."), ("non_preferred", "Lyon, maybe."))
    }
    row = {"input": {"messages": [{"role": "user", "content": "Capital?"}]}, **answers}
    file = blue.files.create(file=("p.jsonl", json.dumps(row).encode()), purpose="fine-tune")
    hyperparameters = {"beta": 0.3, "learning_rate_multiplier": 2}
    job = blue.fine_tuning.jobs.create(
        model="chat",
        training_file=file.id,
        suffix="taste",
        seed=7,
        method={"type": "dpo", "dpo": {"hyperparameters": hyperparameters}},
    )
    assert job.method.dpo.hyperparameters.beta == 0.3
    spec = held.job("blue", "taste")["spec"]
    assert spec["dataset"]["format"] == "preference"
    assert spec["training"] == {
        "epochs": 3,
        "batchSize": 1,
        "learningRate": pytest.approx(1e-5),
        "seed": 7,
        "method": "dpo",
        "dpo": {"beta": 0.3},
    }
    status, error = refusal(blue.fine_tuning.jobs.create, model=MODEL, training_file=file.id)
    assert (status, error["param"]) == (400, "training_file")
    wrong = json.dumps({**row, "non_preferred_output": "Lyon"}).encode()
    status, error = refusal(blue.files.create, file=("p.jsonl", wrong), purpose="fine-tune")
    assert "p.jsonl:1: `non_preferred_output` is not a list of turns" in error["message"]


ACCEPTED = ("Accepted", "True", "Valid", "The spec is valid")
RUNNING = ("Running", "True", "Started", "The worker has loaded the job")
DONE = ("Succeeded", "True", "Completed", "The adapter is in /data")


def test_a_job_is_followed_from_its_rows_to_its_tuned_model(held, blue, tmp_path):
    file = upload(blue)
    assert (file.bytes, file.purpose, file.status) == (len(ROWS), "fine-tune", "processed")
    assert blue.files.content(file.id).content == ROWS
    assert [each.id for each in blue.files.list()] == [file.id]
    job = blue.fine_tuning.jobs.create(
        model="chat",
        training_file=file.id,
        suffix="tone",
        seed=7,
        metadata={"ticket": "1"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.5}},
        },
    )
    assert (job.id, job.status, job.model) == ("ftjob-tone", "validating_files", "chat")
    assert job.method.supervised.hyperparameters.n_epochs == 2
    body = held.job("blue", "tone")
    spec = body["spec"]
    assert spec["training"] == {
        "epochs": 2,
        "batchSize": 2,
        "learningRate": pytest.approx(1e-4),
        "seed": 7,
    }
    assert (spec["policies"], spec["adapter"]) == (TEMPLATE["policies"], TEMPLATE["adapter"])
    assert (tmp_path / os.path.relpath(spec["dataset"]["source"], tmp_path)).read_bytes() == ROWS

    say(held, body, ACCEPTED)
    assert blue.fine_tuning.jobs.retrieve(job.id).status == "queued"
    say(
        held,
        body,
        RUNNING,
        startTime="2026-01-02T03:05:00Z",
        progress={"step": 3, "totalSteps": 20},
    )
    assert blue.fine_tuning.jobs.retrieve(job.id).status == "running"
    assert blue.fine_tuning.jobs.pause(job.id).status == "paused"
    assert blue.fine_tuning.jobs.resume(job.id).status == "running"

    folder = f"{spec['output']['destination']}/.windrow/{body['metadata']['uid']}"
    os.makedirs(f"{folder}/checkpoints/step-00000003-00000")
    with open(f"{folder}/metrics.jsonl", "w") as figures:
        for step, loss in ((1, 2.5), (2, 2.0), (2, 2.1), (3, 1.5)):
            line = {"step": step, "loss": loss, "tokens": step * 10, "unix_seconds": 1767323100}
            figures.write(json.dumps(line) + "\n")
        figures.write('{"step": 4, "lo')
    (checkpoint,) = blue.fine_tuning.jobs.checkpoints.list(job.id)
    assert (checkpoint.step_number, checkpoint.metrics.train_loss) == (3, 1.5)
    events = list(blue.fine_tuning.jobs.list_events(job.id, limit=2))
    assert [e.message for e in events if e.type == "metrics"][-1] == "Step 3/20: train loss=1.5000"
    assert events[-1].message == "Created the job"  # every page of two was fetched

    done = ("Running", "False", "Finished", "The job has ended")
    say(held, body, done, DONE, completionTime="2026-01-02T03:06:00Z", progress={"tokens": 30})
    ended = blue.fine_tuning.jobs.retrieve(job.id)
    assert (ended.status, ended.trained_tokens) == ("succeeded", 30)
    assert ended.fine_tuned_model == f"{MODEL}:blue.tone"
    (results,) = ended.result_files
    assert blue.files.content(results).text.splitlines() == [
        "step,train_loss,valid_loss,trained_tokens",
        "1,2.5,,10",
        "2,2.1,,20",
        "3,1.5,,30",
    ]
    assert blue.files.retrieve(results).purpose == "fine-tune-results"
    assert [m.id for m in blue.models.list()] == [MODEL, ended.fine_tuned_model]
    assert blue.models.retrieve(ended.fine_tuned_model).owned_by == "blue"
    assert blue.files.delete(file.id).deleted
    assert list(blue.files.list()) == []
    assert blue.models.delete(ended.fine_tuned_model).deleted
    assert list(blue.fine_tuning.jobs.list()) == []


def test_the_example_for_users_of_openai_runs_to_its_end(held, endpoint, monkeypatch, capsys):
    slept = time.sleep

    def passes(seconds):
        if threading.current_thread() is not threading.main_thread():
            return slept(seconds)  # of a thread that other tests have left
        body = held.job("blue", "shop-tone")
        folder = f"{body['spec']['output']['destination']}/.windrow/{body['metadata']['uid']}"
        os.makedirs(folder)
        with open(f"{folder}/metrics.jsonl", "w") as figures:
            figures.write(json.dumps({"step": 1, "loss": 2.5, "tokens": 9}) + "\n")
        return say(held, body, ACCEPTED, DONE, completionTime="2026-01-02T03:06:00Z")

    monkeypatch.setenv("OPENAI_BASE_URL", endpoint)
    monkeypatch.setenv("OPENAI_API_KEY", BLUE)
    monkeypatch.setattr(time, "sleep", passes)
    tuned = f"{MODEL}:blue.shop-tone"
    with serving_chat(MODEL, tuned) as (url, chat):
        monkeypatch.setenv("CHAT_BASE_URL", url)
        cells = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "openai_finetuning.py"))
        cells["client"].close()
        cells["chat"].close()
    said = capsys.readouterr().out
    # The same question to the base model and to the tuned one, by the names that servers know.
    assert [body["model"] for body in chat.asked] == [MODEL, tuned]
    assert {body["messages"][1]["content"] for body in chat.asked} == {"Do you ship abroad?"}
    assert f"{tuned} says: As {tuned} says." in said
    for line in ("ftjob-shop-tone", "Step 1: train loss=2.5000", "1,2.5,,9", "ftjob-shop-taste"):
        assert line in said
    assert f"tuned model: {MODEL}:blue.shop-tone" in said
    training = held.job("blue", "shop-taste")["spec"]["training"]
    assert (training["method"], training["dpo"]) == ("dpo", {"beta": 0.1})


def test_another_key_sees_neither_files_nor_jobs_nor_models(held, endpoint, blue):
    file = upload(blue)
    job = blue.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
    say(held, held.job("blue", job.id.removeprefix("ftjob-")), DONE)
    for key in (RED, OTHER):  # of another namespace, and of the same
        with client_of(endpoint, key) as other:
            assert list(other.files.list()) == []
            assert list(other.fine_tuning.jobs.list()) == []
            assert "blue" not in " ".join(model.id for model in other.models.list())
            for call in (
                other.files.retrieve,
                other.files.content,
                other.files.delete,
            ):
                status, error = refusal(call, file.id)
                assert (status, error["message"]) == (404, f"No such file: {file.id}")
            for call in (
                other.fine_tuning.jobs.retrieve,
                other.fine_tuning.jobs.cancel,
                other.fine_tuning.jobs.pause,
                other.fine_tuning.jobs.resume,
                other.fine_tuning.jobs.list_events,
                other.fine_tuning.jobs.checkpoints.list,
            ):
                assert refusal(call, job.id)[0] == 404
            status, error = refusal(
                other.fine_tuning.jobs.create, model=MODEL, training_file=file.id
            )
            assert (status, error["param"]) == (404, "training_file")
    assert [each.id for each in blue.files.list()] == [file.id]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ROWS + b"not json\n", "rows.jsonl:41: is not JSON"),
        (b'\n{"messages": []}\n', "rows.jsonl:2: has no `messages`"),
        (ROWS + b'{"prompt": "a", "completion": "b"}', "rows.jsonl:41: is a row of the format"),
        (b'{"question": "a"}\n', "rows.jsonl:1: has no `messages`, `conv"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}\n', "rows.jsonl:1: is not UTF-8"),
        (b"[1]\n", "rows.jsonl:1: is not a JSON object"),
        (b"\n \n", "rows.jsonl: holds no row"),
        (b"PAR1\x00\x01", "rows.jsonl:1: is not"),
    ],
)
def test_a_wrong_row_is_named_by_its_line_and_nothing_stays(blue, tmp_path, content, said):
    status, error = refusal(upload, blue, content)
    assert (status, error["param"], error["code"]) == (400, "file", "invalid_training_file")
    assert error["message"].startswith(said)
    assert left_over(tmp_path) == []


def test_a_line_without_end_is_refused_before_it_fills_the_memory(blue, tmp_path):
    status, error = refusal(upload, blue, b'{"text": "' + b"a" * (9 << 20))
    assert (status, error["message"].partition(".")[0]) == (400, "rows")
    assert "longer than 8 MiB" in error["message"]
    assert left_over(tmp_path) == []


def test_files_have_bounds(held, tmp_path):
    limits = StorageLimits(file_bytes=len(ROWS), key_bytes=3 * len(ROWS), files=2)
    with served(held, str(tmp_path), limits=limits) as url, client_of(url, BLUE) as client:
        assert refusal(upload, client, ROWS + ROWS)[1]["code"] == "file_too_large"
        upload(client)
        upload(client)
        assert refusal(upload, client)[1]["code"] == "too_many_files"
    limits = StorageLimits(key_bytes=2 * len(ROWS))
    with served(held, str(tmp_path), limits=limits) as url, client_of(url, BLUE) as client:
        assert refusal(upload, client)[1]["code"] == "storage_limit_exceeded"
    assert len(left_over(tmp_path)) == 4


def test_an_upload_that_breaks_off_leaves_nothing(endpoint, blue, tmp_path):
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
    head = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n' + ROWS
    )
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Authorization", f"Bearer {BLUE}")
    connection.putheader("Content-Type", "multipart/form-data; boundary=b")
    connection.putheader("Content-Length", str(len(head) + 1000))
    connection.endheaders(head)
    connection.close()
    await_empty(tmp_path)
    assert list(blue.files.list()) == []


def test_one_namespace_does_not_hold_all_places_of_uploads(endpoint, blue):
    held_up = []
    for _ in range(4):
        connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
        connection.putrequest("POST", "/v1/files")
        connection.putheader("Authorization", f"Bearer {BLUE}")
        connection.putheader("Content-Type", "multipart/form-data; boundary=b")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"--b\r\n")
        held_up.append(connection)
    deadline_s = time.monotonic() + 60
    while True:  # until the server has taken up all four
        try:
            blue.files.delete(upload(blue).id)
        except openai.RateLimitError:
            break
        assert time.monotonic() < deadline_s
    with client_of(endpoint, OTHER) as other, pytest.raises(openai.RateLimitError):
        upload(other)  # another key of the same namespace
    with client_of(endpoint, RED) as red:
        assert upload(red).bytes == len(ROWS)
    for connection in held_up:
        connection.close()


def test_connections_that_show_no_key_keep_nobody_out(held, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_MOST_UNPROVEN", 4)
    with served(held, str(tmp_path)) as url, contextlib.ExitStack() as opened:
        place = urlsplit(url)
        silent = [
            opened.enter_context(socket.create_connection((place.hostname, place.port)))
            for _ in range(12)
        ]
        with client_of(url, BLUE) as client:
            assert list(client.files.list()) == []
        silent[0].settimeout(60)
        assert silent[0].recv(1) == b""  # the oldest was ended


async def test_an_upload_that_comes_byte_by_byte_is_ended():
    class Dripping:
        def at_eof(self):
            return False

        async def read_chunk(self, size):
            return b"x"

    times = itertools.count(0, 30)
    with pytest.raises(CallRefused) as refused:
        async for _ in server._pieces(Dripping(), lambda: float(next(times))):
            pass
    assert refused.value.status == 408


@pytest.mark.parametrize(
    "written", ["[" * 100_000, "[]", '{"method": {"a": 1}}', "null", '{"metadata": [1]}']
)
def test_what_others_write_into_a_jobs_annotation_breaks_no_listing(written):
    meta = {"annotations": {"windrow.dev/api-request": written}}
    assert jobs.request_of({"metadata": meta}) == {}


def test_what_others_write_beside_their_rows_breaks_no_listing(endpoint, blue, tmp_path):
    file = upload(blue)
    (about,) = tmp_path.rglob("file.json")
    right = json.loads(about.read_text())
    for wrong in ({"bytes": -(10**18)}, {"rows": "many"}, {"created_at": None}, {"id": "../../x"}):
        about.write_text(json.dumps(right | wrong))
        with served(held_objects(), str(tmp_path)) as url, client_of(url, BLUE) as again:
            assert list(again.files.list()) == []
    about.write_text("[" * 60_000)
    with served(held_objects(), str(tmp_path)) as url, client_of(url, BLUE) as again:
        assert refusal(again.files.retrieve, file.id)[0] == 404


def test_lines_of_figures_that_are_none_are_left_out():
    lines = [
        b'{"step": 1, "loss": 0.5}',
        b'{"step": 2, "loss": "x", "eval_loss": 1}',
        b'{"step": 3, "loss": 1, "unix_seconds": "now"}',
        b"[" * 100_000,
        b'{"step": 4, "loss": 1, "stage": []}',
        b'{"step": 5, "loss": 1, "unix_seconds": 1e999}',
        b'{"step": 6, "loss": NaN}',
        b'{"step": 7, "loss": 1%s}' % (b"0" * 400),
        b'{"step": 1%s, "loss": 1}' % (b"0" * 400),
    ]
    assert [line["step"] for line in jobs.losses_of(b"\n".join(lines))] == [1]


def test_the_order_of_an_uploads_parts_does_not_matter(endpoint, blue, tmp_path):
    def sent(*parts):
        body = b"".join(
            f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
            + content
            + b"\r\n"
            for name, more, content in parts
        )
        connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
        headers = {"Authorization": f"Bearer {BLUE}"}
        headers["Content-Type"] = "multipart/form-data; boundary=b"
        connection.request("POST", "/v1/files", body + b"--b--\r\n", headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, found

    file = ("file", '; filename="rows.jsonl"', ROWS)
    again = sent(*[("purpose", "", b"fine-tune")] * 2, file)
    assert again[0] == 400  # each may take its time, and there could be thousands
    assert "sent twice" in again[1]["error"]["message"]
    status, found = sent(file, ("purpose", "", b"fine-tune"))
    assert (status, found["bytes"]) == (200, len(ROWS))
    blue.files.delete(found["id"])
    for parts, param in (
        ([file, ("purpose", "", b"batch")], "purpose"),
        ([file], "purpose"),
        ([file, file], "file"),
        ([("purpose", "", b"fine-tune")], "file"),
        ([file, ("expires_after[anchor]", "", b"created_at")], "expires_after[anchor]"),
        ([("file", '; filename="rows.csv"', ROWS)], "file"),
    ):
        status, found = sent(*parts)
        assert (status, found["error"]["param"]) == (400, param)
        assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"model": "gpt-4o-mini"}, "model", f"served: {MODEL}"),
        ({"training_file": "file-unknown"}, "training_file", "No such file: file-unknown"),
        ({"training_file": "../../red"}, "training_file", "No such file"),
        ({"suffix": "My Model"}, "suffix", "lower-case"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "1 to 50"),
        ({"hyperparameters": {"n_epochs": 1.5}}, "hyperparameters.n_epochs", "an integer"),
        ({"hyperparameters": {"batch_size": 1000}}, "hyperparameters.batch_size", "1 to 256"),
        ({"hyperparameters": {"rank": 8}}, "hyperparameters.rank", "n_epochs"),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {
                "learning_rate_multiplier": 1e9}}}},
            "method.supervised.hyperparameters.learning_rate_multiplier", "0.0001 to 100",
        ),
        ({"method": {"type": "reinforcement"}}, "method.type", "supervised"),
        ({"method": {"type": ["supervised"]}}, "method.type", "supervised"),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}},
            "method.supervised.hyperparameters.beta", "n_epochs",
        ),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 9}}}},
            "method.dpo.hyperparameters.beta", "0.001 to 2",
        ),
        ({"method": {"type": "dpo"}}, "training_file", "the method is dpo"),
        ({"seed": -1}, "seed", "from 0"),
        ({"seed": True}, "seed", "from 0"),
        ({"metadata": {"a": "b" * 600}}, "metadata.a", "512"),
        ({"integrations": [{"type": "acme", "acme": {}}]}, "integrations[0].type", "'acme'"),
        (
            {"integrations": [{"type": "wandb", "wandb": {}}]},
            "integrations[0].wandb.project", "missing",
        ),
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "a/b"}}]},
            "integrations[0].wandb.project", "without /",
        ),
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
            "integrations[0]", "tracking.secretRef",
        ),
        ({"extra_body": {"priority": 3}}, "priority", "Known: model"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_field_and_makes_nothing(held, blue, asked, param, said):
    file = upload(blue)
    base = {"model": MODEL, "training_file": file.id}
    status, error = refusal(blue.fine_tuning.jobs.create, **{**base, **asked})
    assert (error["param"], status in (400, 404)) == (param, True)
    assert said in error["message"]
    assert not [path for path in held.objects if "/finetunejobs/" in path]


def test_rows_to_evaluate_on_are_read_from_a_file_of_their_own(held, blue):
    training, validation = upload(blue), upload(blue)
    job = blue.fine_tuning.jobs.create(
        model=MODEL, training_file=training.id, validation_file=validation.id
    )
    assert job.validation_file == validation.id
    dataset = held.job("blue", job.id.removeprefix("ftjob-"))["spec"]["dataset"]
    assert dataset["evalSource"].endswith(f"{validation.id}/rows.jsonl")
    assert refusal(blue.files.delete, validation.id)[1]["code"] == "file_in_use"
    other = upload(blue, b'{"text": "a"}\n')
    status, error = refusal(
        blue.fine_tuning.jobs.create,
        model=MODEL,
        training_file=training.id,
        validation_file=other.id,
    )
    assert (status, error["param"]) == (400, "validation_file")


def test_a_suffix_that_is_taken_is_refused(held, blue):
    held.put(f"{GROUP}/namespaces/blue/finetunejobs/tone", spec={"model": {"name": MODEL}})
    file = upload(blue)
    status, error = refusal(
        blue.fine_tuning.jobs.create, model=MODEL, training_file=file.id, suffix="tone"
    )
    assert (status, error["param"], error["code"]) == (400, "suffix", "suffix_taken")


def test_a_file_that_a_job_reads_is_kept_until_the_job_is_cancelled(held, blue):
    file = upload(blue)
    job = blue.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
    assert refusal(blue.files.delete, file.id)[1]["code"] == "file_in_use"
    cancelled = blue.fine_tuning.jobs.cancel(job.id)
    assert (cancelled.status, cancelled.finished_at is None) == ("cancelled", False)
    for call in (
        blue.fine_tuning.jobs.cancel,
        blue.fine_tuning.jobs.pause,
        blue.fine_tuning.jobs.resume,
    ):
        assert refusal(call, job.id)[1]["code"] == "invalid_job_status"
    assert blue.files.delete(file.id).deleted


def test_a_failed_job_says_what_is_wrong_with_which_field(held, blue):
    file = upload(blue)
    job = blue.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
    body = held.job("blue", job.id.removeprefix("ftjob-"))
    wrong = {"field": "rows.jsonl:3", "remedy": "Drop the row."}
    say(held, body, ("Failed", "True", "DatasetInvalid", "rows.jsonl:3: too long"), userError=wrong)
    error = blue.fine_tuning.jobs.retrieve(job.id).error
    assert (error.code, error.param) == ("dataset_invalid", "training_file")
    assert error.message == "rows.jsonl:3: too long Drop the row."
    assert blue.fine_tuning.jobs.list_events(job.id).data[0].level == "error"


def test_a_job_whose_adapter_is_to_be_loaded_runs_until_servers_have_answered(held, blue):
    file = upload(blue)
    job = blue.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
    body = held.job("blue", job.id.removeprefix("ftjob-"))
    body["spec"]["output"]["deploy"] = {"enabled": True}
    say(held, body, DONE)
    assert blue.fine_tuning.jobs.retrieve(job.id).status == "running"
    say(held, body, ("Deployed", "False", "NoInstances", "No instance serves it"))
    assert blue.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
    assert "warn" in [event.level for event in blue.fine_tuning.jobs.list_events(job.id)]


def test_a_service_accounts_token_counts_in_its_namespace_if_it_may_create_jobs(held, endpoint):
    account = "system:serviceaccount:blue:ci"
    held.accounts["a.b.c"] = account
    with client_of(endpoint, "a.b.c") as client:
        assert refusal(client.files.list)[0] == 403
        held.allowed.add(account)
        upload(client)
        before = len(held.asked)
        assert len(list(client.files.list())) == 1
        assert len(held.asked) == before  # a token that is known is not asked about again
    with client_of(endpoint, "x.y.z") as client:
        assert "--audience windrow-api" in refusal(client.files.list)[1]["message"]


def test_a_wrong_key_is_refused_and_many_of_them_for_a_while(endpoint):
    with client_of(endpoint, "sk-wrong") as client:
        statuses = [refusal(client.models.list)[0] for _ in range(30)]
    assert set(statuses) == {401, 429}
    assert statuses[0] == 401
    with client_of(endpoint, BLUE) as client:  # the right key of another caller of that address
        assert [model.id for model in client.models.list()] == [MODEL]


def test_no_key_an_unknown_path_and_a_silent_api_server_are_answered_in_openais_form(
    held, endpoint, blue
):
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
    connection.request("GET", "/v1/models")
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (401, "invalid_api_key")
    connection.close()
    assert refusal(blue.get, "/threads", cast_to=object)[1]["code"] == "unknown_url"
    blue.models.list()
    held.silent = True
    assert refusal(blue.fine_tuning.jobs.list)[0] == 503


def test_keys_that_are_not_written_as_they_should_are_left_out():
    digest = hashlib.sha256(b"k").hexdigest()
    lines = {"good": f"blue {digest}\n", "plain": "blue secret", "two": f"a b {digest}"}
    data = {name: base64.b64encode(line.encode()).decode() for name, line in lines.items()}
    data["bytes"] = "/w=="
    ((found, key),) = keys_of("keys", {"data": data})
    assert (found, key.namespace, key.name) == (digest, "blue", "key-keys.good")


def test_no_two_keys_of_a_namespace_share_a_folder():
    digest = hashlib.sha256(b"k").hexdigest()
    data = {"data": {}}
    for entry in ("b.c", "c", "b_c", "b", ".b.c", "a.b.c", "_b.c"):
        data["data"][entry] = base64.b64encode(f"blue {digest}".encode()).decode()
    found: dict[str, tuple[str, str]] = {}
    for secret in ("a", "a.b", "a-b", "a.b.c", "a.a"):
        for _, key in keys_of(secret, data):
            entry = key.name.partition(".")[2]
            for known in (key.folder, key.label):
                assert found.setdefault(known, (secret, entry)) == (secret, entry)
    assert len(found) == 2 * 5 * 7


def test_a_tenants_links_lead_the_endpoint_nowhere(held, blue, tmp_path):
    """A tenant's pods write in their folder, where the endpoint reads figures."""
    (tmp_path / "red").mkdir()
    (tmp_path / "red" / "metrics.jsonl").write_text('{"step": 1, "loss": 42.0}\n')
    file = upload(blue)
    job = blue.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
    body = held.job("blue", job.id.removeprefix("ftjob-"))
    folder = f"{body['spec']['output']['destination']}/.windrow/{body['metadata']['uid']}"
    os.makedirs(folder)
    os.symlink(tmp_path / "red" / "metrics.jsonl", f"{folder}/metrics.jsonl")
    assert "42" not in " ".join(e.message for e in blue.fine_tuning.jobs.list_events(job.id))
    body["spec"]["output"]["destination"] = f"{tmp_path}/blue/openai/key-keys.blue/adapters/../.."
    blue.fine_tuning.jobs.list_events(job.id)
    os.symlink(tmp_path / "red", tmp_path / "blue" / "openai" / "key-keys.other")
    with client_of(str(blue.base_url), OTHER) as other:
        assert refusal(upload, other)[0] == 503
    assert left_over(tmp_path / "red") == ["metrics.jsonl"]


def test_drafts_of_a_process_that_was_killed_are_swept(tmp_path):
    with DirectoryStore(tmp_path).write("blue/openai/k/files/file-1/rows.jsonl") as writer:
        writer.write(b"a")
        (draft,) = left_over(tmp_path)
        assert DirectoryStore(tmp_path).sweep(10.0) == 0
        now_s = (tmp_path / draft).stat().st_mtime + 11
        assert DirectoryStore(tmp_path).sweep(10.0, now_s) == 1
    assert left_over(tmp_path) == []


def test_auto_gives_few_rows_some_steps():
    sizes = [jobs.settled(jobs.Hyperparameters(), rows)["batch_size"] for rows in (1, 100, 9999)]
    assert sizes == [1, 6, 16]
