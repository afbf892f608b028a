"""How a job's adapter is put into the model, and how it is written for everyone else to load."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec
from windrow.errors import UserError

ADAPTER = "default"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def add_adapter(model: nn.Module, spec: FinetuneJobSpec) -> Any:  # noqa: ANN401 - peft is untyped
    """Return the model with fresh LoRA adapters, made from the job's seed; all else is frozen.

    Raises:
        UserError: a target module does not exist, or lies outside of layers and head.
    """
    from peft import LoraConfig, get_peft_model

    lora = spec.adapter.lora
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.modules(),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.model.name,
        revision=None if Path(spec.model.name).is_dir() else spec.model.revision,
    )
    # peft writes down the name that the model carries, which for shared weights is none.
    model.name_or_path = spec.model.name  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(spec.training.seed)
        try:
            tuned = get_peft_model(model, config)
        except ValueError as error:
            raise _bad_targets(lora.target_modules, str(error).splitlines()[0], model) from error
    outside = [
        name
        for name, parameter in tuned.named_parameters()
        if parameter.requires_grad and "embed_tokens" in name
    ]
    if outside:
        raise _bad_targets(lora.target_modules, "embeddings cannot be adapted here", model)
    return tuned


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by name, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:  # noqa: ANN401
    """Let the model compute as the base does."""
    with model.disable_adapter():
        yield


def save_adapter(model: Any, folder: Path) -> None:  # noqa: ANN401
    """Write weights and configuration into an existing folder as `peft` does."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = model.peft_config[ADAPTER].to_dict()
    config["inference_mode"] = True
    config["target_modules"] = _sorted(config.get("target_modules"))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _sorted(modules: Any) -> Any:  # noqa: ANN401 - a name, a pattern or a set of names
    return sorted(modules) if isinstance(modules, set | list | tuple) else modules


def _bad_targets(found: str, why: str, model: nn.Module) -> UserError:
    linear = sorted(
        {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    )
    return UserError(
        f"{found!r} cannot be adapted: {why}",
        field="spec.adapter.lora.targetModules",
        remedy=f"Write all-linear, or some of {', '.join(linear)}.",
        reason=Reason.INVALID_SPEC,
    )
