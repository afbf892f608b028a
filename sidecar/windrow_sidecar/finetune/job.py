"""What a worker is asked to do, and the assembly of everything that does it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from windrow.crd import FinetuneJobSpec, parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.adapters import add_adapter, trainable
from windrow_sidecar.finetune.data import BatchPlan, Split, split, tokenize
from windrow_sidecar.finetune.layerwise import Boundaries, DecoderStack
from windrow_sidecar.finetune.loss import Head
from windrow_sidecar.finetune.model import BaseModel
from windrow_sidecar.finetune.optimizer import AdapterOptimizer
from windrow_sidecar.finetune.rows import local_path, read_rows
from windrow_sidecar.finetune.schedule import Schedule
from windrow_sidecar.finetune.stream import MicroLimits, TaskletStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One placement of one FinetuneJob."""

    namespace: str
    name: str
    uid: str
    epoch: int
    spec: FinetuneJobSpec

    @property
    def destination(self) -> Path:
        """The directory that gets the adapter."""
        return local_path(self.spec.output.destination, field="spec.output.destination")


def read_job(path: Path) -> Job:
    """Read a job as the agent writes it, or a FinetuneJob manifest (YAML or JSON).

    Raises:
        UserError: the file cannot be read, or the spec in it cannot be honoured.
    """
    try:
        document: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"cannot be read: {error}", field=str(path), remedy="Name a FinetuneJob manifest."
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        raise UserError("holds no spec", field=str(path), remedy="Name a FinetuneJob manifest.")
    about = document.get("metadata") or document
    return Job(
        namespace=str(about.get("namespace", "default")),
        name=str(about.get("name", path.stem)),
        uid=str(about.get("uid", path.stem)),
        epoch=int(document.get("epoch", 1)),
        spec=parse_job_spec(document["spec"]),
    )


@dataclass(slots=True)
class Session:
    """A job, loaded: its model with the adapter in it, and its tasklets."""

    job: Job
    model: Any  # peft
    stream: TaskletStream
    longest_row: int  # tokens
    shared_weights: bool


def read_examples(job: Job, tokenizer: Any) -> Split:  # noqa: ANN401
    """Read, tokenize and split the rows of a job.

    Raises:
        UserError: see `read_rows`, `tokenize` and `split`.
    """
    spec = job.spec
    rows = read_rows(spec.dataset.source, spec.dataset.format)
    examples = tokenize(rows, tokenizer, max_length=spec.training.max_sequence_length)
    return split(examples, eval_fraction=spec.dataset.eval_fraction, seed=spec.training.seed)


def open_session(
    job: Job,
    base: BaseModel,
    *,
    boundaries: Boundaries,
    limits: Callable[[], MicroLimits],
) -> Session:
    """Put adapter, data and optimizer of a job together.

    Args:
        job: what to do.
        base: the frozen model; gets the adapter.
        boundaries: where activations between layers live.
        limits: of micro-batches, asked before each.

    Raises:
        UserError: rows, model or adapter cannot be honoured.
    """
    spec, training = job.spec, job.spec.training
    rows = read_examples(job, base.tokenizer)
    tuned = add_adapter(base.model, spec)
    stack = DecoderStack(base.model)
    plan = BatchPlan(len(rows.train), training.batch_size, training.seed)
    total = plan.total_steps(epochs=training.epochs, max_steps=training.max_steps)
    schedule = Schedule(training.schedule, training.learning_rate, total, training.warmup_ratio)
    stream = TaskletStream(
        tuned,
        stack,
        Head(stack.norm, stack.head, stack.config),
        AdapterOptimizer(trainable(tuned), schedule),
        rows,
        plan,
        total_steps=total,
        boundaries=boundaries,
        limits=limits,
        seed=training.seed,
    )
    longest = max(example.length for example in rows.train)
    return Session(job, tuned, stream, longest, base.shared)
