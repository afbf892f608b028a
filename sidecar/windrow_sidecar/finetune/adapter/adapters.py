"""Put an adapter into the model with peft, check that all of it can be trained, and save it.

peft makes an adapter of all layers at once, and of those that are in their files it sees NaN (see
`frozen_layers.LayerWeights.detach`). So what it copied or computed from them is made again, layer
by layer while each is there: modules that are trained as a whole, and the magnitudes of DoRA.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windrow.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec
from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.beginning import begin_with
from windrow_sidecar.finetune.adapter.config import (
    bad_targets,
    check_targets,
    option_of,
    peft_config,
)
from windrow_sidecar.finetune.adapter.served import as_served
from windrow_sidecar.finetune.adapter.targets import target_names
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.model.around import AroundLayer
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.key_values import Prefix
from windrow_sidecar.finetune.model.structure import find_layers, in_mode
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys, TokenDropout
from windrow_sidecar.finetune.training.checkpoint import told_by_system

ADAPTER = "default"


def add_adapter(
    model: nn.Module,
    spec: FinetuneJobSpec,
    frozen: AroundLayer | None = None,
    access: SourceAccess = UNCONFINED,
) -> Any:  # noqa: ANN401 - peft is untyped
    """Return the model with a fresh adapter, made from the job's seed; all else is frozen.

    `frozen`: the model's layers, where they take turns in memory. `access`: what the job may
    read, for the adapter that it begins with.

    Raises:
        UserError: the model has an adapter already; a target module does not exist; an option does
            not fit the model; the base has weights that are NaN or infinite where it learns.
        OSError: the file of a layer that takes turns could not be read.
    """
    from peft import get_peft_model

    if getattr(model, "peft_config", None):
        raise UserError(
            f"{spec.model.name} carries an adapter already",
            field="spec.model.name",
            remedy="Name the plain base model: a folder without adapter_config.json.",
            reason=Reason.MODEL_UNSUPPORTED,
        )
    config, known = peft_config(spec, model), target_names(model)
    # peft writes down the name that the model carries, which for shared weights is none.
    model.name_or_path = spec.model.name  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # Elsewhere these are warnings: an option that does nothing is a mistake in the job.
        warnings.filterwarnings("error", ".*did not match any targeted module", RuntimeWarning)
        # GPT-2's linear layers keep their weights the other way round: it notes so in an attribute.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        # It adds patterns of its own for some mixtures of experts, whatever is targeted.
        warnings.filterwarnings("ignore", ".*gate_up_proj", RuntimeWarning)
        torch.manual_seed(spec.training.seed)
        try:
            tuned = get_peft_model(model, config)
        except (ValueError, RuntimeWarning) as error:
            raise bad_targets(spec, str(error), known) from error
    check_targets(tuned, spec)
    _own_what_learns(tuned)
    if frozen is not None:
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        take_over(find_layers(decoder, decoder.config), frozen, ADAPTER)
    _check_finite(tuned, spec)
    begin_with(tuned, ADAPTER, spec, access)
    return tuned


def _check_finite(tuned: nn.Module, spec: FinetuneJobSpec) -> None:
    """Refuse a base whose weights are not finite where trained parameters start from them."""
    for name, parameter in trainable(tuned).items():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(
                f"{spec.model.name} has weights that are not finite, and {name} begins with them",
                field="spec.model.name",
                remedy="Use a checkpoint whose weights are finite numbers.",
                reason=Reason.MODEL_UNSUPPORTED,
            )


def _own_what_learns(tuned: nn.Module) -> None:
    """Copy base parameters that are trained (biases): decode may be serving from that memory."""
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad and name.endswith("bias"):
            parameter.data = parameter.data.clone()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by name, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Adapter:
    """The adapter of a model, as tasklets use it: on or off, training or not.

    Args:
        tuned: what peft made; its dropout is replaced by one that goes by tokens.

    Attributes:
        drops: whether it has any.
    """

    def __init__(self, tuned: Any) -> None:  # noqa: ANN401 - peft is untyped
        self.model = tuned
        self.dropout = DropoutKeys()
        self._enabled = True
        self._learning: dict[nn.Module, list[nn.Parameter]] = {}
        places = [
            (parent, name, child)
            for parent in tuned.modules()
            if isinstance(parent, nn.ModuleDict)
            for name, child in parent.items()
            if isinstance(child, nn.Dropout)
        ]
        for index, (parent, name, child) in enumerate(places):
            parent[name] = TokenDropout(child.p, self.dropout, index)
        self.drops = bool(places)

    def switch(self, *, on: bool, training: bool) -> None:
        """Let the model compute with the adapter or as the base does, and train or not."""
        self._enabled = on
        if not self.model.active_peft_config.is_prompt_learning:
            with warnings.catch_warnings():
                # Biases that have been trained stay; the base is only asked before any has.
                warnings.filterwarnings("ignore", "Careful, disabling adapter layers with bias")
                layers = self.model.base_model
                (layers.enable_adapter_layers if on else layers.disable_adapter_layers)()
        self.model.train(training)

    def learning(self, layer: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that learn in a layer; call it while the adapter is on."""
        known = self._learning.get(layer)
        if known is None:
            # Walking a layer's modules takes 55 us, 1% of the backward of a small one.
            known = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            self._learning[layer] = known
        return known

    def prefix(self, rows: int, *, learn: bool) -> Prefix | None:
        """Return what precedes the first token of each of `rows` rows; None: nothing does."""
        if not self._enabled or not self.model.active_peft_config.is_prompt_learning:
            return None
        with torch.set_grad_enabled(learn):
            return Prefix.of(self.model.get_prompt(rows))


def save_adapter(model: Any, folder: Path) -> None:  # noqa: ANN401
    """Write weights and configuration into an existing folder, for peft and for servers."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state: dict[str, Tensor] = get_peft_model_state_dict(
        model,
        adapter_name=ADAPTER,
        # They are frozen here. "auto" would ask the Hub about them at the end of each job.
        save_embedding_layers=False,
    )
    config = model.peft_config[ADAPTER].to_dict()
    state, plain = as_served(model, ADAPTER, state, config)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
    weights = folder / WEIGHTS_FILE
    weights.touch()
    mode = weights.stat().st_mode  # that the umask gives; safetensors writes for its own user alone
    with told_by_system(weights):
        save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(mode)
    plain["inference_mode"] = True
    (folder / CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")


def take_over(layers: Sequence[nn.Module], frozen: AroundLayer, adapter: str) -> None:
    """Initialise the adapter of that name in each of `layers`, whose weights are offloaded.

    Raises:
        OSError: a file could not be read.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    with torch.no_grad():
        for index, layer in enumerate(layers):
            found = [m for m in layer.modules() if isinstance(m, ModulesToSaveWrapper | LoraLayer)]
            if not any(_depends(module, adapter) for module in found):
                continue
            with frozen.forward(index):
                for module in found:
                    if isinstance(module, ModulesToSaveWrapper):
                        _copy(module, adapter)
                    else:
                        _measure(module, adapter)


def _depends(module: Any, adapter: str) -> bool:  # noqa: ANN401 - peft is untyped
    """Return whether the adapter's first values depend on the base's weights."""
    return adapter in getattr(module, "modules_to_save", ()) or adapter in getattr(
        module, "lora_magnitude_vector", ()
    )


def _copy(wrapper: Any, adapter: str) -> None:  # noqa: ANN401
    copied = dict(wrapper.modules_to_save[adapter].named_parameters())
    for name, parameter in wrapper.original_module.named_parameters():
        copied[name].copy_(parameter)


def _measure(module: Any, adapter: str) -> None:  # noqa: ANN401
    """Return the norm of each output's weights, as `DoraLinearLayer.update_layer` computes it."""
    if adapter not in module.lora_magnitude_vector:
        return
    magnitude = module.lora_magnitude_vector[adapter]
    added = module.lora_B[adapter].weight @ module.lora_A[adapter].weight
    weight = module.get_base_layer().weight
    norm = magnitude.get_weight_norm(weight, added, scaling=module.scaling[adapter])
    magnitude.weight.copy_(norm)


def check_reach(tuned: Any, stack: DecoderStack) -> None:  # noqa: ANN401 - peft is untyped
    """Refuse an adapter with parameters that receive no gradient, or a prefix that is ignored.

    Raises:
        UserError: it is ahead of the first layer, where a step's backward does not reach; or it
            is a prefix of a model whose attention cannot be given one.
    """
    if tuned.active_peft_config.is_prompt_learning:
        if why := stack.prefix_refused or _prefix_fails(tuned, stack):
            raise UserError(
                f"{type(stack.model).__name__} cannot take a prefix: {why}",
                field="spec.adapter.type",
                remedy="Choose lora or ia3 for this model.",
                reason=Reason.INVALID_SPEC,
            )
        return
    reached = {id(p) for part in (*stack.layers, stack.norm) for p in part.parameters()}
    for name, parameter in stack.decoder.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            module, kind = name.split(".")[0], tuned.active_peft_config.peft_type.value.lower()
            raise UserError(
                f"{module} comes before the first layer, where nothing can be trained",
                field=f"spec.adapter.{kind}.{option_of(name)}",
                remedy=f"Leave {module} out: by excludeModules, or by bias: lora_only.",
                reason=Reason.INVALID_SPEC,
            )


def _prefix_fails(tuned: Any, stack: DecoderStack) -> str:  # noqa: ANN401 - peft is untyped
    """Run the first layer behind the prefix, on the probe; return its error, "" if it runs."""
    try:
        with torch.no_grad(), in_mode(tuned, training=False):
            at = stack.begin(stack.probe, Prefix.of(tuned.get_prompt(1)))
            stack.forward(at, 0, at.whole, TorchBoundaries(), learn=False)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return f"peft makes none that its attention takes ({str(error).partition(chr(10))[0]})"
    return ""
