"""Windrow's native core: the arena and its chunk table, and the shared page.

Hot paths of both: no system call, no lock, no allocation. Everything here may be called from any
one thread at a time; the table and the page are shared with other processes and hold their own order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.view import Grant, Offer, View

LAYOUT_VERSION: int
LEVELS_MAX: int
VIEW_FIELDS: tuple[str, ...]  # names of the shared page's records, in their order
OFFER_FIELDS: tuple[str, ...]
GRANT_FIELDS: tuple[str, ...]
DECISION_FIGURES: dict[str, float]  # constants of policies and predictor
POLICIES: tuple[str, ...]
GROW_REST_NS: int  # for so long after a revocation nothing is lent
STEP_FIELDS: tuple[str, ...]  # of `engines.hook.StepInput`

class Error(Exception):
    """Base of what the core raises; the message says what to do."""

class GeometryError(Error): ...
class AttachError(Error): ...

class OwnershipError(Error):
    """A transition that the table of owners does not allow (a double return, a lend of a KV chunk)."""

class LiveTensorsError(Error):
    """The arena cannot be closed while tensors over it live; the message names them."""

class DriverUnavailable(Error):
    """The device that was asked for cannot be used here; the message says what is missing."""

class BudgetError(Error):
    """An allocation does not fit into the chunks that decode has lent; the message names the budget."""

FREE: int
KV: int
LENT: int
RESERVED: int
DRAINING: int
# The control region up to the table: name, first byte, bytes, who writes it.
LAYOUT: tuple[tuple[str, int, int, str], ...]
# All legal transitions of a chunk: from, to, who, calls, when, if the worker dies in it.
TRANSITIONS: tuple[tuple[str, str, str, str, str, str], ...]

class Geometry:
    """Sizes of an arena. A chunk has the size of `2 * layers` blocks.

    In the layout "per-layer" it is those blocks: K and V of every layer, in that order. In
    "token-major" it is one piece: token after token, each with K and V of all layers; a GPU then
    makes, maps and hands over one memory for a chunk.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype_bytes: int,
        block_bytes: int,
        chunks: int,
        layout: str = "per-layer",
    ) -> None: ...
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_bytes: int
    chunks: int
    @property
    def layout(self) -> str: ...
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

class Partition:
    """One process's hold on a device's compute units, in groups of one size. One thread at a time.

    Sides are "decode" (its shares begin at the first group) and "finetune" (they end at the last).
    A call that raises has changed nothing; a share with more groups than there are is a ValueError.
    """

    @property
    def total_units(self) -> int: ...  # cores on the host, SMs on a GPU
    @property
    def group_units(self) -> int: ...
    @property
    def groups(self) -> int: ...
    def enter(self, side: str, groups: int) -> int:
        """Make the share ready; returns what its work is launched on.

        GPU: a CUstream, made once, valid as long as this object. Host: 0, and every thread of this
        process is on those cores. Raises Error.
        """
    def leave(self) -> None:
        """Threads may use every core again, those in the background too. Nothing on a GPU."""
    def units(self, side: str, groups: int) -> int: ...
    def measure(self, side: str, groups: int) -> list[int]:
        """Units on which probes of that share really ran, ascending. Waits for them."""
    def exclude(self, thread_id: int) -> None:
        """Never move that thread (native id). Nothing on a GPU."""
    def keep_in_background(self, thread_id: int) -> None:
        """Keep that thread (native id) on the last core until `leave`. Nothing on a GPU."""

class Driver:
    """What touches a device. By name: "host", "cuda" (the first GPU that is seen) or "cuda:N"."""

    @property
    def name(self) -> str: ...
    @property
    def facts(self) -> dict[str, Any]:
        """Of the device.

        `name`, `units`, `unit_granularity`, `memory_bytes`, `granularity_bytes`, `version` (of
        CUDA's driver, 13000 for 13.0; 0 on the host), `is_mps_client` (this process's context is
        shared by MPS).
        """
    def partition(self, units: Sequence[int] = ()) -> Partition:
        """A hold on those cores, or on all units; a GPU is shared whole.

        Raises DriverUnavailable for fewer than two groups, or a GPU without green contexts.
        """

def driver(name: str) -> Driver:
    """The process's driver of that name. Raises DriverUnavailable, ValueError for no such name."""

def gpu_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, 32 hexadecimal digits each, in CUDA's order.

    Makes no context on any. Raises DriverUnavailable where there is none.
    """

def use_libcuda(library: str) -> None:
    """Which CUDA driver library "cuda" means from now on, by path or by the loader's name."""

class FaultyDriver(Driver):
    """Another driver whose calls go wrong as they are told; `tests/support/faults.py` tells it."""

    def __init__(self, inner: Driver | str) -> None: ...
    def fail(self, call: str, n: int) -> None:
        """The n-th such call from now on raises Error and does nothing; 1 is the next.

        Calls: reserve, map, unmap, create, export, import, seal, copy; partition, enter, leave.
        """
    def fail_any(self, n: int) -> None: ...
    def lose_export(self, n: int) -> None:
        """The n-th export gives no descriptor, as if it had been lost on its way."""
    def before(self, call: str, n: int, action: Callable[[], None]) -> None: ...
    def clear(self) -> None:
        """Take back what has not fired."""
    @property
    def calls(self) -> int: ...
    @property
    def fired(self) -> int: ...

class Arena:
    """All blocks of a slot, mapped once in each process; on the host one memfd, prefaulted."""

    @staticmethod
    def create(geometry: Geometry, *, reserved_chunks: int, driver: Driver | str = "host") -> Arena:
        """Make the arena; the caller is decode and its only owner. Raises DriverUnavailable."""
    @staticmethod
    def attach(
        socket_path: str, *, timeout_s: float = 5.0, driver: Driver | str | None = None
    ) -> Arena:
        """Map a running arena as its peer, with the owner's driver unless one is given.

        Processes number GPUs each for itself, so the owner's "cuda:1" may be "cuda" here.

        Raises AttachError (version, geometry, user, no server, another driver).
        """
    @property
    def geometry(self) -> Geometry: ...
    @property
    def driver(self) -> str:
        """Name of the driver that the blocks are memory of: "host", "cuda", "cuda:N"."""
    @property
    def is_owner(self) -> bool: ...
    @property
    def page(self) -> Page: ...
    def tensor(self, offset: int, n_bytes: int) -> Any:
        """Zero-copy uint8 tensor (DLPack; `torch.from_dlpack`) over part of the arena.

        Writable on either side. Keeps the mapping alive. In a worker on a GPU, which maps what it is
        lent when it first asks for it, all its chunks are LENT or DRAINING; else OwnershipError.
        """
    def chunk_offset(self, chunk: int) -> int:
        """Where its first block begins; each of the others lies `block_stride` bytes after the last.

        A worker's chunk is one range. Decode's is not where a GPU has a memory for each block.
        """
    @property
    def block_stride(self) -> int: ...
    def kv_view(self, layer: int, *, value: bool) -> tuple[int, int, int]:
        """K (or V) of one layer: offset of slot 0, bytes from chunk to chunk, from slot to slot."""
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
    # The same by id, for ranks that have agreed on which chunk moves:
    def take_kv_chunk(self, chunk: int) -> None:
        """FREE or RESERVED -> KV. Raises OwnershipError where it is neither."""
    def lend_chunk(self, chunk: int, *, owner: int) -> None:
        """FREE -> LENT. Raises OwnershipError where it is not FREE."""
    def revoke_chunk(self, chunk: int) -> bool:
        """LENT -> DRAINING. False where it is not LENT: nobody has to give it back."""
    # Peer (worker):
    def held(self, owner: int) -> list[int]:
        """Chunks LENT to that owner, ascending."""
    def draining(self, owner: int) -> list[int]: ...
    def give_back(self, chunk: int, *, owner: int) -> None:
        """LENT or DRAINING -> RESERVED while the reserve is short, else FREE."""
    # Serving and closing:
    def serve(self, socket_path: str) -> None:
        """Hand out the descriptors on a Unix socket (mode 0600, same user), from a native thread."""
    def export(self, name: str, fd: int, *, n_bytes: int = 0) -> None:
        """Hand out one more read-only descriptor under a name (shared weights).

        A GPU's descriptors do not tell the size of their memory, so say it; 0: as the file says.
        """
    def peers(self) -> list[int]:
        """Process ids of those attached now; one that died is gone from here at once."""
    def owner_lives(self) -> bool:
        """Peer: whether decode is there; False from the moment it died or closed the arena."""
    def imported(self, name: str) -> Any:
        """Peer: read-only uint8 tensor over a descriptor that the owner exported."""
    def check(self) -> None:
        """Verify every invariant of the table; raises Error with what is wrong."""
    def close(self) -> None:
        """Unmap, hang up, remove the socket file. Raises LiveTensorsError; idempotent.

        Afterwards every call raises Error; a Page taken before stays readable.
        """

class Inspection:
    """A look at a live arena from another process: read-only, and no peer of it."""

    @staticmethod
    def open(socket_path: str, *, timeout_s: float = 5.0) -> Inspection:
        """Raises AttachError (version, user, no server)."""
    @property
    def geometry(self) -> Geometry: ...
    @property
    def owner_pid(self) -> int:
        """Of the process that serves; 0 from within another pid namespace."""
    def owner_lives(self) -> bool: ...
    def counts(self) -> tuple[int, int, int, int, int]:
        """Chunks by state, in the order FREE, KV, LENT, RESERVED, DRAINING."""
    def chunks(self) -> list[ChunkInfo]: ...
    def states(self) -> bytes:
        """One byte a chunk, as `Arena.states`."""
    def held(self, owner: int) -> list[int]:
        """Chunks LENT to that owner, ascending."""
    def draining(self, owner: int) -> list[int]: ...
    def job_epoch(self) -> int:
        """Of the worker that offered last; 0: none."""
    def heartbeat_age_ns(self, writer: int) -> int: ...
    def counter(self, counter: int) -> int:
        """Return one of the page's counters (see `Page.add`).

        Who sees a value sees what its writer had done before.
        """

class SharedWeights:
    """Sealed memory: written by its maker, read-only for everyone after.

    The host's kernel holds everyone to it (F_SEAL_FUTURE_WRITE). CUDA has no seal: its maker's and
    our importers' mappings are read-only, and a write through one is a fatal fault; where the
    driver takes no access away, the maker's stays writable, with a line on stderr.
    """

    @staticmethod
    def create(n_bytes: int, *, driver: Driver | str = "host") -> SharedWeights: ...
    @property
    def fd(self) -> int: ...
    def tensor(self) -> Any:
        """Zero-copy uint8 tensor over all of it; read-only once sealed: a write is SIGSEGV."""
    def seal(self) -> None:
        """No more writes by anyone, through mappings old or new. Idempotent."""

def ask_policy(
    name: str,  # of POLICIES
    view: View,
    offer: Offer,
    *,
    figures: Mapping[str, float],
    units: int,
    splits: Sequence[tuple[int, int]],  # units of the worker and of decode
    offered: Sequence[int],  # units of `Offer.estimates_us`, in their order
    allowed: int,
    idle_units: int,
    predicted_us: Sequence[float],
    solo_us: Sequence[float],
    margin: float,
    current: int,
    per_request: bool,
    in_flight_bound_us: int,
    layers: int,
    gaps: bool,
    deferral_us: int,
    chunk_bytes: int,
    taught: bool,
) -> tuple[int, ...]:
    """Return a policy's answer, in the order of `Grant`; `qos.policies.Context` has what it knows."""

def beside_us(bound: float, solo: float, beside: float) -> float:
    """Return how long a worker may run beside a step so that it takes `bound` at most."""

def accompanied_layers(objective: float, layers: float, solo: float, beside: float) -> float:
    """Return how many of decode's layers may have a tasklet beside them: LLMStation's N_d."""

def plan_lending(
    chunks: tuple[int, int, int, int, int],  # by state, as Arena.counts
    *,
    wanted: int,
    limit: int,
    reserve: int,
    kv_short: bool,
    since_revoke_ns: int,
) -> tuple[int, int, int]:
    """Return how many chunks the worker may hold, how many to lend, and how many to ask back."""

class KvDemand:
    """What KV may ask for before lent memory is back."""

    def __init__(
        self,
        *,
        release_us: float,  # from asking until a chunk is free
        objective_us: int,  # 0: none, growth is left out
        max_batch: int,
        token_bytes: int,
        admitted_q99_tokens: int = 0,
    ) -> None: ...

def kv_demand_bytes(demand: KvDemand, *, prompts: bool) -> float:
    """Return the bytes by which running requests grow; with `prompts`, those that arrive as well."""

def reserve_chunks(demand: KvDemand, *, prompts: bool, chunk_bytes: int, total: int) -> int:
    """Return how many of `total` chunks to keep free."""

class AdmissionRate:
    """Context tokens that arrive within windows of a fixed length, over the last 600."""

    def __init__(self, window_ns: int) -> None: ...
    def add(self, now_ns: int, tokens: int) -> None: ...
    def q99(self) -> int:
        """Return the 99th percentile; of few windows, the largest."""

class Guard:
    """Watches latencies; `qos.guard` says when it acts. Times are nanoseconds of one clock."""

    def __init__(self, settings: Mapping[str, float], *, watches: bool = True) -> None: ...
    def set_percentile(self, percentile: float) -> None: ...
    def extra_margin(self, now_ns: int) -> float: ...
    def doubt(self, view: View, offer: Offer, predicted_us: Sequence[float], now_ns: int, /) -> str:
        """Return why nothing can be decided on these figures; "" where it can."""
    def pauses(self, now_ns: int) -> bool: ...
    def may_run(self, now_ns: int) -> bool: ...
    def distrust(self, now_ns: int) -> None:
        """Take note of a step whose latency cannot be: the worker pauses, nothing is learned."""
    def queued(self, now_ns: int, waited_us: int) -> None:
        """Take note that requests have waited for so long without a break."""
    def throttled(self, now_ns: int, seconds: float) -> None:
        """Give up for a while: a CPU limit has kept decode from running beside the worker."""
    def begin_trial(self) -> None: ...
    def observe(
        self, now_ns: int, *, latency_us: float, objective_us: int, harvested: bool
    ) -> None:
        """Take note of a finished step; `harvested`: the worker was granted units during it."""
    @property
    def reason(self) -> str: ...  # why harvesting has given up; "" while it has not
    trips: int

class Predictor:
    """Latency of the next step; `qos.predictor` says how. One thread."""

    def __init__(
        self,
        *,
        figures: Mapping[str, float],
        units: int,
        splits: Sequence[tuple[int, int]],
        models: Sequence[tuple[float, float, float]],  # c0, b0, k0 in microseconds
        start: tuple[float, float],
        measured: bool,
        profiled: tuple[int, int],
        form: str,
        blind: bool,
    ) -> None: ...
    def predict(
        self, batch: int, context_tokens: int, phase: int = 0
    ) -> tuple[list[float], list[float]]:
        """Return the latency under each split beside a worker, and without one on decode's units."""
    def extrapolates(self, batch: int, context_tokens: int) -> bool: ...
    def observe(
        self,
        split: int,
        *,
        batch: int,
        context_tokens: int,
        latency_us: float,
        objective_us: float = 0.0,
        phase: int = 0,
    ) -> float:
        """Learn from a step beside a worker; return the relative residual."""
    def follow(self, residual: float, weight: float = 1.0) -> None:
        """Let the margin follow a step beside which a worker ran for a part of it."""
    margin: float
    @property
    def factors(self) -> tuple[float, float]: ...  # b1, k1
    @property
    def taught(self) -> bool: ...
    @property
    def known_kinds(self) -> int: ...  # of steps, whose records correct predictions
    @property
    def least_step_us(self) -> float: ...

class Decider:
    """Decides for one slot; `qos.control.Controller` is around it. One thread at a time."""

    def __init__(
        self,
        *,
        figures: Mapping[str, float],  # those of DECISION_FIGURES; KeyError where one is missing
        units: int,
        splits: Sequence[tuple[int, int]],
        offered: Sequence[int],
        layers: int,
        chunk_bytes: int,
        gaps: bool,
        handover: bool,
        pause_epoch: int,
        guard: Guard,
        grant_type: type[Grant],
    ) -> None: ...
    def set_predictor(self, predictor: Predictor | None) -> None: ...
    def set_guard(self, guard: Guard, /) -> None: ...
    def clear_terms(self) -> None: ...
    def set_terms(
        self,
        *,
        policy: str | Callable[[tuple[Any, ...], tuple[Any, ...]], Grant],  # "": none, for `idle`
        idle: str,
        observing: bool,
        per_request: bool,
        refused: bool,
        objective_us: int,
        deferral_us: int,
        first_token_us: int,  # 0: no objective
        allowed: int,
        idle_units: int,
    ) -> None: ...
    def decide(
        self,
        view: View,
        offer: Offer,
        now_ns: int,
        present: bool,
        chunks: int,
        prompts_left: int,  # see StepInput
        first_token_waited_us: int,
        /,
    ) -> Grant: ...
    def observe_prompt(self, tokens: int, latency_us: float, grant: Grant, /) -> None: ...
    def observe_first_token(self, after_us: float, /) -> None: ...
    @property
    def prompt_token_us(self) -> float: ...  # of a prompt's token on all units; 0: not known
    @property
    def prompt_margin(self) -> float: ...
    @property
    def first_tokens(self) -> tuple[int, int]: ...  # in all, and later than the objective
    def observe(self, now_ns: int, latency_us: float, /) -> float | None: ...
    def headroom_units(self, view: View, /) -> float: ...
    def during(self) -> tuple[int, int, int, bool, int, bool, bool, int, int]:
        """Return the fields of `qos.control.DuringStep`."""
    # Of the last decision.
    @property
    def why(self) -> str: ...
    @property
    def margin(self) -> float: ...
    @property
    def alone_us(self) -> float: ...
    @property
    def would_units(self) -> float: ...
    @property
    def extrapolated(self) -> bool: ...

class HarvestStep:
    """All that decode pays for before a step; `engines.harvest.HarvestHook` is made of it.

    Where `clock` is given, arena and page are Python's, as a simulation has them. Where `group` is
    given, it is asked in place of the arena what is lent (`engines.harvest.group_chunks`).
    """

    def __init__(
        self,
        arena: Arena,
        *,
        clock: Callable[[], int] | None,
        group: GroupChunks | None,
        decider: Decider,
        units: int,
        pause_epoch: int,
        chunks: int,
        chunk_bytes: int,
        slots_per_chunk: int,
        max_batch: int,
        drain_us: float,
        reserve_prompts: bool,
        keeps_reserve: bool,
        admission_window_ns: int,
        worker_stale_ns: int,
        regrant_ns: int,
        steady_ns: int,
        lending_every_ns: int,
        keeps_decisions: bool,
    ) -> None: ...
    def before_step(self, facts: StepInput, /) -> Grant:
        """Show the view, decide, grant; a decision holds while nothing that it rests on has changed."""
    def after_step(self, end_ns: int, latency_us: float, /) -> None:
        """Take note; a step over the objective is judged at once, others at the next decision."""
    def idle(self, now_ns: int, /) -> Grant:
        """Decide for a decode that runs dry: the worker may have the device."""
    def after_prompt(self, tokens: int, latency_us: float, grant: Grant, /) -> None: ...
    def after_first_token(self, after_us: float, /) -> None: ...
    def worker_lives(self, epoch: int, /) -> None:
        """Take note of the job epoch of the only worker that lives; 0: none does. Any thread."""
    @property
    def cost_us(self) -> float: ...  # what `before_step` took of the current step
    @property
    def chunks_lacking(self) -> int: ...  # that would have to be FREE for what the worker wants
    @property
    def live_epoch(self) -> int | None: ...  # as `worker_lives` said; None: nobody has said
    def _revoke_all(self) -> None: ...
    def _news(self) -> None: ...
    def _look_again(self) -> None: ...
    def _set_terms(
        self,
        *,
        any: bool,
        harvests: bool,
        objective_us: int,
        token_objective_us: int,
        max_memory_percent: int,
        step_tokens: float,
    ) -> None: ...
    def _take_kept(self) -> list[tuple[Any, ...]]: ...
    def _take_beside(self) -> list[tuple[int, int, int, float]]: ...
    def _take_measured(self) -> tuple[list[tuple[int, int, int, float]], list[float]]: ...
    def _take_returns(self) -> list[float]: ...
    def _counters(self) -> tuple[int, int, int, int, int, int, float, float]: ...
    @property
    def _view(self) -> tuple[int, ...]: ...
    @property
    def _grant(self) -> Grant: ...
    @property
    def _holds_out(self) -> bool: ...
    @property
    def _tokens_done(self) -> int: ...

class Page:
    """The shared page: view and grant (decode writes), offer (worker writes); seqlocks and a futex.

    `publish_*` take a record of `windrow_sidecar.qos.view`, whose heartbeat_ns they set themselves;
    `read_*` return what was published whole, as a plain tuple of its fields.
    """

    def publish_view(self, view: View) -> None:
        """Publish; sets heartbeat_ns."""
    def read_view(self) -> tuple[int, ...]:
        """Return all fields in the order of `View`: `View._make(page.read_view())`."""
    def publish_offer(self, offer: Offer) -> None:
        """Publish; sets heartbeat_ns; wakes who waits. estimates_us: at most LEVELS_MAX."""
    def read_offer(self) -> tuple[Any, ...]: ...
    def publish_grant(self, grant: Grant) -> None:
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
    def grant_stands(self, seq: int, stale_ns: int) -> bool: ...
    def add(self, counter: int, n: int) -> int:
        """Add to one of 16 counters that live as long as the arena; returns the new value."""

class DeviceAllocator:
    """Memory for tensors from chunks that decode has lent: a buddy pool for each stream below 2 MiB,
    whole blocks at consecutive addresses from there on. Any thread. Addresses and streams (a
    `cudaStream_t`; 0 is the default stream) are plain numbers.
    """

    @staticmethod
    def over(arena: Arena) -> DeviceAllocator:
        """With an empty budget. It keeps the arena's memory, whoever closes the arena.

        Raises GeometryError for blocks that do not divide 2 MiB; where a chunk is one memory
        (token-major on CUDA), for chunks that are no multiple of it.
        """
    def lend(self, chunk: int) -> None:
        """The chunk may be used from now on."""
    def drain(self, chunk: int) -> None:
        """Hand out no more of the chunk; `take_quiet` names it when its last block is free."""
    def shrink_to(self, chunks: int) -> None:
        """Drain the lowest ids until so many are left."""
    def take_quiet(self) -> list[int]:
        """Drained chunks that nothing uses any more; the budget forgets them."""
    def allocate(self, n_bytes: int, *, stream: int = 0) -> int:
        """An address, or 0 for 0 bytes. Raises BudgetError."""
    def free(self, address: int) -> None:
        """Reusable on its stream at once, on others when its work is done.

        Where the device cannot tell when that is, the memory waits for all streams.
        """
    def record_stream(self, address: int, stream: int) -> None:
        """The allocation is used on that stream too."""
    def keep_small(self, blocks: int, *, stream: int = 0) -> int:
        """Hold so many blocks of 2 MiB for small requests; returns how many it could get."""
    def wait_freed(self) -> None:
        """Until nothing uses what was freed so far, on any stream."""
    def release_cached(self) -> None:
        """Give up what is not in use: empty pool blocks, idle mappings."""
    def begin_pool(self, pool: tuple[int, int], *, stream: int) -> None:
        """What that stream allocates until `end_pool` is memory of CUDA graphs, as torch asks for it.

        Others wait. Raises Error in the middle of another capture of this thread.
        """
    def end_pool(self, pool: tuple[int, int]) -> None:
        """The capture is over."""
    def release_pool(self, pool: tuple[int, int]) -> None:
        """One graph of the pool fewer."""
    def back_pool(self, pool: tuple[int, int], n_bytes: int) -> bool:
        """Put lent memory behind the pool's first bytes; False: there is too little now.

        All pools are mapped over the same memory: graphs of two never run at the same time.
        """
    def unback_pools(self) -> None:
        """Give the memory back; graphs may run again once `back_pool` says True."""
    def pool_bytes(self, pool: tuple[int, int]) -> int:
        """Bytes from its beginning that graphs of the pool may use; 0: nothing was captured."""
    def backed_bytes(self) -> int:
        """Bytes of lent memory behind all pools."""
    def stats(self) -> dict[str, int]:
        """Under the names of torch.cuda.memory_stats; besides, `num_device_set_access`: aliases that
        got their access (one call each), and `num_device_alloc_saved`: mapping calls that idle
        aliases saved.
        """
    def fragmentation_bytes(self) -> int:
        """Held minus requested, now."""
    def describe_budget(self) -> str: ...
    def check(self) -> None:
        """Verify every invariant; raises Error with what is wrong."""

POOL_BLOCK_BYTES: int

def small_pool_blocks_for(trace: list[tuple[int, int]]) -> int:
    """Blocks that the small requests of an iteration need, and a tenth more.

    Steps are (id, bytes), with 0 bytes where allocation `id` ends.
    """

def serve_device(device: int, allocator: DeviceAllocator | None) -> None:
    """Let the C entry points (`windrow_alloc`, ...) serve that device from this allocator."""

def monotonic_ns() -> int: ...
