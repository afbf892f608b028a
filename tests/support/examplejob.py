"""A job over the model and the rows that come with this repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windrow.crd import parse_job_spec
from windrow_sidecar.finetune.job.assembly import JobSpec

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "windrow-tiny"
ROWS = ROOT / "examples" / "support-tone" / "train.jsonl"


def pod_job(
    folder: Path, *, every_steps: int, dataset: Mapping[str, Any] | None = None, **training: Any
) -> dict[str, Any]:
    """Return the spec of a job that the operator assigns to a pod; it writes below `folder`.

    `every_steps`: between checkpoints; `dataset`, `training`: further options of both.
    """
    return {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(ROWS), "format": "chat", **(dataset or {})},
        "adapter": {"type": "lora", "lora": {"rank": 4, "alpha": 8}},
        "training": {"learningRate": "2e-3", **training},
        "checkpoint": {"everySteps": every_steps},
        "output": {"destination": str(folder / "adapters")},
    }


def example_job(folder: Path, *, rows: int = 12, **training: Any) -> JobSpec:
    """Make a job of two steps without evaluation that writes below `folder`.

    `training`: options that replace these.
    """
    data = folder / "rows.jsonl"
    data.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:rows]))
    spec = {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(data), "evalFraction": 0.0},
        "adapter": {"lora": {"rank": 2, "alpha": 4}},
        "training": {
            "maxSteps": 2,
            "batchSize": 4,
            "maxSequenceLength": 64,
            "learningRate": "1e-3",
            **training,
        },
        "output": {"destination": str(folder / "out")},
    }
    return JobSpec("default", "example", "example-uid", 1, parse_job_spec(spec))
