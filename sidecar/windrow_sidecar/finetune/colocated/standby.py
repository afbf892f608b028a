"""A worker that has loaded everything but its job.

Importing torch, transformers and peft takes 6 to 12 s of a core. At niceness 19 beside a decode
process that has the device, that is a minute without harvest at every start; done ahead, while
nobody waits for it, it is nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)

_LIBRARIES = (
    "peft",
    "transformers.models.auto.tokenization_auto",
    "windrow_sidecar.finetune.colocated.jobs",
)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """Which job to take, and under which fencing token; its job.json lies in its directory."""

    job_uid: str
    epoch: int


def warm_up(model: str) -> None:
    """Import what any job needs, and the code of the model that decode serves.

    A model that cannot be read is no error here: the job that wants it says so.
    """
    for library in _LIBRARIES:
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
