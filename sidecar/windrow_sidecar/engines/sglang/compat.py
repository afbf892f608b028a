"""Check that the plugin knows this version of SGLang and its command line. Changes nothing."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from windrow.errors import UserError

# Versions on which the tests of tests/sglang have passed (docs/sglang.md has the table).
TESTED = ("0.5.23",)
ENV_UNTESTED = "WINDROW_SGLANG_UNTESTED"  # "1": run on another version as well
# For how long transfers that were given up may still write: no page is lent before that.
ENV_TRANSFER_GUARD, TRANSFER_GUARD_S = "WINDROW_TRANSFER_GUARD_SECONDS", 60.0

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
CHECKER = f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker"
OBSERVER = f"{_COMPONENTS}.pool_stats_observer.SchedulerPoolStatsObserver"
SLEEPER = f"{_COMPONENTS}.idle_sleeper.IdleSleeper"
UPDATER = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
LATENT_POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
ALLOCATOR = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator"
GRAPHS_MODULE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
GRAPHS = f"{GRAPHS_MODULE}.DecodeCudaGraphRunner"
PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"

# What the plugin hooks, calls or overrides, with the parameters that it relies on.
NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"{SCHEDULER}.run_batch", ("self", "batch")),
    (f"{SCHEDULER}.process_batch_result", ("self", "batch", "result")),
    (f"{SCHEDULER}.on_idle", ("self",)),
    (f"{SCHEDULER}.process_decode_queue", ("self",)),
    (f"{SCHEDULER}.get_next_batch_to_run", ("self",)),
    (f"{CHECKER}._check_full_pool", ("self", "ps", "uncached")),
    (f"{OBSERVER}._get_token_info", ("self",)),
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
    (f"{PLATFORM}.get_graph_runner_cls", ("self",)),
    (f"{PLATFORM}.get_paged_allocator_cls", ("self",)),
    (f"{PLATFORM}.post_load_model", ("self", "model")),
)

# trtllm_mha and trtllm_mla compute on views of the pool by page, of whatever strides.
_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "trtllm_mha", "trtllm_mla")
_HOST_TRANSFERS = ("mooncake", "fake")
_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# Options that put other memory, other ranks or other loops where the plugin expects SGLang's own:
# attribute of ServerArgs, the value that is fine, what to write.
_PLAIN: tuple[tuple[str, object, str], ...] = (
    ("tp_size", 1, "--tp-size 1, and a server on each GPU"),
    ("pp_size", 1, "--pp-size 1"),
    ("dp_size", 1, "--dp-size 1, and a server on each GPU"),
    ("dcp_size", 1, "--dcp-size 1"),
    ("speculative_algorithm", None, "no --speculative-algorithm"),
    ("enable_pdmux", False, "no --enable-pdmux"),
    ("enable_memory_saver", False, "no --enable-memory-saver"),
    ("enable_unified_memory", False, "no --enable-unified-memory"),
    ("enable_page_major_kv_layout", False, "no --enable-page-major-kv-layout"),
    ("enable_hierarchical_cache", False, "no --enable-hierarchical-cache"),
    ("enable_hisparse", False, "no --enable-hisparse"),
    ("enable_dp_attention", False, "no --enable-dp-attention"),
    ("enable_kv_cache_sharding", False, "no --enable-kv-cache-sharding"),
    ("enable_pd_role_switch", False, "no --enable-pd-role-switch"),
    ("cpu_offload_gb", 0, "no --cpu-offload-gb"),
)


def check_version(version: str, *, insisted: bool) -> None:
    """Refuse a version that nobody has tested, unless the user insists. Raises UserError."""
    if version not in TESTED and not insisted:
        raise UserError(
            f"SGLang {version} is not one that the plugin was tested with ({', '.join(TESTED)})",
            remedy=f"Install one of those, or set {ENV_UNTESTED}=1 to try this one.",
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


def check_arguments(args: Any) -> None:  # noqa: ANN401  SGLang's ServerArgs
    """Refuse a command line whose KV cannot be lent. Raises UserError with what to change."""
    mode = args.disaggregation_mode
    if mode not in ("decode", "null"):
        raise UserError(
            f"a {mode} instance has no decode steps to harvest beside",
            field="--disaggregation-mode",
            remedy="Run the sidecar in the decode instances.",
        )
    if (args.page_size or 1) < 2:
        raise UserError(
            f"pages of {args.page_size} token cannot be lent in chunks",
            field="--page-size",
            remedy="Use --page-size 16 or more.",
        )
    for name, fine, remedy in _PLAIN:
        value = getattr(args, name, fine)
        if value != fine and not (fine in (False, None) and not value):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{value} is not supported yet", field=flag, remedy=f"Use {remedy}.")
    backend = args.disaggregation_transfer_backend
    if mode == "decode" and args.device == "cpu" and backend not in _HOST_TRANSFERS:
        raise UserError(
            f"untested: transfers by {backend} into the memory of cores beside lent chunks",
            field="--disaggregation-transfer-backend",
            remedy=f"Use {' or '.join(_HOST_TRANSFERS)}, or decode on a GPU.",
        )
    if args.kv_cache_dtype not in _KV_DTYPES:
        raise UserError(
            f"KV of {args.kv_cache_dtype} has a layout that the plugin does not know",
            field="--kv-cache-dtype",
            remedy="Use --kv-cache-dtype auto or fp8_e4m3.",
        )
    for field in ("attention_backend", "decode_attention_backend"):
        if (backend := getattr(args, field, None)) not in (None, *_BACKENDS):
            raise UserError(
                f"the plugin does not know how {backend} lays out KV",
                field="--" + field.replace("_", "-"),
                remedy=f"Use one of {', '.join(_BACKENDS)}.",
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
            f"{text!r} is no number of seconds",
            field=ENV_TRANSFER_GUARD,
            remedy="Write for how long a transfer that was given up may still write: 60.",
        )
    return int(seconds * 1e9)


def _changed(what: str) -> UserError:
    return UserError(
        f"this SGLang differs from what the plugin knows: {what}",
        remedy=f"Install SGLang {TESTED[-1]}.",
    )
