"""Command line of the built-in engine: its flags, and which of them contradict each other.

Flags are named as SGLang names them, where it has them. The engine asks this as it starts, `windrow
inject` of a manifest before there is one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from windrow.crd.values import parse_duration
from windrow.errors import UserError
from windrow.rundir import ENV_RUN_DIR

MODULE: Final = "windrow_sidecar.engines.builtin"  # what `python -m` starts
_EXAMPLE = """\
example:
  python -m windrow_sidecar.engines.builtin --model-path models/windrow-tiny --port 30000 \\
      --disaggregation-mode decode --disaggregation-transfer-backend fake
  python -m windrow_sidecar.engines.builtin --model-path MODEL --device cuda --arena-bytes 46GiB
  curl localhost:30000/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "The for statement", "max_tokens": 32, "temperature": 0}'
A request with bootstrap_host or bootstrap_room counts as one whose KV a prefill instance has sent.
"""
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
# Of the kubelet, of a shell, and what it runs: values that a manifest does not show.
_OPEN = re.compile(r"\$[({A-Za-z_]|`")


class _Parser(argparse.ArgumentParser):
    """Parser that may be asked without ending the process."""

    raises = False

    def error(self, message: str) -> NoReturn:
        """End the process with the message; raise it where that is asked."""
        if self.raises:
            raise UserError(message, remedy="Correct the engine's arguments.")
        super().error(message)


def refusal(words: Sequence[str]) -> str:
    """Return why the engine would not start in a pod with these words; empty: it would.

    Flags whose values are filled in later count as fine.
    """
    if MODULE not in words:
        return ""
    given = words[words.index(MODULE) + 1 :]
    known = _known(given)
    asked = parser()
    asked.raises = True
    for action in asked._actions:
        action.required = action.required and len(known) == len(given)
    try:
        check(asked.parse_args(known), in_pod=True)
    except UserError as error:
        return str(error)
    return ""


def _known(words: Sequence[str]) -> list[str]:
    """Return arguments without those that are filled in later, and without flags of such values."""
    known: list[str] = []
    for word in words:
        if word in ("-h", "--help"):
            continue
        if not _OPEN.search(word):
            known.append(word)
        elif not word.startswith("-") and known and re.fullmatch(r"--[^=]+", known[-1]):
            known.pop()
    return known


def parser() -> _Parser:
    """Return the parser of the engine's command line."""
    parser = _Parser(
        prog="python -m windrow_sidecar.engines.builtin",
        description="A small decode server for Llama checkpoints, on CPU cores or on a GPU.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for adds in (_add_model, _add_serving, _add_memory, _add_profile, _add_finetune):
        adds(parser.add_argument)
    return parser


def _add_model(add: Callable[..., object]) -> None:
    """Add what is said of the model, and of how it is computed."""
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


def _add_serving(add: Callable[..., object]) -> None:
    """Add what is said of requests."""
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
        metavar="SECONDS",
        help="with --tp-size: a rank that takes longer over a pass ends the engine (300)",
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


def _add_memory(add: Callable[..., object]) -> None:
    """Add what is said of memory, and of cores."""
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


def _add_profile(add: Callable[..., object]) -> None:
    """Add what is said of what decode learns of itself."""
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


def _add_finetune(add: Callable[..., object]) -> None:
    """Add what is said of jobs."""
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


def check(given: argparse.Namespace, *, in_pod: bool) -> None:
    """Refuse what cannot be honoured or would change nothing, before anything is loaded.

    Args:
        given: what `parser` has made of a command line.
        in_pod: a sidecar is beside the engine.

    Raises:
        UserError: `field` is the flag.
    """
    if given.tp_size > 1:
        _check_ranks(given)
    elif given.watchdog_timeout is not None:
        raise UserError(
            "one rank has no other to wait for",
            field="--watchdog-timeout",
            remedy="Leave it out, or cut the model over several with --tp-size.",
        )
    if not 0 <= given.port <= 65535:
        raise UserError(f"{given.port} is not a port", field="--port", remedy="Use 1 to 65535.")
    _check_finetune(given, in_pod=in_pod)
    _check_streamed(given)
    _check_unused(given, in_pod=in_pod)
    _check_profile(given, in_pod=in_pod)


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
    _refuse(asked, "Leave it out, or use --tp-size 1.", reason="TensorParallelUnsupported")


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
            "no job is named, and no sidecar sends one",
            field="--finetune",
            remedy=f"Add --finetune-job FILE, or set {ENV_RUN_DIR}.",
        )
    if given.finetune_objective is None:
        raise UserError(
            "decode has no objective to keep",
            field="--finetune-objective",
            remedy="Give the time per output token, for example --finetune-objective 40ms.",
        )


def _check_streamed(given: argparse.Namespace) -> None:
    """Refuse what streamed layers cannot do, before anything is loaded."""
    if given.weights_budget is None:
        slowed, deferred = given.weights_rate is not None, given.finetune_deferral is not None
        why = "all weights stay in memory: "
        unused = (
            ("--weights-rate", slowed, f"{why}there is nothing to slow down"),
            ("--finetune-deferral", deferred, f"{why}no pass carries a finetune batch"),
        )
        _refuse(unused, "Add --weights-budget, or leave it out.")
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
    remedy = "Leave it out, or leave out --weights-budget."
    _refuse(asked, remedy, reason="StreamingUnsupported")


def _check_unused(given: argparse.Namespace, *, in_pod: bool) -> None:
    """Refuse what is said of a job where the command line names none: it would change nothing."""
    if given.finetune_job:
        return
    problem = "the sidecar of this pod sends the policy" if in_pod else "no job is named"
    unused = (
        ("--finetune-objective", given.finetune_objective is not None, problem),
        ("--finetune-policy", given.finetune_policy is not None, problem),
    )
    _refuse(unused, "Leave it out." if in_pod else "Add --finetune-job FILE, or leave it out.")


def _refuse(
    asked: Iterable[tuple[str, bool, str]], remedy: str, *, reason: str = "InvalidSpec"
) -> None:
    """Raise UserError for the first flag that is refused; `asked`: flag, whether, the problem."""
    for field, refused, problem in asked:
        if refused:
            raise UserError(problem, field=field, remedy=remedy, reason=reason)
