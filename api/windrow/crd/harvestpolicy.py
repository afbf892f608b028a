"""Fields of a HarvestPolicy, and of its status."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Annotated, Final, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from windrow.access import SOURCE_PATTERN, parse_source
from windrow.crd.common import CONDITIONS_BY_TYPE, Condition, LabelSelector
from windrow.crd.texts import OBJECT_NAME, Name
from windrow.crd.values import (
    NAME_MAX,
    Duration,
    Quantity,
    Record,
    cel,
    format_duration,
    invalid,
)

# The sidecar's own mounts and the kernel's file systems: a volume there would hide them.
RESERVED_PATHS: Final = ("/run", "/var/run", "/proc", "/sys", "/dev")
# A mount over one of these would hide one of those.
_ABOVE_RESERVED: Final = ("/", "/var")
# Kubernetes separates mount options by colons, so no mount path may hold one.
PATH_PATTERN: Final = r"^(/[^/:]+)+$"
_PATH_MAX: Final = 512
_SHORTEST_TPOT: Final = timedelta(microseconds=100)
_LONGEST_TPOT: Final = timedelta(minutes=1)
_SHORTEST_PREPARATION: Final = timedelta(seconds=1)
_SHORTEST_LEASE, _LONGEST_LEASE = timedelta(seconds=2), timedelta(hours=24)
_SHORTEST_DEFERRAL, _LONGEST_DEFERRAL = timedelta(milliseconds=1), timedelta(minutes=1)
_SHORTEST_TTFT, _LONGEST_TTFT = timedelta(milliseconds=1), timedelta(minutes=10)

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY: Final = f"({'|'.join(_DAYS)})"
HOURS_PATTERN: Final = (
    rf"^({_DAY}(-{_DAY})?(,{_DAY}(-{_DAY})?)* )?"
    r"([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)( [A-Za-z0-9_+/-]+)?$"
)


class HarvestHours:
    """An interval of the day in a time zone, of all days or some: `Mon-Fri 20:00-08:00 Asia/Tokyo`.

    It may pass midnight, and then belongs to the day on which it begins. Days are listed by commas
    and ranges, which may pass the end of the week: `Fri-Sun`, `Sat,Sun`.
    """

    def __init__(self, text: str) -> None:
        if not re.fullmatch(HOURS_PATTERN, text):
            raise ValueError(f"{text!r} is not an interval of the day")
        words = text.split(" ")
        self.days = _days_of(words.pop(0)) if words[0][0].isalpha() else frozenset(range(7))
        begin, end = words[0].split("-")
        if begin == end:
            raise ValueError("begin and end are the same, so it is not an interval")
        self.begin = time.fromisoformat(begin)
        self.end = time() if end == "24:00" else time.fromisoformat(end)
        zone = words[1] if words[1:] else ""
        try:
            self.zone: tzinfo = ZoneInfo(zone) if zone else UTC
        except (ZoneInfoNotFoundError, OSError) as error:  # OSError: a folder, like Europe
            raise ValueError(f"there is no time zone {zone!r}") from error

    def contains(self, moment: datetime) -> bool:
        """Return whether the aware `moment` falls into the interval; begin counts, end does not."""
        local = moment.astimezone(self.zone)
        clock, today = local.time(), local.weekday()
        if self.begin < self.end:
            return today in self.days and self.begin <= clock < self.end
        begun_today = today in self.days and clock >= self.begin
        return begun_today or ((today - 1) % 7 in self.days and clock < self.end)


def _days_of(text: str) -> frozenset[int]:
    """Return the days, 0 for Monday, of words like `Mon-Fri,Sun`."""
    days: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin = _DAYS.index(first)
        length = (_DAYS.index(last or first) - begin) % 7
        days |= {(begin + offset) % 7 for offset in range(length + 1)}
    return frozenset(days)


def _hours(text: str) -> str:
    try:
        HarvestHours(text)
    except ValueError as error:
        raise invalid(
            f"{text!r}: {error}",
            "Write it like Mon-Fri 20:00-08:00 Europe/Berlin (no days: all; no zone: UTC), or "
            "leave it out for always.",
        ) from error
    return text


Hours = Annotated[
    str,
    AfterValidator(_hours),
    WithJsonSchema({"type": "string", "pattern": HOURS_PATTERN, "maxLength": 96}),
]


class ObjectiveSpec(Record):
    """Latency objective that serving must keep."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "duration(self.tpot) >= duration('100us') && "
                    "duration(self.tpot) <= duration('1m')",
                    "tpot must be between 100us and 1m",
                ),
                cel(
                    "!has(self.ttft) || (duration(self.ttft) >= duration('1ms') "
                    "&& duration(self.ttft) <= duration('10m'))",
                    "ttft must be between 1ms and 10m",
                ),
                cel(
                    "!has(self.deferralBound) || (duration(self.deferralBound) >= duration('1ms') "
                    "&& duration(self.deferralBound) <= duration('1m'))",
                    "deferralBound must be between 1ms and 1m",
                ),
            ]
        }
    )

    tpot: Duration = Field(
        description="Time per output token that must be kept, like 40ms. 100us to 1m."
    )
    percentile: float = Field(
        default=99,
        ge=50,
        le=99.99,
        description="Percentile of the TPOT that the objective is for, 50 to 99.99.",
    )
    scope: Literal["perStep", "perRequest"] = Field(
        default="perStep",
        description="perStep: each decode step is judged; perRequest: a request's mean.",
    )
    ttft: Duration | None = Field(
        default=None,
        description="Time to first token that must be kept where an instance computes prompts "
        "itself, like 500ms. 1ms to 10m. While a prompt waits, the worker gets as much as leaves "
        "this time. Left out: the worker pauses while a pass computes a prompt, and prompts that "
        "only wait do not hold it back.",
    )
    deferral_bound: Duration | None = Field(
        default=None,
        description="Longest time that a policy that defers (fineinfer, iterations) may hold a "
        "request back before admission, 1ms to 1m. Default: 400ms.",
    )

    @field_validator("tpot")
    @classmethod
    def _within_reason(cls, tpot: timedelta) -> timedelta:
        if not _SHORTEST_TPOT <= tpot <= _LONGEST_TPOT:
            raise invalid(
                f"{format_duration(tpot)} is not a time per output token",
                "Write one between 100us and 1m, like 40ms.",
            )
        return tpot

    @field_validator("deferral_bound")
    @classmethod
    def _a_bound(cls, bound: timedelta | None) -> timedelta | None:
        if bound is not None and not _SHORTEST_DEFERRAL <= bound <= _LONGEST_DEFERRAL:
            raise invalid(
                f"{format_duration(bound)} is not a time that a request may be held back",
                "Write one between 1ms and 1m, like 400ms, or leave it out.",
            )
        return bound

    @field_validator("ttft")
    @classmethod
    def _a_first_token(cls, length: timedelta | None) -> timedelta | None:
        if length is not None and not _SHORTEST_TTFT <= length <= _LONGEST_TTFT:
            raise invalid(
                f"{format_duration(length)} is not a time to first token",
                "Write one between 1ms and 10m, like 500ms, or leave it out.",
            )
        return length


class LimitsSpec(Record):
    """Limits on what may be harvested."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel("!has(self.hostMemory)", "hostMemory is not supported yet: leave it out"),
                cel(
                    "!has(self.hours) || self.hours.all(h, "
                    "h.substring(h.indexOf(':') - 2, h.indexOf(':') + 3) != "
                    "h.substring(h.indexOf(':') + 4, h.indexOf(':') + 9))",
                    "hours begin when they end: leave hours out for always",
                ),
            ]
        }
    )

    max_sm_percent: int = Field(
        default=100, ge=1, le=100, description="Most compute of a device (SMs, or cores of a host)."
    )
    max_memory_percent: int = Field(
        default=50, ge=0, le=100, description="Most of the arena that may be lent; 0: nothing."
    )
    host_memory: Quantity | None = Field(
        default=None,
        description="Most host memory of a worker, like 64Gi. v1alpha1 does not limit it yet.",
    )
    hours: list[Hours] = Field(
        default_factory=list,
        max_length=16,
        description="Hours in which harvesting is allowed, like 20:00-08:00 Europe/Berlin, or on "
        "some days only, like Mon-Fri 20:00-08:00 or Sat,Sun 00:00-24:00. An interval that passes "
        "midnight belongs to the day on which it begins. Empty: always.",
    )

    @field_validator("host_memory")
    @classmethod
    def _not_yet(cls, n_bytes: int | None) -> int | None:
        if n_bytes is not None:
            raise invalid(
                "is not supported yet",
                "Leave it out, and limit the memory of the sidecar's container.",
            )
        return n_bytes


def _source_pattern(text: str) -> str:
    try:
        parse_source(text)
    except ValueError as error:
        raise invalid(
            f"{text!r}: {error}",
            "Write it like rows.example.com, *.example.com, 10.0.0.0/8, minio.team.svc:9000 or *.",
        ) from error
    return text


SourcePattern = Annotated[
    str,
    AfterValidator(_source_pattern),
    WithJsonSchema(
        {"type": "string", "minLength": 1, "maxLength": NAME_MAX + 6, "pattern": SOURCE_PATTERN}
    ),
]


class KeySecret(Record):
    """A key in a Secret of the policy's namespace."""

    name: str = Field(
        min_length=1,
        max_length=NAME_MAX,
        pattern=OBJECT_NAME,
        description="Name of the Secret, which has the label `windrow.dev/credentials: true`.",
    )
    key: str = Field(
        default="api-key",
        min_length=1,
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        description="Key in it.",
    )


# The label that the API server gives each namespace.
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"


class AccessSpec(Record):
    """Namespaces and jobs that may use the slots."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.preparation) || duration(self.preparation) >= duration('1s')",
                    "preparation must be 1s or more",
                )
            ]
        }
    )

    namespace_selector: LabelSelector = Field(
        default_factory=LabelSelector,
        description="Namespaces whose jobs may be placed here, by their labels. Empty: that of the "
        "policy. All of them: an expression `kubernetes.io/metadata.name` `Exists`.",
    )
    gpu_seconds_per_day: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Device seconds that all jobs together may take in a day (UTC).",
    )
    gpu_seconds_per_day_and_namespace: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Device seconds that the jobs of each namespace may take in a day (UTC). Jobs "
        "that share a device share its seconds.",
    )
    adapters: bool = Field(
        default=False,
        description="true: jobs with `output.deploy.enabled` may load their adapters into the "
        "pods, and into the prefill instances of the same model in this namespace.",
    )
    server_key_secret: KeySecret | None = Field(
        default=None,
        description="Secret with the servers' own key (SGLang's --admin-api-key, else --api-key), "
        "for servers that load adapters only with it. Default: no key.",
    )
    sources: list[SourcePattern] | None = Field(
        default=None,
        max_length=64,
        description="Hosts that jobs may read from and write to by the network: a name, *.domain, "
        "an address or a network like 10.0.0.0/8, each with a :port if only that is meant, or * "
        "for every host with a public address. Left out: hosts with public addresses, and for "
        "jobs of this namespace those with private ones. Link-local addresses, where a node's "
        "credentials are served, are reached only where they are listed.",
    )
    pod_credentials: bool | None = Field(
        default=None,
        description="true: jobs may use s3:// and the Hub without a Secret, with the credentials "
        "of the pod or its node. Left out: jobs of this namespace only; others read of the Hub "
        "what is public.",
    )
    share_workers: bool = Field(
        default=False,
        description="true: jobs of several namespaces may run in one worker process.",
    )
    priority_classes: list[Name] | None = Field(
        default=None,
        max_length=64,
        description="PriorityClasses that jobs may name here. Left out: every one.",
    )
    preempt_across_namespaces: bool = Field(
        default=False,
        description="true: a job may take the slot of a job of another namespace, by its priority.",
    )
    preparation: Duration | None = Field(
        default=None,
        description="Computing time that the rows of a job may take before it trains: they are "
        "unpacked, written by the chat template and tokenized. Left out: 10m, and 0.1 s for each "
        "row and 1 s for 200,000 characters of its text.",
    )

    @field_validator("preparation")
    @classmethod
    def _a_preparation(cls, preparation: timedelta | None) -> timedelta | None:
        if preparation is not None and preparation < _SHORTEST_PREPARATION:
            raise invalid(
                f"{format_duration(preparation)} is not a time in which rows can be prepared",
                "Write 1s or more.",
            )
        return preparation

    def admits_others(self, own_namespace: str) -> bool:
        """Return whether jobs of other namespaces than the policy's own may come."""
        selector = self.namespace_selector
        names = [selector.match_labels.get(_NAMESPACE_NAME)] + [
            each.values[0]
            for each in selector.match_expressions
            if each.key == _NAMESPACE_NAME and each.operator == "In" and len(each.values) == 1
        ]
        return not selector.is_empty and own_namespace not in names

    def admits(self, own_namespace: str, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return whether jobs of `namespace`, with these labels, may come.

        Args:
            own_namespace: that of the policy: the one that an empty selector means.
            namespace: of the jobs.
            labels: of that namespace.
        """
        if self.namespace_selector.is_empty:
            return namespace == own_namespace
        return self.namespace_selector.matches(dict(labels))


class ClaimSource(Record):
    """A PersistentVolumeClaim of the pod's namespace."""

    claim_name: str = Field(
        min_length=1,
        max_length=NAME_MAX,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        description="Name of the claim.",
    )


def _absolute(path: str) -> str:
    if not re.fullmatch(PATH_PATTERN, path) or posixpath.normpath(path) != path:
        raise invalid(
            f"{path!r} is not an absolute path as Kubernetes mounts it",
            "Write it like /data/rows: from the root, without . or .., : or a slash at the end.",
        )
    return path


def _mount_path(path: str) -> str:
    if path in _ABOVE_RESERVED or any(
        path == reserved or path.startswith(f"{reserved}/") for reserved in RESERVED_PATHS
    ):
        raise invalid(
            f"{path!r} belongs to the sidecar or to its kernel",
            f"Mount it elsewhere than at /, /var, or in {', '.join(RESERVED_PATHS)}.",
        )
    return path


_PATH_SCHEMA: Final = {"type": "string", "maxLength": _PATH_MAX, "pattern": PATH_PATTERN}
AbsolutePath = Annotated[str, AfterValidator(_absolute), WithJsonSchema(_PATH_SCHEMA)]
MountPath = Annotated[
    str,
    AfterValidator(_absolute),
    AfterValidator(_mount_path),
    WithJsonSchema(
        {
            **_PATH_SCHEMA,
            "x-kubernetes-validations": [
                cel(
                    r"!self.matches('/\\.\\.?(/|$)')",
                    "mountPath may not hold . or .. as a name",
                ),
                cel(
                    f"!self.matches('^(/|/var|({'|'.join(RESERVED_PATHS)})(/.*)?)$')",
                    f"mountPath may not be /, /var, or stand in {', '.join(RESERVED_PATHS)}: "
                    "those belong to the sidecar or to its kernel",
                ),
            ],
        }
    ),
]


class HostPathSource(Record):
    """A directory of the node."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    r"!self.path.matches('/\\.\\.?(/|$)')",
                    "path may not hold . or .. as a name",
                )
            ]
        }
    )

    path: AbsolutePath = Field(description="Absolute path on the node.")


# The namespace of a job in the folder of a volume.
NAMESPACE_FOLDER: Final = "{namespace}"
_FOLDER_PATTERN: Final = r"^(([A-Za-z0-9._-]|\{namespace\})+(/([A-Za-z0-9._-]|\{namespace\})+)*)?$"


def _folder(text: str) -> str:
    if not re.fullmatch(_FOLDER_PATTERN, text) or {".", ".."} & set(text.split("/")):
        raise invalid(
            f"{text!r} is not a folder of a volume",
            "Write it like {namespace} or teams/{namespace}, without . or .., or leave it empty "
            "for the whole volume.",
        )
    return text


VolumeFolder = Annotated[
    str,
    AfterValidator(_folder),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": _PATH_MAX,
            "pattern": _FOLDER_PATTERN,
            "x-kubernetes-validations": [
                cel(r"!self.matches('(^|/)\\.\\.?(/|$)')", "folder may not hold . or .. as a name")
            ],
        }
    ),
]


class VolumeSpec(Record):
    """A volume that the sidecars mount, for models, rows and adapters."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "has(self.persistentVolumeClaim) != has(self.hostPath)",
                    "exactly one of persistentVolumeClaim and hostPath is wanted",
                )
            ]
        }
    )

    name: str = Field(
        max_length=48, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", description="Name in the pod."
    )
    mount_path: MountPath = Field(
        description="Where the sidecar sees it: an absolute path, not / or /var, and not in "
        f"{', '.join(RESERVED_PATHS)}. Adapters are written below one that is not readOnly."
    )
    read_only: bool = Field(default=False, description="Mount it read-only.")
    folder: VolumeFolder | None = Field(
        default=None,
        description="Folder of the volume to which a job is confined; {namespace} means that "
        "of the job. Left out: {namespace} where access.namespaceSelector is set and the volume is "
        "not readOnly, else the whole volume. An empty text: the whole volume.",
    )
    persistent_volume_claim: ClaimSource | None = Field(
        default=None, description="A claim of the pod's namespace."
    )
    host_path: HostPathSource | None = Field(default=None, description="A directory of the node.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.persistent_volume_claim is None) == (self.host_path is None):
            raise invalid(
                f"volume {self.name!r} needs exactly one source",
                "Set one of persistentVolumeClaim and hostPath.",
            )
        return self

    def tree_of(self, namespace: str, *, shared: bool) -> str:
        """Return the directory, as the sidecar sees it, to which jobs of `namespace` are confined.

        Args:
            namespace: of the job.
            shared: whether jobs of several namespaces may come.
        """
        folder = self.folder
        if folder is None:
            folder = NAMESPACE_FOLDER if shared and not self.read_only else ""
        return posixpath.join(self.mount_path, folder.replace(NAMESPACE_FOLDER, namespace)).rstrip(
            "/"
        )


class AdapterCacheSpec(Record):
    """Copies of finished adapters on a volume from which servers load them."""

    volume: str = Field(
        max_length=48,
        description="Name of one of `volumes` that is not readOnly. Servers of the policy's "
        "namespace mount it at the same path.",
    )
    size: Quantity = Field(
        default=10 * 2**30,
        description="Most bytes of the copies of each namespace, like 10Gi. Copies that no name "
        "points to go first.",
        json_schema_extra={"default": "10Gi"},
    )


# How decode and a worker share a GPU, as a policy asks for it.
SharingMode = Literal["auto", "spatial", "temporal"]
MPS_AND_SHARING = "sidecar.mps: false means sharing: temporal, and sharing says something else"
ADAPTER_CACHE = "adapterCache.volume is none of the volumes that are not readOnly"
DRA_FORM = "gpuAccess dra needs form sidecar: an ephemeral container can hold no claims"


class SidecarSpec(Record):
    """Way in which the sidecar comes into a pod and reaches the device."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.gpuAccess) || self.gpuAccess != 'dra' || "
                    "has(self.form) && self.form == 'sidecar'",
                    DRA_FORM,
                ),
                cel(
                    "!has(self.adapterCache) || has(self.volumes) && self.volumes.exists(v, "
                    "v.name == self.adapterCache.volume && (!has(v.readOnly) || !v.readOnly))",
                    ADAPTER_CACHE,
                ),
            ]
        }
    )

    form: Literal["attach", "sidecar"] = Field(
        default="attach",
        description="attach: an ephemeral container, added while decode serves; it cannot delay or "
        "stop decode. sidecar: a native sidecar with requests and limits of its own, made with the "
        "pod after a check that the pod would still be admitted.",
    )
    gpu_access: Literal["auto", "dra", "env", "mps"] = Field(
        default="auto",
        description="Way in which the sidecar's container gets at decode's GPU, never a second "
        "one. dra: it shares the claims of decode's container; needs form sidecar. env: the "
        "container runtime shows it GPUs by NVIDIA_VISIBLE_DEVICES, decode's own value or all, "
        "and workers use decode's alone; for nodes of one tenant. mps: as env, and as a client of "
        "the node's MPS daemon, by the pipes that decode mounts. auto: dra, mps or env where "
        "decode's container shows that it has it; never more than decode has. Read when a sidecar "
        "comes into a pod.",
    )
    mps: bool | None = Field(
        default=None,
        description="Deprecated: write `sharing` of the spec. false: as `sharing: temporal`; true: "
        "as `sharing: auto`.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of the pod's address at which the sidecar serves its metrics; the pod is "
        "annotated with it, for Prometheus. Default: the operator's setting. Read when a pod is "
        "created.",
    )
    volumes: list[VolumeSpec] = Field(
        default_factory=list,
        max_length=16,
        description="Volumes that the sidecars mount. Read when a pod is created.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "x-kubernetes-validations": [
                cel(
                    "self.all(v, self.exists_one(w, w.mountPath == v.mountPath))",
                    "two volumes have one mountPath",
                )
            ],
        },
    )

    adapter_cache: AdapterCacheSpec | None = Field(
        default=None,
        description="Where sidecars put copies of adapters for `output.deploy`, so that servers "
        "load from it what jobs have written to s3:// or to another volume. Left out: servers "
        "load from the job's destination, which has to be a path that they mount.",
    )

    @field_validator("volumes")
    @classmethod
    def _apart(cls, volumes: list[VolumeSpec]) -> list[VolumeSpec]:
        for field in ("name", "mount_path"):
            values = [getattr(volume, field) for volume in volumes]
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise invalid(
                    f"two volumes have the {to_camel(field)} {twice!r}",
                    "Give each volume a name and a path of its own.",
                )
        return volumes

    @model_validator(mode="after")
    def _cache_on_a_volume(self) -> Self:
        cache = self.adapter_cache
        if cache is not None and self.cache_volume is None:
            raise invalid(ADAPTER_CACHE, f"Add volume {cache.volume!r}, or name another.")
        return self

    @property
    def cache_volume(self) -> VolumeSpec | None:
        """The volume of the adapter cache; None: there is no cache."""
        named = self.adapter_cache.volume if self.adapter_cache else ""
        found = (each for each in self.volumes if each.name == named and not each.read_only)
        return next(found, None)

    @model_validator(mode="after")
    def _claims_need_a_container_of_the_pod(self) -> Self:
        if self.gpu_access == "dra" and self.form != "sidecar":
            raise invalid(DRA_FORM, "Set form: sidecar, or gpuAccess: auto.")
        return self


class HarvestPolicySpec(Record):
    """Decode pods that are harvested, with the objective and limits."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.sharing) || self.sharing == 'temporal' || !has(self.sidecar) || "
                    "!has(self.sidecar.mps) || self.sidecar.mps",
                    MPS_AND_SHARING,
                ),
                cel(
                    "!has(self.lease) || (duration(self.lease) >= duration('2s') && "
                    "duration(self.lease) <= duration('24h'))",
                    "lease must be between 2s and 24h",
                ),
            ]
        }
    )

    selector: LabelSelector = Field(
        description="Decode pods of this namespace, by their labels. The rules of their stack say "
        "which pods decode. Empty: all of them."
    )
    objective: ObjectiveSpec = Field(description="Latency objective that serving must keep.")
    mode: Literal["harvest", "observe", "off"] = Field(
        default="observe",
        description="observe, the default: decide but run no job, to see what harvesting would "
        "give; a running job writes a checkpoint and waits, as with off. harvest: jobs run.",
    )
    lease: Duration = Field(
        default=timedelta(minutes=5),
        description="Longest time that a sidecar harvests by this policy without contact to the "
        "operator, 2s to 24h. Its jobs then finish their step, write a checkpoint and stop until "
        "the operator is back.",
        json_schema_extra={"default": "5m"},
    )
    policy: Literal[
        "windrow",
        "harli",
        "llmstation",
        "flexllm",
        "fineinfer",
        "temporal",
        "iterations",
        "static",
    ] = Field(
        default="windrow", description="Policy that decides what the worker may do beside decode."
    )
    sharing: SharingMode | None = Field(
        default=None,
        description="Way in which decode and a worker share a GPU. spatial: both run at once, as "
        "clients of an MPS daemon that decode's start brings up; a fatal fault of one client then "
        "ends the other's work on the GPU too, and a slot where this is not possible takes no "
        "job. temporal: in turn, so the worker runs only while decode has no request; no fault is "
        "shared. auto: spatial where decode's start found all that it needs, else temporal; the "
        "slot's condition SharedInSpace says which and why. Read when a pod is created. Left out: "
        "auto.",
    )
    limits: LimitsSpec = Field(
        default_factory=LimitsSpec, description="Limits on what may be harvested."
    )
    access: AccessSpec = Field(
        default_factory=AccessSpec, description="Namespaces and jobs that may use the slots."
    )
    sidecar: SidecarSpec = Field(
        default_factory=SidecarSpec,
        description="Way in which the sidecar comes into a pod and reaches the device.",
    )

    @model_validator(mode="after")
    def _one_word_on_sharing(self) -> Self:
        if self.sidecar.mps is False and self.sharing not in (None, "temporal"):
            raise invalid(MPS_AND_SHARING, "Leave sidecar.mps out: sharing takes its place.")
        return self

    @property
    def wanted_sharing(self) -> SharingMode:
        """Return `sharing`, or what the deprecated `sidecar.mps` means in its place."""
        return self.sharing or ("temporal" if self.sidecar.mps is False else "auto")

    @field_validator("lease")
    @classmethod
    def _a_lease(cls, lease: timedelta) -> timedelta:
        if not _SHORTEST_LEASE <= lease <= _LONGEST_LEASE:
            raise invalid(
                f"{format_duration(lease)} is not a time that a policy may hold without the "
                "operator",
                "Write one between 2s and 24h, like 5m.",
            )
        return lease

    def open_at(self, moment: datetime) -> bool:
        """Return whether the hours allow harvesting at the aware `moment`."""
        hours = self.limits.hours
        return not hours or any(HarvestHours(text).contains(moment) for text in hours)


class NamespaceUsage(Record):
    """Use of today by the jobs of a namespace."""

    namespace: str = Field(description="Namespace of the jobs.")
    gpu_seconds: float = Field(description="Device seconds.")


class UsageStatus(Record):
    """Use of today."""

    day: str = Field(description="The day, UTC.")
    gpu_seconds: float = Field(description="Device seconds that jobs held slots for.")
    namespaces: list[NamespaceUsage] = Field(
        default_factory=list,
        description="Device seconds of each namespace's jobs.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["namespace"],
        },
    )


class HarvestPolicyStatus(Record):
    """Status of a policy, written by the operator."""

    observed_generation: int | None = Field(
        default=None, description="Generation of the spec that this status is about."
    )
    conditions: list[Condition] | None = Field(
        default=None,
        description="Conditions: Accepted, and SelectsPods.",
        json_schema_extra=CONDITIONS_BY_TYPE,
    )
    pods: int | None = Field(default=None, description="Decode pods that are selected.")
    slots: int | None = Field(default=None, description="Slots of these pods that are attached.")
    harvesting: int | None = Field(default=None, description="Slots that run a job.")
    refused: int | None = Field(
        default=None,
        description="Slots whose engine cannot be harvested; the condition SelectsPods says why.",
    )
    usage: UsageStatus | None = Field(default=None, description="Use of today.")
