"""Read what a caller asks a finetuning job for: every field known, typed and in range."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from windrow.crd.tracking import WandbSpec
from windrow_operator.openai_api.refusals import CallRefused, invalid

_FIELDS: Final = (
    *("model", "training_file", "validation_file", "hyperparameters", "method", "suffix"),
    *("seed", "metadata", "integrations"),
)
_HYPERPARAMETERS: Final = ("n_epochs", "batch_size", "learning_rate_multiplier")
_METHODS: Final = {"supervised": _HYPERPARAMETERS, "dpo": (*_HYPERPARAMETERS, "beta")}
# Names of OpenAI's integration, and of `spec.tracking.wandb`.
_WANDB: Final = {"project": "project", "entity": "entity", "name": "runName", "tags": "tags"}
_SUFFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_MOST_PAIRS, _LONGEST_NAME, _LONGEST_VALUE = 16, 64, 512
_LONGEST_TEXT: Final = 1024
_MOST_SEED: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Settings of a caller; None: `auto`."""

    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate_multiplier: float | None = None
    beta: float | None = None  # of dpo alone


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A checked request for a job.

    Attributes:
        model: as the caller names it.
        training_file: id of the rows.
        validation_file: id of the rows to evaluate on; empty: none.
        method: by which the rows are learnt: supervised or dpo.
        hyperparameters: of the method.
        suffix: of the tuned model's name; empty: one is made.
        seed: None: one is drawn.
        metadata: the caller's own pairs.
        wandb: where Weights & Biases gets the job's figures, as `spec.tracking.wandb`; empty: not
            there.
    """

    model: str
    training_file: str
    validation_file: str = ""
    method: str = "supervised"
    hyperparameters: Hyperparameters = Hyperparameters()
    suffix: str = ""
    seed: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    wandb: Mapping[str, Any] = field(default_factory=dict)


def job_request(body: object) -> JobRequest:
    """Return a checked request.

    Raises:
        CallRefused: names the field, and what to write.
    """
    if not isinstance(body, dict):
        raise CallRefused(400, "The body is not a JSON object.", code="invalid_json")
    _refuse_unknown(body, _FIELDS, "")
    model = _text(body, "model", required=True)
    training = _text(body, "training_file", required=True)
    suffix = _text(body, "suffix")
    if suffix and not _SUFFIX.fullmatch(suffix):
        raise invalid(
            "suffix",
            f"{suffix!r} cannot be part of a model's name here",
            "Write at most 40 lower-case letters, digits and - between them.",
        )
    method, hyperparameters = _method(body)
    return JobRequest(
        model=model,
        training_file=training,
        validation_file=_text(body, "validation_file"),
        method=method,
        hyperparameters=hyperparameters,
        suffix=suffix,
        seed=_seed(body.get("seed")),
        metadata=_metadata(body.get("metadata")),
        wandb=_wandb(body.get("integrations")),
    )


def _refuse_unknown(found: Mapping[str, Any], known: Collection[str], path: str) -> None:
    for name in found:
        if name not in known:
            raise invalid(
                f"{path}{name}"[:_LONGEST_NAME],
                "is not a field that this server knows",
                f"Leave it out. Known: {', '.join(known)}.",
                code="unknown_parameter",
            )


def _text(body: Mapping[str, Any], name: str, *, required: bool = False) -> str:
    value = body.get(name)
    if value is None and not required:
        return ""
    if value is None:
        raise invalid(name, "is missing", "Write it.", code="missing_required_parameter")
    if not isinstance(value, str) or not value or len(value) > _LONGEST_TEXT:
        raise invalid(name, "is not a text of some characters", "Write one.", code="invalid_type")
    return value


def _seed(seed: object) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MOST_SEED:
        raise invalid(
            "seed", f"{seed!r} is not a seed", f"Write an integer from 0 to {_MOST_SEED}."
        )
    return seed


def _metadata(found: object) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise invalid("metadata", "is not an object", "Write names and texts.", "invalid_type")
    if len(found) > _MOST_PAIRS:
        raise invalid("metadata", f"has {len(found)} pairs", f"Write at most {_MOST_PAIRS}.")
    for name, value in found.items():
        if len(name) > _LONGEST_NAME or not isinstance(value, str) or len(value) > _LONGEST_VALUE:
            raise invalid(
                f"metadata.{name[:_LONGEST_NAME]}",
                f"is not a text of at most {_LONGEST_VALUE} characters under a name of at most "
                f"{_LONGEST_NAME}",
                "Shorten it.",
            )
    return dict(found)


def _wandb(found: object) -> dict[str, Any]:
    """Return the one integration that there is, as a part of a FinetuneJob's spec."""
    if found in (None, []):
        return {}
    if not isinstance(found, list):
        raise invalid("integrations", "is not a list", "Leave it out.", code="invalid_type")
    if len(found) > 1:
        raise invalid("integrations", f"has {len(found)} entries", "Write one.")
    entry = found[0] if isinstance(found[0], dict) else {}
    if entry.get("type") != "wandb":
        raise invalid(
            "integrations[0].type",
            f"{entry.get('type')!r} is not an integration of this server",
            "Write wandb, or leave integrations out: losses are in the job's events and in its "
            "result file.",
            code="unsupported_integration",
        )
    _refuse_unknown(entry, ("type", "wandb"), "integrations[0].")
    path = "integrations[0].wandb"
    settings = entry.get("wandb")
    if not isinstance(settings, dict):
        raise invalid(path, "is not an object", "Write {project: ...}.", code="invalid_type")
    _refuse_unknown(settings, _WANDB, f"{path}.")
    if not settings.get("project"):
        raise invalid(
            f"{path}.project", "is missing", "Write it.", code="missing_required_parameter"
        )
    asked = {ours: settings[name] for name, ours in _WANDB.items() if settings.get(name)}
    try:
        WandbSpec.model_validate(asked)
    except ValidationError as error:
        wrong = error.errors()[0]
        theirs = {ours: name for name, ours in _WANDB.items()}
        name = theirs.get(str(wrong["loc"][0]), "project")
        raise invalid(
            f"{path}.{name}", "is not such a name", "Write texts without / and line breaks."
        ) from error
    return asked


def _method(body: Mapping[str, Any]) -> tuple[str, Hyperparameters]:
    """Return the method with its settings, or those of the older field `hyperparameters`."""
    older, method = body.get("hyperparameters"), body.get("method")
    if method is None:
        return "supervised", _read(older, "hyperparameters", "supervised")
    if not isinstance(method, dict):
        raise invalid("method", "is not an object", "Write {type: supervised}.", "invalid_type")
    kind = method.get("type")
    if not isinstance(kind, str) or kind not in _METHODS:
        raise invalid(
            "method.type",
            f"{kind!r} is not a method of this server",
            f"Write {' or '.join(_METHODS)}.",
            code="unsupported_method",
        )
    _refuse_unknown(method, ("type", kind), "method.")
    if older is not None:
        raise invalid(
            "hyperparameters",
            "is written beside method, which has hyperparameters of its own",
            f"Write them in method.{kind}.hyperparameters alone.",
        )
    settings = method.get(kind)
    if settings is None:
        return kind, Hyperparameters()
    if not isinstance(settings, dict):
        raise invalid(f"method.{kind}", "is not an object", "Write one.", code="invalid_type")
    _refuse_unknown(settings, ("hyperparameters",), f"method.{kind}.")
    return kind, _read(settings.get("hyperparameters"), f"method.{kind}.hyperparameters", kind)


def _read(found: object, path: str, method: str) -> Hyperparameters:
    if found is None:
        return Hyperparameters()
    if not isinstance(found, dict):
        raise invalid(path, "is not an object", "Write one.", code="invalid_type")
    _refuse_unknown(found, _METHODS[method], f"{path}.")
    epochs = _number(found, "n_epochs", path, 1, 50)
    batch = _number(found, "batch_size", path, 1, 256)
    return Hyperparameters(
        n_epochs=None if epochs is None else int(epochs),
        batch_size=None if batch is None else int(batch),
        learning_rate_multiplier=_number(
            found, "learning_rate_multiplier", path, 0.0001, 100, whole=False
        ),
        beta=_number(found, "beta", path, 0.001, 2, whole=False),
    )


def _number(
    found: Mapping[str, Any],
    name: str,
    path: str,
    least: float,
    most: float,
    *,
    whole: bool = True,
) -> float | None:
    value = found.get(name, "auto")
    if value in (None, "auto"):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (whole and value != int(value)):
        kind = "an integer" if whole else "a number"
        raise invalid(
            f"{path}.{name}", f"{value!r} is not {kind}", f"Write {kind} or auto.", "invalid_type"
        )
    if not least <= value <= most:
        raise invalid(
            f"{path}.{name}", f"{value} is out of range", f"Write {least:g} to {most:g}, or auto."
        )
    return float(value)
