from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SidecarMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "job_event", "profile", "adapter")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    JOB_EVENT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    hello: SidecarHello
    heartbeat: SlotHeartbeat
    job_event: JobEvent
    profile: ProfileReport
    adapter: AdapterStored
    def __init__(self, hello: _Optional[_Union[SidecarHello, _Mapping]] = ..., heartbeat: _Optional[_Union[SlotHeartbeat, _Mapping]] = ..., job_event: _Optional[_Union[JobEvent, _Mapping]] = ..., profile: _Optional[_Union[ProfileReport, _Mapping]] = ..., adapter: _Optional[_Union[AdapterStored, _Mapping]] = ...) -> None: ...

class OperatorMessage(_message.Message):
    __slots__ = ("hello", "policy", "assign", "command", "renewal", "adapter")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    hello: OperatorHello
    policy: PolicyConfig
    assign: Assign
    command: JobCommand
    renewal: PolicyRenewal
    adapter: StoreAdapter
    def __init__(self, hello: _Optional[_Union[OperatorHello, _Mapping]] = ..., policy: _Optional[_Union[PolicyConfig, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., command: _Optional[_Union[JobCommand, _Mapping]] = ..., renewal: _Optional[_Union[PolicyRenewal, _Mapping]] = ..., adapter: _Optional[_Union[StoreAdapter, _Mapping]] = ...) -> None: ...

class SidecarHello(_message.Message):
    __slots__ = ("protocol_version", "windrow_version", "pod_namespace", "pod_name", "pod_uid", "node_name", "slots", "running", "leader_term", "heartbeat_seconds", "rests", "stores_adapters")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WINDROW_VERSION_FIELD_NUMBER: _ClassVar[int]
    POD_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    LEADER_TERM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    STORES_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    windrow_version: str
    pod_namespace: str
    pod_name: str
    pod_uid: str
    node_name: str
    slots: _containers.RepeatedCompositeFieldContainer[SlotFacts]
    running: _containers.RepeatedCompositeFieldContainer[RunningJob]
    leader_term: int
    heartbeat_seconds: float
    rests: bool
    stores_adapters: bool
    def __init__(self, protocol_version: _Optional[int] = ..., windrow_version: _Optional[str] = ..., pod_namespace: _Optional[str] = ..., pod_name: _Optional[str] = ..., pod_uid: _Optional[str] = ..., node_name: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[SlotFacts, _Mapping]]] = ..., running: _Optional[_Iterable[_Union[RunningJob, _Mapping]]] = ..., leader_term: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., rests: _Optional[bool] = ..., stores_adapters: _Optional[bool] = ...) -> None: ...

class SlotFacts(_message.Message):
    __slots__ = ("index", "engine", "engine_version", "device", "driver", "model", "model_fingerprint", "compute_units", "finetune_levels", "arena_bytes", "chunk_bytes", "chunks", "tensor_parallel", "endpoint", "max_jobs", "sharing", "sharing_reason", "output_trees", "unseen_device", "sharing_code", "ranks", "refused")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_UNITS_FIELD_NUMBER: _ClassVar[int]
    FINETUNE_LEVELS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    SHARING_REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TREES_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_DEVICE_FIELD_NUMBER: _ClassVar[int]
    SHARING_CODE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    index: int
    engine: str
    engine_version: str
    device: str
    driver: str
    model: str
    model_fingerprint: str
    compute_units: int
    finetune_levels: _containers.RepeatedScalarFieldContainer[int]
    arena_bytes: int
    chunk_bytes: int
    chunks: int
    tensor_parallel: int
    endpoint: str
    max_jobs: int
    sharing: str
    sharing_reason: str
    output_trees: _containers.RepeatedScalarFieldContainer[str]
    unseen_device: str
    sharing_code: str
    ranks: int
    refused: str
    def __init__(self, index: _Optional[int] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., device: _Optional[str] = ..., driver: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., compute_units: _Optional[int] = ..., finetune_levels: _Optional[_Iterable[int]] = ..., arena_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., endpoint: _Optional[str] = ..., max_jobs: _Optional[int] = ..., sharing: _Optional[str] = ..., sharing_reason: _Optional[str] = ..., output_trees: _Optional[_Iterable[str]] = ..., unseen_device: _Optional[str] = ..., sharing_code: _Optional[str] = ..., ranks: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class OperatorHello(_message.Message):
    __slots__ = ("protocol_version", "operator_version", "heartbeat_seconds", "leader_term", "rest_heartbeat_seconds", "renews")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEADER_TERM_FIELD_NUMBER: _ClassVar[int]
    REST_HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RENEWS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    operator_version: str
    heartbeat_seconds: float
    leader_term: int
    rest_heartbeat_seconds: float
    renews: bool
    def __init__(self, protocol_version: _Optional[int] = ..., operator_version: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., leader_term: _Optional[int] = ..., rest_heartbeat_seconds: _Optional[float] = ..., renews: _Optional[bool] = ...) -> None: ...

class PolicyRenewal(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PolicyConfig(_message.Message):
    __slots__ = ("name", "policy", "mode", "objective_seconds", "percentile", "scope", "max_compute_percent", "max_memory_percent", "generation", "deferral_seconds", "lease_seconds", "first_token_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PERCENTILE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPUTE_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEFERRAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy: str
    mode: str
    objective_seconds: float
    percentile: float
    scope: str
    max_compute_percent: int
    max_memory_percent: int
    generation: int
    deferral_seconds: float
    lease_seconds: float
    first_token_seconds: float
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[str] = ..., mode: _Optional[str] = ..., objective_seconds: _Optional[float] = ..., percentile: _Optional[float] = ..., scope: _Optional[str] = ..., max_compute_percent: _Optional[int] = ..., max_memory_percent: _Optional[int] = ..., generation: _Optional[int] = ..., deferral_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("slot", "job_namespace", "job_name", "job_uid", "epoch", "spec_json", "outputs", "leader_term", "dataset_secret", "output_secret", "tracking_secret", "model_secret", "checkpoint_path", "access")
    class DatasetSecretEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class OutputSecretEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TrackingSecretEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ModelSecretEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SLOT_FIELD_NUMBER: _ClassVar[int]
    JOB_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LEADER_TERM_FIELD_NUMBER: _ClassVar[int]
    DATASET_SECRET_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SECRET_FIELD_NUMBER: _ClassVar[int]
    TRACKING_SECRET_FIELD_NUMBER: _ClassVar[int]
    MODEL_SECRET_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    job_namespace: str
    job_name: str
    job_uid: str
    epoch: int
    spec_json: str
    outputs: Outputs
    leader_term: int
    dataset_secret: _containers.ScalarMap[str, str]
    output_secret: _containers.ScalarMap[str, str]
    tracking_secret: _containers.ScalarMap[str, str]
    model_secret: _containers.ScalarMap[str, str]
    checkpoint_path: str
    access: Access
    def __init__(self, slot: _Optional[int] = ..., job_namespace: _Optional[str] = ..., job_name: _Optional[str] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., spec_json: _Optional[str] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., leader_term: _Optional[int] = ..., dataset_secret: _Optional[_Mapping[str, str]] = ..., output_secret: _Optional[_Mapping[str, str]] = ..., tracking_secret: _Optional[_Mapping[str, str]] = ..., model_secret: _Optional[_Mapping[str, str]] = ..., checkpoint_path: _Optional[str] = ..., access: _Optional[_Union[Access, _Mapping]] = ...) -> None: ...

class Access(_message.Message):
    __slots__ = ("readable_trees", "lists_sources", "sources", "private_sources", "pod_credentials", "shares_worker", "serves_model", "preparation_seconds")
    READABLE_TREES_FIELD_NUMBER: _ClassVar[int]
    LISTS_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_SOURCES_FIELD_NUMBER: _ClassVar[int]
    POD_CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    SHARES_WORKER_FIELD_NUMBER: _ClassVar[int]
    SERVES_MODEL_FIELD_NUMBER: _ClassVar[int]
    PREPARATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    readable_trees: _containers.RepeatedScalarFieldContainer[str]
    lists_sources: bool
    sources: _containers.RepeatedScalarFieldContainer[str]
    private_sources: bool
    pod_credentials: bool
    shares_worker: bool
    serves_model: bool
    preparation_seconds: float
    def __init__(self, readable_trees: _Optional[_Iterable[str]] = ..., lists_sources: _Optional[bool] = ..., sources: _Optional[_Iterable[str]] = ..., private_sources: _Optional[bool] = ..., pod_credentials: _Optional[bool] = ..., shares_worker: _Optional[bool] = ..., serves_model: _Optional[bool] = ..., preparation_seconds: _Optional[float] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("trees", "mounts")
    TREES_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedScalarFieldContainer[str]
    mounts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trees: _Optional[_Iterable[str]] = ..., mounts: _Optional[_Iterable[str]] = ...) -> None: ...

class JobCommand(_message.Message):
    __slots__ = ("job_uid", "epoch", "action", "reason", "leader_term")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[JobCommand.Action]
        PAUSE: _ClassVar[JobCommand.Action]
        RESUME: _ClassVar[JobCommand.Action]
        CHECKPOINT: _ClassVar[JobCommand.Action]
        STOP: _ClassVar[JobCommand.Action]
        ABORT: _ClassVar[JobCommand.Action]
    ACTION_UNSPECIFIED: JobCommand.Action
    PAUSE: JobCommand.Action
    RESUME: JobCommand.Action
    CHECKPOINT: JobCommand.Action
    STOP: JobCommand.Action
    ABORT: JobCommand.Action
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEADER_TERM_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    action: JobCommand.Action
    reason: str
    leader_term: int
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., action: _Optional[_Union[JobCommand.Action, str]] = ..., reason: _Optional[str] = ..., leader_term: _Optional[int] = ...) -> None: ...

class RunningJob(_message.Message):
    __slots__ = ("slot", "job_uid", "epoch", "progress")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    job_uid: str
    epoch: int
    progress: Progress
    def __init__(self, slot: _Optional[int] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "total_steps", "loss", "tokens_per_second", "tokens", "eta_seconds", "checkpoint_step", "checkpoint_path", "skipped_rows", "cut_rows", "joined_with")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ETA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    CUT_ROWS_FIELD_NUMBER: _ClassVar[int]
    JOINED_WITH_FIELD_NUMBER: _ClassVar[int]
    step: int
    total_steps: int
    loss: float
    tokens_per_second: float
    tokens: int
    eta_seconds: float
    checkpoint_step: int
    checkpoint_path: str
    skipped_rows: int
    cut_rows: int
    joined_with: int
    def __init__(self, step: _Optional[int] = ..., total_steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., tokens: _Optional[int] = ..., eta_seconds: _Optional[float] = ..., checkpoint_step: _Optional[int] = ..., checkpoint_path: _Optional[str] = ..., skipped_rows: _Optional[int] = ..., cut_rows: _Optional[int] = ..., joined_with: _Optional[int] = ...) -> None: ...

class SlotHeartbeat(_message.Message):
    __slots__ = ("slot", "engine_state", "steps", "steps_over_objective", "tpot_p50_seconds", "tpot_p99_seconds", "batch", "context_tokens", "waiting", "decode_units", "finetune_units", "chunks_kv", "chunks_lent", "chunks_reserved", "chunks_free", "predicted_tokens_per_second", "compute_utilization", "compute_utilization_decode", "memory_utilization", "breaker", "job", "chunks_draining", "jobs", "off", "predicted_from", "ranks_differ")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_OVER_OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DECODE_UNITS_FIELD_NUMBER: _ClassVar[int]
    FINETUNE_UNITS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_KV_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_LENT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FREE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_UTILIZATION_DECODE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FROM_FIELD_NUMBER: _ClassVar[int]
    RANKS_DIFFER_FIELD_NUMBER: _ClassVar[int]
    slot: int
    engine_state: str
    steps: int
    steps_over_objective: int
    tpot_p50_seconds: float
    tpot_p99_seconds: float
    batch: int
    context_tokens: int
    waiting: int
    decode_units: int
    finetune_units: int
    chunks_kv: int
    chunks_lent: int
    chunks_reserved: int
    chunks_free: int
    predicted_tokens_per_second: float
    compute_utilization: float
    compute_utilization_decode: float
    memory_utilization: float
    breaker: str
    job: RunningJob
    chunks_draining: int
    jobs: _containers.RepeatedCompositeFieldContainer[RunningJob]
    off: str
    predicted_from: str
    ranks_differ: str
    def __init__(self, slot: _Optional[int] = ..., engine_state: _Optional[str] = ..., steps: _Optional[int] = ..., steps_over_objective: _Optional[int] = ..., tpot_p50_seconds: _Optional[float] = ..., tpot_p99_seconds: _Optional[float] = ..., batch: _Optional[int] = ..., context_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., decode_units: _Optional[int] = ..., finetune_units: _Optional[int] = ..., chunks_kv: _Optional[int] = ..., chunks_lent: _Optional[int] = ..., chunks_reserved: _Optional[int] = ..., chunks_free: _Optional[int] = ..., predicted_tokens_per_second: _Optional[float] = ..., compute_utilization: _Optional[float] = ..., compute_utilization_decode: _Optional[float] = ..., memory_utilization: _Optional[float] = ..., breaker: _Optional[str] = ..., job: _Optional[_Union[RunningJob, _Mapping]] = ..., chunks_draining: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[RunningJob, _Mapping]]] = ..., off: _Optional[str] = ..., predicted_from: _Optional[str] = ..., ranks_differ: _Optional[str] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("kind", "job_uid", "epoch", "reason", "detail", "user_error", "progress", "adapter_path", "base_eval_loss", "tuned_eval_loss", "at_unix_seconds", "field", "remedy", "adapter_digest")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[JobEvent.Kind]
        STARTED: _ClassVar[JobEvent.Kind]
        PAUSED: _ClassVar[JobEvent.Kind]
        RESUMED: _ClassVar[JobEvent.Kind]
        CHECKPOINTED: _ClassVar[JobEvent.Kind]
        STOPPED: _ClassVar[JobEvent.Kind]
        SUCCEEDED: _ClassVar[JobEvent.Kind]
        FAILED: _ClassVar[JobEvent.Kind]
        REJECTED: _ClassVar[JobEvent.Kind]
        EVALUATED: _ClassVar[JobEvent.Kind]
        WARNED: _ClassVar[JobEvent.Kind]
    KIND_UNSPECIFIED: JobEvent.Kind
    STARTED: JobEvent.Kind
    PAUSED: JobEvent.Kind
    RESUMED: JobEvent.Kind
    CHECKPOINTED: JobEvent.Kind
    STOPPED: JobEvent.Kind
    SUCCEEDED: JobEvent.Kind
    FAILED: JobEvent.Kind
    REJECTED: JobEvent.Kind
    EVALUATED: JobEvent.Kind
    WARNED: JobEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    USER_ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PATH_FIELD_NUMBER: _ClassVar[int]
    BASE_EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    TUNED_EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    kind: JobEvent.Kind
    job_uid: str
    epoch: int
    reason: str
    detail: str
    user_error: bool
    progress: Progress
    adapter_path: str
    base_eval_loss: float
    tuned_eval_loss: float
    at_unix_seconds: float
    field: str
    remedy: str
    adapter_digest: str
    def __init__(self, kind: _Optional[_Union[JobEvent.Kind, str]] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., user_error: _Optional[bool] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., adapter_path: _Optional[str] = ..., base_eval_loss: _Optional[float] = ..., tuned_eval_loss: _Optional[float] = ..., at_unix_seconds: _Optional[float] = ..., field: _Optional[str] = ..., remedy: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class StoreAdapter(_message.Message):
    __slots__ = ("job_uid", "source", "digest", "cache", "cache_bytes", "keep", "outputs", "access", "secret", "leader_term", "forget")
    class SecretEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LEADER_TERM_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    source: str
    digest: str
    cache: str
    cache_bytes: int
    keep: _containers.RepeatedScalarFieldContainer[str]
    outputs: Outputs
    access: Access
    secret: _containers.ScalarMap[str, str]
    leader_term: int
    forget: bool
    def __init__(self, job_uid: _Optional[str] = ..., source: _Optional[str] = ..., digest: _Optional[str] = ..., cache: _Optional[str] = ..., cache_bytes: _Optional[int] = ..., keep: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., access: _Optional[_Union[Access, _Mapping]] = ..., secret: _Optional[_Mapping[str, str]] = ..., leader_term: _Optional[int] = ..., forget: _Optional[bool] = ...) -> None: ...

class AdapterStored(_message.Message):
    __slots__ = ("job_uid", "digest", "error")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    digest: str
    error: str
    def __init__(self, job_uid: _Optional[str] = ..., digest: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ProfileReport(_message.Message):
    __slots__ = ("slot", "key", "profile_json")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    slot: int
    key: str
    profile_json: str
    def __init__(self, slot: _Optional[int] = ..., key: _Optional[str] = ..., profile_json: _Optional[str] = ...) -> None: ...
