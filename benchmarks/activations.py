"""Memory of one real-size layer of a 70B model, from its forward to its backward.

The layer is a Llama's (hidden 8192, 64 heads, 8 KV heads, intermediate 28672) in bf16 with LoRA of
rank 16 on all linears, 1,024 tokens; peft's default ran in the same run. Live bytes are followed
operation by operation: everything that was made since the forward began and has not gone, weights
and the layer's input excepted. Takes about 4 GB of the device's memory (`--driver`).
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import (
    DRIVER_HELP,
    Baseline,
    Result,
    arguments,
    environment,
    write,
)
from windrow.errors import UserError
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.finetune.model.key_values import KeyValues
from windrow_sidecar.finetune.model.window_attention import looking_back
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.recompute.planning import largest, smallest
from windrow_sidecar.finetune.recompute.recording import record
from windrow_sidecar.finetune.tasklets import TokenWindow

LLAMA_70B = {"hidden": 8192, "heads": 64, "kv_heads": 8, "intermediate": 28672}
SMALL = {"hidden": 512, "heads": 8, "kv_heads": 2, "intermediate": 1792}
RANK, TOKENS = 16, 1024
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The first is the goal's; the others, how far it goes.
WINDOWS = (128, 64, 32)
KEPT_GOAL_KIB, PEAK_GOAL = 185.0, 0.80
# Of bf16 gradients, whose sums run over other pieces.
WINDOWS_APART = 0.02


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is made inside: how many bytes live now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """Bytes of storages that were made inside and have not gone."""
        self._live = {k: (r, n) for k, (r, n) in self._live.items() if not r.expired()}  # type: ignore[no-untyped-call]
        return sum(n for _, n in self._live.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is(t)}
        made = func(*args, **(kwargs or {}))
        for tensor in filter(_is, tree_leaves(made)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, self.now)
        return made


def _is(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


@dataclass
class Layer:
    """One decoder layer with its adapter, and how the model calls it."""

    module: nn.Module
    hidden: Tensor  # [1, tokens, hidden]
    kwargs: dict[str, Any]
    device: ComputeDevice

    def gradient(self) -> Tensor:
        """Return the gradient of the output: the same one each time."""
        drawn = torch.randn(self.hidden.shape, generator=torch.Generator().manual_seed(1))
        return drawn.bfloat16().to(self.hidden.device)

    def now(self) -> float:
        """Seconds, once all that was queued is through."""
        self.device.mark().wait()
        return time.monotonic()

    @property
    def input_bytes(self) -> int:
        """Bytes of the boundary."""
        return self.hidden.nbytes


def make_layer(shape: dict[str, int], device: ComputeDevice, *, frozen: bool = True) -> Layer:
    """Random weights; matrices are filled with one small piece over and over, which is fast."""
    config = transformers.LlamaConfig(
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=1,
        vocab_size=8,
    )
    torch.manual_seed(0)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        get_peft_model(model, LoraConfig(r=RANK, target_modules=LINEARS))
    module = model.model.layers[0].to_empty(device=device.torch).train()
    piece = torch.randn(1 << 20, device=device.torch) * 0.02
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "layernorm" in name:
                parameter.fill_(1.0)
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), piece.numel()):
                flat[start : start + piece.numel()] = piece[: flat.numel() - start]
            parameter.requires_grad_(not frozen or "lora" in name)
    rotary = type(model.model.rotary_emb)(config).to(device.torch)
    hidden = torch.randn(1, TOKENS, shape["hidden"]).bfloat16().to(device.torch).requires_grad_()
    places = rotary(hidden, torch.arange(TOKENS, device=device.torch)[None])
    return Layer(module, hidden, {"position_embeddings": places}, device)


@dataclass
class ActivationRun:
    """One forward and backward."""

    kept_bytes: int  # between the two, the layer's input included
    peak_bytes: int  # input included
    seconds: float
    gradients: list[Tensor]


def run(layer: Layer, around: Callable[[], AbstractContextManager[None]]) -> ActivationRun:
    """Run forward and backward once, following what lives."""
    gradient = layer.gradient()
    for tensor in (layer.hidden, *layer.module.parameters()):
        tensor.grad = None
    gc.collect()
    begun = layer.now()
    with LiveBytes() as live:
        with around():
            out = layer.module(layer.hidden, **layer.kwargs)
        edge = torch.autograd.graph.get_gradient_edge(out)
        del out
        kept = live.now
        torch.autograd.backward((edge,), (gradient,))
    seconds = layer.now() - begun
    gradients = [p.grad for p in layer.module.parameters() if p.grad is not None]
    extra = layer.input_bytes
    assert layer.hidden.grad is not None
    return ActivationRun(kept + extra, live.peak + extra, seconds, [layer.hidden.grad, *gradients])


def run_in_windows(
    layer: Layer, planned: PlannedLayers, tokens: int, *, least: bool
) -> ActivationRun:
    """The same on windows of `tokens`, with one cache of keys and values and its sums of gradients.

    Memory above the layer (its output, where the gradient is overwritten in place) counts.
    """
    config = layer.module.self_attn.config  # type: ignore[union-attr]
    key_values = KeyValues(TOKENS)
    windows = [TokenWindow(begin, begin + tokens) for begin in range(0, TOKENS, tokens)]
    gradient = layer.gradient()
    for parameter in layer.module.parameters():
        parameter.grad = None
    calls = [_part(layer, window) for window in windows]
    planned.bytes_per_token = 0
    with looking_back(config, windows[0], KeyValues(TOKENS)):
        if least and (recording := planned.recording(0, (calls[0][0],), calls[0][1])) is not None:
            planned.bytes_per_token = smallest(recording.graph).kept_bytes / tokens
            planned.recompute_plan(
                0, (calls[0][0],), calls[0][1]
            )  # decided before anything is followed
    begun = layer.now()
    with LiveBytes() as live:
        above = torch.empty_like(layer.hidden)
        graphs = []
        for window, (leaf, kwargs) in zip(windows, calls, strict=True):
            with planned.forward(0), looking_back(config, window, key_values):
                out = layer.module(leaf, **kwargs)
            above[:, window.begin : window.end].data.copy_(out.detach())
            graphs.append((window, leaf, torch.autograd.graph.get_gradient_edge(out)))
            del out
        kept = live.now
        while graphs:
            window, leaf, edge = graphs.pop()
            part = gradient[:, window.begin : window.end]
            torch.autograd.backward((edge,), (part,))
            assert leaf.grad is not None
            part.copy_(leaf.grad)
            del leaf.grad, leaf, edge
            calls.pop()
    seconds = layer.now() - begun
    gradients = [p.grad for p in layer.module.parameters() if p.grad is not None]
    extra = layer.input_bytes
    return ActivationRun(kept + extra, live.peak + extra, seconds, [gradient, *gradients])


def _part(layer: Layer, window: TokenWindow) -> tuple[Tensor, dict[str, Any]]:
    cos, sin = layer.kwargs["position_embeddings"]
    cut = (slice(None), slice(window.begin, window.end))
    leaf = layer.hidden.data[cut].requires_grad_()
    return leaf, {"position_embeddings": (cos[cut], sin[cut])}


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative distance of all gradients together."""
    total = sum(float(t.float().square().sum()) for t in theirs)
    pairs = zip(ours, theirs, strict=True)
    return float(
        (sum(float((a.float() - b.float()).square().sum()) for a, b in pairs) / total) ** 0.5
    )


def per_token_kib(n_bytes: float) -> float:
    """KiB a token."""
    return n_bytes / TOKENS / 1024


def unpruned_bytes(shape: dict[str, int], device: ComputeDevice) -> int:
    """Return what a forward keeps if every weight wants a gradient, from its graph alone."""
    layer = make_layer(shape, device, frozen=False)
    graph = record(layer.module, (layer.hidden,), layer.kwargs).graph
    return largest(graph).kept_bytes + layer.input_bytes


def measure(shape: dict[str, int], device: ComputeDevice) -> list[Result]:
    """Pruning, rematerialisation, windows and boundary-only, each against peft's default."""
    unpruned = unpruned_bytes(shape, device)
    layer = make_layer(shape, device)
    planned = PlannedLayers([layer.module], gemm_again=False)
    graph = record(layer.module, (layer.hidden,), layer.kwargs).graph
    forward = sum(op.flops for op in graph.ops)
    least = smallest(graph)
    attention = sum(op.flops for op in graph.ops if "attention" in op.name)
    default = run(layer, nullcontext)
    kept, peak = per_token_kib(default.kept_bytes), per_token_kib(default.peak_bytes)
    results = [
        Result(
            "kept, every weight wants a gradient", per_token_kib(unpruned), "KiB/token", "lower"
        ),
        Result("kept, pruned: peft's default", kept, "KiB/token", "lower"),
    ]
    for name, budget, windows, extra in (
        ("rematerialised", least.kept_bytes, 0, least.extra_flops),
        ("boundary only", 0, 0, forward),
        *(
            (f"rematerialised, windows of {n}", least.kept_bytes, n, least.extra_flops + attention)
            for n in WINDOWS
        ),
        *((f"boundary only, windows of {n}", 0, n, forward + attention) for n in WINDOWS),
    ):
        if windows:
            ran = run_in_windows(layer, planned, windows, least=budget > 0)
        else:
            planned.bytes_per_token = budget / TOKENS
            planned.recompute_plan(
                0, (layer.hidden,), layer.kwargs
            )  # decided before anything is followed
            ran = run(layer, lambda: planned.forward(0))
        away = apart(ran.gradients, default.gradients)
        if away > (WINDOWS_APART if windows else 0.0):
            raise RuntimeError(f"{name}: gradients are {away} apart from peft's")
        results += results_of(name, ran, default, extra / forward, kept, peak)
    return results


def results_of(
    name: str, ran: ActivationRun, default: ActivationRun, extra: float, kept: float, peak: float
) -> list[Result]:
    """Figures of one way; `kept` and `peak`: peft's, in KiB a token."""
    kept_goal = KEPT_GOAL_KIB if name == "rematerialised" else None
    aimed_at = f"boundary only, windows of {WINDOWS[0]}"
    peak_goal = (1 - PEAK_GOAL) * peak if name == aimed_at else None
    return [
        Result(
            f"kept, {name}",
            per_token_kib(ran.kept_bytes),
            "KiB/token",
            "lower",
            kept_goal,
            baseline=Baseline("peft", kept),
        ),
        Result(
            f"peak, {name}",
            per_token_kib(ran.peak_bytes),
            "KiB/token",
            "lower",
            peak_goal,
            baseline=Baseline("peft", peak),
        ),
        Result(f"extra work, {name}", extra, "of a forward", "lower"),
        Result(
            f"seconds, {name}",
            ran.seconds,
            "s",
            "lower",
            baseline=Baseline("peft", default.seconds),
        ),
    ]


def main() -> None:
    """Run all."""
    parser = arguments(__doc__)
    parser.add_argument("--driver", default="host", help=DRIVER_HELP)
    options = parser.parse_args()
    env = environment()
    try:
        device = find_device(options.driver)
    except UserError as error:
        sys.exit(str(error))
    results = measure(SMALL if options.quick else LLAMA_70B, device)
    write("activations", results, env, options.json)


if __name__ == "__main__":
    main()
