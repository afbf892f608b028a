"""Make peft's configuration from a job's adapter spec, and check it against the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec, Ia3Spec, LoraSpec, PrefixSpec
from windrow.crd.adapter import names
from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.patterns import CPU_SECONDS, as_matched, slow_pattern
from windrow_sidecar.finetune.adapter.targets import (
    expert_names,
    has_experts,
    ia3_targets,
    linear_names,
    target_names,
)
from windrow_sidecar.finetune.model.coded import CodedExperts, CodedLinear


def peft_config(spec: FinetuneJobSpec, model: nn.Module) -> Any:  # noqa: ANN401 - peft is untyped
    """Return the configuration that peft takes.

    Raises:
        UserError: an option does not fit the model.
    """
    settings = spec.adapter.settings
    common: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.model.name,
        "revision": None if Path(spec.model.name).is_dir() else spec.model.revision,
    }
    if isinstance(settings, LoraSpec):
        _check_quantised(settings, spec, model)
        return _lora(settings, model, common)
    if isinstance(settings, Ia3Spec):
        return _ia3(settings, model, common)
    return _prefix(settings, model, common)


def check_targets(tuned: Any, spec: FinetuneJobSpec) -> None:  # noqa: ANN401
    """Look at what peft made.

    Raises:
        UserError: embeddings learn.
    """
    if spec.adapter.type == "prefix":
        return
    embedded = {
        id(parameter)
        for module in tuned.modules()
        if isinstance(module, nn.Embedding) or hasattr(module, "lora_embedding_A")
        for parameter in (
            *module.parameters(recurse=isinstance(module, nn.Embedding)),
            *_of_embedding(module),
        )
    }
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad and id(parameter) in embedded:
            raise refused(option_of(name), f"{name} is an embedding, and those are frozen here", "")


def _of_embedding(module: Any) -> Iterator[nn.Parameter]:  # noqa: ANN401 - peft is untyped
    """Yield what peft has put beside an embedding."""
    for name in ("lora_embedding_A", "lora_embedding_B"):
        yield from getattr(module, name, nn.ParameterDict()).values()


def option_of(parameter: str) -> str:
    """Return the option of the spec that makes a parameter trainable."""
    if ".modules_to_save." in parameter:
        return "modulesToSave"
    return "bias" if parameter.endswith(".bias") else "targetModules"


def bad_targets(spec: FinetuneJobSpec, why: str, known: list[str]) -> UserError:
    """Return the error for targets that peft does not take.

    Args:
        spec: the job's.
        why: what peft says.
        known: names of modules that may be targets.
    """
    settings = spec.adapter.settings
    said = _first_sentence(why)
    if isinstance(settings, LoraSpec):
        # What it says of experts, which it adapts as parts of one tensor.
        if "lora_dropout" in why:
            problem = "the tokens of an expert cannot be separated"
            return refused("dropout", problem, "Set it to 0, or leave out the experts.")
        if "use_dora" in why:
            problem = "the weights of experts cannot be decomposed"
            return refused("useDora", problem, "Set it to false, or leave out the experts.")
        for option, ours in (("rank_pattern", "rankPattern"), ("alpha_pattern", "alphaPattern")):
            if option in why:
                return refused(ours, said, "Name modules that get an adapter.")
        if settings.target_pattern is not None:
            problem = f"{settings.target_pattern!r} cannot be adapted: {said}"
            remedy = f"Match the whole name of a module, like .*{known[-1]}."
            return refused("targetPattern", problem, remedy)
        found: Any = settings.modules()
        others = "Write" if found == "all-linear" else "Write all-linear, or"
        remedy = f"{others} some of {', '.join(known)}."
    else:
        named = settings.target_modules if isinstance(settings, Ia3Spec) else None
        found = names(named) or "this architecture"
        remedy = f"Name some of {', '.join(known)}."
    problem = f"{found!r} cannot be adapted: {said}"
    return refused("targetModules", problem, remedy, kind=spec.adapter.type)


def _first_sentence(text: str) -> str:
    """Return an error's first sentence in one line, without a module's printed contents."""
    flat = re.sub(r"\s*\(.*?\)(?= is not)", "", " ".join(text.split()))
    return flat.split(". ")[0].rstrip(".")


def refused(option: str, problem: str, remedy: str, *, kind: str = "lora") -> UserError:
    """Return the error for an option that does not fit."""
    return UserError(
        problem,
        field=f"spec.adapter.{kind}.{option}",
        remedy=remedy or "Leave it out.",
        reason=Reason.INVALID_SPEC,
    )


def _lora(lora: LoraSpec, model: nn.Module, common: dict[str, Any]) -> Any:  # noqa: ANN401
    from peft import LoraConfig

    targets = lora.modules()
    if targets == "all-linear" and (has_experts(model) or lora.layers_to_transform):
        targets = linear_names(model, attention_only=has_experts(model))
    _check_patterns(lora, model)
    _check_layers(lora, model)
    _check_embeddings(lora, model)
    if lora.modules() not in ("all-linear", lora.target_pattern):
        _check_names("targetModules", lora.target_modules, model)
    _check_names("excludeModules", lora.exclude_modules, model)
    _check_names("modulesToSave", lora.modules_to_save, model)
    if "lm_head" in names(lora.modules_to_save) and model.config.tie_word_embeddings:  # type: ignore[union-attr]
        raise refused(
            "modulesToSave",
            "lm_head is the embedding of this model, and those are frozen here",
            "Leave it out.",
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=names(lora.exclude_modules) or None,
        layers_to_transform=lora.layers_to_transform,
        rank_pattern=lora.rank_pattern or {},
        alpha_pattern=lora.alpha_pattern or {},
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias=lora.bias,
        modules_to_save=names(lora.modules_to_save) or None,
        init_lora_weights="gaussian" if lora.init_lora_weights == "gaussian" else True,
        **common,
    )


def _ia3(ia3: Ia3Spec, model: nn.Module, common: dict[str, Any]) -> Any:  # noqa: ANN401
    from peft import IA3Config

    _check_names("targetModules", ia3.target_modules, model, kind="ia3")
    targets: list[str] | None = names(ia3.target_modules)
    feedforward: list[str] | None = names(ia3.feedforward_modules)
    if not targets:
        targets, feedforward = ia3_targets(model) or (None, None)
    return IA3Config(target_modules=targets, feedforward_modules=feedforward, **common)


def _prefix(prefix: PrefixSpec, model: nn.Module, common: dict[str, Any]) -> Any:  # noqa: ANN401
    from peft import PrefixTuningConfig

    config: Any = model.config
    shortest = getattr(config, "sliding_window", None)
    if shortest and prefix.virtual_tokens >= shortest:
        raise refused(
            "virtualTokens",
            f"{prefix.virtual_tokens} reach beyond the model's sliding window of {shortest}",
            f"Write less than {shortest}.",
            kind="prefix",
        )
    return PrefixTuningConfig(
        num_virtual_tokens=prefix.virtual_tokens,
        prefix_projection=prefix.projection_size is not None,
        encoder_hidden_size=prefix.projection_size,
        **common,
    )


def prefix_tokens(spec: FinetuneJobSpec) -> int:
    """Return how many virtual tokens stand before each row."""
    settings = spec.adapter.settings
    return settings.virtual_tokens if isinstance(settings, PrefixSpec) else 0


def _check_patterns(lora: LoraSpec, model: nn.Module) -> None:
    patterns = as_matched(lora.target_pattern, lora.rank_pattern or {}, lora.alpha_pattern or {})
    slow = slow_pattern(patterns, (name for name, _ in model.named_modules()))
    if slow is not None:
        raise refused(
            slow,
            f"matching it against the model's modules takes more than {CPU_SECONDS} s",
            "Write a pattern without repetitions inside of repetitions, like .*q_proj.",
        )


def _check_layers(lora: LoraSpec, model: nn.Module) -> None:
    depth = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    outside = [i for i in lora.layers_to_transform or () if i >= depth]
    if outside:
        raise refused(
            "layersToTransform", f"there is no layer {outside[0]}", f"There are {depth}, from 0."
        )
    if lora.layers_to_transform and lora.target_pattern:
        raise refused(
            "layersToTransform",
            "a pattern over whole names already says which layers",
            "Leave out one of the two.",
        )


def _check_embeddings(lora: LoraSpec, model: nn.Module) -> None:
    """Refuse adapters of embeddings: the tasklets of a step begin after them."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    ours = next(name for name, m in model.named_modules() if m is embedding).rpartition(".")[2]
    for option, text in (
        ("targetModules", lora.target_modules),
        ("modulesToSave", lora.modules_to_save),
    ):
        if ours in names(text):
            raise refused(option, f"{ours} is the embedding, which is frozen here", "Leave it out.")


def _check_quantised(lora: LoraSpec, spec: FinetuneJobSpec, model: nn.Module) -> None:
    """Refuse options that a base in 4 or 8 bits cannot honour."""
    kept = spec.model.quantization
    if kept == "int8" and lora.use_dora:
        raise refused(
            "useDora",
            "weights in 8 bits cannot be decomposed",
            "Set it to false, or use spec.model.quantization: nf4.",
        )
    whole = set(names(lora.modules_to_save))
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in whole and name not in whole:
            continue
        codes = next(
            (m.codec for m in module.modules() if isinstance(m, CodedLinear | CodedExperts)), ""
        )
        if codes or any(not parameter.is_floating_point() for parameter in module.parameters()):
            raise refused(
                "modulesToSave",
                f"{name} is kept in {codes or kept}, and only floating-point numbers can learn",
                "Make it a target (targetModules) instead, or write spec.model.quantization: none.",
            )


def _check_names(option: str, text: str | None, model: nn.Module, *, kind: str = "lora") -> None:
    """Refuse names that are no modules of the model; peft ignores them silently."""
    modules = [f".{name}" for name, _ in model.named_modules()]
    experts = expert_names(model)
    for name in names(text):
        if name not in experts and not any(module.endswith(f".{name}") for module in modules):
            known = f"Name some of {', '.join(target_names(model))}."
            remedy = known if option == "targetModules" else "Name another, or none."
            raise refused(option, f"the model has no module {name!r}", remedy, kind=kind)
