"""Parts that several of our resources share: conditions, selectors, names of the kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from windrow.crd.values import NAME_MAX, Record, Timestamp, cel, invalid

GROUP: Final = "windrow.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "windrow"

LABEL_DECODE: Final = f"{GROUP}/decode"  # on injected pods: the one selector of the pod watch
LABEL_INJECT: Final = f"{GROUP}/inject"  # enabled | disabled, what a pod asks for
ANNOTATION_GPU_ACCESS: Final = f"{GROUP}/gpu-access"  # how the sidecar reaches decode's GPU, why
ANNOTATION_INJECTED_BY: Final = f"{GROUP}/injected-by"  # the rule that matched
ANNOTATION_POLICY: Final = f"{GROUP}/policy"  # name of a HarvestPolicy, over any selector
ANNOTATION_LOGS: Final = f"{GROUP}/log-dir"  # of a local cluster's pods: where their logs are
ANNOTATION_METRICS_PORT: Final = f"{GROUP}/metrics-port"  # where the sidecar serves its metrics
FINALIZER: Final = f"{GROUP}/cleanup"
# Of a job whose adapter is loaded, or about to be, in serving pods.
FINALIZER_ADAPTER: Final = f"{GROUP}/adapter"
SIDECAR_CONTAINER: Final = "windrow"
# Kueue's labels on a job: its LocalQueue, and a WorkloadPriorityClass.
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
# Resource that quotas of Kueue count: one for each job that may have a slot.
HARVEST_SLOTS: Final = f"{GROUP}/harvest-slots"


@dataclass(frozen=True)
class Kind:
    """Names of one of our kinds."""

    kind: str
    plural: str
    singular: str
    short: str


FINETUNE_JOB: Final = Kind("FinetuneJob", "finetunejobs", "finetunejob", "ftj")
HARVEST_POLICY: Final = Kind("HarvestPolicy", "harvestpolicies", "harvestpolicy", "hp")
HARVEST_SLOT: Final = Kind("HarvestSlot", "harvestslots", "harvestslot", "hs")
LATENCY_PROFILE: Final = Kind("LatencyProfile", "latencyprofiles", "latencyprofile", "lp")
KINDS: Final = (FINETUNE_JOB, HARVEST_POLICY, HARVEST_SLOT, LATENCY_PROFILE)


# Each condition is applied and kept alone, whatever others write.
CONDITIONS_BY_TYPE: Final[JsonDict] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}


class Condition(Record):
    """One fact about a resource, by Kubernetes' conventions."""

    type: str = Field(max_length=316, description="What it is about, in CamelCase.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that it is about."
    )
    last_transition_time: Timestamp = Field(description="When the status last changed.")
    reason: str = Field(
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, in one CamelCase word.",
    )
    message: str = Field(max_length=32768, description="Why, in a sentence for people.")


LABEL_KEY_PATTERN: Final = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
LABEL_VALUE_PATTERN: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_KEY_MAX: Final = NAME_MAX + 64
_VALUE_MAX: Final = 63


def _label_key(key: str) -> str:
    if len(key) > _KEY_MAX or not re.fullmatch(LABEL_KEY_PATTERN, key):
        raise invalid(f"{key!r} is not a label key", "Write it like app or example.com/app.")
    return key


def _label_value(value: str) -> str:
    if len(value) > _VALUE_MAX or not re.fullmatch(LABEL_VALUE_PATTERN, value):
        raise invalid(
            f"{value!r} is not a label value",
            "Write at most 63 letters, digits, - _ and . between letters or digits.",
        )
    return value


def _label_keys(labels: dict[str, str]) -> dict[str, str]:
    return {_label_key(key): value for key, value in labels.items()}


LabelKey = Annotated[
    str,
    AfterValidator(_label_key),
    WithJsonSchema({"type": "string", "maxLength": _KEY_MAX, "pattern": LABEL_KEY_PATTERN}),
]
LabelValue = Annotated[
    str,
    AfterValidator(_label_value),
    WithJsonSchema({"type": "string", "maxLength": _VALUE_MAX, "pattern": LABEL_VALUE_PATTERN}),
]


class SelectorRequirement(Record):
    """One expression of a label selector."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "self.operator in ['In', 'NotIn'] == (has(self.values) && "
                    "size(self.values) > 0)",
                    "In and NotIn need values, Exists and DoesNotExist take none",
                )
            ]
        }
    )

    key: LabelKey = Field(description="Label key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="How key and values relate."
    )
    values: list[LabelValue] = Field(
        default_factory=list, max_length=64, description="Values for In and NotIn."
    )

    @model_validator(mode="after")
    def _values_where_they_are_read(self) -> Self:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise invalid(
                f"{self.operator} with {len(self.values)} values is not a selector",
                "In and NotIn need values, Exists and DoesNotExist take none.",
            )
        return self


class LabelSelector(Record):
    """Labels that select objects. Empty: all."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.matchLabels) || self.matchLabels.all(key, "
                    f"key.matches(r'{LABEL_KEY_PATTERN}'))",
                    "matchLabels holds a key that is not a label key",
                )
            ]
        }
    )

    match_labels: Annotated[dict[str, LabelValue], AfterValidator(_label_keys)] = Field(
        default_factory=dict,
        max_length=64,
        description="Labels that must have exactly these values.",
    )
    match_expressions: list[SelectorRequirement] = Field(
        default_factory=list, max_length=64, description="Expressions that must all hold."
    )

    @property
    def is_empty(self) -> bool:
        """True where it selects nothing in particular."""
        return not self.match_labels and not self.match_expressions

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether an object with these labels is meant."""
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(_holds(requirement, labels) for requirement in self.match_expressions)

    def query(self, *more: str) -> str:
        """Return the value of `labelSelector` that lists what is meant.

        Args:
            more: further terms of that syntax, which must hold too.
        """
        terms = [f"{key}={value}" for key, value in self.match_labels.items()]
        for each in self.match_expressions:
            values = f"({','.join(each.values)})"
            terms.append(
                {
                    "In": f"{each.key} in {values}",
                    "NotIn": f"{each.key} notin {values}",
                    "Exists": each.key,
                    "DoesNotExist": f"!{each.key}",
                }[each.operator]
            )
        return ",".join([*terms, *more])


def _holds(requirement: SelectorRequirement, labels: dict[str, str]) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
