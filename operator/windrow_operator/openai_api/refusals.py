"""Refusals of the API: OpenAI's error object, with a field and a remedy."""

from __future__ import annotations

from typing import Any

from windrow.errors import UserError

INVALID = "invalid_request_error"


class CallRefused(Exception):
    """A call that is not done.

    Attributes:
        status: HTTP status.
        message: what is wrong, and what to do.
        kind: OpenAI's `type`.
        param: the field that is wrong; None: no single one.
        code: OpenAI's `code`; None: it has none.
        retry_after_s: when to come back; 0: never with the same call.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after_s = param, code, retry_after_s
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str, problem: str, remedy: str, code: str = "invalid_value") -> CallRefused:
    """Return the refusal of a field's value."""
    return CallRefused(400, f"{param}: {problem}. {remedy}", param=param, code=code)


def missing(kind: str, name: str, param: str) -> CallRefused:
    """Return the refusal of an object that is not there, or that another key has."""
    return CallRefused(404, f"No such {kind}: {name}", param=param, code=f"{kind}_not_found")


def wrong_rows(error: UserError, param: str) -> CallRefused:
    """Return the refusal of a file's row; the error names file and line."""
    return CallRefused(400, str(error), param=param, code="invalid_training_file")


def busy(message: str, retry_after_s: float) -> CallRefused:
    """Return the refusal of a call that comes too early."""
    return CallRefused(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def unavailable(message: str) -> CallRefused:
    """Return the refusal where something behind the API does not answer."""
    return CallRefused(
        503, message, kind="server_error", code="service_unavailable", retry_after_s=2.0
    )
