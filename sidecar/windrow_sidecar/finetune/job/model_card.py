"""Write the model card of an adapter: base, rows, settings and evaluation, as the Hub shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from windrow.crd import FinetuneJobSpec
from windrow.crd.texts import HUB_NAME
from windrow.redaction import redacted
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.training.checkpoint import Completion

CARD_FILE = "README.md"
_HUB = "hf://datasets/"


def model_card(name: str, spec: FinetuneJobSpec, rows: DataSplit, done: Completion) -> str:
    """Return the text of a card.

    Args:
        name: of the job.
        spec: of the job.
        rows: that it learnt and was evaluated on.
        done: how it ended.
    """
    head = yaml.safe_dump(_head(spec), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{head}---\n\n# {name}\n",
        f"An adapter ({spec.adapter.type}) for {_code(spec.model.name)}, finetuned by Windrow.\n",
        _table("Rows", _rows(spec, rows)),
        _table("Settings", _settings(spec)),
        _table("Result", _result(spec, rows, done)),
    ]
    return "\n".join(parts)


def _head(spec: FinetuneJobSpec) -> dict[str, Any]:
    """Return the card's metadata; names of models and data sets only where the Hub has them."""
    head: dict[str, Any] = {}
    if HUB_NAME.fullmatch(spec.model.name):
        head |= {"base_model": spec.model.name, "base_model_relation": "adapter"}
    head |= {"library_name": "peft", "pipeline_tag": "text-generation"}
    head["tags"] = [spec.adapter.type, spec.training.method, "windrow"]
    places = [place for field, place in spec.dataset.sources if field != "dataset.evalSource"]
    if named := [found for place in places if (found := _hub_dataset(place))]:
        head["datasets"] = list(dict.fromkeys(named))
    return head


def _hub_dataset(place: str) -> str:
    """Return the name of a dataset on the Hub; empty: the place is another one."""
    owner_and_name = "/".join(place.removeprefix(_HUB).split("/")[:2]).partition("@")[0]
    on_hub = place.startswith(_HUB) or HUB_NAME.fullmatch(place)
    return owner_and_name if on_hub and HUB_NAME.fullmatch(owner_and_name) else ""


def _rows(spec: FinetuneJobSpec, rows: DataSplit) -> Iterable[tuple[str, object]]:
    dataset = spec.dataset
    weights = {"dataset.source": dataset.weight}
    weights |= {f"dataset.mixture[{i}].source": m.weight for i, m in enumerate(dataset.mixture)}
    for field, place in dataset.sources:
        weight = weights.get(field, 1.0)
        times = f", weight {weight:g}" if weight != 1.0 else ""
        yield field.removeprefix("dataset."), f"{_code(redacted(place))}{times}"
    yield "format", dataset.format
    yield "rows of an epoch", f"{rows.train_rows:,}"
    yield "rows to evaluate on", f"{rows.held_out_rows:,}"
    if rows.skipped:
        yield "wrong rows, left out", f"{rows.skipped:,}"
    if rows.cut:
        yield "rows cut to maxSequenceLength", f"{rows.cut:,}"


def _settings(spec: FinetuneJobSpec) -> Iterable[tuple[str, object]]:
    model, adapter, training = spec.model, spec.adapter, spec.training
    yield "base model", f"{_code(model.name)}, revision {_code(model.revision)}"
    if model.quantization != "none":
        yield "base weights", model.quantization
    if adapter.start_from is not None:
        yield "begun with", _code(adapter.start_from)
    yield from _flat(adapter.settings.model_dump(mode="json", by_alias=True, exclude_none=True))
    shown = training.model_dump(mode="json", by_alias=True, exclude_none=True)
    if training.preferences is not None:
        shown["dpo"] = training.preferences.model_dump(mode="json", by_alias=True)
    yield from _flat(shown)


def _flat(found: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, object]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif value not in ("", []):
            yield f"{before}{name}", _code(str(value))


def _result(
    spec: FinetuneJobSpec, rows: DataSplit, done: Completion
) -> Iterable[tuple[str, object]]:
    yield "steps", f"{done.step:,}"
    yield "tokens", f"{done.tokens:,}"
    if done.loss is not None:
        yield "training loss of the last step", f"{done.loss:.4f}"
    kind = "preference loss" if spec.training.method == "dpo" else "loss"
    of = f"{kind} on {rows.held_out_rows:,} rows"
    if done.base_eval_loss is not None:
        yield f"{of}, base model", f"{done.base_eval_loss:.4f}"
    if done.tuned_eval_loss is not None:
        yield f"{of}, with the adapter", f"{done.tuned_eval_loss:.4f}"


def _table(title: str, lines: Iterable[tuple[str, object]]) -> str:
    cells = "".join(f"| {name} | {str(value).replace('|', '&#124;')} |\n" for name, value in lines)
    return f"## {title}\n\n| | |\n|---|---|\n{cells}"


def _code(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    return f"`{' '.join(text.split())}`" if "`" not in text else text.replace("`", "'")
