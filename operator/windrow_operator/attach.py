"""The gRPC side that sidecars attach to: who may speak, and the two directions of a stream.

Every replica of the operator listens; only the one that leads takes streams. The others name it, so
that a sidecar which came to them by the Service dials the leader next.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final, Protocol

import grpc

from windrow.crd import slot_name
from windrow.proto import attach_pb2 as pb
from windrow.proto import attach_pb2_grpc as pb_grpc
from windrow.rundir import LEADER_METADATA, MOST_SLOTS, PROTOCOL_VERSION
from windrow.wheel import installed_version
from windrow_operator import claims, reports
from windrow_operator.cluster_state import ClusterState, LiveSlot, jobs_of
from windrow_operator.identity import Identity, Refused
from windrow_operator.kube import Kube
from windrow_operator.metrics import Metrics
from windrow_operator.model import STALE_AFTER, Pod
from windrow_operator.rate_limit import TokenBucket
from windrow_operator.session import Session

log = logging.getLogger(__name__)

_VERSION: Final = installed_version()  # looked up in the files of all packages
# A sidecar reports every second; of very many each one more seldom, so that all of them together
# send no more messages than one process can take.
_HEARTBEATS_PER_SECOND = 500
_SHORTEST_HEARTBEAT_S, _LONGEST_HEARTBEAT_S = 1.0, 10.0
# Likewise those at rest, on which nothing runs and nothing changes that placement looks at: people
# look at them now and then.
_RESTING_PER_SECOND = 50
_LONGEST_REST_S: Final = 20.0
# A peer that does not answer at all, a stopped process or a dead node, is found within 10 s.
_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Sidecars ping every ten seconds; gRPC's own rule would end their streams for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A stream keeps a buffer of one frame for TLS, 16 KiB by default; ours are of 300
    # bytes, a job's assignment of a few KiB.
    ("grpc.tsi.max_frame_size", 2048),
    ("grpc.max_receive_message_length", claims.MOST_MESSAGE_BYTES),
    # Somebody who connects and says nothing: no handshake, no stream, long headers.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_metadata_size", 32 * 2**10),
)
# All connections, those before the end of their handshake too: without a bound, somebody who opens
# them takes every file that the process may have. A sidecar that finds no room comes again.
_MOST_CONNECTIONS: Final = 16_384
# A sidecar says hello at once.
_HELLO_WITHIN_S: Final = 10.0
# Streams whose token or hello is still awaited, of all sidecars.
_MOST_ARRIVING: Final = 4096
# Those of one pod whose hello is awaited: a sidecar that dials again may have one more on its way.
_MOST_ARRIVING_OF_POD: Final = 4
# Messages of one stream: what 64 slots report, and turns of their jobs. One that sends more is read
# no faster. A long message counts as several.
_MESSAGES_PER_SECOND: Final = 100.0
_MESSAGES_AT_ONCE: Final = 512.0
_BYTES_AS_ONE: Final = 4096
# Profiles that one stream may report: of its engines' kinds, measured again now and then.
_MOST_PROFILES: Final = 2 * MOST_SLOTS


class Leadership(Protocol):
    """Leadership of this replica (see `lease.LeaderLease`)."""

    term: int
    leader_address: str

    def holds(self) -> bool:
        """Return whether it may act at this moment."""

    def doubt(self) -> None:
        """Take a hint that somebody else leads."""


class _NoLeader:
    """Placeholder before it is known who leads."""

    term, leader_address = 0, ""

    def holds(self) -> bool:
        return False

    def doubt(self) -> None:
        return


class Listener(Protocol):
    """Parts of a leading replica that receive the news of sidecars."""

    def on_news(self) -> None:
        """Note that something happened that decisions depend on."""

    def on_heartbeat(self) -> None:
        """A heartbeat came; less urgent."""

    def on_profile(self, pod: Pod, report: pb.ProfileReport) -> None:
        """A latency profile of a pod came."""

    def on_adapter(self, pod: Pod, told: pb.AdapterStored) -> None:
        """A sidecar says what became of an adapter that it was to store."""


class AttachServer(pb_grpc.AttachServicer):
    """Serves `Attach` and keeps the sessions.

    Args:
        cluster: what reports are folded into.
        kube: reviews tokens and reads pods.
        metrics: counts what was refused and what was stale.
        clock: the time, aware.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._cluster, self._metrics, self._clock = cluster, metrics, clock
        self._identity = Identity(cluster, kube)
        self._leadership: Leadership = _NoLeader()
        self._listener: Listener | None = None
        self.sessions: dict[str, Session] = {}  # by pod UID
        self._server: grpc.aio.Server | None = None
        self._arriving = 0  # streams whose token or hello is awaited
        self._greeting: Counter[str] = Counter()  # those whose hello is awaited, by pod UID

    def connect(self, leadership: Leadership) -> None:
        """Say who knows whether this replica leads. Its address is known once it listens."""
        self._leadership = leadership

    def open(self, listener: Listener) -> None:
        """Take streams from now on: this replica leads, and knows every object."""
        self._listener = listener

    def close(self) -> None:
        """End all streams and take no more: this replica does not lead any more."""
        self._listener = None
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
        self._metrics.streams.set(0)

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
        """Listen with TLS; return the port.

        Raises:
            OSError: the port is taken.
        """
        most = ("grpc.max_allowed_incoming_connections", _most_connections())
        server = grpc.aio.server(options=(*_SERVER_OPTIONS, most))
        pb_grpc.add_AttachServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        try:
            bound = server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        await server.start()
        self._server = server
        return int(bound)

    async def stop(self) -> None:
        """End all streams and listen no more."""
        self.close()
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
            self._require_leading()
            pod, hello = await self._arrive(requests, context)
            self._require_leading()  # it may have taken a while
        except Refused as refused:
            log.warning("a sidecar was refused: %s", refused)
            self._metrics.refused(refused.code.name)
            leader = ((LEADER_METADATA, refused.leader),) if refused.leader else ()
            await context.abort(refused.code, str(refused), trailing_metadata=leader)
        session = self._open(pod, hello)
        reader = asyncio.create_task(self._read(session, hello, requests))
        try:
            yield self._operator_hello(session)
            while (message := await session.outbox.get()) is not None:
                if not self._speaks_for(session):
                    break
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._closed(session)

    async def _arrive(
        self, requests: AsyncIterator[pb.SidecarMessage], context: grpc.aio.ServicerContext
    ) -> tuple[Pod, pb.SidecarHello]:
        """Return who has come and its hello; those on their way here are bounded."""
        if self._arriving >= _MOST_ARRIVING:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sidecars come at once")
        self._arriving += 1
        try:
            metadata = dict(context.invocation_metadata() or ())
            peer = context.peer().rpartition(":")[0]
            said = {name: str(value) for name, value in metadata.items()}
            pod = await self._identity.identify(said, peer)
            with self._place(pod):
                try:
                    async with asyncio.timeout(_HELLO_WITHIN_S):
                        return pod, await self._hello(requests, pod)
                except TimeoutError:
                    raise Refused(
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        f"no hello within {_HELLO_WITHIN_S:.0f} s",
                    ) from None
        finally:
            self._arriving -= 1

    @contextmanager
    def _place(self, pod: Pod) -> Iterator[None]:
        """Have a place among the streams of a pod that have said no hello while it is open."""
        if self._greeting[pod.uid] >= _MOST_ARRIVING_OF_POD:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams of the pod say no hello"
            )
        self._greeting[pod.uid] += 1
        try:
            yield
        finally:
            self._greeting[pod.uid] -= 1
            if not self._greeting[pod.uid]:
                del self._greeting[pod.uid]

    def _require_leading(self) -> None:
        if self._listener is None or not self._leadership.holds():
            leader = "" if self._listener else self._leadership.leader_address
            where = f"; {leader} leads" if leader else ""
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"this replica does not lead{where}", leader)

    def _speaks_for(self, session: Session) -> bool:
        """Return whether the session's leader still leads: what it decided may be long past."""
        return session.term == self._leadership.term and self._leadership.holds()

    def _operator_hello(self, session: Session) -> pb.OperatorMessage:
        return pb.OperatorMessage(
            hello=pb.OperatorHello(
                protocol_version=PROTOCOL_VERSION,
                operator_version=_VERSION,
                heartbeat_seconds=session.interval.total_seconds(),
                rest_heartbeat_seconds=session.rest.total_seconds(),
                leader_term=session.term,
                renews=True,
            )
        )

    def end(self, session: Session) -> None:
        """End a stream from this side; its slots count as detached from this moment."""
        session.close()
        self._closed(session)

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
        if hello.leader_term > self._leadership.term:
            self._leadership.doubt()
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this replica led before another one did")
        return hello

    # --- what it says -----------------------------------------------------------------------------

    def _open(self, pod: Pod, hello: pb.SidecarHello) -> Session:
        earlier = self.sessions.get(pod.uid)
        if earlier is not None:
            earlier.close()
        interval = self._interval(hello)
        rest = max(interval, self._rest()) if hello.rests else interval
        session = Session(pod, self._leadership.term, interval, rest)
        session.stores_adapters = hello.stores_adapters
        self.sessions[pod.uid] = session
        self._metrics.streams.set(len(self.sessions))
        log.info("sidecar of pod %s attached", pod.key)
        return session

    def _interval(self, hello: pb.SidecarHello) -> timedelta:
        """Return how often a sidecar reports: as the load allows, and as it can."""
        ours = self._expected() / _HEARTBEATS_PER_SECOND
        wanted = max(_SHORTEST_HEARTBEAT_S, ours, hello.heartbeat_seconds)
        return timedelta(seconds=min(wanted, _LONGEST_HEARTBEAT_S))

    def _rest(self) -> timedelta:
        """Return how often a sidecar reports of a slot at rest."""
        return timedelta(seconds=min(self._expected() / _RESTING_PER_SECOND, _LONGEST_REST_S))

    def _expected(self) -> int:
        """Return how many streams there are or will be: those that come first stay for long."""
        return max(len(self.sessions), len(self._cluster.pods))

    def _closed(self, session: Session) -> None:
        if self.sessions.get(session.pod.uid) is not session:
            return  # a newer stream of the same sidecar has taken over, or the term is over
        del self.sessions[session.pod.uid]
        self._metrics.streams.set(len(self.sessions))
        reports.detach(self._cluster, session.pod, self._clock())
        log.info("sidecar of pod %s detached", session.pod.key)
        if self._listener is not None:
            self._listener.on_news()

    async def _read(
        self,
        session: Session,
        hello: pb.SidecarHello,
        requests: AsyncIterator[pb.SidecarMessage],
    ) -> None:
        clock = asyncio.get_running_loop().time
        bucket = TokenBucket.full(_MESSAGES_PER_SECOND, _MESSAGES_AT_ONCE, clock())
        profiles_left = _MOST_PROFILES
        try:
            self._take_hello(session, hello, first=True)
            async for message in requests:
                if self._listener is None or self.sessions.get(session.pod.uid) is not session:
                    return
                profiles_left -= message.WhichOneof("message") == "profile"
                if profiles_left < 0:
                    log.warning("the sidecar of pod %s reports profiles only", session.pod.key)
                    return
                self._take(session, message, self._listener)
                # Nothing is lost: what is not read waits at the sidecar.
                cost = 1 + message.ByteSize() / _BYTES_AS_ONE
                if wait_s := bucket.take(cost, clock()):
                    await asyncio.sleep(wait_s)
        finally:
            session.close()

    def _take(self, session: Session, message: pb.SidecarMessage, listener: Listener) -> None:
        now = self._clock()
        match message.WhichOneof("message"):
            case "hello":
                self._take_hello(session, message.hello, first=False)
            case "heartbeat":
                name = slot_name(session.pod.name, message.heartbeat.slot)
                live = self._cluster.slots.get(f"{session.pod.namespace}/{name}")
                if live is not None and live.pod_uid == session.pod.uid:
                    self._expect_next(session, live, message.heartbeat, now)
                    stale = reports.take_heartbeat(self._cluster, live, message.heartbeat, now)
                    self._end_stale(session, stale)
                    listener.on_heartbeat()
            case "job_event":
                mine = [live.key for live in self._cluster.slots_of(session.pod.uid)]
                reports.take_event(self._cluster, mine, message.job_event, now)
                listener.on_news()
            case "profile":
                listener.on_profile(session.pod, message.profile)
            case "adapter":
                listener.on_adapter(session.pod, message.adapter)

    def _expect_next(
        self, session: Session, live: LiveSlot, beat: pb.SlotHeartbeat, now: datetime
    ) -> None:
        """Note when the pod's next heartbeat is due: soon, while a job is on one of its slots.

        Each slot has its own schedule of reports, one at rest a slow one, independent of the
        others.
        """
        slots = self._cluster.slots_of(session.pod.uid)
        others = (self._is_at_rest(other, other.beat) for other in slots if other is not live)
        at_rest = self._is_at_rest(live, beat)
        session.expect_next(now, at_rest=at_rest and all(others))
        # Figures are not of now any more once a heartbeat is missing, and never after ten seconds
        # where one comes each second.
        interval = session.rest if at_rest else session.interval
        live.stale_after = max(STALE_AFTER, 2 * interval)

    def _is_at_rest(self, live: LiveSlot, beat: pb.SlotHeartbeat | None) -> bool:
        return not (beat and jobs_of(beat)) and live.key not in self._cluster.index.held

    def _take_hello(self, session: Session, hello: pb.SidecarHello, *, first: bool) -> None:
        now = self._clock()
        if hello.slots:
            session.expect_first(now)
        stale = reports.take_hello(self._cluster, session.pod, hello, now, first=first)
        self._end_stale(session, stale)
        if self._listener is not None:
            self._listener.on_news()

    def _end_stale(self, session: Session, stale: list[pb.JobCommand]) -> None:
        for command in stale:
            log.warning(
                "job %s epoch %d on %s is stale", command.job_uid, command.epoch, session.pod.name
            )
            self._metrics.stale.inc()
            session.command(command)


def _most_connections() -> int:
    """Return how many connections the port takes: half of the files that the process may have."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, most_files // 2))
