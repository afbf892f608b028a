"""Resources that users write and read: the four kinds of windrow.dev/v1alpha1.

`crds/*.yaml` is made from these models by `tools/generate_crds.py`; a test holds both equal.
"""

from windrow.crd.adapter import AdapterSpec, Ia3Spec, LoraSpec, PrefixSpec
from windrow.crd.common import (
    ANNOTATION_GPU_ACCESS,
    ANNOTATION_INJECTED_BY,
    ANNOTATION_LOGS,
    ANNOTATION_METRICS_PORT,
    ANNOTATION_POLICY,
    API_VERSION,
    CATEGORY,
    FINALIZER,
    FINALIZER_ADAPTER,
    FINETUNE_JOB,
    GROUP,
    HARVEST_POLICY,
    HARVEST_SLOT,
    KINDS,
    LABEL_DECODE,
    LABEL_INJECT,
    LATENCY_PROFILE,
    SIDECAR_CONTAINER,
    VERSION,
    Condition,
    Kind,
    LabelSelector,
    SelectorRequirement,
)
from windrow.crd.dataset import DatasetSpec
from windrow.crd.finetunejob import (
    FinetuneJobSpec,
    FinetuneJobStatus,
    ModelSpec,
    OutputSpec,
)
from windrow.crd.harvestpolicy import HarvestHours, HarvestPolicySpec, HarvestPolicyStatus
from windrow.crd.harvestslot import HarvestSlotSpec, HarvestSlotStatus, slot_name
from windrow.crd.latencyprofile import CoRunModel, LatencyProfileSpec, ProfileSample, SoloModel
from windrow.crd.parse import parse_job_spec, parse_policy_spec, parse_profile_spec
from windrow.crd.training import (
    CheckpointSpec,
    EarlyStopSpec,
    OptimizerSpec,
    TrainingSpec,
)
from windrow.crd.values import format_duration, parse_duration, parse_quantity

__all__ = [
    "ANNOTATION_GPU_ACCESS",
    "ANNOTATION_INJECTED_BY",
    "ANNOTATION_LOGS",
    "ANNOTATION_METRICS_PORT",
    "ANNOTATION_POLICY",
    "API_VERSION",
    "CATEGORY",
    "FINALIZER",
    "FINALIZER_ADAPTER",
    "FINETUNE_JOB",
    "GROUP",
    "HARVEST_POLICY",
    "HARVEST_SLOT",
    "KINDS",
    "LABEL_DECODE",
    "LABEL_INJECT",
    "LATENCY_PROFILE",
    "SIDECAR_CONTAINER",
    "VERSION",
    "AdapterSpec",
    "CheckpointSpec",
    "CoRunModel",
    "Condition",
    "DatasetSpec",
    "EarlyStopSpec",
    "FinetuneJobSpec",
    "FinetuneJobStatus",
    "HarvestHours",
    "HarvestPolicySpec",
    "HarvestPolicyStatus",
    "HarvestSlotSpec",
    "HarvestSlotStatus",
    "Ia3Spec",
    "Kind",
    "LabelSelector",
    "LatencyProfileSpec",
    "LoraSpec",
    "ModelSpec",
    "OptimizerSpec",
    "OutputSpec",
    "PrefixSpec",
    "ProfileSample",
    "SelectorRequirement",
    "SoloModel",
    "TrainingSpec",
    "format_duration",
    "parse_duration",
    "parse_job_spec",
    "parse_policy_spec",
    "parse_profile_spec",
    "parse_quantity",
    "slot_name",
]
