"""The agent's state of one harvested device: its engine, its arena, its jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from windrow.conditions import Reason
from windrow.proto import agent_pb2, attach_pb2
from windrow_sidecar import _core
from windrow_sidecar.agent.channel import OutgoingQueue
from windrow_sidecar.agent.forking import ForkServer
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.rank_difference import rank_difference
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot_jobs import SlotJobs
from windrow_sidecar.agent.switches import Off
from windrow_sidecar.agent.worker_process import EndGpuWork, Standby, WorkerDevices
from windrow_sidecar.compute.mps_priority import client_priority
from windrow_sidecar.compute.sharing import Sharing
from windrow_sidecar.compute.survey import Survey
from windrow_sidecar.compute.utilization import (
    Utilization,
    is_slice,
    make_meter,
    visible_device,
)
from windrow_sidecar.engine_facts import EngineFacts

_log = logging.getLogger(__name__)

EngineChannel = OutgoingQueue[agent_pb2.EngineCommand]
Counts = tuple[int, int, int, int, int]


class VisibleGpus(Protocol):
    """The GPUs of the agent's container (see `GpuSharing`)."""

    sharing: Sharing | None
    found: Survey

    @property
    def worker_environment(self) -> Mapping[str, str]:
        """The variables that make a worker a client of the pod's MPS daemon."""
        ...

    async def join(self) -> None:
        """Decode has called as a client of that daemon."""
        ...


class _NoGpus:
    sharing: Sharing | None = None
    found = Survey()
    worker_environment: Final[Mapping[str, str]] = MappingProxyType({})

    async def join(self) -> None:
        """Do nothing: there is nothing to join."""


_NO_GPUS: Final = _NoGpus()


class AgentSlot:
    """One slot. Used from the agent's event loop only."""

    def __init__(
        self,
        index: int,
        settings: AgentSettings,
        outbox: EventOutbox,
        *,
        on_facts: Callable[[], None],
        gpus: VisibleGpus = _NO_GPUS,
        end_gpu_work: EndGpuWork | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self.index = index
        self._settings, self._on_facts, self._gpus = settings, on_facts, gpus
        self.engine_state = "starting"
        self._leaving = False  # the sidecar was asked to end
        self.hello: agent_pb2.EngineHello | None = None
        self.stats = agent_pb2.EngineStats()
        self._ranks_differ = ""
        self.reported_at_s = 0.0  # Unix time of the stats; 0: none yet
        self.profile: agent_pb2.EngineProfile | None = None
        self.utilization = Utilization()
        self._meter = make_meter("host", 1)
        self._told_sharing: Sharing | None = None
        self._channel: EngineChannel | None = None
        self.policy = agent_pb2.EnginePolicy()
        self._off = Off()
        self._refused = ""  # why its engine cannot be harvested
        self._stopping: asyncio.Task[None] | None = None
        self._arena: _core.Inspection | None = None
        self._absence: asyncio.Task[None] | None = None
        self._standby = Standby(settings, index, forks)
        self.jobs = SlotJobs(
            settings,
            index,
            outbox,
            self._standby,
            refuses_all=self._refuses_all,
            max_jobs=self.max_jobs,
            worker_changed=self._worker_changed,
            why_paused=lambda: self.stats.paused,
            end_gpu_work=end_gpu_work,
            engine=lambda: EngineFacts.of_hello(self.hello),
        )
        self._preparing: asyncio.Task[None] | None = None
        self._showing: asyncio.Task[None] | None = None

    # The engine

    async def engine_attached(self, hello: agent_pb2.EngineHello, channel: EngineChannel) -> None:
        """An engine has called: a new one, or the same again."""
        if self._absence:
            self._absence.cancel()
            self._absence = None
        replaced = self.hello is not None and self.hello.pid != hello.pid
        self._channel, self.engine_state = channel, "serving"
        if replaced:
            self._arena = None
            await self.jobs.give_up(Reason.ENGINE_NOT_SERVING, "the decode engine was restarted")
        if hello.sharing == "spatial":
            await self._gpus.join()
        if self.hello != hello or self._standby.devices != self._devices(hello):
            self.hello = hello
            self._meter = make_meter(hello.driver, hello.compute_units, hello.device_uuid)
            await self._standby.show(self._devices(hello))
            self._on_facts()
        channel.send(agent_pb2.EngineCommand(policy=self._effective_policy()))
        self._tell_who_lives()
        await self._enter_arena()
        self._prepare()

    def _devices(self, hello: agent_pb2.EngineHello) -> WorkerDevices:
        """Return what of the pod's devices workers are shown: where there are more, decode's."""
        if hello.driver == "host":
            return WorkerDevices(cores=tuple(hello.cores), ranks=max(1, hello.tensor_parallel))
        several = bool(self._settings.gpu_access) or len(self._gpus.found.uuids or ()) > 1
        known = several and hello.device_uuid
        # Shares of SMs that only workers have are worth nothing.
        joins = hello.sharing == "spatial"
        mps = dict(self._gpus.worker_environment) if joins else {}
        shared = self._gpus.sharing
        if joins and shared is not None and shared.mode == "spatial":
            mps |= client_priority(
                self._settings.mps_priority, on_every_sm=self.policy.max_compute_percent >= 100
            )
        return WorkerDevices(
            gpu=visible_device(hello.device_uuid, hello.device) if known else "",
            mps=tuple(mps.items()),
        )

    def engine_reported(self, stats: agent_pb2.EngineStats) -> None:
        """Take the engine's report; called once a second."""
        self._ranks_differ = rank_difference(self.stats.ranks, stats.ranks)
        self.stats, self.reported_at_s = stats, time.time()
        if (sharing := self.shared()) != self._told_sharing:
            self._told_sharing = sharing
            if sharing is not None:
                _log.warning(
                    "slot %d: shared in %s mode: %s", self.index, sharing.mode, sharing.reason
                )
            self._on_facts()
        self._prepare()

    def engine_hung_up(self, channel: EngineChannel) -> None:
        """Note that the engine's stream has ended; after a while without one it counts as gone."""
        if channel is not self._channel:
            return
        self._channel = None
        self._absence = asyncio.create_task(self._engine_absent())

    async def _engine_absent(self) -> None:
        await asyncio.sleep(self._settings.engine_absence_s)
        _log.warning("slot %d: the engine has disconnected", self.index)
        self.engine_state = "gone"
        self._arena = None
        await self.jobs.give_up(Reason.ENGINE_NOT_SERVING, "the decode engine is gone")

    def set_policy(self, policy: agent_pb2.EnginePolicy) -> None:
        """Hand the engine a policy now, and whenever it calls again."""
        self.policy = policy
        if (
            self.hello is not None
            and (devices := self._devices(self.hello)) != self._standby.devices
        ):
            self._showing = asyncio.create_task(self._standby.show(devices))
        self._tell_policy()

    def switch(self, off: Off) -> None:
        """Harvest nothing, or as the policy says again. Every job writes a checkpoint and ends.

        At the end of a lease jobs finish their step first; by the switch decode has the whole
        device at once.
        """
        self._off = off
        self._tell_policy()
        if off.why and self.jobs.going:
            self._stopping = asyncio.create_task(self._stop_jobs(off.why))

    async def _stop_jobs(self, why: str) -> None:
        await self.jobs.give_up(Reason.POLICY_CHANGED, why)
        for run in self.jobs.going:
            await run.wait()
        self._tell_policy()

    def _effective_policy(self) -> agent_pb2.EnginePolicy:
        finishing = not self._off.switched and bool(self.jobs.going)
        if not self._off.why or finishing or self.policy.mode == "off":
            return self.policy
        policy = agent_pb2.EnginePolicy()
        policy.CopyFrom(self.policy)
        policy.mode = "off"
        return policy

    def _tell_policy(self) -> None:
        if self._channel:
            self._channel.send(agent_pb2.EngineCommand(policy=self._effective_policy()))
        self._prepare()

    def refuse(self, why: str) -> None:
        """Note why the engine cannot be harvested; one that has called is heard itself."""
        if self._channel is None and why != self._refused:
            _log.warning("slot %d: not harvested: %s", self.index, why)
            self._refused = why
            self._on_facts()

    def forget_refusal(self) -> None:
        """Drop a refusal: the engine has called."""
        if self._channel is not None and self._refused:
            self._refused = ""
            self._on_facts()

    @property
    def needs_no_worker(self) -> bool:
        """Return whether no worker runs here and none is to come."""
        return self._effective_policy().mode != "harvest" and self.jobs.has_no_worker

    def _prepare(self) -> None:
        """Have a worker wait ahead of its job where one may come: beside an engine, to harvest.

        Only while decode has nothing to do: loading libraries takes seconds of cache and memory
        from a busy one. A job that comes before such a moment starts its worker itself.
        """
        free = self.jobs.has_no_worker
        harvests = self._effective_policy().mode == "harvest"
        if not harvests:
            # No job comes: the memory of one that waits is decode's.
            self._preparing = asyncio.create_task(self._standby.dismiss())
        wanted = harvests and self._channel is not None and free
        if wanted and self.hello and self.stats.batch == 0:
            self._preparing = asyncio.create_task(self._standby.prepare(self.hello.model))

    def _tell_who_lives(self) -> None:
        if self._channel:
            worker = agent_pb2.EngineWorker(epoch=self.jobs.worker_epoch)
            self._channel.send(agent_pb2.EngineCommand(worker=worker))

    # The arena: for its counts only

    async def _enter_arena(self) -> None:
        if self._arena or not self.hello or not self.hello.arena_socket:
            return
        try:
            self._arena = await asyncio.to_thread(
                _core.Inspection.open, self.hello.arena_socket, timeout_s=2.0
            )
        except _core.Error as error:
            _log.warning("slot %d: cannot attach the arena: %s", self.index, error)

    def chunks(self) -> Counts:
        """FREE, KV, LENT, RESERVED, DRAINING; zeros without an arena."""
        return self._arena.counts() if self._arena else (0, 0, 0, 0, 0)

    # Jobs

    def max_jobs(self) -> int:
        """Return how many jobs over one base may run here at a time.

        Over several ranks one: they train a single job.
        """
        hello = self.hello
        several = hello is not None and hello.tensor_parallel <= 1
        return self._settings.max_jobs if several else 1

    def _refuses_all(self) -> tuple[Reason, str] | None:
        if self._leaving:
            return Reason.SLOT_LOST, f"the sidecar of slot {self.index} was asked to end"
        if self._off.why:
            return Reason.POLICY_CHANGED, self._off.why
        if self.engine_state == "serving":
            return None
        return Reason.ENGINE_NOT_SERVING, f"no decode engine serves slot {self.index}"

    def _worker_changed(self) -> None:
        self._tell_who_lives()
        self._prepare()

    def leave(self) -> None:
        """Take no job any more, and say so: what was running here must not come back."""
        self._leaving = True

    async def close(self) -> None:
        """End the worker with a checkpoint, within the grace, and leave the arena."""
        if self._absence:
            self._absence.cancel()
        await self.jobs.give_up(Reason.SLOT_LOST, "the sidecar was asked to end")
        await self.jobs.wait()
        await self._standby.close()
        self._arena = None

    # Reports

    @property
    def on_host(self) -> bool:
        """True where decode has called and runs on the host's cores."""
        return self.hello is not None and self.hello.driver == "host"

    def shared(self) -> Sharing | None:
        """Return how the slot's GPU is shared now, as its worker reports it too; None: no GPU."""
        if self.hello is None or self.on_host:
            return None
        sharing = self._gpus.sharing
        if sharing is None:
            return None
        if self.hello.sharing == "temporal":  # the first reason: what decode lacks
            why = f"decode shares it so: {self.hello.sharing_reason}"
            return Sharing("temporal", why, self.hello.sharing_code or Reason.REASON_NOT_SAID)
        if sharing.mode == "temporal":
            return sharing
        told = next((run.meter.latest for run in self.jobs.going), None)
        if told is None or told.sharing != "temporal":
            return sharing
        why = f"the worker shares it so: {told.sharing_reason}"
        return Sharing("temporal", why, told.sharing_code or Reason.REASON_NOT_SAID)

    def _unseen_device(self) -> str:
        """Say why no worker can use decode's GPU: this container does not see it; "": it does."""
        hello, found = self.hello, self._gpus.found
        if hello is None or hello.driver == "host" or found.uuids is None:
            return ""
        if not found.uuids:
            return f"the sidecar's container sees no GPU ({found.why})"
        if not hello.device_uuid and len(found.uuids) > 1 and not is_slice(hello.device):
            return (
                f"the sidecar's container sees {len(found.uuids)} GPUs, and decode has not said "
                "which one is its own: show both containers one GPU (NVIDIA_VISIBLE_DEVICES, or a "
                "claim)"
            )
        # Of a GPU's slices CUDA shows a process one; which it is tells nothing of the others.
        is_one = not hello.device_uuid or hello.device_uuid in found.uuids
        if is_one or is_slice(hello.device):
            return ""
        name = visible_device(hello.device_uuid, hello.device)
        return (
            f"decode's {name} is none of the {len(found.uuids)} that the sidecar's container sees"
        )

    def facts(self) -> attach_pb2.SlotFacts | None:
        """Return the hello's facts; None until an engine has called or is known not to call."""
        h = self.hello
        if h is None and not self._refused:
            return None
        if h is None or self._refused:
            return attach_pb2.SlotFacts(index=self.index, max_jobs=1, refused=self._refused)
        self._told_sharing = sharing = self.shared()
        return attach_pb2.SlotFacts(
            index=self.index,
            engine=h.engine,
            engine_version=h.engine_version,
            device=h.device,
            driver=h.driver,
            model=h.model,
            model_fingerprint=h.model_fingerprint,
            compute_units=h.compute_units,
            finetune_levels=h.finetune_levels,
            arena_bytes=h.chunk_bytes * h.chunks,
            chunk_bytes=h.chunk_bytes,
            chunks=h.chunks,
            tensor_parallel=h.tensor_parallel,
            ranks=self._devices(h).ranks,
            endpoint=h.endpoint,
            max_jobs=self.max_jobs(),
            sharing=sharing.mode if sharing else "",
            sharing_reason=sharing.reason if sharing else "",
            sharing_code=sharing.code if sharing else "",
            output_trees=self._settings.output_trees,
            unseen_device=self._unseen_device(),
        )

    def heartbeat(self) -> attach_pb2.SlotHeartbeat:
        """Return what the operator receives at each interval."""
        free, kv, lent, reserved, draining = self.chunks()
        total = max(1, free + kv + lent + reserved + draining)
        if self.hello:
            # As this process sees it: the engine's own number is of its PID namespace.
            engine = self._arena.owner_pid if self._arena else self.hello.pid
            self.utilization = self._meter.sample(engine, self.jobs.worker_pid)
        s, used, jobs = self.stats, self.utilization, self.jobs.running()
        return attach_pb2.SlotHeartbeat(
            slot=self.index,
            engine_state="leaving" if self._leaving else self.engine_state,
            steps=s.steps,
            steps_over_objective=s.steps_over_objective,
            tpot_p50_seconds=s.tpot_p50_seconds,
            tpot_p99_seconds=s.tpot_p99_seconds,
            batch=s.batch,
            context_tokens=s.context_tokens,
            waiting=s.waiting,
            decode_units=s.decode_units,
            finetune_units=s.finetune_units,
            chunks_kv=kv,
            chunks_lent=lent,
            chunks_reserved=reserved,
            chunks_free=free,
            chunks_draining=draining,
            predicted_tokens_per_second=s.predicted_tokens_per_second,
            predicted_from=s.predicted_from,
            compute_utilization=used.decode + used.finetune,
            compute_utilization_decode=used.decode,
            memory_utilization=(kv + lent + draining) / total,
            breaker=s.breaker,
            off=self._off.why,
            ranks_differ=self._ranks_differ,
            job=jobs[0] if jobs else None,
            jobs=jobs,
        )
