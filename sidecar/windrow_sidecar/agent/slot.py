"""One harvested device as the agent sees it: its engine, its arena, the job that runs on it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from windrow.conditions import Reason
from windrow.proto import agent_pb2, attach_pb2
from windrow_sidecar import _core
from windrow_sidecar.agent.channel import Channel
from windrow_sidecar.agent.jobrun import JobRun
from windrow_sidecar.agent.outbox import Outbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.utilization import Utilization, make_meter
from windrow_sidecar.agent.worker_process import Standby
from windrow_sidecar.compute.mode import Sharing

_log = logging.getLogger(__name__)

EngineChannel = Channel[agent_pb2.EngineCommand]
Counts = tuple[int, int, int, int, int]


class Slot:
    """State of one slot. All of it belongs to the agent's event loop."""

    def __init__(
        self,
        index: int,
        settings: AgentSettings,
        outbox: Outbox,
        *,
        on_facts: Callable[[], None],
        sharing: Callable[[], Sharing | None] = lambda: None,
    ) -> None:
        self.index = index
        self._settings, self._outbox, self._on_facts = settings, outbox, on_facts
        self._sharing = sharing
        self.engine_state = "starting"
        self.hello: agent_pb2.EngineHello | None = None
        self.stats = agent_pb2.EngineStats()
        self.profile: agent_pb2.EngineProfile | None = None
        self.run: JobRun | None = None
        self.harvested_tokens = 0
        self.worker_starts = 0
        self.worker_exits: Counter[str] = Counter()
        self.utilization = Utilization()
        self._meter = make_meter("host", 1)
        self._channel: EngineChannel | None = None
        self._policy = agent_pb2.EnginePolicy()
        self._arena: _core.Inspection | None = None
        self._absence: asyncio.Task[None] | None = None
        self._assigned = ("", 0)  # the newest assignment, which may still wait for the one before
        self._inbox = asyncio.Lock()  # assignments and commands, one after the other
        self._standby = Standby(settings, index)
        self._preparing: asyncio.Task[None] | None = None

    # The engine

    async def engine_attached(self, hello: agent_pb2.EngineHello, channel: EngineChannel) -> None:
        """An engine has called: a new one, or the same again."""
        if self._absence:
            self._absence.cancel()
            self._absence = None
        replaced = self.hello is not None and self.hello.pid != hello.pid
        self._channel, self.engine_state = channel, "serving"
        if replaced and self.run:
            self.run.give_up(Reason.ENGINE_NOT_SERVING, "the decode engine was restarted")
        if replaced:
            self._arena = None
        if self.hello != hello:
            self.hello = hello
            self._meter = make_meter(hello.driver, hello.compute_units)
            self._on_facts()
        channel.send(agent_pb2.EngineCommand(policy=self._policy))
        self._tell_who_lives()
        await self._enter_arena()
        self._prepare()

    def engine_reported(self, stats: agent_pb2.EngineStats) -> None:
        """Once a second."""
        self.stats = stats
        self._prepare()

    def engine_hung_up(self, channel: EngineChannel) -> None:
        """Its stream has ended; after a while without another one the engine counts as gone."""
        if channel is not self._channel:
            return
        self._channel = None
        self._absence = asyncio.create_task(self._engine_absent())

    async def _engine_absent(self) -> None:
        await asyncio.sleep(self._settings.engine_absence_s)
        _log.warning("slot %d: the engine is gone", self.index)
        self.engine_state = "gone"
        self._arena = None
        if self.run:
            self.run.give_up(Reason.ENGINE_NOT_SERVING, "the decode engine is gone")

    def set_policy(self, policy: agent_pb2.EnginePolicy) -> None:
        """Hand the engine a policy now, and whenever it calls again."""
        self._policy = policy
        if self._channel:
            self._channel.send(agent_pb2.EngineCommand(policy=policy))
        self._prepare()

    def _prepare(self) -> None:
        """Have a worker wait ahead of its job where one may come: beside an engine, to harvest.

        Only while decode has nothing to do: loading libraries takes seconds of cache and memory
        from a busy one. A job that comes before such a moment starts its worker itself.
        """
        taken = self.run is not None and not self.run.is_over
        wanted = self._policy.mode == "harvest" and self._channel is not None and not taken
        if wanted and self.hello and self.stats.batch == 0:
            self._preparing = asyncio.create_task(self._standby.prepare(self.hello.model))

    def _tell_who_lives(self) -> None:
        if self._channel:
            alive = self.run is not None and not self.run.is_over and self.run.pid
            epoch = self.run.assign.epoch if self.run and alive else 0
            self._channel.send(agent_pb2.EngineCommand(worker=agent_pb2.EngineWorker(epoch=epoch)))

    # The arena: for its counts only

    async def _enter_arena(self) -> None:
        if self._arena or not self.hello or not self.hello.arena_socket:
            return
        try:
            self._arena = await asyncio.to_thread(
                _core.Inspection.open, self.hello.arena_socket, timeout_s=2.0
            )
        except _core.Error as error:
            _log.warning("slot %d: no view of the arena: %s", self.index, error)

    def chunks(self) -> Counts:
        """FREE, KV, LENT, RESERVED, DRAINING; zeros without an arena."""
        return self._arena.counts() if self._arena else (0, 0, 0, 0, 0)

    # Jobs

    async def assign(self, assign: attach_pb2.Assign) -> None:
        """Start a job's worker, or say why not. The same assignment twice is one."""
        self._assigned = (assign.job_uid, assign.epoch)
        async with self._inbox:
            run = self.run
            if run and run.is_of(assign.job_uid, assign.epoch):
                return
            refusal = self._refusal(assign)
            if refusal:
                await self._reject(assign, *refusal)
                return
            if run:
                # An older epoch of the same job is fenced off; a finished worker ends by itself.
                await (run.wait() if run.ended is not None else run.abort())
            self._outbox.settle(assign.job_uid, assign.epoch)
            await self._start(assign)

    def is_for(self, job_uid: str, epoch: int) -> bool:
        """Whether that placement is here, or about to be."""
        here = self.run is not None and self.run.is_of(job_uid, epoch)
        return here or self._assigned == (job_uid, epoch)

    def _refusal(self, assign: attach_pb2.Assign) -> tuple[Reason, str] | None:
        if self.engine_state != "serving":
            return Reason.ENGINE_NOT_SERVING, f"no decode engine serves slot {self.index}"
        run = self.run
        if run is None:
            return None
        if run.assign.job_uid == assign.job_uid and run.assign.epoch > assign.epoch:
            return Reason.STALE_EPOCH, f"epoch {run.assign.epoch} has been here already"
        if run.assign.job_uid != assign.job_uid and run.ended is None:
            return Reason.BUSY, f"slot {self.index} runs job {run.assign.job_name}"
        return None

    async def _reject(self, assign: attach_pb2.Assign, reason: Reason, detail: str) -> None:
        await self._outbox.add(
            attach_pb2.JobEvent(
                kind=attach_pb2.JobEvent.REJECTED,
                job_uid=assign.job_uid,
                epoch=assign.epoch,
                reason=str(reason),
                detail=detail,
            )
        )

    async def _start(self, assign: attach_pb2.Assign) -> None:
        def count_tokens(n: int) -> None:
            self.harvested_tokens += n

        def count_exit(outcome: str) -> None:
            self.worker_exits[outcome] += 1
            asyncio.get_running_loop().call_soon(self._after_worker)

        self.run = JobRun(
            self._settings,
            assign,
            self._outbox,
            standby=self._standby,
            on_tokens=count_tokens,
            on_exit=count_exit,
        )
        await self.run.start()
        self.worker_starts += 1
        self._tell_who_lives()

    def _after_worker(self) -> None:
        self._tell_who_lives()
        self._prepare()

    async def command(self, command: attach_pb2.JobCommand) -> None:
        """Pass a command on; one for a run that is not here is answered as done."""
        async with self._inbox:
            run = self.run
            if run and run.is_of(command.job_uid, command.epoch):
                run.obey(command.action, command.reason)
            elif command.action in (attach_pb2.JobCommand.STOP, attach_pb2.JobCommand.ABORT):
                await self._outbox.add(
                    attach_pb2.JobEvent(
                        kind=attach_pb2.JobEvent.STOPPED,
                        job_uid=command.job_uid,
                        epoch=command.epoch,
                        reason=str(Reason.STOPPED),
                        detail="no such worker runs here",
                    )
                )

    async def close(self) -> None:
        """End the worker with a checkpoint, within the grace, and leave the arena."""
        if self._absence:
            self._absence.cancel()
        if self.run and not self.run.is_over:
            self.run.give_up(Reason.SLOT_LOST, "the sidecar was asked to end")
            await self.run.wait()
        await self._standby.close()
        self._arena = None

    # Reports

    def facts(self) -> attach_pb2.SlotFacts | None:
        """For the hello to the operator; None until an engine has called."""
        h = self.hello
        if h is None:
            return None
        sharing = None if h.driver == "host" else self._sharing()
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
            endpoint=h.endpoint,
            sharing=sharing.mode if sharing else "",
            sharing_reason=sharing.reason if sharing else "",
        )

    def running(self) -> attach_pb2.RunningJob | None:
        """The run whose end has not been reported."""
        return self._run_message() if self.run and self.run.ended is None else None

    def unsettled(self) -> attach_pb2.RunningJob | None:
        """For a hello: also a run that has ended, for the operator may not have heard of it yet.

        It would count a run that the hello leaves out as lost; the event of its end comes next.
        """
        return self._run_message() if self.run else None

    def _run_message(self) -> attach_pb2.RunningJob | None:
        run = self.run
        if run is None:
            return None
        return attach_pb2.RunningJob(
            slot=self.index,
            job_uid=run.assign.job_uid,
            epoch=run.assign.epoch,
            progress=run.meter.message(),
        )

    def heartbeat(self) -> attach_pb2.SlotHeartbeat:
        """What the operator hears at its interval."""
        free, kv, lent, reserved, draining = self.chunks()
        total = max(1, free + kv + lent + reserved + draining)
        if self.hello:
            worker = self.run.pid if self.run and not self.run.is_over else 0
            self.utilization = self._meter.sample(self.hello.pid, worker)
        s, used = self.stats, self.utilization
        return attach_pb2.SlotHeartbeat(
            slot=self.index,
            engine_state=self.engine_state,
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
            compute_utilization=used.decode + used.finetune,
            compute_utilization_decode=used.decode,
            memory_utilization=(kv + lent + draining) / total,
            breaker=s.breaker,
            job=self.running(),
        )
