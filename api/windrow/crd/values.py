"""How durations, quantities and decimals are written in our resources, and what they mean.

Each type is a Python value inside and a string in YAML: Kubernetes advises against floating-point
fields, and `40ms` says its unit.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

# No field of ours is longer. CEL's cost estimate needs a bound on every string that a rule reads.
TEXT_MAX: Final = 2048
NAME_MAX: Final = 253

DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(us|ms|s|m|h))+$"
QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
DECIMAL_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$"

_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class Record(BaseModel):
    """Base of everything that stands in a custom resource: camelCase outside, no unknown keys."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        # `modelFingerprint` and the like are ours; pydantic's own prefix is not in the way.
        protected_namespaces=(),
    )


def invalid(problem: str, remedy: str) -> PydanticCustomError:
    """Return the error that a validator raises, with what to write instead."""
    return PydanticCustomError(
        "windrow", "{problem}. {remedy}", {"problem": problem, "remedy": remedy}
    )


def parse_duration(text: str) -> timedelta:
    """Return the length of `40ms`, `1.5s`, `1h30m`; raise ValueError for anything else."""
    if not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError(f"{text!r} is not a duration")
    parts = re.findall(r"([0-9.]+)(us|ms|s|m|h)", text)
    try:
        return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))
    except OverflowError as error:
        raise ValueError(f"{text!r} is longer than any duration") from error


def format_duration(length: timedelta) -> str:
    """Return `length` in the largest unit that writes it with at most three decimals."""
    seconds = length.total_seconds()
    unit = "s" if seconds >= 1 else "ms" if seconds >= 1e-3 else "us"
    return f"{round(seconds / _SECONDS[unit], 3):g}{unit}"


def parse_quantity(text: str) -> int:
    """Return the bytes of `64Gi`; raise ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity of bytes")
    return int(float(match[1]) * _BYTES[match[2] or ""])


def _duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    try:
        length = parse_duration(value) if isinstance(value, str) else None
    except ValueError:
        length = None
    if length is None or length <= timedelta(0):
        raise invalid(f"{value!r} is not a duration above zero", "Write it like 40ms, 1.5s or 2m.")
    return length


def _quantity(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    try:
        return parse_quantity(value if isinstance(value, str) else "")
    except ValueError:
        raise invalid(
            f"{value!r} is not a quantity of bytes", "Write it like 512Mi or 64Gi."
        ) from None


def _decimal(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise invalid(f"{value!r} is not a number", 'Write a decimal in quotes, like "2e-4".')
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise invalid(
            f"{value!r} is not a finite number", 'Write a decimal in quotes, like "2e-4".'
        )
    return number


Duration = Annotated[
    timedelta,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "maxLength": 32}),
]
Quantity = Annotated[
    int,
    BeforeValidator(_quantity),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": QUANTITY_PATTERN, "maxLength": 32}),
]
Decimal = Annotated[
    float,
    BeforeValidator(_decimal),
    PlainSerializer(lambda number: f"{number:.12g}", return_type=str),
    WithJsonSchema({"type": "string", "pattern": DECIMAL_PATTERN, "maxLength": 32}),
]
Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


def cel(rule: str, message: str) -> JsonDict:
    """Return one entry of `x-kubernetes-validations`."""
    return {"rule": rule, "message": message}
