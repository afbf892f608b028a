"""The gRPC side that sidecars attach to: who may speak, and the two directions of a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version

import grpc

from windrow.crd import slot_name
from windrow.proto import attach_pb2 as pb
from windrow.proto import attach_pb2_grpc as pb_grpc
from windrow.rundir import PROTOCOL_VERSION, TOKEN_AUDIENCE
from windrow_operator import reports
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.metrics import Metrics
from windrow_operator.model import Pod
from windrow_operator.pki import KeyPair

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_ACCOUNT = "system:serviceaccount:"


class Refused(Exception):
    """The stream is not who it says, or speaks another version."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass
class Session:
    """One attached sidecar."""

    pod: Pod
    outbox: asyncio.Queue[pb.OperatorMessage | None] = field(default_factory=asyncio.Queue)
    config: pb.PolicyConfig | None = None  # as last sent

    def send(self, message: pb.OperatorMessage) -> None:
        """Queue a message; it is lost when the stream ends, and then the next pass sees that."""
        self.outbox.put_nowait(message)

    def configure(self, config: pb.PolicyConfig) -> None:
        """Tell the sidecar its policy if that has changed."""
        if self.config != config:
            self.config = config
            self.send(pb.OperatorMessage(policy=config))

    def command(self, command: pb.JobCommand) -> None:
        """Queue a command."""
        self.send(pb.OperatorMessage(command=command))

    def close(self) -> None:
        """End the stream after what is queued."""
        self.outbox.put_nowait(None)


class AttachServer(pb_grpc.AttachServicer):
    """Serves `Attach` and keeps the sessions.

    Args:
        world: what reports are folded into.
        kube: reviews tokens and reads pods.
        metrics: counts what was refused and what was stale.
        clock: the time, aware.
        on_news: called when something happened that decisions depend on.
        on_heartbeat: called with each heartbeat; less urgent.
        on_profile: takes a latency profile of a pod.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
        on_news: Callable[[], None],
        on_heartbeat: Callable[[], None],
        on_profile: Callable[[Pod, pb.ProfileReport], None],
    ) -> None:
        self._cluster, self._kube, self._metrics, self._clock = cluster, kube, metrics, clock
        self._on_news, self._on_heartbeat, self._on_profile = on_news, on_heartbeat, on_profile
        self.sessions: dict[str, Session] = {}  # by pod UID
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, pair: KeyPair) -> int:
        """Listen with TLS; return the port.

        Raises:
            OSError: the port is taken.
        """
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_AttachServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
        try:
            bound = server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        await server.start()
        self._server = server
        return int(bound)

    async def stop(self) -> None:
        """End all streams."""
        for session in self.sessions.values():
            session.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)

    def session_of(self, slot: str) -> Session | None:
        """Return the session that speaks for a slot, if its sidecar is attached."""
        live = self._cluster.slots.get(slot)
        return self.sessions.get(live.pod_uid) if live is not None else None

    async def Attach(
        self, requests: AsyncIterator[pb.SidecarMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OperatorMessage]:
        """Serve one sidecar until one of both sides ends the stream."""
        try:
            pod = await self._identify(context)
            hello = await self._hello(requests, pod)
        except Refused as refused:
            log.warning("a sidecar was refused: %s", refused)
            self._metrics.refused(refused.code.name)
            await context.abort(refused.code, str(refused))
        session = self._open(pod)
        reader = asyncio.create_task(self._read(session, hello, requests))
        try:
            yield _operator_hello()
            while (message := await session.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._closed(session)

    # --- who it is --------------------------------------------------------------------------------

    async def _identify(self, context: grpc.aio.ServicerContext) -> Pod:
        """Return the live pod that the bearer token is bound to."""
        metadata = dict(context.invocation_metadata() or ())
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "no bearer token")
        try:
            namespace, name, uid = await self._review(token)
            body = await self._kube.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        except ObjectNotFound:
            # A deleted pod's token stays valid for some seconds.
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "the pod is gone") from None
        except ApiError as error:
            raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if body["metadata"]["uid"] != uid:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED, f"another pod is now named {namespace}/{name}"
            )
        return self._cluster.put_pod(body)

    async def _review(self, token: str) -> tuple[str, str, str]:
        review = await self._kube.create(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
            },
        )
        status = review.get("status") or {}
        if not status.get("authenticated") or TOKEN_AUDIENCE not in status.get("audiences", ()):
            why = status.get("error") or f"it is not for audience {TOKEN_AUDIENCE}"
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"the token is not valid: {why}")
        user = status["user"]
        extra = user.get("extra") or {}
        if not user["username"].startswith(_ACCOUNT) or not extra.get(_POD_UID):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "the token is bound to no pod")
        namespace = user["username"].removeprefix(_ACCOUNT).partition(":")[0]
        return namespace, extra[_POD_NAME][0], extra[_POD_UID][0]

    async def _hello(self, requests: AsyncIterator[pb.SidecarMessage], pod: Pod) -> pb.SidecarHello:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "the first message is not a hello")
        hello = first.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol version {hello.protocol_version} is unknown here, which speaks "
                f"{PROTOCOL_VERSION}",
            )
        if hello.pod_uid and hello.pod_uid != pod.uid:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the hello names pod UID {hello.pod_uid}, the token {pod.uid}",
            )
        return hello

    # --- what it says -----------------------------------------------------------------------------

    def _open(self, pod: Pod) -> Session:
        earlier = self.sessions.get(pod.uid)
        if earlier is not None:
            earlier.close()
        session = Session(pod)
        self.sessions[pod.uid] = session
        self._metrics.streams.set(len(self.sessions))
        log.info("sidecar of pod %s/%s attached", pod.namespace, pod.name)
        return session

    def _closed(self, session: Session) -> None:
        if self.sessions.get(session.pod.uid) is not session:
            return  # a newer stream of the same sidecar has taken over
        del self.sessions[session.pod.uid]
        self._metrics.streams.set(len(self.sessions))
        reports.detach(self._cluster, session.pod, self._clock())
        log.info("sidecar of pod %s/%s detached", session.pod.namespace, session.pod.name)
        self._on_news()

    async def _read(
        self,
        session: Session,
        hello: pb.SidecarHello,
        requests: AsyncIterator[pb.SidecarMessage],
    ) -> None:
        try:
            self._take_hello(session, hello, first=True)
            async for message in requests:
                self._take(session, message)
        finally:
            session.close()

    def _take(self, session: Session, message: pb.SidecarMessage) -> None:
        now = self._clock()
        match message.WhichOneof("message"):
            case "hello":
                self._take_hello(session, message.hello, first=False)
            case "heartbeat":
                name = slot_name(session.pod.name, message.heartbeat.slot)
                live = self._cluster.slots.get(f"{session.pod.namespace}/{name}")
                if live is not None and live.pod_uid == session.pod.uid:
                    stale = reports.take_heartbeat(self._cluster, live, message.heartbeat, now)
                    self._end_stale(session, stale)
                    self._on_heartbeat()
            case "job_event":
                mine = [live.key for live in reports.slots_of(self._cluster, session.pod)]
                stale = reports.take_event(self._cluster, mine, message.job_event, now)
                self._end_stale(session, stale)
                self._on_news()
            case "profile":
                self._on_profile(session.pod, message.profile)

    def _take_hello(self, session: Session, hello: pb.SidecarHello, *, first: bool) -> None:
        now = self._clock()
        stale = reports.take_hello(self._cluster, session.pod, hello, now, first=first)
        self._end_stale(session, stale)
        self._on_news()

    def _end_stale(self, session: Session, stale: list[pb.JobCommand]) -> None:
        for command in stale:
            log.warning(
                "job %s epoch %d on %s is stale", command.job_uid, command.epoch, session.pod.name
            )
            self._metrics.stale.inc()
            session.command(command)


def _operator_hello() -> pb.OperatorMessage:
    return pb.OperatorMessage(
        hello=pb.OperatorHello(
            protocol_version=PROTOCOL_VERSION,
            operator_version=version("windrow"),
            heartbeat_seconds=HEARTBEAT_SECONDS,
        )
    )
