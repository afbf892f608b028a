"""Wait, with all libraries loaded, for the order that names a job.

Importing torch, transformers and peft takes 6 to 12 s of a core. At niceness 19 beside a decode
process that has the device, that is a minute without harvest at every start; done ahead, while
nobody waits for it, it is nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from windrow_sidecar.heap import uncollected

log = logging.getLogger(__name__)

# Of what finetunes, and of what reads its rows: decode comes first on every core.
NICENESS = 19

_LIBRARIES = (
    "peft",
    "transformers.models.auto.tokenization_auto",
    # torch's optimizers import it when the first one is made.
    "torch._dynamo",
    "windrow_sidecar.finetune.colocated.jobs",
    "windrow_sidecar.finetune.colocated.slot",
    "windrow_sidecar.finetune.data.readers",
)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """The job to run and its fencing token; its job.json is in its job directory."""

    job_uid: str
    epoch: int


def warm_up(model: str, *, without: Collection[str] = ()) -> None:
    """Import what any job needs, and the code of the model that decode serves.

    A model that cannot be read is no error here: the job that wants it says so.

    Args:
        model: directory of the model that decode serves; "": no model's code is imported.
        without: libraries that are not imported.
    """
    with uncollected():
        for library in _LIBRARIES:
            if library not in without:
                importlib.import_module(library)
        if model and os.path.isdir(model):
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

            try:
                MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(model))]
            except (KeyError, OSError, ValueError) as error:
                log.info("the code of %s is not loaded ahead: %s", model, error)


def await_order(lines: Iterable[str]) -> JobOrder | None:
    """Return the order that comes as a line `{"job_uid", "epoch"}`; None: the agent hung up."""
    for line in lines:
        told = json.loads(line)
        return JobOrder(str(told["job_uid"]), int(told["epoch"]))
    return None
