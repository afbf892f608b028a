"""The entry point that SGLang calls in each of its processes, and the hooks of its scheduler.

Without a run directory nothing is touched. With one, everything is checked when the scheduler is
made; whatever is not as expected switches harvesting off with one line in the log, and SGLang
serves as if the plugin were not installed. What fails later does the same, and gives all memory
back.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR, PROTOCOL_VERSION, RunDir

if TYPE_CHECKING:
    from windrow_sidecar._core import Arena
    from windrow_sidecar.compute.partition import Partition
    from windrow_sidecar.compute.sharing import Sharing
    from windrow_sidecar.engines.profile import Subject
    from windrow_sidecar.engines.sglang.harvesting import SchedulerHarvest
    from windrow_sidecar.engines.sglang.weights import SharedModel
    from windrow_sidecar.qos.levels import Partitioning

_log = logging.getLogger(__name__)

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
# Transfers that were given up may still write for a while; their pages are not lent before.
_TRANSFER_GUARD_NS = 60_000_000_000


def register() -> None:
    """Hook the scheduler's making, in processes that have one, where there is a run directory."""
    root = os.environ.get(ENV_RUN_DIR)
    if not root or _SCHEDULER_MODULE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from windrow_sidecar.engines.sglang.compat import SCHEDULER

    plugin = Plugin(RunDir(Path(root)), os.environ)
    HookRegistry.register(f"{SCHEDULER}.__init__", plugin.make_scheduler, HookType.AROUND)


@dataclass(frozen=True, slots=True)
class _Ground:
    """The device as decode shares it."""

    partition: Partition
    splits: Partitioning
    finetune_levels: tuple[int, ...]
    label: str
    driver: str
    background_threads: Callable[[], AbstractContextManager[None]]
    sharing: Sharing | None = None  # of a GPU


@dataclass(slots=True)
class Plugin:
    """One scheduler process's state.

    Attributes:
        off: why nothing is harvested; "" while all is well.
    """

    run_dir: RunDir
    environment: Mapping[str, str]
    off: str = ""
    args: Any = None
    arena: Arena | None = None
    weights: SharedModel | None = None
    allocator_class: type[Any] | None = None
    harvest: SchedulerHarvest | None = None
    scheduler: Any = None
    fingerprint: str = ""  # of the served checkpoint

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
        if not self.off:
            self._guarded("not started", self._start)

    def _prepare(self, server_args: Any) -> None:  # noqa: ANN401
        from windrow_sidecar.engines.sglang import compat

        self.args = server_args
        insisted = self.environment.get(compat.ENV_UNTESTED) == "1"
        compat.check_version(version("sglang"), insisted=insisted)
        compat.check_names()
        compat.check_arguments(server_args)
        if not os.access(self.run_dir.root, os.W_OK):
            from windrow.errors import UserError

            raise UserError(
                f"{self.run_dir.root} is not there, or this process may not write to it",
                field=ENV_RUN_DIR,
                remedy="Mount the directory that decode and sidecar share, or unset the variable.",
            )
        self._hook()

    def _hook(self) -> None:
        """Put the hooks in place; raises where SGLang's registry did not take one."""
        from pkgutil import resolve_name

        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from windrow.errors import InvariantBroken
        from windrow_sidecar.engines.sglang import compat

        around, before, after = HookType.AROUND, HookType.BEFORE, HookType.AFTER
        hooks: list[tuple[str, Callable[..., Any], Any]] = [
            (f"{compat.POOL}._create_buffers", self.create_buffers, around),
            (f"{compat.PLATFORM}.get_paged_allocator_cls", self.paged_allocator, after),
            (f"{compat.PLATFORM}.post_load_model", self.post_load_model, after),
            (f"{compat.SCHEDULER}.run_batch", self.run_batch, before),
            (f"{compat.SCHEDULER}.process_batch_result", self.process_batch_result, after),
            (f"{compat.SCHEDULER}.on_idle", self.on_idle, before),
            (f"{compat.SCHEDULER}.process_decode_queue", self.process_decode_queue, around),
            (f"{compat.SCHEDULER}.get_next_batch_to_run", self.get_next_batch, before),
            (f"{compat.CHECKER}._check_full_pool", self.check_full_pool, before),
            (f"{compat.OBSERVER}._get_token_info", self.token_info, after),
            (f"{compat.SLEEPER}.maybe_sleep", self.maybe_sleep, around),
        ]
        hooks += [
            (f"{compat.UPDATER}.{name}", self.before_weight_update, before)
            for name in (
                "update_weights_from_disk",
                "update_weights_from_distributed",
                "update_weights_from_tensor",
                "update_weights_from_ipc",
                "begin_weight_update",
            )
        ]
        before_ours = {path: resolve_name(path) for path, _, _ in hooks}
        for path, hook, kind in hooks:
            HookRegistry.register(path, hook, kind)
        HookRegistry.apply_hooks()
        missing = [path for path, found in before_ours.items() if resolve_name(path) is found]
        if missing:
            raise InvariantBroken(f"SGLang did not take the hooks on {', '.join(missing)}")

    # What SGLang calls while it makes its scheduler:

    def post_load_model(self, _result: None, _platform: Any, model: Any) -> None:  # noqa: ANN401
        """The weights are loaded: share them, if they are the checkpoint's."""
        if self.off or self.weights is not None:
            return
        from windrow.errors import UserError
        from windrow_sidecar.engines.fingerprint import model_fingerprint
        from windrow_sidecar.engines.sglang.pool import driver_of
        from windrow_sidecar.engines.sglang.weights import share_model

        try:
            folder = _model_folder(self.args)
            self.fingerprint = model_fingerprint(folder)
            device = str(next(model.parameters()).device)
            self.weights = share_model(model, folder, driver_of(device))
        except UserError as error:
            _log.warning("windrow: %s", error)
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("weights could not be shared", error)

    def create_buffers(self, original: Callable[..., None], pool: Any) -> None:  # noqa: ANN401
        """The KV pool takes its memory: the arena's, where it is a pool that can be lent."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        if self.off or self.arena is not None or type(pool) is not MHATokenToKVPool:
            original(pool)
            return
        arena = None
        try:
            from windrow_sidecar.engines.sglang.allocator import allocator_class
            from windrow_sidecar.engines.sglang.pool import make_arena, use_arena

            arena = make_arena(pool)
            use_arena(pool, arena)
            self.allocator_class = allocator_class(arena, self._fence)
            self.arena = arena
        except Exception as error:  # noqa: BLE001 - serving goes on whatever it is
            self._switch_off("the KV pool cannot lie in an arena", error)
            original(pool)

    def paged_allocator(self, result: Any, *_: Any) -> Any:  # noqa: ANN401
        """Which allocator serves the pool."""
        return self.allocator_class if result is None else None

    # What SGLang calls while it serves:

    def run_batch(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Before each batch."""
        if self.harvest is not None and not self.off:
            self._guarded_step(self.harvest.before_batch, scheduler, batch)

    def process_batch_result(
        self,
        _result: None,
        _scheduler: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        *_: Any,  # noqa: ANN401
    ) -> None:
        """After each batch."""
        if self.harvest is not None and not self.off:
            self._guarded_step(self.harvest.after_batch, batch)

    def on_idle(self, _scheduler: Any) -> None:  # noqa: ANN401
        """Nothing runs."""
        if self.harvest is not None and not self.off:
            self._guarded_step(self.harvest.idle)

    def process_decode_queue(self, original: Callable[..., None], scheduler: Any) -> None:  # noqa: ANN401
        """Before a decode instance admits requests: the safe point."""
        if self.harvest is not None:
            self._guarded_step(self.harvest.between_batches, scheduler)
            if self.harvest.holds_admission:
                return
        original(scheduler)

    def get_next_batch(self, scheduler: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Before an instance that also prefills admits requests: the safe point."""
        if self.harvest is not None:
            self._guarded_step(self.harvest.between_batches, scheduler)

    def check_full_pool(
        self,
        checker: Any,  # noqa: ANN401
        ps: Any,  # noqa: ANN401
        uncached: int = 0,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """SGLang counts its tokens: lent ones are held by somebody, not leaked."""
        lent = getattr(checker.token_to_kv_pool_allocator, "lent_tokens", 0)
        return ((checker, ps), {"uncached": uncached + lent}) if lent else None

    def token_info(self, stats: Any, observer: Any) -> Any:  # noqa: ANN401
        """SGLang's figures of load: lent tokens are not in use by requests."""
        lent = getattr(observer.token_to_kv_pool_allocator, "lent_tokens", 0)
        if not lent:
            return None
        import dataclasses

        used = stats.full_num_used - lent
        usage = used / observer.max_total_num_tokens
        return dataclasses.replace(stats, full_num_used=used, full_token_usage=usage)

    def maybe_sleep(self, original: Callable[..., None], sleeper: Any) -> None:  # noqa: ANN401
        """An idle scheduler sleeps for a second: too long for somebody who reads its heartbeat."""
        if self.harvest is None or not self.harvest.is_awake:
            original(sleeper)
            return
        from windrow_sidecar.engines.sglang.harvesting import IDLE_POLL_MS

        sleeper.poller.poll(IDLE_POLL_MS)

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

    def _start(self) -> None:
        """The scheduler is made: probe it, build the hook, and let a worker and the agent come."""
        from windrow.errors import UserError

        scheduler = self.scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        if self.arena is None or not isinstance(allocator, self.allocator_class or ()):
            kind = type(allocator.get_kvcache()).__name__
            raise UserError(
                f"the model's KV lies in a {kind} behind a {type(allocator).__name__}",
                remedy="Serve a model with plain multi-head or grouped-query attention.",
            )
        _probe(scheduler, allocator)
        ground = self._ground()
        self._open(scheduler, allocator, ground)

    def _open(self, scheduler: Any, allocator: Any, ground: _Ground) -> None:  # noqa: ANN401
        from windrow.eventlog import EventLog
        from windrow_sidecar.engines.builtin.logflush import LogFlusher
        from windrow_sidecar.engines.harvest import EngineAgentLink, HarvestHook, HarvestSettings
        from windrow_sidecar.engines.harvest.link import Profile
        from windrow_sidecar.engines.hook import FailClosed
        from windrow_sidecar.engines.profile import Subject
        from windrow_sidecar.engines.sglang.harvesting import HarvestParts, SchedulerHarvest
        from windrow_sidecar.engines.sglang.learning import SoloLearner

        assert self.arena is not None
        subject = Subject(
            device=ground.label,
            driver=ground.driver.partition(":")[0],
            engine="sglang",
            engine_version=version("sglang"),
            model_fingerprint=self.fingerprint,
        )
        profile = self._kept_profile(subject)
        log_dir = self.environment.get(ENV_LOG_DIR)
        source = self.environment.get(ENV_POD_NAME) or f"sglang-{self.args.port}"
        log = EventLog(Path(log_dir) / f"{source}.events.jsonl", source=source) if log_dir else None
        settings = HarvestSettings(max_batch=scheduler.max_running_requests)
        inner = HarvestHook(self.arena, ground.splits, profile, settings, log=log)
        hook = FailClosed(inner, on_failure=self._failed)
        reported = Profile(subject.key, json.dumps(profile)) if profile else None
        link = EngineAgentLink(
            self.run_dir.agent_socket, self._hello(subject, ground), inner, reported
        )
        parts = HarvestParts(
            inner=inner,
            hook=hook,
            link=link,
            partition=ground.partition,
            splits=ground.splits,
            subject=subject,
            arena=self.arena,
            allocator=allocator,
            log=log,
            keep_profile=self._keep_profile,
            reserved_tokens=self.args.num_reserved_decode_tokens,
        )
        # All of it before a worker can attach.
        if self.weights is not None:
            self.arena.export("weights", self.weights.shared.fd, n_bytes=self.weights.n_bytes)
            self.weights.write_manifest(self.run_dir.weights_manifest(), self.fingerprint)
        else:
            self.run_dir.weights_manifest().unlink(missing_ok=True)
        self.arena.serve(str(self.run_dir.arena_socket()))
        learner = None if profile else SoloLearner(ground.splits)
        self.harvest = SchedulerHarvest(parts, learner)
        with ground.background_threads():
            if log is not None:
                LogFlusher(log)  # its thread writes for as long as this process lives
            link.start()
        g = self.arena.geometry
        _log.info(
            "windrow: %d chunks of %d tokens can be lent; weights are %s",
            g.chunks - 1,
            g.slots_per_chunk,
            "shared" if self.weights is not None else "not shared",
        )

    def _hello(self, subject: Subject, ground: _Ground) -> Any:  # noqa: ANN401
        from windrow.proto import agent_pb2
        from windrow_sidecar import _core

        assert self.arena is not None
        return agent_pb2.EngineHello(
            protocol_version=PROTOCOL_VERSION,
            slot=0,
            pid=os.getpid(),
            engine=subject.engine,
            engine_version=subject.engine_version,
            model=str(self.args.model_path),
            model_fingerprint=subject.model_fingerprint,
            device=subject.device,
            driver=subject.driver,
            compute_units=ground.splits.units,
            finetune_levels=ground.finetune_levels,
            chunk_bytes=self.arena.geometry.chunk_bytes,
            chunks=self.arena.geometry.chunks,
            tensor_parallel=1,
            endpoint=f"http://{self.args.host}:{self.args.port}",
            arena_socket=str(self.run_dir.arena_socket()),
            weights_manifest=str(self.run_dir.weights_manifest()),
            sharing=ground.sharing.mode if ground.sharing else "",
            sharing_reason=ground.sharing.reason if ground.sharing else "",
            device_uuid=_core.driver(ground.driver).facts["uuid"],
        )

    def _ground(self) -> _Ground:
        """How decode shares its device. Raises UserError where it cannot."""
        import torch

        assert self.arena is not None
        driver = self.arena.driver
        if driver == "host":
            from windrow_sidecar.compute.host import HostPartition
            from windrow_sidecar.engines.profile import host_splits

            most = torch.get_num_threads()  # what whoever started the server has chosen
            host = HostPartition.from_affinity(
                "decode", set_threads=lambda n: torch.set_num_threads(min(n, most))
            )
            units = host.total_units
            return _Ground(
                host,
                host_splits(units),
                host.levels()[:-1],
                f"host:{units}-cores",
                driver,
                host.background_threads,
            )
        from windrow_sidecar.engines.builtin.device import open_gpu

        gpu = open_gpu(driver, torch.bfloat16)
        return _Ground(
            gpu.partition,
            gpu.splits,
            gpu.finetune_levels,
            gpu.label,
            driver,
            nullcontext,
            gpu.sharing,
        )

    def _fence(self) -> Callable[[int], bool]:
        """A check that the batches launched so far, and transfers given up, write no more."""
        import torch

        until_ns = 0
        if self.args.disaggregation_mode == "decode":
            fake = self.args.disaggregation_transfer_backend == "fake"
            until_ns = 0 if fake else time.monotonic_ns() + _TRANSFER_GUARD_NS
        if self.arena is None or self.arena.driver == "host":
            return lambda now_ns: now_ns >= until_ns
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.scheduler.forward_stream)
        return lambda now_ns: now_ns >= until_ns and bool(event.query())

    def _profile_path(self) -> Path:
        return self.run_dir.root / "profile-0.json"

    def _kept_profile(self, subject: Subject) -> dict[str, Any] | None:
        """The profile that an earlier start of the same kind has left."""
        try:
            kept: dict[str, Any] = json.loads(self._profile_path().read_text())
        except (OSError, ValueError):
            return None
        return kept if kept.get("key") == subject.key else None

    def _keep_profile(self, profile: Mapping[str, Any]) -> None:
        draft = self._profile_path().with_suffix(".tmp")
        try:
            draft.write_text(json.dumps(profile))
            os.replace(draft, self._profile_path())
        except OSError as error:
            _log.warning("windrow: the latency profile is not kept for the next start: %s", error)

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

    def _failed(self, reason: str) -> None:
        """The step hook has switched itself off, and has said so."""
        self.off = self.off or reason
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
        if self.harvest is not None:
            self.harvest.give_up(error)


def _probe(scheduler: Any, allocator: Any) -> None:  # noqa: ANN401
    """Allocate and free a page as SGLang does. Raises InvariantBroken when the sums do not stay."""
    from windrow.errors import InvariantBroken

    total = scheduler.max_total_num_tokens // allocator.page_size * allocator.page_size
    page = allocator.alloc(allocator.page_size)
    left = allocator.available_size()
    if page is not None:
        allocator.free(page)
    after = allocator.available_size()
    if page is None or after != total or left != total - allocator.page_size:
        raise InvariantBroken(
            f"the KV allocator does not count as SGLang's: {total} tokens, {left} less a page, "
            f"{after} with it again"
        )


def _model_folder(args: Any) -> Path:  # noqa: ANN401
    """The directory of the served checkpoint; a Hub model's is in the cache by now."""
    path = Path(args.model_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            args.model_path,
            revision=args.revision,
            cache_dir=args.download_dir,
            local_files_only=True,
        )
    )
