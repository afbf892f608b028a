"""Decides whose turn it is: what has changed, and what is due by the clock, gets a step.

A look at what is due waits for nobody and costs what has changed, not what there is. Jobs whose
turn it is wait in a queue for one of a few workers, so that a slow answer holds one job up; what
need not be done for each piece of news (counts, registrations, containers) is done beside them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from windrow_operator import preemption
from windrow_operator.attach import AttachServer
from windrow_operator.cluster_state import ClusterState
from windrow_operator.events import Recorder
from windrow_operator.injection import SidecarTemplate
from windrow_operator.job_steps import PROGRESS_INTERVAL, JobSteps
from windrow_operator.kube import ApiError, Kube
from windrow_operator.lease import NotLeading
from windrow_operator.metrics import Metrics
from windrow_operator.moving import JobMoves
from windrow_operator.policy_status import PolicyStatus
from windrow_operator.reconcile import Timeouts
from windrow_operator.sidecars import Sidecars
from windrow_operator.slot_table import SlotTable
from windrow_operator.webhook import WebhookRegistration
from windrow_operator.work_queue import DueKeys, WorkQueue

log = logging.getLogger(__name__)

# Bursts of news become one look.
_SETTLE_SECONDS = 0.02
# The clock alone changes things: hours, quotas, rests, silence.
_CLOCK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
# The shortest lease is two seconds.
_RENEWED_SECONDS = 0.4
# Steps at a time. Each mostly waits for the API server, which has others to serve as well.
_WORKERS = 4
# So many slots and jobs are looked at in one go; admission and streams have their turn in between.
_AT_ONCE = 50
# What counts everything is done the more seldom the more there is: so many objects a second.
_COUNTED_PER_SECOND = 500.0
# To give all waiting jobs a turn takes this part of the time at most; their steps take as much as
# five times that.
_WAITING_SHARE = 0.05


@dataclass
class _Alarm:
    """Wakes the loop at the earliest moment that anybody asked for."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    due: float = 0.0

    def within(self, seconds: float) -> None:
        due = time.monotonic() + max(0.0, seconds)
        if due < self.due:
            self.due = due
            self.event.set()

    async def wait(self) -> None:
        while (left := self.due - time.monotonic()) > 0:
            self.event.clear()
            try:
                await asyncio.wait_for(self.event.wait(), left)
            except TimeoutError:
                break
        self.due = time.monotonic() + _CLOCK_SECONDS


class Driver:
    """Carries out what `reconcile` decides.

    Args:
        cluster: what is known.
        kube: a client that may write.
        recorder: of events.
        metrics: of the process.
        timeouts: for decisions.
        clock: the time, aware.
        workers: steps that may be taken at a time.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        recorder: Recorder,
        metrics: Metrics,
        *,
        timeouts: Timeouts,
        clock: Callable[[], datetime],
        workers: int = _WORKERS,
    ) -> None:
        self._cluster, self._metrics, self._clock = cluster, metrics, clock
        self._n_workers = workers
        self._slots = SlotTable()
        self._slots.policies = cluster.policies
        self._queue, self._schedule, self._alarm = WorkQueue(), DueKeys(), _Alarm()
        self._sidecars = Sidecars(cluster, kube, recorder, metrics, self._within)
        self._policies = PolicyStatus(cluster, kube, recorder, metrics)
        self._steps = JobSteps(
            *(cluster, self._slots, kube, recorder, metrics, self._sidecars),
            look_again=self._look_again,
            timeouts=timeouts,
            clock=clock,
        )
        self._moves = JobMoves()
        self._registration: WebhookRegistration | None = None
        self._clock_passed: datetime | None = None
        self._counted: tuple[datetime, int] | None = None  # when, after how many policies changed
        self._room = -1  # of the table when all waiting jobs were looked at
        self._waiting_due = 0.0  # before then they are not looked at again
        cluster.changed_jobs.mark_all(cluster.jobs)
        cluster.changed_slots.mark_all([*cluster.index.held, *cluster.slots])

    @property
    def slots(self) -> SlotTable:
        """The slots that decisions look at; to be read alone."""
        return self._slots

    def connect(self, attach: AttachServer) -> None:
        """Say through whom sidecars are reached."""
        self._sidecars.connect(attach)

    def prepare_pods(
        self, registration: WebhookRegistration, template: Callable[[], SidecarTemplate]
    ) -> None:
        """Say how pods are registered for, and what a sidecar is made of."""
        self._registration = registration
        self._sidecars.prepare(template)

    def wake(self) -> None:
        """Look soon: something happened."""
        self._alarm.within(_SETTLE_SECONDS)

    def wake_for_progress(self) -> None:
        """Look within the time that progress may wait."""
        self._alarm.within(PROGRESS_INTERVAL.total_seconds())

    async def run(self) -> None:
        """Look and act, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_always(), name="look")
            tasks.create_task(self._end_sessions_always(), name="streams")
            tasks.create_task(self._keep_house_always(), name="house")
            for number in range(self._n_workers):
                tasks.create_task(self._work(), name=f"steps-{number}")

    async def turn(self) -> None:
        """Look once, take every step that is due, and keep house."""
        await self._sidecars.end_sessions(self._clock())
        self._look()
        while self._cluster.changed_slots.waits("driver"):
            self._look()
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(self._work()) for _ in range(self._n_workers)]
            await self._queue.drained()
            for worker in workers:
                worker.cancel()
        await self._keep_house()

    async def _look_always(self) -> None:
        while True:
            await self._alarm.wait()
            began = time.monotonic()
            self._look()
            self._metrics.passed(time.monotonic() - began)
            if (due := self._schedule.next_at()) is not None:
                self._alarm.within(due - time.monotonic())

    async def _work(self) -> None:
        while True:
            uid = await self._queue.take()
            try:
                await self._steps.take(uid)
            except NotLeading as error:
                log.warning("a step was not taken: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                if self._queue.done(uid):
                    # Not at once: the step may have freed a slot for one of higher priority.
                    self._cluster.changed_jobs.mark(uid)
                self._metrics.liveness.stepped()
            self.wake()  # what was written is looked at, too

    async def _end_sessions_always(self) -> None:
        while True:
            await self._sidecars.end_sessions(self._clock())
            await self._sidecars.renew(self._clock())
            await asyncio.sleep(_RENEWED_SECONDS)

    async def _keep_house_always(self) -> None:
        while True:
            try:
                await self._keep_house()
            except NotLeading as error:
                log.warning("policies and pods were not looked after: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    # --- whose turn it is -------------------------------------------------------------------------

    def _look(self) -> None:
        """Give a turn to each job that something has changed for, or whose time has come."""
        now = self._clock()
        passed = timedelta(seconds=_CLOCK_SECONDS)
        if self._clock_passed is None or now - self._clock_passed >= passed:
            self._clock_passed = now
            self._cluster.pass_time(now)
        if self._slots.off != self._cluster.off:
            self._slots.off = self._cluster.off
            self._cluster.changed_jobs.mark_all(self._cluster.index.waiting)
        self._sidecars.configure_changed(self._cluster.changed_pods.take("driver"), now)
        due = dict.fromkeys(self._take_slots(now))
        self._preempt()
        due |= dict.fromkeys(self._schedule.take_due(time.monotonic()))
        due |= dict.fromkeys(self._cluster.changed_jobs.take("driver", _AT_ONCE))
        self._give_turns(due)
        marks = (self._cluster.changed_slots, self._cluster.changed_jobs)
        if any(changes.waits("driver") for changes in marks):
            self.wake()
        self._metrics.liveness.looked(len(self._queue))

    def _give_turns(self, due: dict[str, None]) -> None:
        waiting, began = self._cluster.index.waiting, time.monotonic()
        if self._room != self._slots.room and waiting:
            # The job that has waited longest comes first, also before one that has just come.
            if began >= self._waiting_due or any(uid in waiting for uid in due):
                due |= {uid: None for uid in waiting if not self._steps.pauses(uid)}
                self._room = self._slots.room
            else:
                self._alarm.within(self._waiting_due - began)
        for job in self._cluster.job_views(due):
            self._queue.add(job.uid, (-job.priority, job.created, job.key))
        for uid in due:
            if uid not in self._cluster.jobs:
                self._steps.forget(uid)
        took = time.monotonic() - began
        if len(due) >= len(waiting) > 0:
            self._waiting_due = began + took / _WAITING_SHARE

    def _take_slots(self, now: datetime) -> list[str]:
        """Take up the slots that have changed; return the jobs on them."""
        touched: list[str] = []
        for key in self._cluster.changed_slots.take("driver", _AT_ONCE):
            view = self._cluster.slot_of(key, now)
            changed = self._slots.put(view) if view is not None else self._slots.remove(key)
            if changed:
                touched += self._cluster.index.held.get(key, ())
        return touched

    def _preempt(self) -> None:
        """Choose which jobs give their slot to one that waits; what was chosen stays so."""
        before = self._cluster.preempted
        if not before and not self._cluster.index.with_priority:
            return
        waiting = self._cluster.job_views(self._cluster.index.waiting)
        # One that Kueue has not admitted takes nobody's slot.
        urgent = [job for job in waiting if job.may_preempt and not job.is_queued]
        held = (uid for uids in self._cluster.index.held.values() for uid in uids)
        placed = self._cluster.job_views(held)
        wanted = {job.key for job in waiting}
        after = {
            job.uid: job.preempted_by for job in placed if job.preempted_by in wanted
        } | preemption.victims(placed, self._slots, self._cluster.runs, urgent)
        self._cluster.preempted = after
        self._cluster.changed_jobs.mark_all(before.keys() ^ after.keys())

    def _move(self, now: datetime) -> None:
        """Choose jobs for a slot with a much higher predicted rate; earlier choices stay."""
        held = (uid for uids in self._cluster.index.held.values() for uid in uids)
        for uid, words in self._moves.due(self._cluster.job_views(held), self._slots, now).items():
            if uid not in self._cluster.moving:
                epoch = int((self._cluster.jobs[uid].get("status") or {}).get("epoch") or 0)
                self._cluster.moving[uid] = (epoch, words)
                self._cluster.changed_jobs.mark(uid)
        self._cluster.moving = {
            uid: move
            for uid, move in self._cluster.moving.items()
            if (view := self._cluster.jobs.get(uid)) is not None
            and (view.get("status") or {}).get("slot")
            and int(view["status"].get("epoch") or 0) == move[0]
        }

    def _look_again(self, uid: str, after: timedelta) -> None:
        """Let a job have a turn after a while."""
        at = time.monotonic() + max(0.0, after.total_seconds())
        self._schedule.put(uid, at)
        self._alarm.within(at - time.monotonic())

    def _within(self, after: timedelta) -> None:
        self._alarm.within(after.total_seconds())

    # --- what need not be done for each piece of news ---------------------------------------------

    async def _keep_house(self) -> None:
        now = self._clock()
        await self._sidecars.attach(now)
        await self._register()
        if not self._counts_now(now):
            return
        self._move(now)
        self._policies.charge(now)
        await self._policies.write(now)
        self._cluster.forget_unused_slots()
        await self._metrics.show(self._cluster, self._slots, now)

    def _counts_now(self, now: datetime) -> bool:
        """Return whether it is time to count everything: seldom where there is much."""
        n_objects = len(self._cluster.pods) + len(self._cluster.jobs)
        pause = timedelta(seconds=n_objects / _COUNTED_PER_SECOND)
        changed = self._cluster.policies_changed
        if self._counted is not None:
            at, policies_changed = self._counted
            if policies_changed == changed and now - at < pause:
                return False
        self._counted = (now, changed)
        return True

    async def _register(self) -> None:
        """Keep the webhook registered for the namespaces that have a policy."""
        if self._registration is None:
            return
        try:
            await self._registration.keep({p.namespace for p in self._cluster.policies.values()})
        except ApiError as error:
            log.warning("the webhook could not be registered: %s", error)
