"""Find the files of a model's folder that hold its weights, and check that each is whole.

Decode, its fingerprint and the worker all read a folder by this, so they mean the same tensors.
Only headers are read: https://huggingface.co/docs/safetensors, a little-endian u64 of the header's
length, the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError

MODEL_FIELD = "spec.model.name"
SERVED_FIELD = "--model-path"
COPY_AGAIN = "Copy the model again, with all its files."
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING_POINT = ("F64", "F32", "F16", "BF16")  # of which weights are made
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a safetensors file: each tensor's `dtype`, `shape` and `data_offsets`."""

    tensors: dict[str, dict[str, Any]]
    begin: int  # byte of the file at which the tensors' bytes begin


def weight_files(directory: Path, *, field: str = MODEL_FIELD) -> list[Path]:
    """Return the safetensors files of which transformers reads a model; [] where there are none.

    A folder may hold others beside them (see `unread_files`): Mistral's has the same weights a
    second time.

    Args:
        directory: of the model.
        field: where the user named it, for errors.

    Raises:
        UserError: the index of the shards cannot be read, a shard that it names is missing, or
            there are shards without an index.
    """
    if (single := directory / _WEIGHTS).is_file():
        return [single]
    index = directory / _INDEX
    if index.is_file():
        return sorted({directory / shard for shard in _weight_map(index, field).values()})
    found = sorted(directory.glob("*.safetensors"))
    if gone := next((path for path in found if not path.exists()), None):
        where = f"a link to {gone.readlink()}, which is not there"
        raise unusable(f"{gone} is {where}", field=field)
    if found:
        raise unusable(
            f"{directory} holds {found[0].name}, but neither {_WEIGHTS} nor an index of shards, "
            f"{_INDEX}",
            field=field,
        )
    return []


def unread_files(directory: Path, *, field: str = MODEL_FIELD) -> list[str]:
    """Return the names of safetensors files in the folder that are no part of the model.

    Raises:
        UserError: see `weight_files`.
    """
    read = set(weight_files(directory, field=field))
    return sorted(path.name for path in directory.glob("*.safetensors") if path not in read)


def unread_note(directory: Path, *, field: str = MODEL_FIELD) -> str:
    """Return a sentence about safetensors files that are not read; "" where there are none.

    Raises:
        UserError: see `weight_files`.
    """
    if not (unread := unread_files(directory, field=field)):
        return ""
    read = weight_files(directory, field=field)[0].name
    of = f"{_WEIGHTS}, which goes before an index" if read == _WEIGHTS else f"what {_INDEX} names"
    more = f" and {len(unread) - 1} more" if unread[1:] else ""
    return f"the model's weights are {of}: {unread[0]}{more} beside it is not read"


def check_files(directory: Path) -> None:
    """Check that the weights in a folder are all there and whole; none at all pass.

    Raises:
        UserError: names the file, and the tensor where one is missing.
    """
    tensors = {path: read_header(path).tensors for path in weight_files(directory)}
    if (directory / _WEIGHTS).is_file() or not tensors:
        return
    index = directory / _INDEX
    for name, shard in sorted(_weight_map(index, MODEL_FIELD).items()):
        if name not in tensors[directory / shard]:
            raise unusable(f"{directory / shard} lacks {name}, which {index} says is in it")


def read_header(path: Path, *, field: str = MODEL_FIELD) -> Header:
    """Read the header of a safetensors file; `field`: see `weight_files`.

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
        raise unusable(
            f"{path} is a pointer of Git LFS, not the file", "Run git lfs pull in it.", field
        )
    if len(start) < _LENGTH_BYTES or (header.startswith(b"{") and len(header) < length):
        raise unusable(f"{path} is cut short: it has {n_bytes} bytes", field=field)
    try:
        tensors: dict[str, dict[str, Any]] = json.loads(header)
        tensors.pop("__metadata__", None)
        ends = [int(at["data_offsets"][1]) for at in tensors.values()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise unusable(f"{path} is not a safetensors file", field=field) from error
    begin = _LENGTH_BYTES + length
    if (wanted := begin + max(ends, default=0)) > n_bytes:
        raise unusable(f"{path} is cut short: it has {n_bytes} of {wanted} bytes", field=field)
    return Header(tensors, begin)


def unusable(problem: str, remedy: str = COPY_AGAIN, field: str = MODEL_FIELD) -> UserError:
    """Return the error for a model whose files cannot be used as they are."""
    return UserError(problem, field=field, remedy=remedy, reason=Reason.MODEL_UNSUPPORTED)


def _weight_map(index: Path, field: str) -> dict[str, str]:
    """Return in which shard each tensor is."""
    try:
        shards: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
        outside = sorted({s for s in shards.values() if s.startswith("/") or ".." in s.split("/")})
        missing = sorted(
            {s for s in shards.values() if s not in outside and not (index.parent / s).is_file()}
        )
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise unusable(f"{index} is not an index of shards", field=field) from error
    if outside:
        raise unusable(
            f"{index} names {outside[0]!r}, which is not in its folder",
            "Write names of files beside it into the index.",
            field,
        )
    if missing:
        more = f" and {len(missing) - 1} more of its shards" if missing[1:] else ""
        raise unusable(
            f"{index.parent / missing[0]}{more} is missing, which {index.name} names", field=field
        )
    if not shards:
        raise unusable(f"{index} names no shard", field=field)
    return shards
