"""Locate the tensors of a checkpoint in its safetensors files, and read them one by one.

Layers are read straight into their place: the page cache keeps what the machine has memory for, and
nothing of a file counts as this process's memory, as its mapped pages would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from windrow_sidecar.engines.weight_files import read_header, weight_files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Of codes, and of scales that are not plain numbers.
_CODES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of one tensor in a file."""

    path: Path
    begin: int  # byte of the file
    n_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(directory: Path, *, codes: bool = False) -> dict[str, Stored]:
    """Return every floating-point tensor of a checkpoint by name; `codes`: and those of codes.

    Raises:
        UserError: a file is missing, cut short, or no safetensors file.
        OSError: a file cannot be read.
    """
    dtypes = _DTYPES | _CODES if codes else _DTYPES
    return dict(found for path in weight_files(directory) for found in _of(path, dtypes))


def read(stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of a file, [*stored.shape] on the host, in `dtype` where one is named.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    raw = torch.empty(stored.n_bytes, dtype=torch.uint8)
    with OpenFiles() as files:
        files.read_into(raw, stored, 0)
    tensor = raw.view(stored.dtype).view(stored.shape)
    return tensor if dtype is None else tensor.to(dtype)


class OpenFiles:
    """Files that stay open while layers are loaded from them."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_into(self, piece: Tensor, stored: Stored, skip: int) -> None:
        """Fill `piece` from `skip` bytes into a tensor: uint8 [bytes], contiguous, host memory.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        if stored.path not in self._descriptors:
            self._descriptors[stored.path] = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        room, done = memoryview(piece.numpy().data), 0
        while done < len(room):
            at = stored.begin + skip + done
            count = os.preadv(self._descriptors[stored.path], [room[done:]], at)
            if not count:
                raise OSError(f"{stored.path} ends before byte {at}")
            done += count

    def close(self) -> None:
        """Close all."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def _of(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Stored]]:
    header = read_header(path)
    for name, at in header.tensors.items():
        if at["dtype"] not in dtypes:
            continue
        begin, end = at["data_offsets"]
        first, shape = header.begin + begin, tuple(at["shape"])
        yield name, Stored(path, first, end - begin, shape, dtypes[at["dtype"]])


def absent(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Return a tensor of NaN, [*shape], that takes the memory of one element; read only.

    Of a type that has no NaN it is of zeros.
    """
    nothing = torch.nan if dtype.is_floating_point else 0
    return torch.full((1,) * len(shape), nothing, dtype=dtype, device=device).expand(shape)
