"""Fields under `spec.adapter`: the adapters of peft that can be trained here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from windrow.crd.texts import Place
from windrow.crd.values import TEXT_MAX, Record, cel, invalid, untyped
from windrow.outputs import is_bucket

# Kinds that papers name and peft does not have, or that cannot be learned layer by layer.
_REFUSED = {
    "bottleneck": "bottleneck adapters (Houlsby, Pfeiffer, parallel) are not in peft, so no engine "
    "could load what is trained",
    "prompt": "prompt tuning puts its tokens into the embeddings, which are frozen here",
    "dora": "DoRA is an option of LoRA",
    "rslora": "rank-stabilised LoRA is an option of LoRA",
}
_REMEDIES = {"dora": "Write type: lora, lora: {useDora: true}.", "rslora": "Write useRslora: true."}


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise invalid(f"{text!r} is not a regular expression: {error}", "Fix it.") from error
    return text


def _joined(value: object) -> object:
    """Take a list of names as the text with commas that says the same."""
    written = value.split(",") if isinstance(value, str) else value
    if not isinstance(written, list):
        raise invalid(f"{value!r} is neither a name nor a list of names", "Write some names.")
    for name in written:
        if not isinstance(name, str) or not name.strip() or "," in name:
            problem = f"{value!r} holds {name!r}" if str(name).strip() else "holds an empty name"
            raise invalid(problem, "Write names, as a list or with commas between them.")
    return ",".join(name.strip() for name in written)


def _patterns(numbers: dict[str, Any]) -> dict[str, Any]:
    for name in numbers:
        _pattern(name)
    return numbers


Names = Annotated[
    str,
    BeforeValidator(_joined),
    Field(min_length=1, max_length=TEXT_MAX),
    WithJsonSchema(
        {
            **untyped(items=256),
            "pattern": r"^[^,]*[^,\s][^,]*(,[^,]*[^,\s][^,]*)*$",
            "minLength": 1,
            "maxLength": TEXT_MAX,
            # No number is within these.
            "minimum": 1,
            "maximum": 0,
        }
    ),
]
Pattern = Annotated[str, AfterValidator(_pattern), Field(min_length=1, max_length=TEXT_MAX)]
Rank = Annotated[int, Field(ge=1, le=1024)]
# Other engines read an integer from the adapter's configuration, so one that is whole stays one.
Alpha = Annotated[
    float,
    Field(gt=0, le=65536),
    AfterValidator(lambda alpha: int(alpha) if alpha.is_integer() else alpha),
    PlainSerializer(lambda alpha: alpha),
]


class LoraSpec(Record):
    """Low-rank adapters, as peft makes them."""

    rank: int = Field(default=16, ge=1, le=1024, description="Rank of the update.")
    alpha: Alpha = Field(default=32, description="Scale: the update is multiplied by alpha / rank.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout in front of the adapter, 0 up to below 1."
    )
    target_modules: Names = Field(
        default="all-linear",
        description="Which modules get an adapter: `all-linear` (on a mixture of experts: the "
        "linear layers of attention), or names, as a list or separated by commas (`q_proj,v_proj`; "
        "experts: `w1,w2,w3` or `gate_proj,up_proj,down_proj`).",
    )
    target_pattern: Pattern | None = Field(
        default=None,
        description="Instead of targetModules: a regular expression over the whole names of "
        "modules, as peft takes it.",
    )
    exclude_modules: Names | None = Field(
        default=None,
        description="Names, a list or separated by commas, of targets that get no adapter.",
    )
    layers_to_transform: list[Annotated[int, Field(ge=0, le=1023)]] | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Numbers of the layers that get an adapter; all, where it is left out.",
    )
    rank_pattern: Annotated[dict[str, Rank], AfterValidator(_patterns)] | None = Field(
        default=None,
        max_length=256,
        description="Other ranks for some modules, by name or regular expression.",
    )
    alpha_pattern: Annotated[dict[str, Alpha], AfterValidator(_patterns)] | None = Field(
        default=None,
        max_length=256,
        description="Other scales for some modules, by name or regular expression.",
    )
    use_rslora: bool = Field(
        default=False, description="Rank-stabilised: multiply by alpha / sqrt(rank) instead."
    )
    use_dora: bool = Field(
        default=False, description="Weight-decomposed: learn the norms of the weights as well."
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="Which biases are trained with it, as in peft."
    )
    modules_to_save: Names | None = Field(
        default=None,
        description="Names, a list or separated by commas, of modules that are trained and "
        "saved whole (`lm_head`). Not the embeddings.",
    )
    init_lora_weights: Literal["default", "gaussian"] = Field(
        default="default", description="How A starts; B starts at zero."
    )

    @model_validator(mode="after")
    def _one_way_to_name_targets(self) -> Self:
        # all-linear is what the API server fills in where nothing is written.
        if self.target_pattern is not None and self.target_modules != "all-linear":
            raise invalid("targetModules and targetPattern are both set", "Keep one of them.")
        return self

    def modules(self) -> str | list[str]:
        """Return the target modules as `peft.LoraConfig` takes them."""
        if self.target_pattern is not None:
            return self.target_pattern
        return "all-linear" if self.target_modules == "all-linear" else names(self.target_modules)


class Ia3Spec(Record):
    """(IA)3: learned factors on activations, as peft makes them."""

    target_modules: Names | None = Field(
        default=None,
        description="Names of modules, a list or separated by commas. Left out: keys, values and "
        "the last linear layer of the MLP, as peft has them or by structure.",
    )
    feedforward_modules: Names | None = Field(
        default=None,
        description="Those of targetModules whose input is scaled, not their output. Only with it.",
    )

    @model_validator(mode="after")
    def _feedforward_among_targets(self) -> Self:
        extra = set(names(self.feedforward_modules)) - set(names(self.target_modules))
        if extra:
            raise invalid(
                f"feedforwardModules names {', '.join(sorted(extra))}, which targetModules lacks",
                "Name them in both.",
            )
        return self


class PrefixSpec(Record):
    """Prefix tuning: learned keys and values before the first token, as peft makes them."""

    virtual_tokens: int = Field(default=16, ge=1, le=1024, description="How many.")
    projection_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Learn them through an MLP of this width; left out: learn them directly.",
    )


class AdapterSpec(Record):
    """Adapter to train."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    f"!has(self.{kind}) || self.type == '{kind}'",
                    f"{kind} is set, but type names another adapter",
                )
                for kind in ("lora", "ia3", "prefix")
            ]
        }
    )

    type: Literal["lora", "ia3", "prefix"] = Field(default="lora", description="Kind of adapter.")
    start_from: Place | None = Field(
        default=None,
        alias="from",
        description="Folder of an adapter whose weights the training begins with, on a volume of "
        "the policy: what an earlier job left at its destination. It has the same kind, rank, "
        "scale and targets, over the same base. Left out: fresh weights.",
    )
    lora: LoraSpec | None = Field(default=None, description="Settings of a LoRA adapter.")
    ia3: Ia3Spec | None = Field(default=None, description="Settings of an (IA)3 adapter.")
    prefix: PrefixSpec | None = Field(default=None, description="Settings of prefix tuning.")

    @field_validator("type", mode="before")
    @classmethod
    def _refused_by_name(cls, kind: Any) -> Any:  # noqa: ANN401 - whatever was written
        if isinstance(kind, str) and kind.lower() in _REFUSED:
            remedy = _REMEDIES.get(kind.lower(), "Use lora, ia3 or prefix.")
            raise invalid(f"{kind!r} cannot be trained: {_REFUSED[kind.lower()]}", remedy)
        return kind

    @model_validator(mode="after")
    def _begins_with_a_folder(self) -> Self:
        if self.start_from is not None and is_bucket(self.start_from):
            raise invalid(
                f"from: {self.start_from!r} is in a bucket, and adapters are read from volumes",
                "Copy the adapter to a volume of the policy, and name that folder.",
            )
        return self

    @model_validator(mode="after")
    def _settings_of_another_kind(self) -> Self:
        for kind in ("lora", "ia3", "prefix"):
            if kind != self.type and getattr(self, kind) is not None:
                raise invalid(
                    f"{kind} is set, but type is {self.type}", f"Set type: {kind}, or leave it out."
                )
        return self

    @property
    def settings(self) -> LoraSpec | Ia3Spec | PrefixSpec:
        """Settings of the kind that `type` names; its defaults where nothing is written."""
        if self.type == "ia3":
            return self.ia3 or Ia3Spec()
        if self.type == "prefix":
            return self.prefix or PrefixSpec()
        return self.lora or LoraSpec()


def names(text: str | None) -> list[str]:
    """Return the names between the commas."""
    return text.split(",") if text else []
