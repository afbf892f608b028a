"""The completion API as data: which requests are accepted, and what answers look like.

Fields are OpenAI's, with SGLang's additions for prefill-decode disaggregation and for benchmarks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from windrow.errors import UserError

_SWITCHES = {"ignore_eos", "stream", "echo"}


class StreamOptions(BaseModel):
    """OpenAI's stream_options."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class CompletionBody(BaseModel):
    """Body of POST /v1/completions. Unknown fields are refused rather than ignored."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    model: str | None = None  # one model is served: the name is not looked at
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Prefill-decode disaggregation: where the prompt's KV comes from. Any of them says it comes.
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    # How long a policy that defers may hold this request back before it is admitted.
    deferral_ms: float | None = Field(None, ge=1.0, le=60_000.0)
    # Accepted with the one value that changes nothing, since clients send them by habit.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401 - any JSON
        """Refuse true and false where a number belongs: Python counts them as 1 and 0."""
        parts = value if isinstance(value, list) else [value]
        if info.field_name not in _SWITCHES and any(isinstance(part, bool) for part in parts):
            raise PydanticCustomError("number", "Input should not be true or false")
        return value

    @property
    def kv_arrives(self) -> bool:
        """True where a prefill instance sends the prompt's KV."""
        return self.bootstrap_host is not None or self.bootstrap_room is not None

    @property
    def stop_strings(self) -> list[str]:
        """`stop`, as a list without empty strings."""
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return [stop for stop in stops if stop]


def parse_body(raw: Any) -> CompletionBody:  # noqa: ANN401 - whatever JSON a client has sent
    """Validate a request. Raises UserError naming the field."""
    try:
        return CompletionBody.model_validate(raw)
    except ValidationError as invalid:
        # Of a union's arms the one that got furthest says best what is wrong.
        first = max(invalid.errors(), key=lambda error: len(error["loc"]))
        field = ".".join(str(part) for part in first["loc"] if part not in _UNION_ARMS)
        raise UserError(
            first["msg"], field=field, remedy="Fix the field, or leave it out."
        ) from invalid


_UNION_ARMS = {"str", "list[constrained-int]", "list[str]"}


def check_source(body: CompletionBody, *, disaggregated: bool) -> None:
    """Refuse KV from elsewhere where none can arrive. Raises UserError."""
    if body.kv_arrives and not disaggregated:
        raise UserError(
            "names a prefill instance, but this is not a decode instance",
            field="bootstrap_host" if body.bootstrap_host is not None else "bootstrap_room",
            remedy="Leave it out, or start the engine with --disaggregation-mode decode.",
        )


def check_length(n_prompt: int, max_tokens: int, max_context: int) -> None:
    """Refuse what could never fit. Raises UserError."""
    if n_prompt == 0:
        raise UserError("is empty", field="prompt", remedy="Send at least one token.")
    if n_prompt + max_tokens > max_context:
        raise UserError(
            f"prompt ({n_prompt} tokens) and max_tokens ({max_tokens}) exceed the context of "
            f"{max_context} tokens",
            field="max_tokens" if n_prompt < max_context else "prompt",
            remedy="Send a shorter prompt, or ask for fewer tokens.",
        )


def error_object(message: str, *, kind: str, field: str = "") -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": field or None, "code": None}}


def completion(
    request_id: str,
    *,
    created: int,
    model: str,
    text: str,
    finish_reason: str | None,
    usage: dict[str, int] | None = None,
    timing: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Return a completion, or one chunk of a stream. `timing` is ours: OpenAI has no such field."""
    answer: dict[str, Any] = {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason},
        ],
    }
    if usage is not None:
        answer["usage"] = usage
    if timing is not None:
        answer["windrow"] = timing
    return answer


def usage(n_prompt: int, n_completed: int) -> dict[str, int]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completed,
        "total_tokens": n_prompt + n_completed,
    }


def timing(arrived_ns: int, first_token_ns: int, end_ns: int, n_completed: int) -> dict[str, float]:
    """Return time to first token, mean time per output token after it, and the whole, in ms."""
    answer = {"latency_ms": (end_ns - arrived_ns) / 1e6}
    if first_token_ns:
        answer["ttft_ms"] = (first_token_ns - arrived_ns) / 1e6
    if n_completed > 1:
        answer["tpot_ms"] = (end_ns - first_token_ns) / (n_completed - 1) / 1e6
    return answer
