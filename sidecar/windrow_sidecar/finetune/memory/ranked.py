"""Memory of a job over ranks: each rank's activations are in chunks of its own rank's arena.

Ranks of decode lend the same chunks, and apply it at slightly different times. The first rank of
the worker looks at all tables, and tells the others which chunks every rank has and which go back,
so a group has one layout on all ranks and leaves its chunks at one tasklet boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from windrow.errors import WindrowError
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.host_device import available_bytes
from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.sharded_stream import FollowChunks
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.lent import LentBoundaries, LentMemory, TenantBoundaries
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget

Tell = Callable[[FollowChunks], None]


class Borrowed(Protocol):
    """Table of one rank's chunks: an `Arena`, or an `Inspection` of it."""

    def held(self, owner: int) -> list[int]:
        """Chunks LENT to that owner, ascending."""

    def draining(self, owner: int) -> list[int]:
        """Chunks of that owner that are asked back."""


class AgreedChunks:
    """Chunks of this rank's arena that all ranks may use or have to leave (see `LentChunks`).

    Args:
        arena: of this rank, attached.

    Attributes:
        free_bytes: of the host's memory, for what leaves its chunks on this rank.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held: list[int] = []
        self._leave: list[int] = []
        self.free_bytes = 0

    @property
    def geometry(self) -> Geometry:
        """Sizes of the arena."""
        return self._arena.geometry

    def chunk_offset(self, chunk: int) -> int:
        """Return where a chunk begins in the arena."""
        return self._arena.chunk_offset(chunk)

    def tensor(self, offset: int, n_bytes: int) -> Any:  # noqa: ANN401 - a DLPack capsule's owner
        """Return a part of the arena, uint8 [n_bytes] (see `Arena.tensor`)."""
        return self._arena.tensor(offset, n_bytes)

    def agree(self, told: FollowChunks) -> None:
        """Use from now on what all ranks have."""
        self._held, self._leave = list(told.held), list(told.leave)
        self.free_bytes = told.free_bytes

    def held(self, owner: int) -> list[int]:
        """Chunks that every rank has, ascending."""
        del owner
        return self._held

    def draining(self, owner: int) -> list[int]:
        """Chunks that every rank has to leave."""
        del owner
        return self._leave

    def give_back(self, chunk: int, *, owner: int) -> None:
        """Return a chunk to this rank of decode, which may not have been able to lend it."""
        self._held = [held for held in self._held if held != chunk]
        self._leave = [leaving for leaving in self._leave if leaving != chunk]
        if chunk in self._arena.held(owner) or chunk in self._arena.draining(owner):
            self._arena.give_back(chunk, owner=owner)

    def give_all_back(self, owner: int) -> None:
        """Return every chunk of this rank, also those that another rank lacks."""
        for chunk in (*self._arena.held(owner), *self._arena.draining(owner)):
            self.give_back(chunk, owner=owner)


class RankTables:
    """The tables of all ranks, as the first rank of a worker looks at them.

    Args:
        tables: of every rank, in their order: its own is the first.
        owner: the worker's epoch.
    """

    def __init__(self, tables: Sequence[Borrowed], owner: int) -> None:
        self._tables, self._owner = tables, owner
        self._leaving: set[int] = set()  # chunks that the ranks have heard of
        self._held: tuple[int, ...] = ()

    def look(self, free_bytes: Callable[[], int]) -> FollowChunks | None:
        """Return what the ranks have to follow; None: nothing has changed.

        `free_bytes`: of the host's memory, which all ranks share.
        """
        held = [set(table.held(self._owner)) for table in self._tables]
        draining = [set(table.draining(self._owner)) for table in self._tables]
        asked = set().union(*draining)
        # This rank has given such a chunk back: one that it has now was lent since.
        self._leaving &= set().union(*held, *draining) - (held[0] | draining[0])
        leave = tuple(sorted(asked - self._leaving))
        usable = tuple(sorted(set.intersection(*held) - asked))
        if not leave and usable == self._held:
            return None
        self._leaving.update(leave)
        self._held = usable
        return FollowChunks(usable, leave, free_bytes() // len(self._tables))


class LedBoundaries(LentBoundaries):
    """The lent chunks of a worker over ranks, on its first rank (see `slot_memory.SlotMemory`).

    Args:
        chunks: of this rank.
        tables: of all ranks.
        owner: this worker's epoch.
        tell: tells the other ranks.
        boundaries, bytes_per_token: see `LentBoundaries`.
        free_bytes: of the host's memory.
    """

    one_job = True

    def __init__(
        self,
        chunks: AgreedChunks,
        tables: RankTables,
        owner: int,
        tell: Tell,
        *,
        boundaries: int,
        bytes_per_token: int,
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        super().__init__(chunks, owner, boundaries=boundaries, bytes_per_token=bytes_per_token)
        self._chunks, self._tables, self._tell = chunks, tables, tell
        self._free_bytes = free_bytes

    def follow_tables(self) -> None:
        """Have all ranks follow what decode's ranks lend and ask for; between two tasklets.

        Raises:
            RankLost: a rank has ended.
        """
        if (found := self._tables.look(self._free_bytes)) is not None:
            self._tell(found)
            self._chunks.agree(found)

    def asked_back(self) -> bool:
        """Return whether a chunk drains on any rank, as of the last look."""
        return bool(self._chunks.draining(self._owner))

    def give_all_back(self) -> None:
        """Return every chunk on all ranks. No activation may be left in them."""
        with suppress(WindrowError):  # a rank that has ended: decode takes what it had
            self._tell(FollowChunks((), (), 0, vacated=True))
        super().give_all_back()
        self._chunks.give_all_back(self._owner)

    def tenancy(self) -> LedTenancy:
        """Return the one job's part."""
        return LedTenancy(self, self._chunks)


class LedTenancy(TenantBoundaries):
    """The one job's part of such chunks (see `slot_memory.Tenancy`)."""

    def __init__(self, lent: LedBoundaries, chunks: AgreedChunks) -> None:
        super().__init__(lent)
        self._led, self._chunks = lent, chunks

    def serve(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> LedMemory:
        """Return the memory of the job with that stream; its groups take `activation_budget`."""
        chunks = self._chunks
        return LedMemory(
            self._led, self, stream, activation_budget, free_bytes=lambda: chunks.free_bytes
        )


class LedMemory(LentMemory):
    """The memory of a job over ranks, on the first rank: the others follow it."""

    _lent: LedBoundaries

    def settle(self) -> None:
        """Follow the tables of all ranks; what comes next is formed for what every rank has."""
        self._lent.follow_tables()
        super().settle()

    def offload(self) -> None:
        """Do nothing: a pause leaves all where it is; what is asked for goes by `settle`."""


class FollowingMemory:
    """The memory of a job on a rank that follows the first one.

    Args:
        arena: of this rank, attached.
        owner: the worker's epoch.
        boundaries, bytes_per_token: see `LentBoundaries`.
    """

    def __init__(self, arena: Arena, owner: int, *, boundaries: int, bytes_per_token: int) -> None:
        self._chunks, self._owner = AgreedChunks(arena), owner
        self._lent = LentBoundaries(
            self._chunks, owner, boundaries=boundaries, bytes_per_token=bytes_per_token
        )
        self.tenancy = self._lent.tenancy()
        self._memory: LentMemory | None = None

    def serve(self, stream: TaskletStream, activation_budget: ActivationBudget) -> None:
        """Belong to the job with that stream."""
        self._memory = LentMemory(
            *(self._lent, self.tenancy, stream, activation_budget),
            free_bytes=lambda: self._chunks.free_bytes,
        )
        self.tenancy.move_in()

    def follow(self, told: FollowChunks) -> None:
        """Use and leave what the first rank says, where it says so."""
        assert self._memory is not None
        if told.vacated:
            self._lent.give_all_back()
            self._chunks.give_all_back(self._owner)
            return
        self._chunks.agree(told)
        self._memory.settle()
