"""Which files of a model's folder hold its weights, and whether each of them is whole.

Only headers are read: https://huggingface.co/docs/safetensors, a little-endian u64 of the header's
length, the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from windrow.conditions import Reason
from windrow.errors import UserError

MODEL_FIELD = "spec.model.name"
COPY_AGAIN = "Copy the model again, with all its files."
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Header:
    """Of a safetensors file: each tensor's `dtype`, `shape` and `data_offsets`."""

    tensors: dict[str, dict[str, Any]]
    begin: int  # byte of the file at which the tensors' bytes begin


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of which transformers reads a model; [] where there are none.

    A folder may hold others beside them: Mistral's has the same weights a second time.

    Raises:
        UserError: the index of the shards cannot be read, or a shard that it names is missing.
    """
    if (single := directory / _WEIGHTS).is_file():
        return [single]
    index = directory / _INDEX
    if not index.is_file():
        return []
    return sorted({directory / shard for shard in _weight_map(index).values()})


def check_files(directory: Path) -> None:
    """Check that the weights in a folder are all there and whole; none at all pass.

    Raises:
        UserError: names the file, and the tensor where one is missing.
    """
    tensors = {path: read_header(path).tensors for path in weight_files(directory)}
    if (directory / _WEIGHTS).is_file() or not tensors:
        return
    index = directory / _INDEX
    for name, shard in sorted(_weight_map(index).items()):
        if name not in tensors[directory / shard]:
            raise unusable(f"{directory / shard} lacks {name}, which {index} says is in it")


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        UserError: it is no such file, or is cut short.
        OSError: it cannot be read.
    """
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        header = file.read(min(length, n_bytes))
    if start and _LFS_POINTER.startswith(start):
        raise unusable(f"{path} is a pointer of Git LFS, not the file", "Run git lfs pull in it.")
    if len(start) < _LENGTH_BYTES or (header.startswith(b"{") and len(header) < length):
        raise unusable(f"{path} is cut short: it has {n_bytes} bytes")
    try:
        tensors: dict[str, dict[str, Any]] = json.loads(header)
        tensors.pop("__metadata__", None)
        ends = [int(at["data_offsets"][1]) for at in tensors.values()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise unusable(f"{path} is no safetensors file") from error
    begin = _LENGTH_BYTES + length
    if (wanted := begin + max(ends, default=0)) > n_bytes:
        raise unusable(f"{path} is cut short: it has {n_bytes} of {wanted} bytes")
    return Header(tensors, begin)


def check_tensors(
    model: nn.Module,
    where: str,
    *,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
    misshaped: Collection[tuple[str, Any, Any]] = (),
) -> None:
    """Refuse weights that are not exactly those of the model: it would train over random numbers.

    Args:
        model: what was built.
        where: the weights are from.
        missing: parameters without a tensor; none that is tied to another one.
        unexpected: tensors without a parameter; buffers that the model makes itself may be there.
        misshaped: names, with the shape that was found and the one that the model has.

    Raises:
        UserError: names the tensors.
    """
    kind, buffers = type(model).__name__, {name for name, _ in model.named_buffers()}
    says = (getattr(model.config, "architectures", None) or [kind])[0]
    of_another = f" (config.json says {says})" if says != kind else ""
    if misshaped:
        (name, found, wanted), *more = sorted(misshaped)
        raise unusable(
            f"{where}: {_some([name], len(more))} has shape {tuple(found)}, {kind} by its "
            f"config.json has {tuple(wanted)}",
            "Use the config.json that belongs to these weights.",
        )
    problems = []
    if missing:
        problems.append(f"it lacks {_some(sorted(missing))}")
    if extra := sorted(set(unexpected) - buffers):
        problems.append(f"it holds {_some(extra)}, which is no tensor of this model")
    if problems:
        raise unusable(
            f"{where} is not a whole {kind}{of_another}: {'; '.join(problems)}",
            "Use a checkpoint of a causal language model." if of_another else COPY_AGAIN,
        )


def _some(names: list[str], more: int = 0) -> str:
    more += len(names) - 1
    return f"{names[0]} and {more} more" if more else names[0]


def unusable(problem: str, remedy: str = COPY_AGAIN) -> UserError:
    """Return the error for a model whose files cannot be used as they are."""
    return UserError(problem, field=MODEL_FIELD, remedy=remedy, reason=Reason.MODEL_UNSUPPORTED)


def _weight_map(index: Path) -> dict[str, str]:
    """Return in which shard each tensor is."""
    try:
        shards: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise unusable(f"{index} is no index of shards") from error
    missing = sorted({shard for shard in shards.values() if not (index.parent / shard).is_file()})
    if missing:
        more = f" and {len(missing) - 1} more of its shards" if missing[1:] else ""
        raise unusable(f"{index.parent / missing[0]}{more} is missing, which {index.name} names")
    return shards
