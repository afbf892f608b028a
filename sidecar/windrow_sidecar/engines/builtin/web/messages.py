"""The messages between front and engine. Times: nanoseconds of CLOCK_MONOTONIC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Submit:
    """Front to engine: a request, in tokens."""

    id: int
    name: str  # what the client knows it by
    prompt: tuple[int, ...]  # at least one token
    max_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    seed: int
    stop_token_ids: frozenset[int]
    kv_arrives: bool  # the prompt's KV comes from a prefill instance
    arrived_ns: int
    deferral_us: int = 0  # how long a policy may hold it back; 0: as long as the policy says


@dataclass(frozen=True, slots=True)
class Cancel:
    """Front to engine: nobody wants more of this request. `error` is empty when it had its fill."""

    id: int
    error: str


@dataclass(frozen=True, slots=True)
class FrontUp:
    """Front to engine: the tokenizer is loaded and the port answers (503 until Ready)."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Engine to front: requests are welcome."""

    max_context: int  # prompt and completion together, tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request; `reason` as OpenAI has it ("stop", "length")."""

    id: int
    reason: str
    first_token_ns: int  # 0: it ended without one
    end_ns: int


@dataclass(frozen=True, slots=True)
class Output:
    """Engine to front: what one or more steps produced, tokens in order."""

    tokens: tuple[tuple[int, int], ...]  # (request id, token)
    finished: tuple[Finished, ...]
