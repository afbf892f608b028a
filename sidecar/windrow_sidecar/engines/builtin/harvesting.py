"""Load harvesting into the built-in engine, where there is a run directory.

Fails closed: whatever goes wrong here is logged, nothing is lent, and decode serves alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from windrow.eventlog import EventLog, MarkEvent
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.device import EngineDevice
from windrow_sidecar.engines.harvest import HarvestSettings
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.hello import engine_hello
from windrow_sidecar.engines.kept_profile import KeptProfile
from windrow_sidecar.engines.opening import RunningHarvest, open_harvest
from windrow_sidecar.engines.profile import Subject


def start(
    settings: EngineSettings,
    run_dir: RunDir,
    *,
    arena: Arena,
    device: EngineDevice,
    subject: Subject,
    profile: Mapping[str, Any] | None,
    log: EventLog | None,
    group: GroupChunks | None = None,
) -> RunningHarvest:
    """Build hook and link, and open the arena to the worker. Whatever it raises: serve alone.

    `group`: lends the chunks of all ranks, where the model is cut; None: the arena lends its own.
    """
    harvest = HarvestSettings(
        max_batch=settings.max_running,
        run_dir=run_dir,
        gaps=True,
        predictor=settings.harvest_predictor,
        without=settings.harvest_without,
        in_turns=settings.in_engine,
    )
    if harvest.without:
        _mark(log, "unprotected", ", ".join(sorted(harvest.without)))
    hello = engine_hello(
        subject,
        arena,
        device,
        run_dir,
        model=str(settings.model_path),
        endpoint=f"http://{settings.host}:{settings.port}",
    )
    return open_harvest(
        device,
        arena,
        subject,
        hello,
        run_dir,
        harvest,
        profile=profile,
        log=log,
        group=group,
        keep_profile=KeptProfile(run_dir).keep,
        on_failure=lambda reason: _mark(log, "harvest-off", reason),
    )


def _mark(log: EventLog | None, what: str, detail: str) -> None:
    if log is not None:
        log.append(MarkEvent(at_ns=time.monotonic_ns(), what=what, detail=detail))
