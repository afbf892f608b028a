"""One attached sidecar: the messages to it, and when it counts as silent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from windrow.proto import attach_pb2 as pb
from windrow.rundir import DEFAULT_LEASE_S
from windrow_operator.model import Pod

MISSED_HEARTBEATS: Final = 3
# One that is lost or late must not end a lease.
_RENEWALS_IN_A_LEASE, _LONGEST_RENEWAL_S = 5, 60.0
# Until the first heartbeat: an engine that has just called has its sidecar busy.
_FIRST_HEARTBEAT = timedelta(seconds=15)


# Messages that wait to be sent: of 64 slots each a few, and commands for stale jobs.
_MOST_QUEUED: Final = 2048


@dataclass
class Session:
    """One attached sidecar."""

    pod: Pod
    term: int  # of the leader whose stream it is
    interval: timedelta  # of heartbeats, as agreed on
    rest: timedelta  # of heartbeats of a slot at rest; `interval`: no other was agreed on
    due: datetime | None = None  # when it counts as silent; None: nothing is expected of it
    outbox: asyncio.Queue[pb.OperatorMessage | None] = field(default_factory=asyncio.Queue)
    config: pb.PolicyConfig | None = None  # as last sent
    renewed_at: datetime | None = None  # when the policy was last sent or renewed
    stores_adapters: bool = False  # it obeys StoreAdapter

    def send(self, message: pb.OperatorMessage) -> None:
        """Queue a message; it is lost when the stream ends, and then the next pass sees that."""
        match message.WhichOneof("message"):
            case "assign":
                message.assign.leader_term = self.term
            case "command":
                message.command.leader_term = self.term
            case "adapter":
                message.adapter.leader_term = self.term
        if self.outbox.qsize() < _MOST_QUEUED:
            self.outbox.put_nowait(message)
        else:
            self.close()  # it reads nothing, or asks for more than anybody has to tell it

    def expect_first(self, now: datetime) -> None:
        """Note that a first heartbeat is to come, unless one is expected already."""
        self.due = self.due or now + max(_FIRST_HEARTBEAT, MISSED_HEARTBEATS * self.interval)

    def expect_next(self, now: datetime, *, at_rest: bool = False) -> None:
        """Note that a heartbeat has come, so that the next one is due."""
        self.due = now + self.patience(at_rest=at_rest)

    def expect_soon(self, now: datetime) -> None:
        """Note that a slot is not at rest any more: it was given a job."""
        if self.due is not None:
            self.due = min(self.due, now + self.patience(at_rest=False))

    def patience(self, *, at_rest: bool) -> timedelta:
        """Return how long a sidecar may be silent."""
        return MISSED_HEARTBEATS * (self.rest if at_rest else self.interval)

    def renew(self, now: datetime) -> None:
        """Say that the policy still holds, several times in its lease."""
        lease_s = (self.config.lease_seconds if self.config else 0) or DEFAULT_LEASE_S
        pause = timedelta(seconds=min(_LONGEST_RENEWAL_S, lease_s / _RENEWALS_IN_A_LEASE))
        if self.config is None or (self.renewed_at and now - self.renewed_at < pause):
            return
        self.renewed_at = now
        self.send(pb.OperatorMessage(renewal=pb.PolicyRenewal()))

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
