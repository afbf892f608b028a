from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineReport(_message.Message):
    __slots__ = ("hello", "stats", "profile")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    stats: EngineStats
    profile: EngineProfile
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ..., profile: _Optional[_Union[EngineProfile, _Mapping]] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("protocol_version", "slot", "pid", "engine", "engine_version", "model", "model_fingerprint", "device", "driver", "compute_units", "finetune_levels", "chunk_bytes", "chunks", "tensor_parallel", "endpoint", "arena_socket", "weights_manifest", "sharing", "sharing_reason", "device_uuid", "cores", "sharing_code", "chats", "adapters")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_UNITS_FIELD_NUMBER: _ClassVar[int]
    FINETUNE_LEVELS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ARENA_SOCKET_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    SHARING_REASON_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    SHARING_CODE_FIELD_NUMBER: _ClassVar[int]
    CHATS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    slot: int
    pid: int
    engine: str
    engine_version: str
    model: str
    model_fingerprint: str
    device: str
    driver: str
    compute_units: int
    finetune_levels: _containers.RepeatedScalarFieldContainer[int]
    chunk_bytes: int
    chunks: int
    tensor_parallel: int
    endpoint: str
    arena_socket: str
    weights_manifest: str
    sharing: str
    sharing_reason: str
    device_uuid: str
    cores: _containers.RepeatedScalarFieldContainer[int]
    sharing_code: str
    chats: str
    adapters: AdapterLimits
    def __init__(self, protocol_version: _Optional[int] = ..., slot: _Optional[int] = ..., pid: _Optional[int] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., driver: _Optional[str] = ..., compute_units: _Optional[int] = ..., finetune_levels: _Optional[_Iterable[int]] = ..., chunk_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., endpoint: _Optional[str] = ..., arena_socket: _Optional[str] = ..., weights_manifest: _Optional[str] = ..., sharing: _Optional[str] = ..., sharing_reason: _Optional[str] = ..., device_uuid: _Optional[str] = ..., cores: _Optional[_Iterable[int]] = ..., sharing_code: _Optional[str] = ..., chats: _Optional[str] = ..., adapters: _Optional[_Union[AdapterLimits, _Mapping]] = ...) -> None: ...

class AdapterLimits(_message.Message):
    __slots__ = ("off", "rank", "targets")
    OFF_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    off: bool
    rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, off: _Optional[bool] = ..., rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("steps", "steps_over_objective", "tpot_p50_seconds", "tpot_p99_seconds", "batch", "context_tokens", "waiting", "decode_units", "finetune_units", "busy_seconds", "breaker", "predicted_tokens_per_second", "decision_p50_seconds", "decision_p99_seconds", "requests_completed", "tpot_histogram", "tpot_sum_seconds", "objective_seconds", "paused", "decision_seconds", "tpot_objective_ratio", "predictor_ratio", "chunk_return_seconds", "chunks_lent", "chunks_revoked", "chunks_reclaimed", "guard_trips", "granted_unit_seconds", "predictor_margin", "throttled_periods", "throttled_seconds", "first_tokens", "first_tokens_over_objective", "predicted_from", "adapters", "ranks")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_OVER_OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DECODE_UNITS_FIELD_NUMBER: _ClassVar[int]
    FINETUNE_UNITS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECISION_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECISION_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TPOT_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    TPOT_SUM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DECISION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TPOT_OBJECTIVE_RATIO_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_RATIO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_RETURN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_LENT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_REVOKED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_RECLAIMED_FIELD_NUMBER: _ClassVar[int]
    GUARD_TRIPS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_UNIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_MARGIN_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_PERIODS_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_OVER_OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FROM_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    steps_over_objective: int
    tpot_p50_seconds: float
    tpot_p99_seconds: float
    batch: int
    context_tokens: int
    waiting: int
    decode_units: int
    finetune_units: int
    busy_seconds: float
    breaker: str
    predicted_tokens_per_second: float
    decision_p50_seconds: float
    decision_p99_seconds: float
    requests_completed: int
    tpot_histogram: _containers.RepeatedScalarFieldContainer[int]
    tpot_sum_seconds: float
    objective_seconds: float
    paused: str
    decision_seconds: Histogram
    tpot_objective_ratio: Histogram
    predictor_ratio: Histogram
    chunk_return_seconds: Histogram
    chunks_lent: int
    chunks_revoked: int
    chunks_reclaimed: int
    guard_trips: int
    granted_unit_seconds: float
    predictor_margin: float
    throttled_periods: int
    throttled_seconds: float
    first_tokens: int
    first_tokens_over_objective: int
    predicted_from: str
    adapters: ServedAdapters
    ranks: _containers.RepeatedCompositeFieldContainer[RankStats]
    def __init__(self, steps: _Optional[int] = ..., steps_over_objective: _Optional[int] = ..., tpot_p50_seconds: _Optional[float] = ..., tpot_p99_seconds: _Optional[float] = ..., batch: _Optional[int] = ..., context_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., decode_units: _Optional[int] = ..., finetune_units: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., breaker: _Optional[str] = ..., predicted_tokens_per_second: _Optional[float] = ..., decision_p50_seconds: _Optional[float] = ..., decision_p99_seconds: _Optional[float] = ..., requests_completed: _Optional[int] = ..., tpot_histogram: _Optional[_Iterable[int]] = ..., tpot_sum_seconds: _Optional[float] = ..., objective_seconds: _Optional[float] = ..., paused: _Optional[str] = ..., decision_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., tpot_objective_ratio: _Optional[_Union[Histogram, _Mapping]] = ..., predictor_ratio: _Optional[_Union[Histogram, _Mapping]] = ..., chunk_return_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., chunks_lent: _Optional[int] = ..., chunks_revoked: _Optional[int] = ..., chunks_reclaimed: _Optional[int] = ..., guard_trips: _Optional[int] = ..., granted_unit_seconds: _Optional[float] = ..., predictor_margin: _Optional[float] = ..., throttled_periods: _Optional[int] = ..., throttled_seconds: _Optional[float] = ..., first_tokens: _Optional[int] = ..., first_tokens_over_objective: _Optional[int] = ..., predicted_from: _Optional[str] = ..., adapters: _Optional[_Union[ServedAdapters, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankStats, _Mapping]]] = ...) -> None: ...

class RankStats(_message.Message):
    __slots__ = ("computed_seconds", "chunks_lent")
    COMPUTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_LENT_FIELD_NUMBER: _ClassVar[int]
    computed_seconds: float
    chunks_lent: int
    def __init__(self, computed_seconds: _Optional[float] = ..., chunks_lent: _Optional[int] = ...) -> None: ...

class ServedAdapters(_message.Message):
    __slots__ = ("most_on_device", "on_device", "waited_for")
    MOST_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_FIELD_NUMBER: _ClassVar[int]
    most_on_device: int
    on_device: _containers.RepeatedScalarFieldContainer[str]
    waited_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, most_on_device: _Optional[int] = ..., on_device: _Optional[_Iterable[str]] = ..., waited_for: _Optional[_Iterable[str]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts", "sum")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class EngineProfile(_message.Message):
    __slots__ = ("key", "profile_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    key: str
    profile_json: str
    def __init__(self, key: _Optional[str] = ..., profile_json: _Optional[str] = ...) -> None: ...

class EngineCommand(_message.Message):
    __slots__ = ("policy", "worker")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    policy: EnginePolicy
    worker: EngineWorker
    def __init__(self, policy: _Optional[_Union[EnginePolicy, _Mapping]] = ..., worker: _Optional[_Union[EngineWorker, _Mapping]] = ...) -> None: ...

class EngineWorker(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class EnginePolicy(_message.Message):
    __slots__ = ("policy", "mode", "objective_seconds", "percentile", "scope", "max_compute_percent", "max_memory_percent", "name", "deferral_seconds", "first_token_seconds")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PERCENTILE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPUTE_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFERRAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    mode: str
    objective_seconds: float
    percentile: float
    scope: str
    max_compute_percent: int
    max_memory_percent: int
    name: str
    deferral_seconds: float
    first_token_seconds: float
    def __init__(self, policy: _Optional[str] = ..., mode: _Optional[str] = ..., objective_seconds: _Optional[float] = ..., percentile: _Optional[float] = ..., scope: _Optional[str] = ..., max_compute_percent: _Optional[int] = ..., max_memory_percent: _Optional[int] = ..., name: _Optional[str] = ..., deferral_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("hello", "progress", "event")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    progress: WorkerProgress
    event: WorkerEvent
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., progress: _Optional[_Union[WorkerProgress, _Mapping]] = ..., event: _Optional[_Union[WorkerEvent, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_version", "pid", "job_uid", "epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    pid: int
    job_uid: str
    epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., pid: _Optional[int] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("step", "total_steps", "loss", "learning_rate", "grad_norm", "tokens", "checkpoint_step", "checkpoint_path", "held_chunks", "busy_seconds", "skipped_rows", "memory_bytes", "allocator_held_bytes", "allocator_requested_bytes", "sharing", "sharing_reason", "cut_rows", "sharing_code", "joined_with", "graph_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    HELD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_REQUESTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    SHARING_REASON_FIELD_NUMBER: _ClassVar[int]
    CUT_ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARING_CODE_FIELD_NUMBER: _ClassVar[int]
    JOINED_WITH_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    total_steps: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    checkpoint_step: int
    checkpoint_path: str
    held_chunks: int
    busy_seconds: float
    skipped_rows: int
    memory_bytes: int
    allocator_held_bytes: int
    allocator_requested_bytes: int
    sharing: str
    sharing_reason: str
    cut_rows: int
    sharing_code: str
    joined_with: int
    graph_bytes: int
    def __init__(self, step: _Optional[int] = ..., total_steps: _Optional[int] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., grad_norm: _Optional[float] = ..., tokens: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., checkpoint_path: _Optional[str] = ..., held_chunks: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., skipped_rows: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., allocator_held_bytes: _Optional[int] = ..., allocator_requested_bytes: _Optional[int] = ..., sharing: _Optional[str] = ..., sharing_reason: _Optional[str] = ..., cut_rows: _Optional[int] = ..., sharing_code: _Optional[str] = ..., joined_with: _Optional[int] = ..., graph_bytes: _Optional[int] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("kind", "reason", "detail", "user_error", "adapter_path", "base_eval_loss", "tuned_eval_loss", "field", "remedy", "adapter_digest")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    USER_ERROR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PATH_FIELD_NUMBER: _ClassVar[int]
    BASE_EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    TUNED_EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    detail: str
    user_error: bool
    adapter_path: str
    base_eval_loss: float
    tuned_eval_loss: float
    field: str
    remedy: str
    adapter_digest: str
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., user_error: _Optional[bool] = ..., adapter_path: _Optional[str] = ..., base_eval_loss: _Optional[float] = ..., tuned_eval_loss: _Optional[float] = ..., field: _Optional[str] = ..., remedy: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("action", "reason", "job_uid", "epoch", "dataset_secret", "output_secret", "tracking_secret", "model_secret")
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
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATASET_SECRET_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SECRET_FIELD_NUMBER: _ClassVar[int]
    TRACKING_SECRET_FIELD_NUMBER: _ClassVar[int]
    MODEL_SECRET_FIELD_NUMBER: _ClassVar[int]
    action: str
    reason: str
    job_uid: str
    epoch: int
    dataset_secret: _containers.ScalarMap[str, str]
    output_secret: _containers.ScalarMap[str, str]
    tracking_secret: _containers.ScalarMap[str, str]
    model_secret: _containers.ScalarMap[str, str]
    def __init__(self, action: _Optional[str] = ..., reason: _Optional[str] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., dataset_secret: _Optional[_Mapping[str, str]] = ..., output_secret: _Optional[_Mapping[str, str]] = ..., tracking_secret: _Optional[_Mapping[str, str]] = ..., model_secret: _Optional[_Mapping[str, str]] = ...) -> None: ...
