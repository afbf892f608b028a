"""Choose the program that runs a job's layers: the model's own modules, or packed ones.

Packed layers are taken where they were asked for and every condition holds; else the model's own
modules run, and one line says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windrow.errors import UserError
from windrow.rundir import ENV_LAYER_PROGRAM
from windrow_sidecar.compute.captures import GraphCaptures
from windrow_sidecar.compute.device import Mark
from windrow_sidecar.finetune.adapter import fused_layer
from windrow_sidecar.finetune.adapter.fused_layer import FusedLayer
from windrow_sidecar.finetune.adapter.layer_graphs import LayerGraphs
from windrow_sidecar.finetune.adapter.packed_copies import Projection, one_matrix
from windrow_sidecar.finetune.adapter.packed_layer import PackedLayer
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import (
    ProgramName,
    install_program,
    program_of,
)
from windrow_sidecar.finetune.model.structure import in_mode
from windrow_sidecar.finetune.model.window_attention import SUPPORTED

log = logging.getLogger(__name__)

PROGRAMS: tuple[ProgramName, ...] = ("eager", "packed", "graphs", "compiled")
# Of transformers: layers of just these modules, in this order.
_MODELS = ("llama", "mistral", "qwen2", "qwen3")
_KINDS = {f"transformers.models.{model}.modeling_{model}" for model in _MODELS}
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_MLP = ("gate_proj", "up_proj", "down_proj")
# Weights of one input, which are worth one product.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def wanted_program(environ: Mapping[str, str] = os.environ) -> ProgramName:
    """Return the program that a worker was asked to use; eager where nothing is said.

    Raises:
        UserError: the variable names no known program.
    """
    value = environ.get(ENV_LAYER_PROGRAM) or PROGRAMS[0]
    for name in PROGRAMS:
        if value == name:
            return name
    raise UserError(
        f"{value!r} is not a valid layer program",
        field=ENV_LAYER_PROGRAM,
        remedy=f"Write one of {', '.join(PROGRAMS)}.",
    )


def use_program(
    stack: DecoderStack,
    wanted: ProgramName,
    *,
    adapter: str,
    in_turns: bool = False,
    repacks: bool = False,
    point: Callable[[], None] | None = None,
) -> str:
    """Let the stack's layers run by the program that is wanted, if it can run all of them.

    Args:
        stack: its model has the adapter already.
        wanted: which one.
        adapter: its name.
        in_turns: whether the layers take turns in memory.
        repacks: whether weights may be moved so that those of one product lie together: not where
            they are decode's.
        point: called between attention and MLP of a packed layer.

    Returns:
        why layers run eagerly though another program was wanted; "": they run as wanted.
    """
    if wanted in ("eager", "compiled"):  # what is compiled waits for shapes (see `use_compiled`)
        return ""
    whys = (refused(layer, stack.config, adapter) for layer in stack.layers)
    why = next((f"in layer {n} {why}" for n, why in enumerate(whys) if why), "")
    why = "layers take turns in memory" if in_turns else why
    if not why:
        if repacks:
            for layer in stack.layers:
                _repack(layer)
        packed = [_packed(layer, adapter, point) for layer in stack.layers]
        for program in packed:
            program.others = tuple(g for p in packed if p is not program for g in p.groups)
        why = _differs(stack, packed)
    if why:
        log.info("layers run eagerly, not packed: %s", why)
        return why
    for layer, program in zip(stack.layers, packed, strict=True):
        install_program(layer, program)
    products, why = packed[0].products, _fuse(stack, packed)
    between = f"torch's operators (not Triton's kernels: {why})" if why else "Triton's kernels"
    log.info("layers run packed: %d products over a layer's weights, and %s", products, between)
    return ""


def use_graphs(
    stack: DecoderStack,
    captures: GraphCaptures | None,
    *,
    mark: Callable[[], Mark],
    point: Callable[[], None] | None = None,
    units: Callable[[], int] = lambda: 0,
    bound_us: Callable[[], int] = lambda: 0,
) -> str:
    """Let layers that run packed run by CUDA graphs where these can (see `LayerGraphs`).

    Args:
        stack: its layers run packed.
        captures: of the device; None: it has no graphs.
        mark: the point behind everything that is queued.
        point: called between two graphs.
        units: of the device that the next graphs run on.
        bound_us: how long decode may have to wait for what runs; 0: nobody waits.

    Returns:
        why they do not; "": they run as graphs.
    """
    found = [program_of(layer) for layer in stack.layers]
    programs = [program for program in found if isinstance(program, PackedLayer)]
    why = _refused_graphs(programs, captures)
    if why or captures is None:
        log.info("layers run packed, not as graphs: %s", why)
        return why
    stack.graphs = LayerGraphs(
        programs, captures, mark=mark, point=point, units=units, bound_us=bound_us
    )
    log.info("layers run as CUDA graphs of the packed program, captured when they first run")
    return ""


def refused(layer: Any, config: Any, adapter: str) -> str:  # noqa: ANN401 - of transformers
    """Return why a layer cannot run packed; "" if it can.

    Args:
        layer: of the decoder, with its adapter.
        config: of the model.
        adapter: its name.
    """
    if type(layer).__module__ not in _KINDS:
        return f"{type(layer).__name__} is not a layer of {', '.join(_MODELS)}"
    if config._attn_implementation not in SUPPORTED:
        return f"attention is {config._attn_implementation}"
    if not isinstance(layer.mlp.act_fn, nn.SiLU) and config.hidden_act != "silu":
        return f"the MLP's activation is {config.hidden_act}"
    if float(getattr(config, "attention_dropout", 0.0) or 0.0):
        return "attention has dropout"
    dtype = None
    learns: set[int] = set()
    for name in (*_OF_ATTENTION, *_OF_MLP):
        module = _linear(layer, name)
        if why := _refused_linear(module, adapter):
            return f"{name} {why}"
        projection = _projection(module, adapter)
        dtype = dtype or projection.weight.dtype
        if projection.weight.dtype != dtype:
            return f"{name} is in another type than q_proj"
        learns.update(id(parameter) for parameter in projection.learns)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(layer.self_attn, n) for n in ("q_norm", "k_norm") if _has(layer, n)]
    if any(not hasattr(norm, "variance_epsilon") or norm.weight.dtype != dtype for norm in norms):
        return "a norm is not a plain RMSNorm in the type of the weights"
    others = [n for n, p in layer.named_parameters() if p.requires_grad and id(p) not in learns]
    return f"{others[0]} learns" if others else ""


def _refused_graphs(programs: Sequence[PackedLayer], captures: GraphCaptures | None) -> str:
    """Return why layers that run packed cannot run as graphs; "" if they can."""
    if captures is None:
        return "graphs need a GPU"
    for n, program in enumerate(programs):
        learns: list[nn.Parameter] = [p for group in program.groups for p in group.learns]
        if not learns:
            return f"layer {n} has no adapter"
        if len({parameter.dtype for parameter in learns}) != 1:
            return f"layer {n} has adapters of several types"
    return ""


def _has(layer: Any, norm: str) -> bool:  # noqa: ANN401
    return hasattr(layer.self_attn, norm)


def _linear(layer: Any, name: str) -> Any:  # noqa: ANN401
    return getattr(layer.self_attn if name in _OF_ATTENTION else layer.mlp, name)


def _refused_linear(module: Any, adapter: str) -> str:  # noqa: ANN401
    from peft.tuners.lora.layer import Linear

    base = module.get_base_layer() if isinstance(module, Linear) else module
    if type(base) is not nn.Linear or type(base.weight) is not nn.Parameter:
        return f"is a {type(base).__name__}"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "learns itself"
    if base.bias is not None and base.bias.dtype != base.weight.dtype:
        return "has a bias of another type"
    if base is module or adapter not in module.lora_A:
        return ""
    variant = module.lora_variant.get(adapter)
    if variant is not None and adapter not in module.lora_magnitude_vector:
        return f"has a {type(variant).__name__}"
    if not isinstance(module.lora_dropout[adapter], nn.Identity):
        return "has dropout"
    a, b = module.lora_A[adapter], module.lora_B[adapter]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None:
        return "has an adapter of another form"
    if module.merged or module.fan_in_fan_out or len(module.lora_A) != 1:
        return "has an adapter that is merged, transposed or not alone"
    if a.weight.dtype not in (torch.float32, torch.float64, base.weight.dtype):
        return f"has an adapter in {a.weight.dtype}"
    return ""


def _projection(module: Any, adapter: str) -> Projection:  # noqa: ANN401
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    if base is module or adapter not in module.lora_A:
        return Projection(base.weight, base.bias)
    magnitude = None
    if adapter in module.lora_magnitude_vector:
        magnitude = module.lora_magnitude_vector[adapter].weight
    return Projection(
        base.weight,
        base.bias,
        module.lora_A[adapter].weight,
        module.lora_B[adapter].weight,
        float(module.scaling[adapter]),
        magnitude,
    )


def _packed(layer: nn.Module, adapter: str, point: Callable[[], None] | None) -> PackedLayer:
    modules = {name: _linear(layer, name) for name in (*_OF_ATTENTION, *_OF_MLP)}
    adapted = next((m for m in modules.values() if hasattr(m, "disable_adapters")), None)
    projections = {name: _projection(module, adapter) for name, module in modules.items()}
    disabled = (lambda: False) if adapted is None else lambda: bool(adapted.disable_adapters)
    return PackedLayer(layer, projections, disabled, point)


def _repack(layer: nn.Module) -> None:
    """Put weights of one input into one memory; the parameters stay the same objects."""
    for names in _TOGETHER:
        found = [_linear(layer, name) for name in names]
        weights = [m.weight if type(m) is nn.Linear else m.get_base_layer().weight for m in found]
        if one_matrix(weights) is not None:
            continue
        joined = torch.cat([weight.detach() for weight in weights])
        rows = [weight.shape[0] for weight in weights]
        for weight, part in zip(weights, torch.split(joined, rows), strict=True):
            weight.data = part


def _differs(stack: DecoderStack, packed: Sequence[PackedLayer]) -> str:
    """Run each layer both ways on the probe; return how one differs, "" if none does."""
    with torch.no_grad(), in_mode(stack.model, training=False):
        at = stack.begin(stack.probe)
        for n, program in enumerate(packed):
            read, call = at.inputs[n], at.calls[n]
            assert read is not None
            with stack.around_layer.forward(n):
                ours = program(read, *call.args, **call.kwargs)
            stack.forward(at, n, at.whole, TorchBoundaries(), learn=False)
            theirs = at.inputs[n + 1]
            assert theirs is not None
            if not _close(ours, theirs):
                return f"layer {n} gives another result packed than as the model computes it"
    return ""


def _fuse(stack: DecoderStack, packed: Sequence[PackedLayer]) -> str:
    """Let layers run by Triton's kernels where those can; return why not, "" if all do."""
    if why := fused_layer.why_not(stack.device):
        return why
    for n, program in enumerate(packed):
        program.refresh()
        if why := FusedLayer.refused(program):
            return f"in layer {n} {why}"
    try:
        for program in packed:
            program.fuse(FusedLayer(program))
        # All compile here: a layer is like the others but for its numbers.
        why = _fused_differs(stack, packed[0])
    except Exception as error:  # noqa: BLE001 - of a compiler, a driver, a library of some version
        why = f"they do not run ({type(error).__name__}: {error})"
    if why:
        for program in packed:
            program.fuse(None)
    return why


def _fused_differs(stack: DecoderStack, program: PackedLayer) -> str:
    """Run a layer forward and back both ways on the probe; return how they differ, or ""."""
    fused = program.fused
    at = stack.begin(stack.probe)
    read, call = at.inputs[0], at.calls[0]
    assert read is not None
    learns = [parameter for group in program.groups for parameter in group.learns]
    before = [parameter.grad for parameter in learns]
    found: list[list[Tensor]] = []
    try:
        for group in program.groups:  # B is zero before the first step, and hides what is wrong
            torch.linspace(-0.5, 0.5, group.b.numel(), out=group.b.view(-1))
        for one in (fused, None):
            program.fused = one
            for parameter in learns:
                parameter.grad = None
            leaf = read.detach().clone().requires_grad_()
            with torch.enable_grad(), in_mode(stack.model, training=False):
                made = program(leaf, *call.args, **call.kwargs)
                torch.autograd.backward(made, made.detach())
            grads = [tensor.grad for tensor in (leaf, *learns)]
            found.append([made.detach(), *(grad for grad in grads if grad is not None)])
    finally:
        program.fused = fused
        program.release()
        for parameter, gradient in zip(learns, before, strict=True):
            parameter.grad = gradient
    ours, theirs = found
    if len(ours) != len(theirs) or not all(map(_close, ours, theirs)):
        return "they give another result than torch's operators"
    return ""


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two results, [...] each, differ by no more than their type rounds."""
    tolerance = torch.finfo(theirs.dtype).eps ** 0.5
    largest = float(theirs.abs().max())
    return torch.allclose(ours, theirs, rtol=0.0, atol=tolerance * max(largest, 1e-30))
