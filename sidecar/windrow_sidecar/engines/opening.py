"""Open one engine to harvesting: its step hook, its arena's socket, its link to the agent.

Every engine calls `open_harvest` once, when its arena exists and before it serves. What differs
between engines stays with them: how weights are shared, and who calls the hook.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windrow.eventlog import EventLog
from windrow.proto import agent_pb2
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.device import EngineDevice
from windrow_sidecar.engines.harvest import EngineAgentLink, HarvestHook, HarvestSettings
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.harvest.link import Profile
from windrow_sidecar.engines.hook import FailClosed
from windrow_sidecar.engines.profile import Subject


@dataclass(frozen=True, slots=True)
class RunningHarvest:
    """The hook of an engine's steps, and the link over which the agent sends policies.

    Attributes:
        hook: what the engine asks before a step; its first exception ends harvesting.
        inner: the hook inside.
        link: started; it dials the agent for as long as it is not closed.
    """

    hook: FailClosed
    inner: HarvestHook
    link: EngineAgentLink

    def close(self) -> None:
        """Hang up, then revoke what is granted."""
        self.link.close()
        self.hook.close()


def open_harvest(
    device: EngineDevice,
    arena: Arena,
    subject: Subject,
    hello: agent_pb2.EngineHello,
    run_dir: RunDir,
    settings: HarvestSettings,
    *,
    profile: Mapping[str, Any] | None,
    log: EventLog | None,
    group: GroupChunks | None = None,
    reports_profile: bool = True,
    keep_profile: Callable[[Mapping[str, Any]], None] = lambda profile: None,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> RunningHarvest:
    """Build hook and link, open the arena to a worker, and dial the agent.

    Whatever the worker needs from the arena, such as the weights, is exported before the call.

    Args:
        device: that decode runs on.
        arena: of the engine's KV; the caller keeps it, and closes it after the harvest.
        subject: what the engine's latency profile is about.
        hello: the engine's first message to the agent (`hello.engine_hello`).
        run_dir: of the slot; has the sockets of arena and agent.
        settings: of the hook.
        profile: a latency profile; None while there is none.
        reports_profile: False: nobody gets the profile before the engine hands it to the link.
        keep_profile: leaves a profile for the next start, once steps beside a worker are in it; it
            is called on the link's thread and must not raise.
        log: of events; None: nothing is logged.
        group: lends the chunks of all ranks of the engine; None: the arena lends its own.
        on_failure: is called with the reason, once, when the hook has switched itself off.

    Raises:
        Exception: of any kind; the engine then serves alone.
    """
    inner = HarvestHook(arena, device.splits, profile, settings, log=log, group=group)
    hook = FailClosed(inner, on_failure=on_failure)
    reported = Profile(subject.key, json.dumps(profile)) if profile and reports_profile else None
    link = EngineAgentLink(run_dir.agent_socket, hello, inner, reported, keep_profile=keep_profile)
    arena.serve(str(run_dir.arena_socket()))
    with device.background_threads():
        link.start()
    return RunningHarvest(hook, inner, link)
