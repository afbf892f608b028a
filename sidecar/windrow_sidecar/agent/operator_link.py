"""Keep the agent's stream to the operator: dial, authenticate, report, take assignments.

The operator may be away for as long as it likes: what runs goes on, and events wait in the outbox.
Of several replicas the one that leads is found by asking any: the others name it. Its term grows
with each leader, and no word of an earlier one is obeyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import grpc.aio

from windrow.errors import Transient
from windrow.proto import attach_pb2, attach_pb2_grpc
from windrow.rundir import LEADER_METADATA, PROTOCOL_VERSION
from windrow.wheel import installed_version
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.policy_lease import PolicyLease
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 10.0
# A replica that names the leader has been asked by thousands in the same moment.
_REDIRECT_SPREAD_S = 0.2
_HELLO_WITHIN_S = 10.0
_CANCEL_AGAIN_S = 0.2
# A prediction that has changed by this factor is sent at once.
_RATE_CHANGED = 1.5
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A peer that vanished without a word is noticed within this and the timeout.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The operator is inside the cluster; a proxy in decode's environment is for the world outside.
    ("grpc.enable_http_proxy", 0),
)

Obey = Callable[[attach_pb2.OperatorMessage], Awaitable[None]]


class StreamCall(Protocol):
    """The methods of a gRPC stream that are used here."""

    async def read(self) -> Any:  # noqa: ANN401 - a message, or gRPC's own EOF
        """The next message, or EOF."""

    async def write(self, message: attach_pb2.SidecarMessage) -> None:
        """Send one; never two at once."""


class _Addresses:
    """Addresses to dial: the leader that was named, else the configured addresses in turn."""

    def __init__(self, configured: str) -> None:
        self._configured = [part.strip() for part in configured.split(",") if part.strip()]
        self._turn = 0
        self._leader = ""

    def next(self) -> str:
        """Return host:port; a leader that was named is dialled once."""
        if self._leader:
            leader, self._leader = self._leader, ""
            return leader
        address = self._configured[self._turn % len(self._configured)]
        self._turn += 1
        return address

    def name_leader(self, address: str) -> None:
        """Dial this one next."""
        self._leader = address

    def stay(self) -> None:
        """Keep the address that was dialled last; when its stream ends, dial it again."""
        self._turn = max(0, self._turn - 1)

    def server_name(self, address: str) -> str:
        """Return the name in the certificate, where it is not the address; empty: it is."""
        if address in self._configured:
            return ""
        return self._configured[0].rpartition(":")[0]


class OperatorLink:
    """The agent's stream to the operator; dials again when it ends."""

    def __init__(
        self,
        settings: AgentSettings,
        outbox: EventOutbox,
        slots: Callable[[], Iterable[AgentSlot]],
        obey: Obey,
        lease: PolicyLease,
    ) -> None:
        self._settings, self._outbox = settings, outbox
        self._slots, self._obey = slots, obey
        self._facts_changed = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._profiles: asyncio.Queue[AgentSlot] = asyncio.Queue()
        self._stored: asyncio.Queue[attach_pb2.AdapterStored] = asyncio.Queue()
        self._sent = 0  # number of the last event that the present stream carries
        self._addresses = _Addresses(settings.operator_address)
        self._term = 0  # the highest of a leader that was heard
        self._lease = lease
        self.attached = False

    def facts_changed(self) -> None:
        """An engine has called, or another one: say hello again."""
        self._facts_changed.set()

    def state_changed(self) -> None:
        """Send the next heartbeat at once: something changed that the operator decides by."""
        self._state_changed.set()

    def profile_taken(self, slot: AgentSlot) -> None:
        """A latency profile has come: pass it on."""
        self._profiles.put_nowait(slot)

    def adapter_stored(self, told: attach_pb2.AdapterStored) -> None:
        """Pass on what became of an adapter; lost with the stream, it is asked for again."""
        self._stored.put_nowait(told)

    async def delivered(self, within_s: float) -> None:
        """Wait until the stream has carried every event, but not for ever."""
        if not self.attached:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._outbox.carried(lambda: self._sent >= self._outbox.last)
        except TimeoutError:
            _log.warning("the operator has not acknowledged the last events")

    async def run(self) -> None:
        """Keep attached until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        redirected = False
        while True:
            address = self._addresses.next()
            leader = ""
            try:
                await self._attach(address)
            except (grpc.RpcError, Transient, OSError) as error:
                _log.warning("no operator at %s: %s", address, _why(error))
                leader = _leader_named_by(error)
            if self.attached:
                self._addresses.stay()
            longer_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            backoff_s = _FIRST_BACKOFF_S if self.attached else longer_s
            self.attached = False
            # Asked once: two replicas that name each other must not keep a sidecar busy.
            if redirected := bool(leader) and not redirected and leader != address:
                self._addresses.name_leader(leader)
                await asyncio.sleep(random.uniform(0, _REDIRECT_SPREAD_S))
                continue
            # Spread: a restarted operator must not meet five thousand sidecars in one moment.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _attach(self, address: str) -> None:
        """Run one stream from dialling to its end. Reads the token again: it is rotated hourly."""
        settings = self._settings
        assert settings.token_file is not None
        token = settings.token_file.read_text(encoding="utf-8").strip()
        options = list(_CHANNEL_OPTIONS)
        if name := settings.operator_server_name or self._addresses.server_name(address):
            options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(settings.operator_ca_pem())
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            stub = attach_pb2_grpc.AttachStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Attach(metadata=(("authorization", f"Bearer {token}"),))
            try:
                await self._talk(call)
            finally:
                call.cancel()

    async def _talk(self, call: StreamCall) -> None:
        self._facts_changed.clear()
        # A replica that is stopped takes the connection and says nothing.
        async with asyncio.timeout(_HELLO_WITHIN_S):
            await call.write(self._hello())
            hello = await self._operator_hello(call)
        self.attached = True
        self._sent = 0
        for slot in self._slots():
            if slot.profile is not None:
                self._profiles.put_nowait(slot)
        # Whichever ends first ends the stream; the others are cancelled with the group.
        try:
            async with asyncio.TaskGroup() as tasks:
                outgoing = _Writer(call)
                tasks.create_task(self._listen(call))
                tasks.create_task(self._beat(outgoing, hello))
                tasks.create_task(self._tell_events(outgoing))
                tasks.create_task(self._tell_profiles(outgoing))
                tasks.create_task(self._tell_stored(outgoing))
                tasks.create_task(self._say_hello_again(outgoing))
        except* grpc.RpcError as group:
            raise group.exceptions[0] from None
        except* Transient as group:
            raise group.exceptions[0] from None

    async def _operator_hello(self, call: StreamCall) -> attach_pb2.OperatorHello:
        first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            raise Transient("it did not say hello")
        if first.hello.protocol_version != PROTOCOL_VERSION:
            raise Transient(
                f"it speaks protocol {first.hello.protocol_version}, this agent {PROTOCOL_VERSION}"
            )
        term = first.hello.leader_term
        # An operator from before leaders had terms says none, also one that was rolled back to.
        if 0 < term < self._term:
            raise Transient(f"it is a former leader: term {term}, not {self._term}")
        self._term = term
        self._lease.hello(time.monotonic(), renews=first.hello.renews)
        _log.info("attached to operator %s, term %d", first.hello.operator_version, term)
        hello: attach_pb2.OperatorHello = first.hello
        return hello

    async def _listen(self, call: StreamCall) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if self._is_former(message):
                raise Transient("it sent a command of a former leader")
            self._lease.heard(time.monotonic())
            await self._obey(message)
        raise Transient("it ended the stream")

    def _is_former(self, message: attach_pb2.OperatorMessage) -> bool:
        match message.WhichOneof("message"):
            case "assign":
                return int(message.assign.leader_term) < self._term
            case "command":
                return int(message.command.leader_term) < self._term
            case "adapter":
                return int(message.adapter.leader_term) < self._term
        return False

    async def _beat(self, out: _Writer, agreed: attach_pb2.OperatorHello) -> None:
        """Report each slot at the agreed interval; seldom while nothing runs or changes on it."""
        interval_s = agreed.heartbeat_seconds or 1.0
        told: dict[int, tuple[float, attach_pb2.SlotHeartbeat]] = {}
        while True:
            now = time.monotonic()
            for slot in self._slots():
                beat = slot.heartbeat()
                at, before = told.get(slot.index, (-math.inf, beat))
                # Half an interval early: the pauses between two looks are not exact.
                rested = now - at + interval_s / 2 < agreed.rest_heartbeat_seconds
                if rested and is_at_rest(before, beat):
                    continue
                told[slot.index] = (now, beat)
                await out.write(attach_pb2.SidecarMessage(heartbeat=beat))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state_changed.wait(), interval_s)
            self._state_changed.clear()

    async def _tell_events(self, out: _Writer) -> None:
        while True:
            number, event = await self._outbox.after(self._sent)
            await out.write(attach_pb2.SidecarMessage(job_event=event))
            self._sent = number
            await self._outbox.note_carried()

    async def _tell_profiles(self, out: _Writer) -> None:
        while True:
            slot = await self._profiles.get()
            if slot.profile is not None:
                report = attach_pb2.ProfileReport(
                    slot=slot.index,
                    key=slot.profile.key,
                    profile_json=slot.profile.profile_json,
                )
                await out.write(attach_pb2.SidecarMessage(profile=report))

    async def _tell_stored(self, out: _Writer) -> None:
        while True:
            told = await self._stored.get()
            await out.write(attach_pb2.SidecarMessage(adapter=told))

    async def _say_hello_again(self, out: _Writer) -> None:
        while True:
            await self._facts_changed.wait()
            self._facts_changed.clear()
            await out.write(self._hello())

    def _hello(self) -> attach_pb2.SidecarMessage:
        settings = self._settings
        slots = list(self._slots())
        return attach_pb2.SidecarMessage(
            hello=attach_pb2.SidecarHello(
                protocol_version=PROTOCOL_VERSION,
                windrow_version=installed_version(),
                pod_namespace=settings.pod_namespace,
                pod_name=settings.pod_name,
                pod_uid=settings.pod_uid,
                node_name=settings.node_name,
                slots=[facts for slot in slots if (facts := slot.facts()) is not None],
                running=[run for slot in slots for run in slot.jobs.unsettled()],
                leader_term=self._term,
                rests=True,
                stores_adapters=True,
            )
        )


async def end(link: asyncio.Task[None]) -> None:
    """Cancel the task of a link until it has ended.

    Once is not enough: of a stream that fails and a cancellation at the same moment a TaskGroup of
    CPython 3.11 and 3.12 tells the failure alone, after which the link dials again.
    """
    while not link.done():
        link.cancel()
        await asyncio.wait({link}, timeout=_CANCEL_AGAIN_S)
    with contextlib.suppress(asyncio.CancelledError):
        await link


def is_at_rest(before: attach_pb2.SlotHeartbeat, beat: attach_pb2.SlotHeartbeat) -> bool:
    """Return whether nothing runs on a slot, and nothing that placement looks at has changed."""
    if before.jobs or beat.jobs or before.HasField("job") or beat.HasField("job"):
        return False
    if any(
        getattr(before, name) != getattr(beat, name) for name in ("engine_state", "breaker", "off")
    ):
        return False
    memory = [heartbeat.chunks_free + heartbeat.chunks_lent > 0 for heartbeat in (before, beat)]
    rates = sorted(heartbeat.predicted_tokens_per_second for heartbeat in (before, beat))
    return memory[0] == memory[1] and rates[1] <= _RATE_CHANGED * rates[0]


class _Writer:
    """One message at a time: gRPC allows no two writes at once."""

    def __init__(self, call: StreamCall) -> None:
        self._call, self._lock = call, asyncio.Lock()

    async def write(self, message: attach_pb2.SidecarMessage) -> None:
        async with self._lock:
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError as error:  # gRPC's word for a call that has ended
                raise Transient("it ended the stream") from error


def _leader_named_by(error: BaseException) -> str:
    """Return host:port of the leader where a replica refused with it; else nothing."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return ""
    named = (value for key, value in error.trailing_metadata() or () if key == LEADER_METADATA)
    return str(next(named, ""))


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
