"""Assemble the agent: slots, the pod's service, the operator's stream, metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine

from windrow.proto import agent_pb2, attach_pb2
from windrow_sidecar.agent.adapter_store import AdapterStore
from windrow_sidecar.agent.exporter import Exporter
from windrow_sidecar.agent.gpu_sharing import GpuSharing
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.operator_link import OperatorLink, end
from windrow_sidecar.agent.orphans import end_orphans
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.policy_lease import PolicyLease
from windrow_sidecar.agent.service import AgentService, serve
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot
from windrow_sidecar.agent.switches import NEVER_CALLED, Off, refusals, switch_text
from windrow_sidecar.agent.worker_process import make_fork_server
from windrow_sidecar.compute.mps import MpsDaemon
from windrow_sidecar.compute.sharing import PIPE_DIRECTORY

_log = logging.getLogger(__name__)

# After the last worker has ended: for its last event to reach the operator.
_FAREWELL_S = 2.0
# The pod's switch, the lease and refusals are looked at so often.
_LOOK_S = 0.25


class Sidecar:
    """One agent. `run` serves until `stop` is set, then ends the workers with a checkpoint."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._outbox = EventOutbox()
        self._slots: dict[int, AgentSlot] = {}
        self._policy = agent_pb2.EnginePolicy()
        self._orders: set[asyncio.Task[None]] = set()
        in_time = settings.sharing == "temporal"
        # A daemon that this process's environment names is the node's, or another program's.
        named = settings.gpu_access == "mps" or PIPE_DIRECTORY in os.environ
        of_node = not in_time and named
        self._sharing = GpuSharing(
            settings.run_dir,
            None if of_node else MpsDaemon(settings.run_dir.mps_folder),
            of_node=of_node,
            in_time=in_time,
            changed=self._sharing_changed,
        )
        # It takes memory that nobody uses between two workers, as the one on standby does.
        self._forks = make_fork_server(settings) if settings.standby else None
        self._lease = PolicyLease()
        self._link = OperatorLink(settings, self._outbox, self._all_slots, self._obey, self._lease)
        self._adapters = AdapterStore(settings, self._link.adapter_stored)
        self._off = Off()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until asked to stop."""
        settings = self._settings
        settings.run_dir.root.mkdir(parents=True, exist_ok=True)
        await self._sharing.start()  # also finds the daemon whose clients orphans are
        await end_orphans(
            settings.run_dir.root,
            grace_s=settings.grace_s,
            end_gpu_work=self._sharing.end_client,
        )
        service = AgentService(
            self._slot_at, self._find_run, self._link.profile_taken, settings.worker_silence_s
        )
        server = await serve(service, str(settings.run_dir.agent_socket))
        exporter = Exporter(settings, self._all_slots, lambda: self._link.attached)
        exporter.start()
        watch = asyncio.create_task(self._watch())
        link = asyncio.create_task(self._link.run()) if settings.operator_address else None
        if link is None:
            _log.warning("no operator is named: no policy will come, nothing is harvested")
        try:
            await stop.wait()
            await self._end_workers()
        finally:
            watch.cancel()
            if link:
                await end(link)
            await self._adapters.close()
            # No grace: workers have been heard to their last word, and an engine's stream would
            # stay open through any.
            await server.stop(grace=None)
            if self._forks:
                await self._forks.close()
            exporter.close()
            settings.run_dir.agent_socket.unlink(missing_ok=True)
            await self._sharing.close()

    def switch(self, *, off: bool) -> None:
        """Turn harvesting in this pod off or on again, by its file, within a second."""
        path = self._settings.run_dir.off_switch
        try:
            if off:
                path.touch()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("the switch %s could not be set: %s", path, error)

    async def _watch(self) -> None:
        """Look at the pod's switch, the policy's lease and refusals of engines, until cancelled."""
        began_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            ended = self._lease.ended(now_s, attached=self._link.attached)
            off = Off(switch_text(self._settings.run_dir), ended)
            if off != self._off:
                _log.warning("harvesting: %s", off.why or "as the policy says again")
                self._off = off
                for slot in self._slots.values():
                    slot.switch(off)
                self._link.state_changed()
            self._look_for_refusals(now_s - began_s)
            if self._forks and self._forks.pid and self._needs_no_worker():
                await self._forks.unload()
            await asyncio.sleep(_LOOK_S)

    def _needs_no_worker(self) -> bool:
        return all(slot.needs_no_worker for slot in self._slots.values())

    def _look_for_refusals(self, age_s: float) -> None:
        """Make a slot of an engine that its plugin has refused, or that has never called."""
        for index, why in refusals(self._settings.run_dir).items():
            self._slot_at(index).refuse(why)
        if not self._slots and age_s >= self._settings.engine_calls_within_s:
            self._slot_at(0).refuse(NEVER_CALLED)
        for slot in self._slots.values():
            slot.forget_refusal()

    def _sharing_changed(self) -> None:
        self._link.facts_changed()

    async def _end_workers(self) -> None:
        for slot in self._slots.values():
            slot.leave()
        self._link.state_changed()
        await asyncio.gather(*(slot.close() for slot in self._slots.values()))
        await self._link.delivered(_FAREWELL_S)

    def _all_slots(self) -> list[AgentSlot]:
        return [self._slots[index] for index in sorted(self._slots)]

    def _slot_at(self, index: int) -> AgentSlot:
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = AgentSlot(
                index,
                self._settings,
                self._outbox,
                on_facts=self._link.facts_changed,
                gpus=self._sharing,
                end_gpu_work=self._sharing.end_client,
                forks=self._forks,
            )
            slot.switch(self._off)
            slot.set_policy(self._policy)
        return slot

    def _find_run(self, job_uid: str, epoch: int) -> JobRun | None:
        found = (slot.jobs.find(job_uid, epoch) for slot in self._slots.values())
        return next((run for run in found if run is not None), None)

    async def _obey(self, message: attach_pb2.OperatorMessage) -> None:
        """Orders to a slot wait for each other there, never in the stream."""
        match message.WhichOneof("message"):
            case "policy":
                self._set_policy(message.policy)
            case "assign":
                self._order(self._assign(message.assign))
            case "command":
                self._order(self._command_run(message.command))
            case "adapter":
                self._order(self._adapters.store(message.adapter))

    def _order(self, order: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(order)
        self._orders.add(task)
        task.add_done_callback(self._ordered)

    def _ordered(self, task: asyncio.Task[None]) -> None:
        self._orders.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("a command of the operator failed", exc_info=error)

    async def _assign(self, assign: attach_pb2.Assign) -> None:
        await self._slot_at(assign.slot).jobs.assign(assign)

    async def _command_run(self, command: attach_pb2.JobCommand) -> None:
        for slot in self._all_slots():
            if slot.jobs.is_for(command.job_uid, command.epoch):
                await slot.jobs.command(command)
                return
        await self._slot_at(0).jobs.command(command)

    def _set_policy(self, policy: attach_pb2.PolicyConfig) -> None:
        _log.info("policy %r: %s, %s", policy.name, policy.policy, policy.mode)
        self._lease.told(policy.lease_seconds)
        self._policy = agent_pb2.EnginePolicy(
            name=policy.name,
            policy=policy.policy,
            mode=policy.mode,
            objective_seconds=policy.objective_seconds,
            percentile=policy.percentile,
            scope=policy.scope,
            max_compute_percent=policy.max_compute_percent,
            max_memory_percent=policy.max_memory_percent,
            deferral_seconds=policy.deferral_seconds,
            first_token_seconds=policy.first_token_seconds,
        )
        for slot in self._slots.values():
            slot.set_policy(self._policy)
