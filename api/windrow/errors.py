"""The three families of errors; each says who acts.

WindrowError ├── UserError the author of the spec, file or command line fixes it; no retry helps ├──
Transient nobody: it is tried again after `retry_after` └── InvariantBroken we do: the finetune side
stops, all memory and compute go back to decode
"""

from __future__ import annotations

from datetime import timedelta


class WindrowError(Exception):
    """Base of all errors that Windrow raises on purpose."""


class UserError(WindrowError):
    """Error in something that a person wrote.

    Attributes:
        field: the path of what is wrong (`spec.adapter.lora.rank`, `rows.jsonl:17`), or "".
        problem: what is wrong with it, with the value.
        remedy: what to write instead.
        reason: CamelCase word for a condition.
    """

    def __init__(
        self, problem: str, *, field: str = "", remedy: str = "", reason: str = "InvalidSpec"
    ) -> None:
        self.problem, self.field, self.remedy, self.reason = problem, field, remedy, reason
        where = f"{field}: " if field else ""
        what_to_do = f" {remedy}" if remedy else ""
        super().__init__(f"{where}{problem}.{what_to_do}" if remedy else f"{where}{problem}")


class Transient(WindrowError):
    """Temporary lack of something; the caller tries again after `retry_after`."""

    def __init__(self, message: str, *, retry_after: timedelta = timedelta(seconds=5)) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class InvariantBroken(WindrowError):
    """Impossible state. Harvesting stops here; decode goes on."""
