"""What several of our resources share: conditions, selectors, and the names of the kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from windrow.crd.values import NAME_MAX, Record, Timestamp

GROUP: Final = "windrow.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "windrow"

LABEL_DECODE: Final = f"{GROUP}/decode"  # on injected pods: the one selector of the pod watch
LABEL_INJECT: Final = f"{GROUP}/inject"  # enabled | disabled, what a pod asks for
ANNOTATION_INJECTED_BY: Final = f"{GROUP}/injected-by"  # the rule that matched
ANNOTATION_POLICY: Final = f"{GROUP}/policy"  # name of a HarvestPolicy, over any selector
FINALIZER: Final = f"{GROUP}/cleanup"
SIDECAR_CONTAINER: Final = "windrow"


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


class SelectorRequirement(Record):
    """One expression of a label selector."""

    key: str = Field(max_length=NAME_MAX + 64, description="Label key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="How key and values relate."
    )
    values: list[str] = Field(default_factory=list, description="Values for In and NotIn.")


class LabelSelector(Record):
    """Which objects are meant, by their labels. Empty: all."""

    match_labels: dict[str, str] = Field(
        default_factory=dict, description="Labels that must have exactly these values."
    )
    match_expressions: list[SelectorRequirement] = Field(
        default_factory=list, description="Expressions that must all hold."
    )

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether an object with these labels is meant."""
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(_holds(requirement, labels) for requirement in self.match_expressions)


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
