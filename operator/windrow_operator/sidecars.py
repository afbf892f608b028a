"""Operator's work on sidecars: add them to pods, send their policy, end streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from windrow.proto import attach_pb2 as pb
from windrow_operator import agents, policies
from windrow_operator.attach import AttachServer
from windrow_operator.cluster_state import ClusterState
from windrow_operator.decode_pods import decoders_of
from windrow_operator.events import Recorder
from windrow_operator.gpu_access import as_one, choose_access
from windrow_operator.injection import SidecarTemplate, attached_sidecar
from windrow_operator.kube import ApiError, Conflict, Kube, ObjectNotFound
from windrow_operator.metrics import Metrics
from windrow_operator.model import EffectivePolicy, Pod, Refusal
from windrow_operator.reconcile import Event
from windrow_operator.session import MISSED_HEARTBEATS, Session
from windrow_operator.work_queue import in_pieces

log = logging.getLogger(__name__)

_RETRY = timedelta(seconds=1)
# A pod that could not get a sidecar is asked about again after this time.
_REFUSED_AGAIN = timedelta(minutes=5)


class Sidecars:
    """Looks after the sidecars of decode pods.

    Args:
        cluster: what is known.
        kube: a client that may write.
        recorder: of events.
        metrics: of the process.
        look_again: asked for another look after that time.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        recorder: Recorder,
        metrics: Metrics,
        look_again: Callable[[timedelta], None],
    ) -> None:
        self._cluster, self._kube, self._recorder, self._metrics = cluster, kube, recorder, metrics
        self._look_again = look_again
        self._attach: AttachServer | None = None
        self._template: Callable[[], SidecarTemplate] | None = None
        self._asked: dict[str, datetime] = {}  # by pod UID: when a sidecar was added
        self._refused: dict[str, datetime] = {}  # by pod UID: not asked about before then
        self._configs: dict[str, tuple[EffectivePolicy, pb.PolicyConfig]] = {}  # by policy key

    def connect(self, attach: AttachServer) -> None:
        """Say where the streams are."""
        self._attach = attach

    def prepare(self, template: Callable[[], SidecarTemplate]) -> None:
        """Say what a sidecar is made of."""
        self._template = template

    def session_of(self, slot: str) -> Session | None:
        """Return the stream that speaks for a slot, if its sidecar is attached."""
        return self._attach.session_of(slot) if self._attach else None

    # --- streams ----------------------------------------------------------------------------------

    def configure_changed(self, pods: Iterable[str], now: datetime) -> None:
        """Tell the sidecars of these pods, by UID, their policy where it has changed."""
        sessions = self._attach.sessions if self._attach else {}
        for uid in pods:
            if (session := sessions.get(uid)) is not None:
                self.configure(session, now)

    def configure(self, session: Session, now: datetime) -> None:
        """Tell a sidecar its policy if that has changed."""
        pod = self._cluster.pods.get(session.pod.uid, session.pod)
        session.configure(self._config(self._cluster.terms(pod, now)))

    def _config(self, terms: EffectivePolicy | None) -> pb.PolicyConfig:
        """Return the message for the sidecars under `terms`: one for all of them."""
        if terms is None:
            return policies.config_of(None)
        known = self._configs.get(terms.policy.key)
        if known is None or known[0] is not terms:
            known = self._configs[terms.policy.key] = (terms, policies.config_of(terms))
        return known[1]

    async def renew(self, now: datetime) -> None:
        """Tell every sidecar in time that its policy still holds."""
        async for session in in_pieces(self._attach.sessions.values() if self._attach else ()):
            session.renew(now)

    async def end_sessions(self, now: datetime) -> None:
        """End the streams of sidecars that are silent, and of those whose pod is no more."""
        attach = self._attach
        async for session in in_pieces(attach.sessions.values() if attach else ()):
            if session.pod.uid not in self._cluster.pods:
                why = "its pod is gone"
            elif session.due is not None and session.due <= now:
                why = f"it missed {MISSED_HEARTBEATS} heartbeats"
            else:
                continue
            assert attach is not None
            log.warning("the stream of the sidecar of pod %s is ended: %s", session.pod.key, why)
            attach.end(session)

    # --- containers -------------------------------------------------------------------------------

    async def attach(self, now: datetime) -> None:
        """Add a sidecar to the pods that get one now."""
        for known in (self._asked, self._refused):
            for uid in [uid for uid in known if uid not in self._cluster.pods]:
                del known[uid]
        views = self._pod_views(now)
        if not views:
            return
        jobs = self._cluster.job_views(self._cluster.index.waiting)
        # A job that only waits in a queue needs no sidecar; its admission checks ask for slots.
        waiting = [
            job for job in jobs if not job.is_queued or (job.admission and job.admission.reserved)
        ]
        pods, look_again = agents.wanted(views, waiting, now)
        for pod in pods:
            try:
                await self._attach_to(pod, now)
            except (Refusal, ApiError) as error:
                self._not_attached(pod, error, now)
        if look_again is not None:
            self._look_again(look_again - now)

    def _pod_views(self, now: datetime) -> list[agents.PodView]:
        """Return the pods that a sidecar could be added to: those without one that is attached."""
        sessions = self._attach.sessions if self._attach else {}
        return [
            agents.PodView(
                pod,
                self._cluster.terms(pod, now),
                held=self._cluster.holds_a_job(pod),
                asked_at=self._asked.get(uid),
                retry_at=self._refused.get(uid),
            )
            for uid, pod in self._cluster.pods.items()
            if uid not in sessions
            and pod.sidecar.prepared
            and pod.sidecar.decode_ready
            and pod.node not in self._cluster.leaving_nodes
            and not any(live.attached for live in self._cluster.slots_of(uid))
        ]

    async def _attach_to(self, pod: Pod, now: datetime) -> None:
        terms = self._cluster.terms(pod, now)
        if terms is None or terms.policy.spec is None or self._template is None:
            return
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        body = await self._kube.get(path)
        asked, sharing = terms.policy.spec.sidecar, terms.policy.spec.wanted_sharing
        container = attached_sidecar(self._template(), body, asked, sharing)
        patch = {
            # Another pod of the name, or one that changed since: refused, and decided again.
            "metadata": {"uid": pod.uid, "resourceVersion": body["metadata"]["resourceVersion"]},
            "spec": {"ephemeralContainers": [container]},
        }
        after = await self._kube.strategic_merge(f"{path}/ephemeralcontainers", patch)
        self._cluster.put_pod(after)
        self._asked[pod.uid] = now
        gpu = choose_access(as_one(decoders_of(body)), asked, sharing)
        message = (
            f"Container {container['name']} added, by policy {terms.policy.name}; "
            f"GPU access {gpu.way}: {gpu.why}"
        )
        self._recorder.put(after, Event("SidecarAttached", message))

    def _not_attached(self, pod: Pod, error: Refusal | ApiError, now: datetime) -> None:
        if isinstance(error, Conflict | ObjectNotFound):
            self._look_again(_RETRY)
            return
        log.warning("pod %s gets no sidecar: %s", pod.key, error)
        self._refused[pod.uid] = now + _REFUSED_AGAIN
        reason = error.reason if isinstance(error, Refusal) else "NotAdmitted"
        self._metrics.not_injected(reason)
        about = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        }
        self._recorder.put(about, Event("SidecarRefused", str(error), warning=True))
