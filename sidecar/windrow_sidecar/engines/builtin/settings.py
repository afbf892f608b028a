"""The engine's command line: flags named as SGLang names them, where it has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windrow.crd.values import parse_duration
from windrow.errors import UserError
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR, RunDir
from windrow_sidecar.compute.sharing import ENV_PARTITION, DecodePartition, asked_partition

if TYPE_CHECKING:
    from windrow_sidecar.engines.harvest.ablation import Protection
    from windrow_sidecar.qos.predictor import PredictorForm

_EXAMPLE = """\
example:
  python -m windrow_sidecar.engines.builtin --model-path models/windrow-tiny --port 30000 \\
      --disaggregation-mode decode --disaggregation-transfer-backend fake
  python -m windrow_sidecar.engines.builtin --model-path MODEL --device cuda --arena-bytes 46GiB
  curl localhost:30000/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "The for statement", "max_tokens": 32, "temperature": 0}'
A request with bootstrap_host or bootstrap_room counts as one whose KV a prefill instance has sent.
"""

# Where nothing is said: (arena, block) bytes. On a GPU a block is what its virtual memory maps.
_SIZES = {"cpu": (192 << 20, 128 << 10), "cuda": (16 << 30, 2 << 20)}
_DEFERRAL_S = 0.4  # FineInfer's bound on what a request waits for finetuning
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that main() has resolved; everything else takes them from here."""

    model_path: Path
    served_name: str
    host: str
    port: int
    max_running: int
    arena_bytes: int
    block_bytes: int
    page_size: int
    stream_interval: int
    prefill_tokens: int
    reserve_tokens: int
    context_length: int  # 0: the model's own
    threads: int  # at most so many compute a step; 0: as many as are found to be useful
    profile: str  # "none", "roofline", "quick", "full"
    disaggregated: bool  # prompts may arrive with their KV
    run_dir: RunDir | None  # None: an ordinary decode server, nothing is harvested
    log_dir: Path | None
    source: str  # names this engine in event logs
    device: str = "cpu"  # "cpu", "cuda:N"
    dtype: str = "float32"  # of weights and KV, as torch names it
    decode_step: str = "gathered"  # "gathered", "static"
    # Of the static step: "torch", "triton"; "auto" on a GPU: triton where it can launch a kernel.
    attention_backend: str = "torch"
    random_weights: int | None = None  # seed of made-up weights
    decode_partition: DecodePartition = "none"  # of a GPU: "green" confines it to a share of SMs
    profile_only: Path | None = None  # write the profile there and end
    harvest_predictor: PredictorForm = "windrow"  # see HarvestSettings.predictor
    harvest_without: frozenset[Protection] = frozenset()  # see HarvestSettings.without
    in_engine: bool = False  # jobs run in a thread of this process
    finetune_fused: bool = False  # and decode's products take finetune rows along
    finetune_jobs: tuple[Path, ...] = ()  # manifests; none: the agent sends jobs
    finetune_objective_s: float | None = None  # of a token, where no agent sends a policy
    finetune_policy: str = "temporal"
    ranks: int = 1  # over which the model is cut
    weights_budget_bytes: int = 0  # that weights may take; 0: all of them stay in memory
    weights_rate: int | None = None  # bytes a second that streamed layers come at, at most
    finetune_deferral_s: float = (
        _DEFERRAL_S  # that a request may wait for finetuning, of streamed layers
    )
    watchdog_s: float = 300.0  # a pass in which a rank takes longer ends the engine

    @classmethod
    def from_command_line(
        cls, argv: Sequence[str] | None, environment: Mapping[str, str]
    ) -> EngineSettings:
        """Parse. argparse ends the process for what it refuses; UserError for the rest."""
        given = _parser().parse_args(argv)
        run_dir = environment.get(ENV_RUN_DIR)
        log_dir = environment.get(ENV_LOG_DIR)
        _check(given)
        _check_finetune(given, in_pod=bool(run_dir))
        _check_streamed(given)
        _check_unused(given, in_pod=bool(run_dir))
        _check_profile(given, in_pod=bool(run_dir))
        on_gpu = given.device != "cpu"
        host_attention = _chosen(given.attention_backend, "torch")
        arena_bytes, block_bytes = _SIZES["cuda" if on_gpu else "cpu"]
        decode_partition = _decode_partition(given, environment)
        return cls(
            model_path=given.model_path,
            served_name=given.served_model_name or str(given.model_path),
            host=given.host,
            port=given.port,
            max_running=given.max_running_requests,
            arena_bytes=given.arena_bytes or arena_bytes,
            block_bytes=given.block_bytes or block_bytes,
            page_size=given.page_size,
            stream_interval=given.stream_interval,
            prefill_tokens=given.chunked_prefill_size,
            reserve_tokens=given.num_reserved_decode_tokens,
            context_length=given.context_length,
            threads=given.cpu_threads,
            profile=given.profile or _usual_profile(given, in_pod=bool(run_dir)),
            disaggregated=given.disaggregation_mode == "decode",
            run_dir=RunDir(Path(run_dir)) if run_dir and not given.profile_only else None,
            log_dir=Path(log_dir) if log_dir else None,
            source=environment.get(ENV_POD_NAME) or f"engine-{given.port}",
            device="cuda:0" if given.device == "cuda" else given.device,
            dtype=_chosen(given.dtype, "bfloat16" if on_gpu else "float32"),
            decode_step=_chosen(given.decode_step, "static" if on_gpu else "gathered"),
            attention_backend=given.attention_backend if on_gpu else host_attention,
            random_weights=given.random_weights,
            profile_only=given.profile_only,
            decode_partition=decode_partition,
            harvest_predictor=given.harvest_predictor,
            harvest_without=frozenset(given.harvest_without),
            in_engine=given.finetune != "process",
            finetune_fused=given.finetune == "fused",
            finetune_jobs=tuple(given.finetune_job),
            finetune_objective_s=given.finetune_objective,
            finetune_policy=given.finetune_policy
            or ("fineinfer" if given.weights_budget else "temporal"),
            weights_budget_bytes=given.weights_budget or 0,
            weights_rate=given.weights_rate,
            finetune_deferral_s=given.finetune_deferral or _DEFERRAL_S,
            ranks=given.tp_size,
            watchdog_s=given.watchdog_timeout,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.engines.builtin",
        description="A small decode server for Llama checkpoints, on CPU cores or on a GPU.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", "--model", type=Path, required=True, help="a transformers checkpoint")
    add("--served-model-name", default="", help="default: the model path")
    add(
        "--random-weights",
        type=int,
        metavar="SEED",
        help="make up the weights: a directory with a config.json alone will do (benchmarks)",
    )
    add("--device", type=_device, default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="of weights and KV; auto: float32 on the host, bfloat16 on a GPU",
    )
    add(
        "--decode-step",
        choices=["auto", "gathered", "static"],
        default="auto",
        help="gathered: request by request (auto on the host); static: one pass over static "
        "buffers, captured as CUDA graphs on a GPU (auto there)",
    )
    add(
        "--attention-backend",
        choices=["auto", "torch", "triton"],
        default="auto",
        help="of the static step; auto: torch on the host, triton on a GPU where it can launch a "
        "kernel, else torch",
    )
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--disaggregation-mode", choices=["null", "decode"], default="null")
    add("--disaggregation-transfer-backend", choices=["fake"], default="fake")
    add(
        "--tp-size",
        "--tensor-parallel-size",
        "--tp",
        type=_positive,
        default=1,
        metavar="RANKS",
        help="cut the model over so many ranks: processes that share the cores",
    )
    add(
        "--watchdog-timeout",
        type=_positive,
        default=300,
        metavar="SECONDS",
        help="with --tp-size: a rank that takes longer over a pass ends the engine (%(default)s)",
    )
    add("--max-running-requests", type=_positive, default=64, help="default: %(default)s")
    add(
        "--context-length",
        type=_not_negative,
        default=0,
        help="default: what model and arena allow",
    )
    add("--page-size", type=_positive, default=16, help="tokens of a KV page (%(default)s)")
    add("--stream-interval", type=_positive, default=1, help="tokens between chunks of a stream")
    add("--chunked-prefill-size", type=_positive, default=512, help="prompt tokens a step")
    add(
        "--num-reserved-decode-tokens",
        type=_positive,
        default=128,
        help="room that admission keeps for each request to grow into (%(default)s)",
    )
    add("--arena-bytes", type=n_bytes, help="memory for KV (192MiB; on a GPU 16GiB)")
    add("--block-bytes", type=n_bytes, help="K or V of a layer in a chunk (128KiB; on a GPU 2MiB)")
    add(
        "--weights-budget",
        type=n_bytes,
        metavar="BYTES",
        help="memory that weights may take, for example 2GiB, on cores: layers that do not fit are "
        "read from the checkpoint's files in each pass (default: all weights stay)",
    )
    add(
        "--weights-rate",
        type=n_bytes,
        metavar="BYTES",
        help="with --weights-budget: bytes a second that layers are read at, at most, for example "
        "1GiB (default: as fast as files are read)",
    )
    add(
        "--cpu-threads",
        type=_positive,
        default=0,
        help="threads of a step at most (default: tried out, up to one for each core)",
    )
    add(
        "--profile",
        choices=["none", "roofline", "quick", "full"],
        help="measure decode's latency before serving (roofline: the device's rates only, within a "
        "second); default: quick in a decode pod, else none. Wants a run directory, "
        "--profile-only or --finetune-job",
    )
    add("--profile-only", type=Path, metavar="FILE", help="write the profile there and end")
    add(
        "--harvest-predictor",
        choices=["windrow", "harli", "llmstation"],
        default="windrow",
        help="what steps teach the predictor beside its profile: both stages and records "
        "(%(default)s), nothing (harli), records only (llmstation)",
    )
    add(
        "--harvest-without",
        action="append",
        choices=["guard", "predictor", "handover", "reserve"],
        default=[],
        help="harvest with a protection off: for tests and benchmarks that show what it is for",
    )
    add(
        "--finetune",
        choices=["process", "in-engine", "fused"],
        default="process",
        help="where finetune jobs run: in a worker's process beside this one (%(default)s), or in "
        "a thread of this one, on cores only; fused: forward passes share decode's products",
    )
    add(
        "--finetune-job",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="with --finetune in-engine and without a sidecar: a FinetuneJob manifest to run while "
        "serving; several run one after the other",
    )
    add(
        "--finetune-objective",
        type=_seconds,
        metavar="TIME",
        help="with --finetune-job: the time per output token that decode keeps, for example 40ms",
    )
    add(
        "--finetune-policy",
        choices=["windrow", "temporal", "flexllm", "llmstation", "fineinfer", "iterations"],
        help="with --finetune-job (temporal; with --weights-budget fineinfer); flexllm with "
        "--finetune fused: windows of as many tokens as a step has room for",
    )
    add(
        "--finetune-deferral",
        type=_seconds,
        metavar="TIME",
        help="with --weights-budget: what a request may wait for finetuning, all its tokens "
        "together, for example 30s (0.4s)",
    )
    return parser


def _usual_profile(given: argparse.Namespace, *, in_pod: bool) -> str:
    """Return what is measured where nothing is said."""
    if not (in_pod or given.finetune_job):
        return "none"
    return "roofline" if given.weights_budget else "quick"


def _seconds(text: str) -> float:
    try:
        seconds = parse_duration(text).total_seconds()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 40ms") from error
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and one hour: write 40ms")
    return seconds


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid device: write cpu, cuda or cuda:1"
        )
    return text


def _chosen(given: str, automatic: str) -> str:
    return automatic if given == "auto" else given


def n_bytes(text: str) -> int:
    """Parse "131072", "128KiB", "192MiB" or "1GiB"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]iB)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 131072, 128KiB or 1GiB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def _positive(text: str) -> int:
    return _whole_number(text, least=1)


def _not_negative(text: str) -> int:
    return _whole_number(text, least=0)


def _whole_number(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}")
    return value


def _check(given: argparse.Namespace) -> None:
    if given.tp_size > 1:
        _check_ranks(given)
    if not 0 <= given.port <= 65535:
        raise UserError(f"{given.port} is not a port", field="--port", remedy="Use 1 to 65535.")
    if not given.model_path.is_dir():
        raise UserError(
            f"{str(given.model_path)!r} is not a directory",
            field="--model-path",
            remedy="Name the directory of a transformers checkpoint.",
            reason="ModelNotFound",
        )


def _check_ranks(given: argparse.Namespace) -> None:
    """Refuse what several ranks cannot do, before anything is loaded."""
    asked = (
        ("--device", given.device != "cpu", "ranks of the built-in engine run on cores only"),
        ("--decode-step", given.decode_step == "static", "a static step runs on one rank only"),
        ("--finetune", given.finetune != "process", "in-engine finetuning runs on one rank only"),
        (
            "--profile",
            given.profile == "roofline",
            "rates of one rank say nothing of several",
        ),
    )
    for field, refused, problem in asked:
        if refused:
            raise UserError(
                problem,
                field=field,
                remedy="Leave it out, or use --tp-size 1.",
                reason="TensorParallelUnsupported",
            )


def _decode_partition(given: argparse.Namespace, environment: Mapping[str, str]) -> DecodePartition:
    """Return where decode runs. Raises UserError where this command line leaves no such way."""
    wanted = asked_partition(environment)
    if wanted == "none":
        return wanted
    for field, refused, why in (
        ("--device", given.device == "cpu", "on cores decode is confined by CPU sets"),
        ("--decode-step", given.decode_step == "gathered", "decode is confined by CUDA graphs"),
    ):
        if refused:
            raise UserError(
                f"{why}: {ENV_PARTITION} cannot be {wanted} here",
                field=field,
                remedy=f"Unset {ENV_PARTITION}.",
            )
    return wanted


def _check_profile(given: argparse.Namespace, *, in_pod: bool) -> None:
    """Refuse to measure a profile that nobody reads: decode alone keeps the whole device."""
    asked = given.profile not in (None, "none")
    if asked and not (in_pod or given.profile_only or given.finetune_job):
        raise UserError(
            f"a {given.profile} profile is for sharing the device, and nothing shares it here",
            field="--profile",
            remedy=f"Add --profile-only FILE to write it, set {ENV_RUN_DIR}, or leave it out.",
        )


def _check_finetune(given: argparse.Namespace, *, in_pod: bool) -> None:
    """Refuse what in-engine finetuning cannot do, before anything is loaded."""
    if given.finetune == "process":
        if given.finetune_job:
            raise UserError(
                "only an engine that finetunes itself takes a job",
                field="--finetune-job",
                remedy="Add --finetune in-engine, or submit the job to a cluster.",
            )
        return
    if given.device != "cpu":
        raise UserError(
            "in-engine finetuning runs on cores only",
            field="--finetune",
            remedy="Use --device cpu, or leave --finetune out: a worker's process shares the GPU.",
        )
    if given.finetune == "fused" and given.decode_step == "static":
        raise UserError(
            "finetune rows join the products of a gathered step only",
            field="--decode-step",
            remedy="Use --decode-step gathered, or --finetune in-engine.",
        )
    if in_pod and given.finetune_job:
        raise UserError(
            "the sidecar of this pod sends jobs",
            field="--finetune-job",
            remedy=f"Leave it out, or unset {ENV_RUN_DIR}.",
        )
    if in_pod:
        return
    if not given.finetune_job:
        raise UserError(
            "there is no job, and no sidecar that could send one",
            field="--finetune",
            remedy=f"Add --finetune-job FILE, or set {ENV_RUN_DIR}.",
        )
    if given.finetune_objective is None:
        raise UserError(
            "there is no objective for decode to keep",
            field="--finetune-objective",
            remedy="Give the time per output token, for example --finetune-objective 40ms.",
        )


def _check_streamed(given: argparse.Namespace) -> None:
    """Refuse what streamed layers cannot do, before anything is loaded."""
    if given.weights_budget is None:
        for field, value, problem in (
            ("--weights-rate", given.weights_rate, "there is nothing to slow down"),
            ("--finetune-deferral", given.finetune_deferral, "no pass carries a finetune batch"),
        ):
            if value is not None:
                raise UserError(
                    f"all weights stay in memory: {problem}",
                    field=field,
                    remedy="Add --weights-budget, or leave it out.",
                )
        return
    if given.weights_budget == 0:
        raise UserError(
            "0 bytes hold no layer",
            field="--weights-budget",
            remedy="Give a size, for example 2GiB, or leave it out: all weights then stay.",
        )
    asked = (
        ("--device", given.device != "cpu", "layers are streamed on cores only"),
        ("--random-weights", given.random_weights is not None, "made-up weights have no file"),
        ("--tp-size", given.tp_size > 1, "layers are streamed on one rank only"),
        (
            "--profile",
            given.profile_only is not None or given.profile in ("quick", "full"),
            "a measured profile does not foretell passes that wait for files",
        ),
        (
            "--finetune-policy",
            given.finetune_policy not in (None, "fineinfer"),
            "jobs beside streamed layers run by FineInfer's rule only",
        ),
        ("--weights-rate", given.weights_rate == 0, "0 bytes a second bring no layer"),
    )
    for field, refused, problem in asked:
        if refused:
            raise UserError(
                problem,
                field=field,
                remedy="Leave it out, or leave out --weights-budget.",
                reason="StreamingUnsupported",
            )


def _check_unused(given: argparse.Namespace, *, in_pod: bool) -> None:
    """Refuse what is said of a job where the command line names none: it would change nothing."""
    if given.finetune_job:
        return
    for field, value in (
        ("--finetune-objective", given.finetune_objective),
        ("--finetune-policy", given.finetune_policy),
    ):
        if value is not None:
            raise UserError(
                "the sidecar of this pod sends the policy" if in_pod else "there is no job",
                field=field,
                remedy="Leave it out." if in_pod else "Add --finetune-job FILE, or leave it out.",
            )
