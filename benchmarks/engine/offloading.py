"""Training of a model that memory does not hold: our window of layers, accelerate, plain peft."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windrow_sidecar.compute.device import ComputeDevice

# One layer: 4 x 768^2 + 3 x 768 x 2112 weights, 28 MiB in fp32. On two cores its transfer takes
# about four forwards of 8 tokens, as on an H200 (PCIe 5) it takes four of 2,048.
LAYERS, BATCH, WIDTH = 16, 16, 8
# On a GPU; the host's width leaves one mostly idle.
WIDTH_ON_GPU = 256
CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 2112,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# A step by its number, which returns the loss; what has been moved.
Arm = tuple[Callable[[int], float], Callable[[], dict[str, float]]]


def save_model(folder: Path) -> None:
    """Write the checkpoint that all of them load."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(num_hidden_layers=LAYERS, tie_word_embeddings=False, **CONFIG)
    LlamaForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches that a step trains on.

    Attributes:
        device: that computes.
        rows: of each micro-batch.
    """

    device: ComputeDevice
    rows: int

    @property
    def width(self) -> int:
        """Tokens of a row: on a GPU so many that a layer takes about as long as its transfer."""
        return WIDTH_ON_GPU if self.device.queues else WIDTH

    def of(self, step: int) -> torch.Tensor:
        """See `batch`."""
        return batch(step, self.rows, self.width).to(self.device.torch)


def batch(step: int, rows: int, width: int) -> torch.Tensor:
    """Ids of one batch, the same however it is cut: [micro-batches, rows, width]."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(3, 256, (BATCH // rows, rows, width), generator=draw)


def adapted(model: Any) -> Any:
    """LoRA as peft makes it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=8, target_modules=LINEARS)).train()


def ours(folder: Path, batches: Batches, in_memory: int) -> Arm:
    """One step of our engine, and what its window has moved."""
    from transformers import AutoConfig

    from windrow_sidecar.finetune.adapter.adapters import Adapter, trainable
    from windrow_sidecar.finetune.data.split import Example
    from windrow_sidecar.finetune.engine.micro_batch_group import MicroBatchGroup, ModelParts
    from windrow_sidecar.finetune.engine.orders import layer_major, next_of
    from windrow_sidecar.finetune.engine.sizing import WholeRows
    from windrow_sidecar.finetune.model.around import InTurn
    from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
    from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
    from windrow_sidecar.finetune.model.loss import Head
    from windrow_sidecar.finetune.model.windowed import load_windowed
    from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
    from windrow_sidecar.finetune.tasklets import MicroBatch

    rows, config = batches.rows, AutoConfig.from_pretrained(folder)
    model, frozen = load_windowed(folder, config, room_bytes=1 << 50, device=batches.device)
    frozen.resize(in_memory)
    planned = PlannedLayers(list(model.get_decoder().layers))  # type: ignore[operator]
    tuned = adapted(model)
    stack = DecoderStack(model, InTurn(frozen, planned))
    parts = ModelParts(stack, Head(stack), Adapter(tuned))
    parameters = list(trainable(tuned).values())
    adamw = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    # Boundaries only: at this width a second forward is cheaper than the memory of the graphs.
    planned.bytes_per_token = 0

    def step(number: int) -> float:
        every = [tuple(r.tolist()) for r in batches.of(number).flatten(0, 1)]
        examples = [Example(ids, ids, "") for ids in every]
        labels = sum(len(ids) - 1 for ids in every)
        group = [
            MicroBatch(number, tuple(range(i, i + rows)), (batches.width,) * rows)
            for i in range(0, BATCH, rows)
        ]
        batch_group = MicroBatchGroup(
            parts, group, examples, TorchBoundaries(), labels_in_batch=labels, seed=0
        )
        while (tasklet := next_of(layer_major, batch_group.progress, WholeRows())) is not None:
            batch_group.run(tasklet)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return batch_group.loss / labels

    def moved() -> dict[str, float]:
        return {"hidden": frozen.moved.hidden, "moved_bytes": float(frozen.moved.n_bytes)}

    return step, moved


def theirs(folder: Path, batches: Batches) -> Arm:
    """One step of peft over accelerate's disk offload."""
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config)
    on_disk = {f"model.layers.{i}": "disk" for i in range(LAYERS)}
    rest, at = ("embed_tokens", "norm", "rotary_emb"), batches.device.torch
    here = {**{f"model.{name}": str(at) for name in rest}, "lm_head": str(at)}
    offload = folder / "offload"
    load_checkpoint_in_model(model, folder, device_map={**on_disk, **here}, offload_folder=offload)
    model.model.rotary_emb.to(at)  # the checkpoint does not have its buffers
    model.requires_grad_(requires_grad=False)
    model.tie_weights()
    tuned = adapted(model)
    with torch.no_grad():  # peft leaves adapters beside weights that are on disk without values
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                _settle(tuned, name, parameter, at)
    _offload(model.model.layers, offload, at)
    return _loop(tuned, batches), dict


def plain(folder: Path, batches: Batches) -> Arm:
    """One step of peft with every layer in memory."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).to(batches.device.torch)
    return _loop(adapted(model), batches), dict


def _loop(tuned: Any, batches: Batches) -> Callable[[int], float]:
    """Return a step as a training loop takes it, layers checkpointed."""
    tuned.gradient_checkpointing_enable({"use_reentrant": True})
    tuned.enable_input_require_grads()
    parameters = [p for p in tuned.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(number: int) -> float:
        total = 0.0
        for ids in batches.of(number):
            loss = tuned(input_ids=ids, labels=ids, use_cache=False).loss * batches.rows / BATCH
            loss.backward()
            total += float(loss.detach())
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return total

    return step


def _settle(model: Any, name: str, parameter: torch.nn.Parameter, at: torch.device) -> None:
    """Put an adapter's matrix into memory, as peft initialises it."""
    path, _, leaf = name.rpartition(".")
    made = torch.zeros(parameter.shape, device=at)
    if "lora_A" in name:
        torch.nn.init.kaiming_uniform_(made, a=5**0.5)
    setattr(model.get_submodule(path), leaf, torch.nn.Parameter(made))


def _offload(layers: Any, folder: Path, at: torch.device) -> None:
    """Hang accelerate's hook on every module of the layers that has frozen weights of its own."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    weights = OffloadedWeightsLoader(save_folder=folder)
    for path, module in layers.named_modules():
        own = list(module.named_parameters(recurse=False))
        if not own or "lora_" in path:
            continue
        prefix = f"model.layers.{path}.".replace("base_layer.", "")
        weights_map = PrefixedDataset(weights, prefix)
        hook = AlignDevicesHook(at, offload=True, weights_map=weights_map)
        add_hook_to_module(module, hook)
