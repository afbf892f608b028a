"""Notation of durations, quantities and decimals in our resources, and their meaning.

Durations and quantities are texts in YAML, since `40ms` says its unit. A decimal may be a number or
a text: Kubernetes advises against floating-point fields, and people write `2e-4`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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
    """Base of every part of a custom resource: camelCase outside, no unknown keys."""

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


def _number(pattern: str, wanted: str, holds: Callable[[float], bool]) -> BeforeValidator:
    """Read a number, or a text of the pattern; `wanted` says which ones hold."""
    remedy = f"Write a number {wanted}, like 2e-4."

    def read(value: object) -> float:
        if isinstance(value, str) and re.fullmatch(pattern, value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{value!r} is not a number {wanted}", remedy)
        if not (math.isfinite(value) and holds(value)):
            raise invalid(f"{value!r} is not {wanted}", remedy)
        return float(value)

    return BeforeValidator(read)


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


def _number_schema(pattern: str, **bounds: float) -> WithJsonSchema:
    return WithJsonSchema(
        {**untyped(), "pattern": pattern, "maxLength": 32, "minimum": 0, **bounds}
    )


def untyped(*, items: int = 0) -> JsonDict:
    """Return the schema of a value of several types: neither a boolean nor an object.

    A structural schema can name one type or none, so what may not be is refused by bounds that
    contradict each other. CEL does not see such a field.

    Args:
        items: that a list may have; 0: it may be none.
    """
    return {
        "x-kubernetes-preserve-unknown-fields": True,
        "not": {"enum": [True, False]},
        "minItems": 1,
        "maxItems": items,
        "minProperties": 1,
        "maxProperties": 0,
    }


# A schema cannot compute what a text is worth: the patterns take those that are within the bounds.
_EXPONENT: Final = r"([eE][-+]?[0-9]{1,2})?"
_NOT_NEGATIVE: Final = rf"^[0-9]+(\.[0-9]+)?{_EXPONENT}$"
_POSITIVE: Final = rf"^([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*){_EXPONENT}$"
_BELOW_ONE: Final = r"^(0(\.[0-9]+)?([eE]-[0-9]{1,2})?|[0-9](\.[0-9]+)?[eE]-0?[1-9][0-9]?)$"
_RATIO: Final = rf"^(1(\.0+)?|{_BELOW_ONE[2:-2]})$"
_AsText = PlainSerializer(lambda number: f"{number:.12g}", return_type=str)

NotNegative = Annotated[
    float,
    _number(_NOT_NEGATIVE, "not below zero", lambda number: number >= 0),
    _AsText,
    _number_schema(_NOT_NEGATIVE),
]
Positive = Annotated[
    float,
    _number(_POSITIVE, "above zero", lambda number: number > 0),
    _AsText,
    _number_schema(_POSITIVE, exclusiveMinimum=0),
]
BelowOne = Annotated[
    float,
    _number(_BELOW_ONE, "from 0 to below 1", lambda number: 0 <= number < 1),
    _AsText,
    _number_schema(_BELOW_ONE, exclusiveMaximum=1),
]
Ratio = Annotated[
    float,
    _number(_RATIO, "between 0 and 1", lambda number: 0 <= number <= 1),
    _AsText,
    _number_schema(_RATIO, maximum=1),
]
Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


def cel(rule: str, message: str) -> JsonDict:
    """Return one entry of `x-kubernetes-validations`."""
    return {"rule": rule, "message": message}
