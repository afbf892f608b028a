"""Setting of an engine benchmark: a job on a model, and the device that trains it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.harness import ROOT
from benchmarks.shapes import write_shape
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.finetune.engine.sizing import LEAST_TOKENS
from windrow_sidecar.finetune.job.assembly import JobSpec, read_job
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.standalone.dedicated import base_of
from windrow_sidecar.finetune.standalone.measurement import endless

EXAMPLE = ROOT / "examples" / "finetunejob.yaml"
_TOKENIZER = ROOT / "models" / "windrow-tiny"
ROWS, TOKENS = 2, 1024
SEED = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """Job, model and device of a measurement.

    Attributes:
        what: for the names of results.
        job_file: a manifest.
        device: as `find_device` takes it.
        random_weights: seed of weights that are made up on the device; None: the model has its own.
        step: rows and tokens of each, of a pass that is measured.
    """

    what: str
    job_file: Path
    device: str = "cpu"
    random_weights: int | None = None
    step: tuple[int, int] = (ROWS, TOKENS)

    @property
    def on_gpu(self) -> bool:
        """True where goals for a GPU apply."""
        return self.device != "cpu"

    @property
    def flags(self) -> list[str]:
        """Flags for the processes of engine and baseline."""
        made_up = [] if self.random_weights is None else [f"--random-weights={self.random_weights}"]
        return ["--job", str(self.job_file), "--device", self.device, *made_up]

    def find(self) -> ComputeDevice:
        """Return the device.

        Raises:
            UserError: it is not here.
        """
        return find_device(self.device)

    def job(self) -> JobSpec:
        """Return the job, without an end."""
        job = read_job(self.job_file)
        return replace(job, spec=endless(job.spec))

    def base(self, device: ComputeDevice) -> BaseModel:
        """Load its model."""
        return base_of(self.job(), device, random_weights=self.random_weights)


def of_example() -> Setting:
    """The example's job on one core of the host; a step as its worker forms it beside decode."""
    return Setting("1 core", EXAMPLE, step=(4, LEAST_TOKENS // 4))


def of_shape(folder: Path, shape: str, device: str) -> Setting:
    """A job of 2 x 1,024 tokens, LoRA of rank 16 on all linears, on a shape with random weights."""
    model = write_shape(folder / shape, shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, model / name)
    config = json.loads((model / "config.json").read_text())
    rows = folder / "rows.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = ((letters[n % 27 :] + letters) * (2 * TOKENS // 27) for n in range(16 * ROWS))
    rows.write_text("".join(json.dumps({"text": text[: 2 * TOKENS]}) + "\n" for text in texts))
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = f"bench-{shape}"
    manifest["spec"] |= {
        "model": {"name": str(model)},
        "dataset": {"source": str(rows), "format": "text"},
        "adapter": {"lora": {"rank": 16, "alpha": 32, "targetModules": "all-linear"}},
        "training": {
            "maxSteps": 1000,
            "batchSize": ROWS,
            "maxSequenceLength": TOKENS,
            "learningRate": "1e-4",
            "loss": "all",
            "precision": "bf16" if config["dtype"] == "bfloat16" else "fp32",
        },
        "output": {"destination": str(folder / "out")},
    }
    job_file = folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(manifest))
    return Setting(f"{shape}, {device}", job_file, device, SEED)
