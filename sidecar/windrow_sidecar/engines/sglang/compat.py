"""Check that the plugin knows this version of SGLang and its command line. Changes nothing."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from windrow.errors import UserError
from windrow.sglang import (
    ENV_UNTESTED,
    TESTED,
    check_arguments,
    check_speculation,
    check_version,
)

__all__ = [
    "ENV_UNTESTED",
    "TESTED",
    "check_arguments",
    "check_names",
    "check_speculation",
    "check_version",
]

# For how long transfers that were given up may still write: no page is lent before that.
ENV_TRANSFER_GUARD, TRANSFER_GUARD_S = "WINDROW_TRANSFER_GUARD_SECONDS", 60.0

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
CHECKER = f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker"
RECEIVER = f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver"
OBSERVER = f"{_COMPONENTS}.pool_stats_observer.SchedulerPoolStatsObserver"
SLEEPER = f"{_COMPONENTS}.idle_sleeper.IdleSleeper"
UPDATER = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
LATENT_POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
ALLOCATOR = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator"
WINDOWS_ALLOCATOR = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"
GRAPHS_MODULE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
GRAPHS = f"{GRAPHS_MODULE}.DecodeCudaGraphRunner"
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"
SPECULATION = "sglang.srt.runtime_context.get_spec"
PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"

# What the plugin hooks, calls or overrides, with the parameters that it relies on.
NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"{SCHEDULER}.run_batch", ("self", "batch")),
    (f"{SCHEDULER}.process_batch_result", ("self", "batch", "result")),
    (f"{SCHEDULER}.on_idle", ("self",)),
    (f"{SCHEDULER}.process_decode_queue", ("self",)),
    (f"{SCHEDULER}.get_next_batch_to_run", ("self",)),
    (f"{RECEIVER}._broadcast_reqs_across_ranks", ("self", "recv_reqs", "local_reqs")),
    (f"{CHECKER}._check_full_pool", ("self", "ps", "uncached")),
    (f"{OBSERVER}._get_token_info", ("self",)),
    (f"{OBSERVER}._get_mamba_token_info", ("self",)),
    (f"{OBSERVER}._get_swa_token_info", ("self",)),
    (f"{SLEEPER}.maybe_sleep", ("self",)),
    (f"{UPDATER}.update_weights_from_disk", ("self",)),
    (f"{UPDATER}.update_weights_from_distributed", ("self",)),
    (f"{UPDATER}.update_weights_from_tensor", ("self",)),
    (f"{UPDATER}.update_weights_from_ipc", ("self",)),
    (f"{UPDATER}.begin_weight_update", ("self",)),
    (f"{POOL}._create_buffers", ("self",)),
    (f"{LATENT_POOL}._create_buffers", ("self",)),
    (f"{POOL}._build_kv_buffer_descs", ("self",)),
    (f"{POOL}._init_data_ptrs_and_strides", ("self",)),
    (f"{ALLOCATOR}.__init__", ("self", "size", "page_size", "dtype", "device", "kvcache")),
    (f"{WINDOWS_ALLOCATOR}.__init__", ("self", "size", "size_swa", "page_size")),
    (f"{ALLOCATOR}.available_size", ("self",)),
    (f"{ALLOCATOR}.clear", ("self",)),
    (f"{ALLOCATOR}.alloc", ("self", "need_size")),
    (f"{ALLOCATOR}.alloc_extend", ("self", "prefix_lens", "prefix_lens_cpu", "seq_lens")),
    (f"{ALLOCATOR}.alloc_decode", ("self", "seq_lens", "seq_lens_cpu", "last_loc")),
    (f"{ALLOCATOR}.get_all_free_pages", ("self",)),
    (f"{GRAPHS}.capture", ("self",)),
    (f"{GRAPHS}.load_batch", ("self", "forward_batch")),
    (
        f"{GRAPHS}._make_graph_key",
        ("self", "size", "stream_idx", "variant_label", "attention_variant"),
    ),
    (f"{GRAPHS_MODULE}.get_or_create_global_graph_capture_stream", ()),
    (RESERVE, ()),
    (SPECULATION, ()),
    (f"{PLATFORM}.get_graph_runner_cls", ("self",)),
    (f"{PLATFORM}.get_paged_allocator_cls", ("self",)),
    (f"{PLATFORM}.post_load_model", ("self", "model")),
)


def check_names(resolve: Callable[[str], Any] = pkgutil.resolve_name) -> None:
    """Refuse an SGLang in which something that the plugin uses is missing or takes other arguments.

    Raises UserError.
    """
    for path, wanted in NAMES:
        try:
            parameters = [*inspect.signature(resolve(path)).parameters]
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise _changed(f"{path} is not there ({error})") from error
        if parameters[: len(wanted)] != [*wanted]:
            raise _changed(f"{path} takes {parameters}, not {[*wanted]} first")


def check_load_format(args: Any) -> None:  # noqa: ANN401
    """Refuse to share weights that SGLang has made up: no file has them, so none can be found.

    Raises UserError.
    """
    if str(args.load_format) == "dummy":
        raise UserError(
            "the served weights cannot be shared: SGLang has made them up",
            field="--load-format dummy",
            remedy="Leave it out to serve the checkpoint. With it a worker reads the checkpoint's "
            "files into memory of its own, and trains on weights that decode does not serve.",
        )


def transfer_guard_ns(environment: Mapping[str, str], args: Any) -> int:  # noqa: ANN401
    """Return for how long a chunk waits before it is lent, in nanoseconds.

    Raises:
        UserError: the environment has no number of seconds for it.
    """
    if args.disaggregation_mode != "decode" or args.disaggregation_transfer_backend == "fake":
        return 0
    text = environment.get(ENV_TRANSFER_GUARD, "")
    try:
        seconds = float(text) if text else TRANSFER_GUARD_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UserError(
            f"{text!r} is not a number of seconds",
            field=ENV_TRANSFER_GUARD,
            remedy="Write for how long a transfer that was given up may still write: 60.",
        )
    return int(seconds * 1e9)


def _changed(what: str) -> UserError:
    return UserError(
        f"this SGLang differs from what the plugin knows: {what}",
        remedy=f"Install SGLang {TESTED[-1]}.",
    )
