"""The entry point that SGLang calls in each of its processes, and the hooks of its scheduler.

Without a run directory nothing is touched. With one, everything is checked when the scheduler is
made; whatever is not as expected switches harvesting off with one line in the log, and SGLang
serves as if the plugin were not installed. What fails later does the same, and gives all memory
back.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windrow.rundir import ENV_RUN_DIR, ENV_SLOT, RunDir
from windrow_sidecar.compute.mps_start import bring_up
from windrow_sidecar.engines.sglang.lookups import allocator_of_tokens, lent_tokens, model_folder

if TYPE_CHECKING:
    from windrow_sidecar._core import Arena
    from windrow_sidecar.engines.claim import SlotClaim
    from windrow_sidecar.engines.confined import GraphShares
    from windrow_sidecar.engines.sglang.harvesting import SchedulerHarvest
    from windrow_sidecar.engines.sglang.in_engine import JobThread
    from windrow_sidecar.engines.sglang.rank_lending import ChunkMoves
    from windrow_sidecar.engines.sglang.ranks import SchedulerRanks
    from windrow_sidecar.engines.sglang.transfers import RangeProbe
    from windrow_sidecar.engines.sglang.weight_cuts import ModelCut
    from windrow_sidecar.engines.sglang.weights import SharedModel

_log = logging.getLogger(__name__)

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


def register() -> None:
    """Hook the scheduler's making, in processes that have one, where there is a run directory.

    SGLang calls this in the server's first process before it reads its arguments and starts any
    other: there the pod's MPS daemon is brought up, and all others inherit its variables. The first
    one has counted the GPUs by then, and computes nothing on them.
    """
    root = os.environ.get(ENV_RUN_DIR)
    if not root:
        return
    is_first = multiprocessing.parent_process() is None
    os.environ.update(bring_up(RunDir(Path(root)), os.environ, only_starts_others=is_first))
    if _SCHEDULER_MODULE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from windrow_sidecar.engines.sglang.compat import SCHEDULER

    plugin = Plugin(RunDir(Path(root)), os.environ)
    HookRegistry.register(f"{SCHEDULER}.__init__", plugin.make_scheduler, HookType.AROUND)


@dataclass(slots=True)
class Plugin:
    """One scheduler process's state.

    Attributes:
        off: why nothing is harvested; "" while all is well.
        is_loaded: whether the served model has come by; a draft's comes after it.
        ranks: of a model that is cut over several; None: this process has all of it.
    """

    run_dir: RunDir
    environment: Mapping[str, str]
    off: str = ""
    is_loaded: bool = False
    args: Any = None
    arena: Arena | None = None
    weights: SharedModel | None = None
    allocator_class: type[Any] | None = None
    pool: Any = None  # whose KV is in the arena
    unlent_bytes: int = 0  # of other KV pools: of drafts, and of layers with sliding windows
    transfer_guard_ns: int = 0
    range_probe: RangeProbe | None = None  # where a transfer library writes KV on a GPU
    is_confined: bool = False  # whether decode's graphs are captured for shares of the SMs
    shares: GraphShares | None = None
    harvest: SchedulerHarvest | None = None
    scheduler: Any = None
    fingerprint: str = ""  # of the served checkpoint
    claim: SlotClaim | None = None
    jobs: JobThread | None = None  # where they run in this process
    ranks: SchedulerRanks | None = None

    def make_scheduler(
        self,
        original: Callable[..., None],
        scheduler: Any,  # noqa: ANN401
        server_args: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Check, hook, let SGLang make its scheduler, then open the arena to a worker."""
        self.scheduler = scheduler
        self._guarded("not started", self._prepare, server_args)
        original(scheduler, server_args, *args, **kwargs)
        if self.ranks is not None:
            self._guarded("not started", self._meet, self.ranks)
        if not self.off and self._leads:
            self._guarded("not started", self._start)
        if not self.off:
            self._tell_refusal("")

    def _prepare(self, server_args: Any) -> None:  # noqa: ANN401
        from windrow_sidecar.engines.sglang import compat, graphs, in_engine, transfers

        self.args = server_args
        insisted = self.environment.get(compat.ENV_UNTESTED) == "1"
        compat.check_version(version("sglang"), insisted=insisted)
        compat.check_names()
        compat.check_arguments(server_args)
        if server_args.tp_size > 1:
            # All ranks come here or none: what is checked above is the same for each.
            from windrow_sidecar.engines.sglang.ranks import SchedulerRanks, own_rank

            self.ranks = SchedulerRanks(own_rank(), server_args.tp_size, self.run_dir)
        self.transfer_guard_ns = compat.transfer_guard_ns(self.environment, server_args)
        receives = transfers.receives_by_transfer(server_args)
        if receives:
            backend = server_args.disaggregation_transfer_backend
            os.environ.update(transfers.check_library(backend, self.environment))
        self.is_confined = graphs.wanted_partition(self.environment, server_args) == "green"
        if not os.access(self.run_dir.root, os.W_OK):
            from windrow.errors import UserError

            raise UserError(
                f"{self.run_dir.root} is not there, or this process may not write to it",
                field=ENV_RUN_DIR,
                remedy="Mount the directory that decode and sidecar share, or unset the variable.",
            )
        if in_engine.wanted(self.environment, server_args):
            # Forks a process that reads rows: before there is a second thread.
            self.jobs = in_engine.prepare(self.run_dir, model_folder(server_args))
        from windrow_sidecar.engines.claim import claim_slot

        if self._leads:
            self.claim = claim_slot(self.run_dir, self.environment)
            self.run_dir = self.claim.run_dir
            # One that an engine before has left would send workers to nobody.
            self.run_dir.in_engine_socket().unlink(missing_ok=True)
        self._hook()
        if receives:
            self.range_probe = transfers.probe(server_args, os.environ)

    def _hook(self) -> None:
        """Put the hooks in place; raises where SGLang's registry did not take one."""
        from windrow_sidecar.engines.sglang import compat, hooking

        new_weights = (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "begin_weight_update",
        )
        over_ranks = (
            {f"{compat.RECEIVER}._broadcast_reqs_across_ranks": self.broadcast}
            if self.ranks is not None
            else {}
        )
        hooking.put(
            around={
                f"{compat.POOL}._create_buffers": self.create_buffers,
                f"{compat.LATENT_POOL}._create_buffers": self.create_buffers,
                f"{compat.SCHEDULER}.process_decode_queue": self.process_decode_queue,
                f"{compat.SLEEPER}.maybe_sleep": self.maybe_sleep,
                **over_ranks,
            },
            before={
                f"{compat.SCHEDULER}.run_batch": self.run_batch,
                f"{compat.SCHEDULER}.on_idle": self.on_idle,
                f"{compat.SCHEDULER}.get_next_batch_to_run": self.get_next_batch,
                f"{compat.CHECKER}._check_full_pool": self.check_full_pool,
                **{f"{compat.UPDATER}.{name}": self.before_weight_update for name in new_weights},
            },
            after={
                f"{compat.PLATFORM}.get_paged_allocator_cls": self.paged_allocator,
                f"{compat.PLATFORM}.get_graph_runner_cls": self.graph_runner,
                f"{compat.PLATFORM}.post_load_model": self.post_load_model,
                f"{compat.SCHEDULER}.process_batch_result": self.process_batch_result,
                f"{compat.OBSERVER}._get_token_info": self.token_info,
                f"{compat.OBSERVER}._get_mamba_token_info": self.token_info,
                f"{compat.OBSERVER}._get_swa_token_info": self.token_info,
            },
        )

    # What SGLang calls while it makes its scheduler:

    def post_load_model(self, _result: None, _platform: Any, model: Any) -> None:  # noqa: ANN401
        """The weights are loaded: share them, if they are the checkpoint's."""
        if self.off or self.is_loaded:
            return
        self.is_loaded = True
        from windrow.errors import UserError
        from windrow_sidecar.engines.fingerprint import model_fingerprint
        from windrow_sidecar.engines.sglang import compat
        from windrow_sidecar.engines.sglang.pool import driver_of
        from windrow_sidecar.engines.sglang.weights import share_model

        try:
            folder = model_folder(self.args)
            self.fingerprint = model_fingerprint(folder)
            cut = self._cut(model, folder)
            compat.check_load_format(self.args)
            device = str(next(model.parameters()).device)
            self.weights = share_model(model, folder, driver_of(device), cut)
        except UserError as error:
            _log.warning("windrow: %s", error)
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("weights could not be shared", error)

    def _cut(self, model: Any, folder: Path) -> ModelCut:  # noqa: ANN401
        """Return the part of the model that this rank has. Raises UserError: no worker trains it.

        Then nothing is harvested; with a model that is whole a worker says so itself.
        """
        from windrow.errors import UserError
        from windrow_sidecar.engines.sglang.weight_cuts import WHOLE, cut_of

        if self.ranks is None:
            return WHOLE
        try:
            return cut_of(model, folder, self.ranks.ranks, self.ranks.rank)
        except UserError as error:
            self._switch_off("not started", error)
            raise

    def create_buffers(self, original: Callable[..., None], pool: Any) -> None:  # noqa: ANN401
        """The KV pool takes its memory: the arena's, where it is a pool that can be lent."""
        from sglang.srt.mem_cache.memory_pool import (
            DSATokenToKVPool,
            MHATokenToKVPool,
            MLATokenToKVPool,
        )

        from windrow_sidecar.engines.sglang.pool import buffers_of

        known = type(pool) in (MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool)
        if self.off or self.arena is not None or not known:
            original(pool)
            if known and self.arena is not None:
                # A draft's pool, of which SGLang's allocator gives out no page that is lent; or the
                # windows' beside the target's, with pages and an allocator of its own.
                self.unlent_bytes += sum(buffer.nbytes for buffer in buffers_of(pool))
            return
        arena = None
        try:
            from windrow_sidecar.engines.sglang.allocator import allocator_class
            from windrow_sidecar.engines.sglang.pool import make_arena, use_arena

            if self.range_probe is not None:
                self.range_probe.check()
            arena = make_arena(pool, reserved_chunks=1 if self.ranks is None else 0)
            use_arena(pool, arena)
            chunks = None
            if self.ranks is not None:
                from windrow_sidecar.engines.rank_chunks import RankChunks

                chunks = self.ranks.chunks = RankChunks(arena)
            self.allocator_class = allocator_class(arena, self._fence, chunks)
            self.arena, self.pool = arena, pool
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("the KV pool cannot lie in an arena", error)
            original(pool)

    def paged_allocator(self, result: Any, *_: Any) -> Any:  # noqa: ANN401
        """Return what makes the allocators of paged pools."""
        return self.make_allocator if result is None and self.arena is not None else None

    def make_allocator(
        self,
        size: int,
        page_size: int,
        dtype: Any,  # noqa: ANN401
        device: str,
        kvcache: Any,  # noqa: ANN401
        need_sort: bool,
    ) -> Any:  # noqa: ANN401
        """Return the allocator of a pool: the lending one where its KV is in the arena."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        from windrow_sidecar.engines.sglang.pool import pool_of_tokens

        kind = self.allocator_class
        if kind is None or pool_of_tokens(kvcache) is not self.pool:
            kind = PagedTokenToKVPoolAllocator
        return kind(size, page_size, dtype, device, kvcache, need_sort)

    def graph_runner(self, result: Any, *_: Any) -> Any:  # noqa: ANN401
        """Return what captures and replays decode's graphs; None leaves it to SGLang."""
        if self.off or not self.is_confined or result is not None or self.arena is None:
            return None
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        from windrow_sidecar.engines.confined import GraphShares
        from windrow_sidecar.engines.sglang.graphs import runner_class

        try:
            self.shares = self.shares or GraphShares(self.arena.driver)
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("decode cannot be confined", error)
            return None
        return runner_class(DecodeCudaGraphRunner, self.shares)

    # What SGLang calls while it serves:

    def run_batch(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Decide before each batch."""
        if self.ranks is not None:
            self.ranks.meter.begin()
        if self.harvest is not None and not self.off:
            self._guarded_step(self.harvest.before_batch, scheduler, batch)

    def process_batch_result(
        self,
        _result: None,
        _scheduler: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        *_: Any,  # noqa: ANN401
    ) -> None:
        """Account after each batch."""
        if self.ranks is not None:
            self.ranks.meter.end()
        if self.harvest is not None and not self.off:
            self._guarded_step(self.harvest.after_batch, batch)

    def on_idle(self, _scheduler: Any) -> None:  # noqa: ANN401
        """Note that nothing runs."""
        if self.harvest is not None and not self.off:
            self._guarded_step(self.harvest.idle)

    def process_decode_queue(self, original: Callable[..., None], scheduler: Any) -> None:  # noqa: ANN401
        """Lend and take back at the safe point: before a decode instance admits requests."""
        if self.harvest is not None:
            self._guarded_step(self.harvest.between_batches, scheduler)
        if self._holds:
            return
        original(scheduler)

    @property
    def _holds(self) -> bool:
        """True where no request is admitted now; over ranks as rank 0 has said to all."""
        if self.ranks is not None:
            return self.ranks.order.holds
        return self.harvest is not None and self.harvest.holds_admission

    @property
    def _leads(self) -> bool:
        """True in the process that decides: the only one, or rank 0."""
        return self.ranks is None or self.ranks.rank == 0

    def broadcast(
        self,
        original: Callable[..., Any],
        receiver: Any,  # noqa: ANN401
        recv_reqs: list[Any] | None,
        local_reqs: list[Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """SGLang tells all ranks the requests that came: what rank 0 has decided goes with them."""
        from windrow_sidecar.engines.sglang.ranks import carried

        ranks = self.ranks
        assert ranks is not None
        holds = self.harvest is not None and not self.off and self.harvest.holds_admission
        order, found = carried(
            ranks, original, receiver, recv_reqs, local_reqs, holds=holds, moves=self._moves
        )
        if order is not None:
            self._guarded_step(ranks.take, order)
            if order.off and not self.off:
                _log.error("windrow: harvesting is off on all ranks: %s", order.off)
                self.off = order.off
        self._guarded_step(ranks.tell, time.monotonic_ns())
        return found

    def _moves(self) -> ChunkMoves | None:
        """Return what rank 0 has decided on chunks; what has been lent comes back also when off."""
        if self.harvest is None:
            return None
        try:
            return self.harvest.moves(self.scheduler)
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("a step hook failed", error)
            return None

    def get_next_batch(self, scheduler: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Lend and take back before an instance that also prefills admits: the safe point."""
        if self.harvest is not None:
            self._guarded_step(self.harvest.between_batches, scheduler)

    def check_full_pool(
        self,
        checker: Any,  # noqa: ANN401
        ps: Any,  # noqa: ANN401
        uncached: int = 0,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """SGLang counts its tokens: lent ones are held by somebody, not leaked."""
        lent = lent_tokens(checker.token_to_kv_pool_allocator)
        return ((checker, ps), {"uncached": uncached + lent}) if lent else None

    def token_info(self, stats: Any, observer: Any) -> Any:  # noqa: ANN401
        """SGLang's figures of load: lent tokens are not in use by requests."""
        lent = lent_tokens(observer.token_to_kv_pool_allocator)
        if not lent:
            return None
        import dataclasses

        used = stats.full_num_used - lent
        usage = used / (stats.full_capacity or observer.max_total_num_tokens)
        return dataclasses.replace(stats, full_num_used=used, full_token_usage=usage)

    def maybe_sleep(self, original: Callable[..., None], sleeper: Any) -> None:  # noqa: ANN401
        """An idle scheduler sleeps for a second: too long for somebody who reads its heartbeat."""
        if self.harvest is None or not self.harvest.is_awake:
            original(sleeper)
            return
        from windrow_sidecar.engines.sglang.harvesting import IDLE_POLL_MS

        if self.jobs is not None:
            self.jobs.turns.offer()
        sleeper.poller.poll(IDLE_POLL_MS)
        if self.jobs is not None:
            self.jobs.turns.recall()

    def before_weight_update(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Weights are about to be replaced: decode takes its own copy, and harvesting ends."""
        from windrow.errors import InvariantBroken

        if self.weights is not None:
            weights, self.weights = self.weights, None
            self.run_dir.weights_manifest().unlink(missing_ok=True)
            weights.make_private()
        if not self.off:
            self._switch_off("the model's weights are replaced", InvariantBroken("weight update"))

    # Starting and stopping:

    def _meet(self, ranks: SchedulerRanks) -> None:
        """Open this rank where it follows, and let all know whether every one can be harvested.

        Each rank calls it, whatever has happened to it. Raises UserError, the same on all.
        """
        from windrow_sidecar.engines.sglang.ranks import (
            RankReport,
            check_reports,
            exchange,
            own_cores,
        )

        def report() -> RankReport:
            return RankReport(self.run_dir.slot, own_cores(), self.off)

        reports = exchange(self.scheduler, report())
        check_reports(reports)
        ranks.run_dir = self.run_dir.of_slot(reports[0].slot)
        if ranks.rank:
            self.run_dir = ranks.run_dir.of_rank(ranks.rank)
            self._guarded("not started", self._start)
            if not self.off:
                self._tell_refusal("")
        check_reports(exchange(self.scheduler, report()))

    def _start(self) -> None:
        """Harvest the scheduler that was just made, if its KV is in the arena. Raises UserError.

        A rank that follows only opens what a worker's rank has to reach.
        """
        from windrow.errors import UserError

        allocator = self.scheduler.token_to_kv_pool_allocator
        from windrow_sidecar.engines.sglang.pool import bytes_beside, pool_of_tokens

        of_tokens = allocator_of_tokens(allocator)
        if self.arena is None or not isinstance(of_tokens, self.allocator_class or ()):
            kind = type(allocator.get_kvcache()).__name__
            raise UserError(
                f"the model's KV is in a {kind} behind a {type(allocator).__name__}",
                remedy="Serve a model with a KV pool that docs/sglang.md names.",
            )
        from windrow_sidecar.engines.sglang.opening import Opened, harvest_scheduler, open_rank

        opened = Opened(
            self.scheduler,
            self.args,
            of_tokens,
            self.arena,
            self.weights,
            self.fingerprint,
            self.shares,
            self.unlent_bytes + bytes_beside(pool_of_tokens(allocator.get_kvcache())),
            self.jobs,
            self.ranks,
        )
        if not self._leads:
            open_rank(opened, self.run_dir)
            return
        self.harvest = harvest_scheduler(opened, self.run_dir, self.environment, self._failed)

    def _fence(self) -> Callable[[int], bool]:
        """A check that the batches launched so far, and transfers given up, write no more."""
        import torch

        until_ns = time.monotonic_ns() + self.transfer_guard_ns
        if self.arena is None or self.arena.driver == "host":
            return lambda now_ns: now_ns >= until_ns
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.scheduler.forward_stream)
        return lambda now_ns: now_ns >= until_ns and bool(event.query())

    def _guarded(self, what: str, call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off(what, error)

    def _guarded_step(self, call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("a step hook failed", error)

    def _tell_refusal(self, reason: str) -> None:
        """Leave in the run directory why nothing is harvested; "": all is well.

        Rank 0 leaves it for the sidecar, the others for rank 0.
        """
        from windrow_sidecar.engines.sglang.ranks import write_refusal

        if not self._leads and not self.run_dir.rank:
            return  # its slot is not known yet; the others hear of it when they meet
        slot = self.environment.get(ENV_SLOT, "")
        named = self._leads and not self.claim and slot.isdecimal()
        mine = self.run_dir.of_slot(int(slot)) if named else self.run_dir
        try:
            write_refusal(mine, reason)
        except OSError as error:  # it says so in its log at least
            _log.warning("windrow: %s could not be written: %s", mine.refusal(), error)

    def _failed(self, reason: str) -> None:
        """The step hook has switched itself off, and has said so."""
        self.off = self.off or reason
        if self.ranks is not None:
            self.ranks.end(self.off)
        if self.harvest is not None:
            self.harvest.leave()

    def _switch_off(self, what: str, error: Exception) -> None:
        """Say it once; from now on decode is served alone. What is lent is asked back."""
        from windrow.errors import UserError

        if not self.off:
            trace = None if isinstance(error, UserError) else error
            _log.error(
                "windrow: harvesting is off, %s: %s", what, error or repr(error), exc_info=trace
            )
        self.off = self.off or f"{what}: {error}"
        self._tell_refusal(self.off)
        if self.ranks is not None:
            self.ranks.end(self.off)
        if self.harvest is not None:
            self.harvest.give_up(error)
