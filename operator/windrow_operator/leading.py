"""Run what the leading replica does in one term, from the first listing to the last task.

Everything here is made for one term, so that nothing of an earlier one is acted on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from windrow.proto import attach_pb2 as pb
from windrow_operator.attach import AttachServer
from windrow_operator.certificates import TrustPublisher
from windrow_operator.cluster_state import ClusterState
from windrow_operator.deploy import Deployments
from windrow_operator.driver import Driver
from windrow_operator.events import Recorder
from windrow_operator.injection import SidecarTemplate
from windrow_operator.kube import ApiError, Kube
from windrow_operator.lease import NotLeading
from windrow_operator.metrics import Metrics
from windrow_operator.model import Pod
from windrow_operator.off_switch import why_off
from windrow_operator.profiles import Profiles
from windrow_operator.queues import Queues
from windrow_operator.reconcile import Timeouts
from windrow_operator.slots import LOOK_SECONDS, SlotWriter
from windrow_operator.webhook import WebhookRegistration

log = logging.getLogger(__name__)

_STORE_AGAIN_S = 2.0
# Latency profiles that wait to be stored: each sidecar reports at each attach.
_MOST_REPORTS = 4096
# The switch of the cluster is looked at so often.
_SWITCH_SECONDS = 2.0
# A LatencyProfile that somebody deletes is given to no new pod after that time.
_PROFILES_COMPARED_S = 60.0
# Somebody else may change the registration at any time; pods come without a sidecar meanwhile.
_REGISTRATION_CHECKED_S = 5.0


class Leading:
    """The parts that act, for one term.

    Args:
        cluster: what is known; read again before this is made.
        kube: a client that refuses to write when the term is over.
        metrics: of the process.
        attach: where sidecars come.
        registration: of the webhook.
        template: of a sidecar.
        trust: gives sidecars the authorities to trust.
        namespace: of the operator, where the cluster's switch is.
        timeouts: for decisions.
        namespaces: that are served; none: all.
        clock: the time, aware.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        metrics: Metrics,
        attach: AttachServer,
        registration: WebhookRegistration,
        template: Callable[[], SidecarTemplate],
        trust: TrustPublisher,
        *,
        namespace: str,
        timeouts: Timeouts,
        clock: Callable[[], datetime],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._cluster, self._attach, self._clock = cluster, attach, clock
        self._registration, self._trust = registration, trust
        self._kube, self._namespace = kube, namespace
        self._recorder = recorder = Recorder(kube, clock)
        self._driver = Driver(cluster, kube, recorder, metrics, timeouts=timeouts, clock=clock)
        self._driver.connect(attach)
        self._driver.prepare_pods(registration, template)
        self._slots = SlotWriter(cluster, kube, namespaces)
        self._queues = Queues(
            *(cluster, kube, self._driver.slots, clock),
            on_news=self.on_news,
            namespaces=namespaces,
        )
        self._deployments = Deployments(cluster, kube, recorder, clock, attach.sessions.get)
        self._profiles = Profiles(kube, namespaces)
        self._reports: asyncio.Queue[tuple[Pod, pb.ProfileReport]] = asyncio.Queue()

    async def begin(self) -> None:
        """Be ready to act: know the slots there are, be asked about pods, take sidecars.

        Raises:
            ApiError: the API server does not answer; to be called again.
        """
        self._cluster.switch(await why_off(self._kube, self._namespace))
        await self._slots.load()
        self._cluster.forget_unused_slots()  # their pods went while nobody led
        await self._profiles.load()
        await self._registration.keep({p.namespace for p in self._cluster.policies.values()})
        # Sidecars can come back from now on, so their grace begins here.
        self._cluster.started_at = self._clock()
        self._attach.open(self)

    async def run(self) -> None:
        """Act until cancelled; raise what a part raises."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._driver.run(), name="driver")
                tasks.create_task(self._recorder.run(), name="events")
                tasks.create_task(self._write_slots(), name="slots")
                tasks.create_task(self._keep_profiles(), name="profiles")
                tasks.create_task(self._keep_registered(), name="registration")
                tasks.create_task(self._deployments.run(), name="deployments")
                tasks.create_task(self._queues.run(), name="queues")
                tasks.create_task(self._watch_switch(), name="switch")
        finally:
            self._attach.close()

    def on_news(self) -> None:
        """Look at everything soon."""
        self._driver.wake()

    def on_heartbeat(self) -> None:
        """Look at everything within the time that progress may wait."""
        self._driver.wake_for_progress()

    def on_profile(self, pod: Pod, report: pb.ProfileReport) -> None:
        """Store a latency profile; with very many under way the sidecar's next stream says it."""
        if self._reports.qsize() < _MOST_REPORTS:
            self._reports.put_nowait((pod, report))
        else:
            log.warning("a latency profile of pod %s is not stored: too many wait", pod.key)

    def on_adapter(self, pod: Pod, told: pb.AdapterStored) -> None:
        """Note what became of an adapter that a sidecar was to store."""
        self._deployments.caches.answered(pod.uid, told)

    async def _watch_switch(self) -> None:
        """Ask for the switch of the cluster now and then; what is not answered changes nothing."""
        while True:
            await asyncio.sleep(_SWITCH_SECONDS)
            try:
                off = await why_off(self._kube, self._namespace)
            except ApiError as error:
                log.warning("the cluster's switch could not be read: %s", error)
                continue
            if off != self._cluster.off:
                log.warning("harvesting: %s", off or "as the policies say again")
                self._cluster.switch(off)
                self.on_news()

    async def _write_slots(self) -> None:
        while True:
            try:
                await self._slots.write(self._clock())
            except (ApiError, NotLeading) as error:
                log.warning("slots could not be written: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep_profiles(self) -> None:
        """Store the profiles that sidecars report, and give new pods what is stored."""
        while True:
            report = None
            try:
                if self._reports.empty():
                    await self._profiles.publish(self._clock())
                if (report := await self._next_report()) is not None:
                    await self._profiles.store(*report)
                else:
                    await self._profiles.load()
            except (ApiError, NotLeading) as error:
                log.warning("latency profiles could not be compared or stored yet: %s", error)
                if report is not None:  # it took its pod a minute to measure
                    self._reports.put_nowait(report)
                await asyncio.sleep(_STORE_AGAIN_S)

    async def _next_report(self) -> tuple[Pod, pb.ProfileReport] | None:
        try:
            async with asyncio.timeout(_PROFILES_COMPARED_S):
                return await self._reports.get()
        except TimeoutError:
            return None

    async def _keep_registered(self) -> None:
        while True:
            try:
                await self._publish_trust()
                await self._registration.compare()
            except (ApiError, NotLeading) as error:
                log.warning("the webhook's registration could not be compared: %s", error)
            await asyncio.sleep(_REGISTRATION_CHECKED_S)

    async def _publish_trust(self) -> None:
        asked = {policy.namespace for policy in self._cluster.policies.values()}
        await self._trust.publish(asked | {pod.namespace for pod in self._cluster.pods.values()})
