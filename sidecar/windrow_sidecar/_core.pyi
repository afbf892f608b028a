"""Windrow's native core: the arena and its chunk table, and the shared page.

Hot paths of both: no system call, no lock, no allocation. Everything here may be called from any
one thread at a time; the table and the page are shared with other processes and hold their own order.
"""

from typing import Any

LAYOUT_VERSION: int
LEVELS_MAX: int
VIEW_FIELDS: tuple[str, ...]  # names of the shared page's records, in their order
OFFER_FIELDS: tuple[str, ...]
GRANT_FIELDS: tuple[str, ...]

class Error(Exception):
    """Base of what the core raises; the message says what to do."""

class GeometryError(Error): ...
class AttachError(Error): ...

class OwnershipError(Error):
    """A transition that the table of owners does not allow (a double return, a lend of a KV chunk)."""

class LiveTensorsError(Error):
    """The arena cannot be closed while tensors over it live; the message names them."""

FREE: int
KV: int
LENT: int
RESERVED: int
DRAINING: int

class Geometry:
    """Sizes of an arena. A chunk is `2 * layers` blocks: K and V of every layer, in that order."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype_bytes: int,
        block_bytes: int,
        chunks: int,
    ) -> None: ...
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_bytes: int
    chunks: int
    @property
    def slots_per_chunk(self) -> int: ...  # tokens
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...

class ChunkInfo:
    state: int
    owner: int  # job epoch of the borrower while LENT or DRAINING, else 0
    epoch: int  # grows with every transition of this chunk
    since_ns: int

class Arena:
    """All blocks of a slot: one memfd, prefaulted, mapped once in each process (host driver)."""

    @staticmethod
    def create(geometry: Geometry, *, reserved_chunks: int) -> Arena:
        """Make the arena; the caller is decode and its only owner."""
    @staticmethod
    def attach(socket_path: str, *, timeout_s: float = 5.0) -> Arena:
        """Map a running arena as its peer. Raises AttachError (version, geometry, user, no server)."""
    @property
    def geometry(self) -> Geometry: ...
    @property
    def is_owner(self) -> bool: ...
    @property
    def page(self) -> Page: ...
    def tensor(self, offset: int, n_bytes: int) -> Any:
        """Zero-copy uint8 tensor (DLPack; `torch.from_dlpack`) over part of the arena.

        Writable on either side. Keeps the mapping alive.
        """
    def chunk_offset(self, chunk: int) -> int: ...
    def counts(self) -> tuple[int, int, int, int, int]:
        """Chunks by state, in the order FREE, KV, LENT, RESERVED, DRAINING."""
    def chunk(self, chunk: int) -> ChunkInfo: ...
    def states(self) -> bytes:
        """One byte a chunk: the whole map, for display."""
    # Owner (decode):
    def take_kv(self) -> int:
        """The lowest FREE chunk, else one of the reserve; -1 when there is none. Never waits."""
    def return_kv(self, chunk: int) -> None:
        """KV -> RESERVED while the reserve is short, else FREE."""
    def set_reserve(self, chunks: int) -> int:
        """Ask for a reserve of that size; filled from FREE now, else as chunks return.

        A surplus becomes FREE. Returns how many chunks are RESERVED now.
        """
    def lend(self, chunks: int, *, owner: int) -> list[int]:
        """Up to that many FREE chunks -> LENT, from the highest ids; never from the reserve.

        A short reserve is filled first.
        """
    def revoke(self, chunks: int) -> list[int]:
        """Up to that many LENT chunks -> DRAINING, the lowest ids first. The peer gives them back."""
    def reclaim(self, owner: int) -> int:
        """All of a dead or fenced borrower's chunks -> RESERVED or FREE. Returns how many."""
    # Peer (worker):
    def held(self, owner: int) -> list[int]:
        """Chunks LENT to that owner, ascending."""
    def draining(self, owner: int) -> list[int]: ...
    def give_back(self, chunk: int, *, owner: int) -> None:
        """LENT or DRAINING -> RESERVED while the reserve is short, else FREE."""
    # Serving and closing:
    def serve(self, socket_path: str) -> None:
        """Hand out the descriptors on a Unix socket (mode 0600, same user), from a native thread."""
    def export(self, name: str, fd: int) -> None:
        """Hand out one more read-only descriptor under a name (shared weights)."""
    def peers(self) -> list[int]:
        """Process ids of those attached now; one that died is gone from here at once."""
    def imported(self, name: str) -> Any:
        """Peer: read-only uint8 tensor over a descriptor that the owner exported."""
    def check(self) -> None:
        """Verify every invariant of the table; raises Error with what is wrong."""
    def close(self) -> None:
        """Unmap, hang up, remove the socket file. Raises LiveTensorsError; idempotent.

        Afterwards every call raises Error; a Page taken before stays readable.
        """

class SharedWeights:
    """A sealed memfd (F_SEAL_FUTURE_WRITE): written by its maker, read-only for everyone after."""

    @staticmethod
    def create(n_bytes: int) -> SharedWeights: ...
    @property
    def fd(self) -> int: ...
    def tensor(self) -> Any:
        """Zero-copy uint8 tensor over all of it; read-only once sealed: a write is SIGSEGV."""
    def seal(self) -> None:
        """No more writes by anyone, through mappings old or new. Idempotent."""

class Page:
    """The shared page: view and grant (decode writes), offer (worker writes); seqlocks and a futex.

    `read_*` return what was published whole. The names and the order of the arguments are the fields
    of `windrow_sidecar.qos.view`.
    """

    def publish_view(
        self,
        step: int,
        start_ns: int,
        last_end_ns: int,
        last_step_us: int,
        batch: int,
        context_tokens: int,
        waiting: int,
        admitted_tokens: int,
        kv_chunks: int,
        free_chunks: int,
        reserved_chunks: int,
        lent_chunks: int,
        objective_us: int,
        slo_debt_us: int,
        steps_over_objective: int,
    ) -> None:
        """Publish; sets heartbeat_ns."""
    def read_view(self) -> tuple[int, ...]:
        """All fields in the order of `View`."""
    def publish_offer(
        self,
        job_epoch: int,
        step: int,
        tasklet_id: int,
        phase: int,
        layer_begin: int,
        layer_end: int,
        tokens: int,
        micro_batch: int,
        estimates_us: tuple[int, ...],
        memory_delta_bytes: int,
        resident_layers: int,
        starving: int,
        in_flight_us: int,
        pause_epoch_seen: int,
        wanted_chunks: int,
        held_chunks: int,
        tokens_done: int,
    ) -> None:
        """Publish; sets heartbeat_ns; wakes who waits. estimates_us: at most LEVELS_MAX."""
    def read_offer(self) -> tuple[Any, ...]: ...
    def publish_grant(
        self,
        action: int,
        finetune_units: int,
        decode_units: int,
        n_tasklets: int,
        budget_us: int,
        window_tokens: int,
        micro_batch: int,
        resident_layers: int,
        fuse_tokens: int,
        pause_epoch: int,
        hold_admission_until_ns: int,
        predicted_us: int,
        chunks: int,
        in_flight_bound_us: int,
    ) -> None:
        """Publish; sets heartbeat_ns; wakes a waiting worker."""
    def read_grant(self) -> tuple[int, ...]: ...
    @property
    def grant_seq(self) -> int:
        """Grows with every published grant."""
    @property
    def offer_seq(self) -> int: ...
    @property
    def pause_epoch(self) -> int:
        """Of the newest grant: one load, for the check before every launch."""
    def wait_grant(self, seen_seq: int, *, timeout_s: float) -> int:
        """Sleep (futex, GIL released) until grant_seq differs from seen_seq; returns the new one."""
    def wait_offer(self, seen_seq: int, *, timeout_s: float) -> int: ...
    def beat(self, writer: int) -> None:
        """Refresh the heartbeat of 0 (decode) or 1 (worker) without publishing anything."""
    def heartbeat_age_ns(self, writer: int) -> int: ...
    def add(self, counter: int, n: int) -> int:
        """Add to one of 16 counters that live as long as the arena; returns the new value."""

def monotonic_ns() -> int: ...
