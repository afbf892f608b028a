"""Published figures of a GPU and of a model, and what a decode step and a tasklet take of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from windrow.errors import UserError

BLOCK_BYTES = 2 << 20  # the smallest memory that CUDA maps


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Published figures of a GPU; none of them was measured by this project.

    Attributes:
        sms: streaming multiprocessors.
        sm_group: the fewest SMs that a green context takes; shares are so many, twice as many, ...
        bandwidth_gb_s: of its memory.
        tflops: dense bf16 with fp32 accumulation.
        memory_gb: of the card.
        host_gb_s: over PCIe, one way, as copies reach it.
        dollars_per_hour: a price to compute with where `--price` gives none (a round figure of the
            on-demand market of 2025, no quotation).
        source: where the figures are published.
        peer_gb_s: to other GPUs of its group, one way: NVLink's published rate, or PCIe's.
    """

    name: str
    sms: int
    sm_group: int
    bandwidth_gb_s: float
    tflops: float
    memory_gb: float
    host_gb_s: float
    dollars_per_hour: float
    source: str
    peer_gb_s: float = 25.0


GPUS: dict[str, GpuFigures] = {
    gpu.name: gpu
    for gpu in (
        GpuFigures(
            *("A100-80G", 108, 4, 2039.0, 312.0, 80.0, 25.0, 1.8),
            "NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB)",
            300.0,
        ),
        GpuFigures(
            *("H100", 132, 8, 3350.0, 989.0, 80.0, 55.0, 2.5),
            "NVIDIA H100 Tensor Core GPU datasheet (SXM)",
            450.0,
        ),
        GpuFigures(
            *("H200", 132, 8, 4800.0, 989.0, 141.0, 55.0, 3.5),
            "NVIDIA H200 Tensor Core GPU datasheet (SXM)",
            450.0,
        ),
        GpuFigures(
            *("L40S", 142, 4, 864.0, 362.0, 48.0, 25.0, 0.9),
            "NVIDIA L40S GPU datasheet",
        ),
        GpuFigures(
            *("RTX-6000-Ada", 142, 4, 960.0, 364.0, 48.0, 25.0, 0.8),
            "NVIDIA RTX 6000 Ada Generation datasheet; Ada architecture whitepaper",
        ),
        GpuFigures(
            *("RTX-3090", 82, 4, 936.0, 71.0, 24.0, 25.0, 0.2),
            "NVIDIA Ampere GA102 architecture whitepaper",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Sizes of a dense decoder in bf16; `kv_heads * head_dim` is the width of K and of V."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    def cut(self, ranks: int) -> ModelFigures:
        """Return the part that one of so many ranks has, as SGLang cuts a model.

        Activations between layers are whole on every rank.

        Raises:
            UserError: its key-value heads cannot be shared evenly.
        """
        if self.kv_heads % ranks or self.heads % ranks:
            raise UserError(
                f"{ranks} ranks cannot share the {self.kv_heads} key-value heads of {self.name}",
                field="ranks",
                remedy="Choose a number that divides them.",
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate=self.intermediate // ranks,
            vocabulary=self.vocabulary // ranks,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's projections."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_bytes(self) -> int:
        """Frozen bytes of one layer."""
        return 2 * self.layer_parameters

    @property
    def step_parameters(self) -> int:
        """Read by each decode step: the layers and the output projection, not the embedding."""
        return self.layers * self.layer_parameters + self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the card."""
        return 2 * (self.step_parameters + (0 if self.tied else self.hidden * self.vocabulary))

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def chunk_bytes(self) -> int:
        """Two blocks of 2 MiB for every layer."""
        return 2 * self.layers * BLOCK_BYTES

    @property
    def chunk_tokens(self) -> int:
        """Token slots of a chunk."""
        return self.chunk_bytes // self.kv_token_bytes

    @property
    def train_flops_per_token(self) -> float:
        """LoRA on frozen weights: a forward and the gradients of the activations, no others.

        Twice the parameters each way, and 4% for attention and adapters (63.9 TFLOP for 2,048
        tokens of Llama-3-8B).
        """
        return 1.04 * 4 * self.step_parameters

    @property
    def train_bytes_per_token(self) -> float:
        """Memory traffic of finetuning: 122 GB for 2,048 tokens of Llama-3-8B, by its size."""
        return 122e9 / 2048 * self.step_parameters / 7.5e9

    @property
    def boundary_bytes_per_token(self) -> int:
        """Activations between layers, all that must be kept when each layer is computed again."""
        return 2 * self.hidden * self.layers

    @property
    def kept_bytes_per_token(self) -> int:
        """Activations of layers whose backward computes no matrix product again.

        Two residual inputs, q, k, v, the output of attention, gate and up.
        """
        width = 2 * self.hidden + self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2 * (width + 2 * self.intermediate) * self.layers


MODELS: dict[str, ModelFigures] = {
    model.name: model
    for model in (
        ModelFigures("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        ModelFigures("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064),
        ModelFigures("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064),
        ModelFigures("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064),
        ModelFigures("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000),
        ModelFigures("llama-3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    )
}


def gpu_named(name: str) -> GpuFigures:
    """Return the figures of a GPU. Raises UserError for one that is not known."""
    return _named(GPUS, name, "--gpu")


def model_named(name: str) -> ModelFigures:
    """Return the sizes of a model. Raises UserError for one that is not known."""
    return _named(MODELS, name, "--model")


_T = TypeVar("_T")


def _named(known: Mapping[str, _T], name: str, option: str) -> _T:
    for key, value in known.items():
        if key.lower() == name.lower():
            return value
    raise UserError(
        f"{name!r} is not known", field=option, remedy=f"Choose one of: {', '.join(known)}."
    )
