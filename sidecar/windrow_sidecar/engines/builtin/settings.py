"""The engine's command line: flags named as SGLang names them, where it has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windrow.errors import UserError
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR, RunDir

_EXAMPLE = """\
example:
  python -m windrow_sidecar.engines.builtin --model-path models/windrow-tiny --port 30000 \\
      --disaggregation-mode decode --disaggregation-transfer-backend fake
  curl localhost:30000/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "The for statement", "max_tokens": 32, "temperature": 0}'
A request with bootstrap_host or bootstrap_room counts as one whose KV a prefill instance has sent.
"""

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What main() has found out; everything else flows from it."""

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
    profile: str  # "none", "quick", "full"
    disaggregated: bool  # prompts may arrive with their KV
    run_dir: RunDir | None  # None: an ordinary decode server, nothing is harvested
    log_dir: Path | None
    source: str  # names this engine in event logs

    @classmethod
    def from_command_line(
        cls, argv: Sequence[str] | None, environment: Mapping[str, str]
    ) -> EngineSettings:
        """Parse. argparse ends the process for what it refuses; UserError for the rest."""
        given = _parser().parse_args(argv)
        run_dir = environment.get(ENV_RUN_DIR)
        log_dir = environment.get(ENV_LOG_DIR)
        _check(given)
        return cls(
            model_path=given.model_path,
            served_name=given.served_model_name or str(given.model_path),
            host=given.host,
            port=given.port,
            max_running=given.max_running_requests,
            arena_bytes=given.arena_bytes,
            block_bytes=given.block_bytes,
            page_size=given.page_size,
            stream_interval=given.stream_interval,
            prefill_tokens=given.chunked_prefill_size,
            reserve_tokens=given.num_reserved_decode_tokens,
            context_length=given.context_length,
            threads=given.cpu_threads,
            profile=given.profile or ("quick" if run_dir else "none"),
            disaggregated=given.disaggregation_mode == "decode",
            run_dir=RunDir(Path(run_dir)) if run_dir else None,
            log_dir=Path(log_dir) if log_dir else None,
            source=environment.get(ENV_POD_NAME) or f"engine-{given.port}",
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.engines.builtin",
        description="A small decode server for Llama checkpoints on CPU cores.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", "--model", type=Path, required=True, help="a transformers checkpoint")
    add("--served-model-name", default="", help="default: the model path")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--disaggregation-mode", choices=["null", "decode"], default="null")
    add("--disaggregation-transfer-backend", choices=["fake"], default="fake")
    add("--tp-size", "--tensor-parallel-size", type=int, default=1, help="only 1")
    add("--max-running-requests", type=_positive, default=64, help="default: %(default)s")
    add("--context-length", type=int, default=0, help="default: what model and arena allow")
    add("--page-size", type=_positive, default=16, help="tokens of a KV page (%(default)s)")
    add("--stream-interval", type=_positive, default=1, help="tokens between chunks of a stream")
    add("--chunked-prefill-size", type=_positive, default=512, help="prompt tokens a step")
    add(
        "--num-reserved-decode-tokens",
        type=_positive,
        default=128,
        help="room that admission keeps for each request to grow into (%(default)s)",
    )
    add("--arena-bytes", type=n_bytes, default="192MiB", help="memory for KV (%(default)s)")
    add("--block-bytes", type=n_bytes, default="128KiB", help="K or V of a layer in a chunk")
    add(
        "--cpu-threads",
        type=_positive,
        default=0,
        help="threads of a step at most (default: tried out, up to one for each core)",
    )
    add(
        "--profile",
        choices=["none", "quick", "full"],
        help="measure decode's latency before serving; default: quick in a decode pod, else none",
    )
    return parser


def n_bytes(text: str) -> int:
    """Parse "131072", "128KiB", "192MiB" or "1GiB"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]iB)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 131072, 128KiB or 1GiB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _check(given: argparse.Namespace) -> None:
    if given.tp_size != 1:
        raise UserError(
            f"tensor parallelism over {given.tp_size} ranks is not supported",
            field="--tp-size",
            remedy="Use 1.",
            reason="TensorParallelUnsupported",
        )
    if not 0 <= given.port <= 65535:
        raise UserError(f"{given.port} is no port", field="--port", remedy="Use 1 to 65535.")
    if not given.model_path.is_dir():
        raise UserError(
            f"{str(given.model_path)!r} is not a directory",
            field="--model-path",
            remedy="Name the directory of a transformers checkpoint.",
            reason="ModelNotFound",
        )
