"""Parse a manifest into a checked spec, or raise an error that names field and remedy."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from windrow.crd.finetunejob import FinetuneJobSpec
from windrow.crd.harvestpolicy import HarvestPolicySpec
from windrow.crd.latencyprofile import LatencyProfileSpec
from windrow.errors import UserError

M = TypeVar("M", bound=BaseModel)


def parse_job_spec(spec: Mapping[str, Any]) -> FinetuneJobSpec:
    """Return the checked `spec` of a FinetuneJob.

    Raises:
        UserError: a field is missing, unknown or wrong; names the first one in full.
    """
    return _parse(FinetuneJobSpec, spec)


def parse_policy_spec(spec: Mapping[str, Any]) -> HarvestPolicySpec:
    """Return the checked `spec` of a HarvestPolicy; raises as `parse_job_spec` does."""
    return _parse(HarvestPolicySpec, spec)


def parse_profile_spec(spec: Mapping[str, Any]) -> LatencyProfileSpec:
    """Return the checked `spec` of a LatencyProfile; raises as `parse_job_spec` does."""
    return _parse(LatencyProfileSpec, spec)


def _parse(model: type[M], spec: Mapping[str, Any]) -> M:
    if not isinstance(spec, Mapping):
        raise UserError(
            f"{spec!r} is not a mapping", field="spec", remedy="Write the fields of the spec."
        )
    try:
        # By its name in Python no field is known to the API server, which would drop it unseen.
        return model.model_validate(dict(spec), by_alias=True, by_name=False)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise _user_error(model, details[0], len(details) - 1) from None


def _user_error(model: type[BaseModel], detail: ErrorDetails, others: int) -> UserError:
    problem, remedy = _explain(model, detail)
    if others:
        problem += f" ({others} more {'field is' if others == 1 else 'fields are'} wrong)"
    return UserError(problem, field=_path(detail["loc"]), remedy=remedy)


def _path(loc: Sequence[int | str]) -> str:
    path = "spec"
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


def _explain(model: type[BaseModel], detail: ErrorDetails) -> tuple[str, str]:
    """Return problem and remedy of one of pydantic's errors."""
    context = detail.get("ctx", {})
    value = detail["input"]
    match detail["type"]:
        case "windrow":
            return context["problem"], context["remedy"]
        case "extra_forbidden":
            return "unknown field", _known_fields(model, detail["loc"])
        case "missing":
            return "is required but missing", "Add it."
        case "literal_error":
            return f"{value!r} is not supported", f"Write one of: {context['expected']}."
        case "string_too_short":
            return "is empty", "Write a value."
        case _:
            return f"{value!r} is wrong", f"{detail['msg']}."


def _known_fields(model: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Return what could have been meant by the unknown last part of `loc`."""
    known = [info.alias or name for name, info in _model_at(model, loc[:-1]).model_fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return f"{hint}Known here: {', '.join(known)}."


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    for part in loc:
        if isinstance(part, int):
            continue
        for name, info in model.model_fields.items():
            if part in (name, info.alias):
                model = next(_models_in(info.annotation), model)
    return model


def _models_in(annotation: object) -> typing.Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
