"""Finetuning in the built-in engine's own process, as the engine starts and ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from windrow.rundir import RunDir
from windrow_sidecar.engines.opening import RunningHarvest
from windrow_sidecar.engines.turns import Turns

if TYPE_CHECKING:
    from windrow_sidecar.engines.builtin.llama.model import LlamaModel
    from windrow_sidecar.engines.builtin.streamed import StreamedWeights


class InEngineFinetune(Protocol):
    """Jobs in a thread of this process (see `finetune.in_engine.builtin_host`).

    Attributes:
        turns: of the device.
        run_dir: of the pod, or one of its own where there is no pod.
    """

    turns: Turns
    run_dir: RunDir

    def serves(self, model: LlamaModel, streamed: StreamedWeights | None) -> None:
        """Note whose weights decode computes with; `streamed`: where memory holds some of them."""

    def claimed(self, run_dir: RunDir) -> None:
        """Note which slot the engine is; from here on the agent finds where to send jobs."""

    def start(self, harvest: RunningHarvest) -> None:
        """Begin to run jobs; the arena is served, and steps ask the hook."""

    def close(self) -> None:
        """Have jobs write a checkpoint and end; returns within some seconds."""

    def remove_own_files(self) -> None:
        """Remove a run directory of its own; the last call."""
