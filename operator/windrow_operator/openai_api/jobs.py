"""A FinetuneJob from a request, and the API's objects from a FinetuneJob: pure functions.

What a caller wrote and a FinetuneJob has no field for is an annotation of it, so that the API
server holds all that is known of a job.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from windrow.conditions import ConditionType as T
from windrow.conditions import Reason, get_condition
from windrow.crd import API_VERSION, FINETUNE_JOB, GROUP
from windrow.views import JobView
from windrow_operator.openai_api.files import UploadedFile
from windrow_operator.openai_api.keyring import ApiKey
from windrow_operator.openai_api.requests import Hyperparameters, JobRequest
from windrow_operator.openai_api.stores import ObjectStore

LABEL_KEY: Final = f"{GROUP}/api-key"
_REQUEST: Final = f"{GROUP}/api-request"
CANCELLED: Final = f"{GROUP}/api-cancelled"
_PREFIX: Final = "ftjob-"
# Peak rates of LoRA by which a multiplier counts; preferences take a lower one (TRL's examples).
_LEARNING_RATE: Final = {"supervised": 2e-4, "dpo": 5e-6}
_BETA: Final = 0.1
_EPOCHS: Final = 3
_MOST_BATCH: Final = 16
# A batch of `auto` is at most such a part of the rows, so that an epoch has some steps.
_LEAST_STEPS: Final = 16

Body = Mapping[str, Any]


def settled(asked: Hyperparameters, rows: int, method: str = "supervised") -> dict[str, Any]:
    """Return the hyperparameters of a job, with `auto` as the number of rows has it."""
    batch = asked.batch_size or max(1, min(_MOST_BATCH, rows // _LEAST_STEPS))
    of_method = {"beta": asked.beta or _BETA} if method == "dpo" else {}
    return {
        **of_method,
        "n_epochs": asked.n_epochs or _EPOCHS,
        "batch_size": batch,
        "learning_rate_multiplier": asked.learning_rate_multiplier or 1.0,
    }


def manifest_of(
    request: JobRequest,
    key: ApiKey,
    model: str,
    training: UploadedFile,
    sources: Mapping[str, str],
    store: ObjectStore,
    template: Body,
) -> dict[str, Any]:
    """Return the FinetuneJob of a request.

    Args:
        request: what the caller asks for.
        key: of the caller.
        model: the served base model.
        training: the rows.
        sources: places of the rows, `training` and maybe `validation`.
        store: where the adapter goes.
        template: fields of a spec that the administrator sets for all jobs; what the
            request says counts.
    """
    tag = secrets.token_hex(6)
    name = request.suffix or f"ft-{tag}"
    numbers = settled(request.hyperparameters, training.rows, request.method)
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    said = {
        **asdict(request),
        "hyperparameters": numbers,
        "seed": seed,
    }
    own: dict[str, Any] = {
        "model": {"name": model},
        "dataset": {"source": sources["training"], "format": training.form, "evalFraction": 0},
        "training": {
            "epochs": numbers["n_epochs"],
            "batchSize": numbers["batch_size"],
            "learningRate": _LEARNING_RATE[request.method] * numbers["learning_rate_multiplier"],
            "seed": seed,
        },
        "output": {"destination": store.url(f"{key.folder}/adapters/{name}-{tag}")},
    }
    if request.method == "dpo":
        own["training"] |= {"method": "dpo", "dpo": {"beta": numbers["beta"]}}
    if request.wandb:
        own["tracking"] = {"wandb": dict(request.wandb)}
    if "validation" in sources:
        own["dataset"]["evalSource"] = sources["validation"]
    return {
        "apiVersion": API_VERSION,
        "kind": FINETUNE_JOB.kind,
        "metadata": {
            "name": name,
            "namespace": key.namespace,
            "labels": {LABEL_KEY: key.label},
            "annotations": {_REQUEST: json.dumps(said)},
        },
        "spec": spec_of(template, own),
    }


def spec_of(template: Body, own: Body) -> dict[str, Any]:
    """Return the spec of a job: its template's, and its own, which counts.

    A template may hold the Secret alone for trackers that only some callers ask for.
    """
    spec = merged(template, own)
    tracking = spec.get("tracking")
    if isinstance(tracking, Mapping) and set(tracking) == {"secretRef"}:
        del spec["tracking"]
    return spec


def merged(below: Body, above: Body) -> dict[str, Any]:
    """Return two specs as one; where both say something, `above` counts."""
    result = dict(below)
    for name, value in above.items():
        held = result.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        result[name] = merged(held, value) if both else value  # type: ignore[arg-type]
    return result


def name_of(job_id: str) -> str:
    """Return the name of the FinetuneJob of an id; empty: it is not an id."""
    name = job_id.removeprefix(_PREFIX)
    valid = re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name)
    return name if valid and name != job_id else ""


def id_of(body: Body) -> str:
    """Return the id of a job."""
    return f"{_PREFIX}{body['metadata']['name']}"


def request_of(body: Body) -> dict[str, Any]:
    """Return what the caller wrote; nothing of a job that others made or changed."""
    text = (body["metadata"].get("annotations") or {}).get(_REQUEST) or "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    texts = ("model", "method", "training_file", "validation_file")
    if not isinstance(found, dict) or not all(isinstance(found.get(n, ""), str) for n in texts):
        return {}
    if not isinstance(found.get("metadata") or {}, dict):
        return {}
    return found


def is_cancelled(body: Body) -> bool:
    """Return whether a job was cancelled and has stayed so."""
    held = CANCELLED in (body["metadata"].get("annotations") or {})
    return held and bool(body["spec"].get("suspend")) and not JobView.of(body).finished


def status_of(body: Body) -> str:
    """Return OpenAI's word for the state of a job.

    A job whose adapter is to be loaded has succeeded once its servers have answered.
    """
    job = JobView.of(body)
    if job.state == "Succeeded":
        return "running" if _is_loading(body) else "succeeded"
    if job.state == "Failed":
        return "failed"
    if is_cancelled(body):
        return "cancelled"
    if job.suspended or job.state == "Suspended":
        return "paused"
    if job.state == "Invalid":
        return "failed" if job.reason == Reason.INVALID_SPEC else "queued"
    if job.state in ("Running", "Stopping", "Silent"):
        return "running"
    heard = get_condition((body.get("status") or {}).get("conditions"), T.ACCEPTED)
    return "queued" if heard else "validating_files"


def is_over(status: str) -> bool:
    """Return whether a job of this status stays as it is."""
    return status in ("succeeded", "failed", "cancelled")


def _is_loading(body: Body) -> bool:
    deploys = ((body["spec"].get("output") or {}).get("deploy") or {}).get("enabled")
    told = get_condition((body.get("status") or {}).get("conditions"), T.DEPLOYED)
    return bool(deploys) and (told is None or told["reason"] == Reason.FETCHING)


def tuned_model(body: Body) -> str:
    """Return the name by which requests ask a server for the adapter of a job."""
    meta, deploy = body["metadata"], (body["spec"].get("output") or {}).get("deploy") or {}
    name = deploy.get("name") or meta["name"]
    return f"{body['spec']['model']['name']}:{meta['namespace']}.{name}"


def unix(text: str | None) -> int | None:
    """Return a time of Kubernetes in Unix seconds."""
    return int(datetime.fromisoformat(text).timestamp()) if text else None


def _unix_of_annotation(text: str | None) -> int | None:
    """Return a time that anybody who may change the job can have written; None: it is not one."""
    try:
        return unix(text)
    except (ValueError, OverflowError):
        return None


def results_id(body: Body) -> str:
    """Return the id of the file with the losses of a job's steps."""
    return f"file-results.{body['metadata']['name']}"


def name_of_results(file_id: str) -> str:
    """Return the name of the job whose results a file id means; empty: none."""
    prefix = "file-results."
    if not file_id.startswith(prefix):
        return ""
    return name_of(f"{_PREFIX}{file_id.removeprefix(prefix)}")


def job_object(body: Body, now: datetime) -> dict[str, Any]:
    """Return a job as the API answers with it."""
    job, said, state = JobView.of(body), request_of(body), status_of(body)
    status = body.get("status") or {}
    done = state == "succeeded"
    numbers = said.get("hyperparameters") or {}
    method = said.get("method") or "supervised"
    estimate = int(now.timestamp() + job.eta_s) if job.eta_s and state == "running" else None
    finished = unix(status.get("completionTime"))
    if state == "cancelled":
        finished = _unix_of_annotation(body["metadata"]["annotations"].get(CANCELLED))
    return {
        "id": id_of(body),
        "object": "fine_tuning.job",
        "created_at": unix(body["metadata"]["creationTimestamp"]),
        "finished_at": finished if is_over(state) else None,
        "estimated_finish": estimate,
        "model": said.get("model") or job.model,
        "fine_tuned_model": tuned_model(body) if done else None,
        "organization_id": job.namespace,
        "status": state,
        "hyperparameters": numbers,
        "method": {"type": method, method: {"hyperparameters": numbers}},
        "training_file": said.get("training_file") or "",
        "validation_file": said.get("validation_file") or None,
        "result_files": [results_id(body)] if done else [],
        "trained_tokens": job.tokens if done else None,
        "seed": said.get("seed", 0),
        "metadata": said.get("metadata") or None,
        "integrations": _integrations(said.get("wandb")),
        "error": _error(job, status) if state == "failed" else None,
    }


def _integrations(wandb: object) -> list[dict[str, Any]]:
    if not isinstance(wandb, Mapping) or not wandb:
        return []
    shown = {"name": wandb.get("runName"), "entity": wandb.get("entity"), **wandb}
    shown.pop("runName", None)
    return [{"type": "wandb", "wandb": shown}]


def _error(job: JobView, status: Body) -> dict[str, Any]:
    of_rows = (Reason.DATASET_INVALID, Reason.DATASET_UNREADABLE, Reason.DATASET_EMPTY)
    told = get_condition(status.get("conditions"), T.FAILED) or {}
    reason = told.get("reason") or job.reason or Reason.INVALID_SPEC
    param = "training_file" if reason in of_rows else job.field or None
    remedy = f" {job.remedy}" if job.remedy and job.remedy not in job.message else ""
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(reason)).lower()
    return {"code": code, "param": param, "message": f"{job.message}{remedy}"}


def events_of(body: Body, noted: Iterable[Body], losses: Iterable[Body]) -> list[dict[str, Any]]:
    """Return what has happened to a job, newest first.

    Args:
        body: the job.
        noted: Kubernetes' Events about it, which the API server forgets after an hour.
        losses: lines of the job's figures.
    """
    status, name = body.get("status") or {}, body["metadata"]["name"]
    job = JobView.of(body)
    found = [_event(name, "created", body["metadata"]["creationTimestamp"], "Created the job")]
    if start := status.get("startTime"):
        found.append(_event(name, "placed", start, "The job has a slot"))
    for condition in status.get("conditions") or ():
        if condition["type"] in (T.SUCCEEDED, T.FAILED, T.DEPLOYED, T.SUSPENDED):
            if condition["status"] != "True" and condition["type"] != T.DEPLOYED:
                continue
            bad = condition["type"] == T.FAILED or condition["status"] == "False"
            found.append(
                _event(
                    name,
                    f"{condition['type']}-{condition['lastTransitionTime']}",
                    condition["lastTransitionTime"],
                    condition["message"],
                    level=("error" if condition["type"] == T.FAILED else "warn") if bad else "info",
                )
            )
    seen = {event["message"] for event in found}
    for note in noted:
        at = (
            note.get("lastTimestamp")
            or note.get("eventTime")
            or body["metadata"]["creationTimestamp"]
        )
        if note.get("message") not in seen:
            level = "warn" if note.get("type") == "Warning" else "info"
            uid = note["metadata"].get("uid", note["metadata"]["name"])
            said = f"{note.get('reason')}: {note.get('message')}"
            found.append(_event(name, str(uid), at, said, level=level))
    counts = status.get("progress") or {}
    for field, words in (("cutRows", "have lost their end"), ("skippedRows", "were left out")):
        if counts.get(field):
            message = f"{counts[field]} rows of the training file {words}"
            at = status.get("startTime") or body["metadata"]["creationTimestamp"]
            found.append(_event(name, field, at, message, level="warn"))
    found += [_step(name, job.total_steps, line) for line in losses]
    return sorted(found, key=lambda event: event["created_at"], reverse=True)


def _event(job: str, part: str, at: str, message: str, level: str = "info") -> dict[str, Any]:
    return {
        "id": f"ftevent-{job}-{part}",
        "object": "fine_tuning.job.event",
        "created_at": unix(at),
        "level": level,
        "message": message,
        "type": "message",
        "data": {},
    }


def _step(job: str, total: int, line: Body) -> dict[str, Any]:
    figure = {"train_loss": line.get("loss"), "valid_loss": line.get("eval_loss")}
    data = {name: value for name, value in figure.items() if value is not None}
    step = line["step"]
    words = ", ".join(f"{name.replace('_', ' ')}={value:.4f}" for name, value in data.items())
    kind = "valid" if "valid_loss" in data else "train"
    stage = f"-{line['stage']}" if "stage" in line else ""
    return {
        "id": f"ftevent-{job}-{kind}-{step}{stage}",
        "object": "fine_tuning.job.event",
        "created_at": int(line.get("unix_seconds") or 0),
        "level": "info",
        "message": f"Step {step}{f'/{total}' if total else ''}: {words}",
        "type": "metrics",
        "data": {"step": step, "total_steps": total or None, **data},
    }


def losses_of(text: bytes) -> list[dict[str, Any]]:
    """Return the lines of a job's figures, the newest of each step; others are left out.

    A worker that resumed has written some steps again, and its last line may be cut off.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            figures = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(figures, dict) or not isinstance(figures.get("step"), int):
            continue
        values = [figures[name] for name in ("loss", "eval_loss") if figures.get(name) is not None]
        numbers = (figures["step"], figures.get("unix_seconds") or 0, *values)
        stage = figures.get("stage", "")
        if values and isinstance(stage, str) and all(map(_is_number, numbers)):
            found[(figures["step"], "eval_loss" in figures, figures.get("stage"))] = figures
    return list(found.values())


def _is_number(value: object) -> bool:
    """Return whether a value is one that an answer can hold: Python's JSON reads others as well."""
    try:
        return isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:  # an integer of hundreds of digits
        return False


def results_csv(losses: Iterable[Body]) -> str:
    """Return a result file as OpenAI's are: a line a step, blank where nothing was measured."""
    rows: dict[int, dict[str, Any]] = {}
    for line in losses:
        row = rows.setdefault(line["step"], {})
        if "eval_loss" in line:
            row["valid_loss"] = line["eval_loss"]
        else:
            row["train_loss"], row["tokens"] = line.get("loss"), line.get("tokens")
    lines = ["step,train_loss,valid_loss,trained_tokens"]
    for step, row in sorted(rows.items()):
        values = (row.get("train_loss"), row.get("valid_loss"), row.get("tokens"))
        lines.append(",".join([str(step), *("" if v is None else str(v) for v in values)]))
    return "\n".join(lines) + "\n"


def checkpoint_objects(
    body: Body, names: Iterable[str], losses: Iterable[Body]
) -> list[dict[str, Any]]:
    """Return the checkpoints of a job that are there, newest first.

    Args:
        body: the job.
        names: of folders like step-00000050-00000.
        losses: lines of the job's figures.
    """
    by_step = {line["step"]: line for line in losses if "loss" in line}
    found = []
    for name in names:
        parts = re.fullmatch(r"step-(\d{8,12})-\d{5,12}", name)
        if parts is None:
            continue
        step = int(parts[1])
        line = by_step.get(step, {})
        metrics = {"step": step, "train_loss": line.get("loss")}
        created = line.get("unix_seconds") or unix(body["metadata"]["creationTimestamp"])
        found.append(
            {
                "id": f"ftckpt-{body['metadata']['name']}-{step}",
                "object": "fine_tuning.job.checkpoint",
                "created_at": int(created or 0),
                "fine_tuning_job_id": id_of(body),
                "fine_tuned_model_checkpoint": f"{tuned_model(body)}:ckpt-step-{step}",
                "step_number": step,
                "metrics": {k: v for k, v in metrics.items() if v is not None},
            }
        )
    return sorted(found, key=lambda each: each["step_number"], reverse=True)
