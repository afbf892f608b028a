"""Settings of the engine, as its command line and environment make them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windrow import builtin_engine
from windrow.errors import UserError
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR, RunDir
from windrow_sidecar.compute.sharing import ENV_PARTITION, DecodePartition, asked_partition

if TYPE_CHECKING:
    from windrow_sidecar.engines.harvest.ablation import Protection
    from windrow_sidecar.qos.predictor import PredictorForm

# Where nothing is said: (arena, block) bytes. On a GPU a block is what its virtual memory maps.
_SIZES = {"cpu": (192 << 20, 128 << 10), "cuda": (16 << 30, 2 << 20)}
_WATCHDOG_S = 300.0  # SGLang's default
_DEFERRAL_S = 0.4  # FineInfer's bound on what a request waits for finetuning


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
    watchdog_s: float = _WATCHDOG_S  # a pass in which a rank takes longer ends the engine

    @classmethod
    def from_command_line(
        cls, argv: Sequence[str] | None, environment: Mapping[str, str]
    ) -> EngineSettings:
        """Parse. argparse ends the process for what it refuses; UserError for the rest."""
        given = builtin_engine.parser().parse_args(argv)
        run_dir = environment.get(ENV_RUN_DIR)
        log_dir = environment.get(ENV_LOG_DIR)
        builtin_engine.check(given, in_pod=bool(run_dir))
        _check_model(given.model_path)
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
            watchdog_s=given.watchdog_timeout or _WATCHDOG_S,
        )


def _usual_profile(given: argparse.Namespace, *, in_pod: bool) -> str:
    """Return what is measured where nothing is said."""
    if not (in_pod or given.finetune_job):
        return "none"
    return "roofline" if given.weights_budget else "quick"


def _chosen(given: str, automatic: str) -> str:
    return automatic if given == "auto" else given


def _check_model(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"{str(folder)!r} is not a directory",
            field="--model-path",
            remedy="Name the directory of a transformers checkpoint.",
            reason="ModelNotFound",
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
