"""Finetune in SGLang's scheduler process, where the environment asks for it (Harli's own place).

Finetuning is a layer above engines: it is loaded by name, and only here.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from windrow.errors import UserError
from windrow.rundir import ENV_FINETUNE, RunDir
from windrow_sidecar.engines.opening import RunningHarvest
from windrow_sidecar.engines.turns import Turns

_log = logging.getLogger(__name__)

_HOST = "windrow_sidecar.finetune.in_engine.host"
# Python hands its lock from thread to thread after 5 ms; a decode step may take less than that.
_SWITCH_INTERVAL_S = 0.0005


class JobThread(Protocol):
    """Jobs in a thread of this process (see `finetune.in_engine.host`).

    Attributes:
        turns: of the device.
    """

    turns: Turns

    def claimed(self, run_dir: RunDir) -> None:
        """Note which slot the engine is; from here on the agent finds where to send jobs."""

    def start(self, harvest: RunningHarvest) -> None:
        """Begin to run jobs; the arena is served, and steps ask the hook."""

    def close(self) -> None:
        """Have jobs write a checkpoint and end; returns within some seconds."""


def wanted(environment: Mapping[str, str], args: Any) -> bool:  # noqa: ANN401
    """Return whether jobs are to run in the scheduler's process.

    Args:
        environment: of the process.
        args: SGLang's ServerArgs.

    Raises:
        UserError: the value is not valid, or the server cannot run jobs.
    """
    value = environment.get(ENV_FINETUNE, "") or "process"
    if value not in ("process", "in-engine"):
        raise UserError(
            f"{value!r} is not a valid value of {ENV_FINETUNE}",
            field=ENV_FINETUNE,
            remedy="Write process (the default), or in-engine.",
        )
    if value == "process":
        return False
    if str(args.device) != "cpu":
        raise UserError(
            f"finetuning in SGLang's process runs on cores only, not on {args.device}",
            field=ENV_FINETUNE,
            remedy=f"Unset {ENV_FINETUNE}: jobs then run in a process of their own.",
        )
    if args.tp_size > 1:
        raise UserError(
            "finetuning in SGLang's process runs on one rank",
            field=ENV_FINETUNE,
            remedy=f"Start SGLang with --tp-size 1, or unset {ENV_FINETUNE}.",
        )
    if not args.sleep_on_idle:
        raise UserError(
            "an idle scheduler that polls would keep Python's lock from the job in its process",
            field="--sleep-on-idle",
            remedy=f"Start SGLang with --sleep-on-idle, or unset {ENV_FINETUNE}.",
        )
    return True


def prepare(run_dir: RunDir, model: Path) -> JobThread:
    """Load what jobs need and fork the process that has rows read.

    Args:
        run_dir: of the pod.
        model: directory of the served checkpoint.

    Raises:
        UserError: a library is not installed, or the process has threads already.
    """
    try:
        host: JobThread = importlib.import_module(_HOST).prepare_for_agent(run_dir, str(model))
    except ImportError as error:
        raise UserError(
            f"finetuning in SGLang's process needs a library that is not installed here: {error}",
            field=ENV_FINETUNE,
            remedy="Install peft beside SGLang, or unset the variable.",
        ) from error
    except RuntimeError as error:
        raise UserError(
            f"SGLang's scheduler cannot run jobs: {error}",
            field=ENV_FINETUNE,
            remedy=f"Unset {ENV_FINETUNE}: jobs then run in a process of their own.",
        ) from error
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _log.info("windrow: jobs run in the scheduler's process")
    return host
