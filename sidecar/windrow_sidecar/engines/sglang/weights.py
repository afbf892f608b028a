"""SGLang's loaded weights in memory that the worker may map, under the names of the checkpoint.

SGLang fuses q, k and v, and gate and up, by rows, and pads the vocabulary; so every tensor of the
checkpoint is still a run of rows of one parameter. Which one is found by name and shape, and proved
by value: what differs from the checkpoint in a first, middle or last row is not shared at all.
Vectors are compared whole, and one that differs lies beside the others as the checkpoint has it:
SGLang adds one to Gemma's norms when it loads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.dlpack import from_dlpack

from windrow.errors import UserError
from windrow_sidecar._core import SharedWeights
from windrow_sidecar.engines.fingerprint import served_files

_ALIGN_BYTES = 64
# Parts of a fused parameter, in the order of their rows.
_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


@dataclass(frozen=True, slots=True)
class FusedRows:
    """A tensor of the checkpoint inside of a parameter."""

    parameter: str
    first: int  # row
    shape: tuple[int, ...]


@dataclass(slots=True)
class SharedModel:
    """A model whose parameters lie in shared memory, sealed: a write would end the process."""

    shared: SharedWeights
    n_bytes: int
    tensors: dict[str, dict[str, Any]]  # by the checkpoint's names: offset, shape, dtype
    model: Any

    def write_manifest(self, path: Path, fingerprint: str) -> None:
        """Tell the worker where each tensor lies; a reader sees nothing or all of it."""
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps({"fingerprint": fingerprint, "tensors": self.tensors}))
        os.replace(draft, path)

    def make_private(self) -> None:
        """Give the model memory of its own again, so that its weights can be replaced."""
        own: dict[int, torch.Tensor] = {}  # tied parameters stay tied
        for parameter in self.model.parameters():
            at = parameter.data_ptr()
            if at not in own:
                own[at] = parameter.data.clone()
            parameter.data = own[at]


def share_model(model: Any, folder: Path, driver: str) -> SharedModel:  # noqa: ANN401
    """Move the parameters of a loaded model into sealed memory of the driver's device.

    Raises:
        UserError: a matrix of the checkpoint is not in the model as it is in the file. The model is
            as it was then.
    """
    parameters = dict(model.named_parameters())
    places = _find(folder, {name: tuple(p.shape) for name, p in parameters.items()})
    changed = _prove(folder, parameters, places)
    offsets: dict[int, int] = {}  # of a parameter's storage; tied parameters have one
    end = 0
    for parameter in parameters.values():
        if not parameter.data.is_contiguous():
            raise _cannot("a parameter is not contiguous")
        at = parameter.data_ptr()
        if at not in offsets:
            offsets[at] = end
            end += -(-parameter.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    beside: dict[str, int] = {}  # where the checkpoint's values of a changed vector begin
    for name, vector in changed.items():
        beside[name] = end
        end += -(-vector.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    shared = SharedWeights.create(end, driver=driver)
    storage = from_dlpack(shared.tensor())
    tensors = {}
    for name, rows in places.items():
        parameter = parameters[rows.parameter]
        row_bytes = parameter.stride(0) * parameter.element_size()
        lies_within = offsets[parameter.data_ptr()] + rows.first * row_bytes
        tensors[name] = {
            "offset": beside.get(name, lies_within),
            "shape": list(rows.shape),
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
    for name, vector in changed.items():
        storage[beside[name] : beside[name] + vector.nbytes].view(vector.dtype).copy_(vector)
    for parameter in parameters.values():
        offset = offsets[parameter.data_ptr()]
        view = storage[offset : offset + parameter.nbytes].view(parameter.dtype)
        view = view.view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
    if storage.is_cuda:
        torch.cuda.synchronize()
    shared.seal()
    return SharedModel(shared, end, tensors, model)


def _find(folder: Path, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, FusedRows]:
    """Where each tensor of the checkpoint must lie."""
    shapes = {name: tuple(file.get_slice(name).get_shape()) for file, name in _checkpoint(folder)}
    return {name: _place(name, shapes, parameters) for name in shapes}


def _place(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, tuple[int, ...]],
) -> FusedRows:
    shape = shapes[name]
    if name in parameters:
        holder, first = name, 0
    else:
        holder, first = _fused_place(name, shapes)
    held = parameters.get(holder)
    if held is None or held[1:] != shape[1:] or first + shape[0] > held[0]:
        raise _cannot(f"{name} {list(shape)} has no place in the served model")
    return FusedRows(holder, first, shape)


def _fused_place(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
    for fused, parts in _FUSED:
        match = re.search(rf"\.({'|'.join(parts)})\.", name)
        if match is None:
            continue
        before = parts[: parts.index(match[1])]
        first = sum(shapes[name.replace(match[1], part)][0] for part in before)
        return name.replace(match[1], fused), first
    return name, 0


def _prove(
    folder: Path, parameters: Mapping[str, Any], places: Mapping[str, FusedRows]
) -> dict[str, torch.Tensor]:
    """Compare rows of every tensor with the checkpoint's, and all of a vector.

    Returns the checkpoint's values of vectors that are served with others. Raises UserError for any
    other tensor that is.
    """
    changed = {}
    for file, name in _checkpoint(folder):
        rows = places[name]
        n = rows.shape[0]
        stored, held = file.get_slice(name), parameters[rows.parameter].data
        if len(rows.shape) == 1:
            whole = stored[:].to(held.device, held.dtype)
            if not torch.equal(whole, held[rows.first : rows.first + n]):
                changed[name] = whole
            continue
        for row in sorted({0, n // 2, n - 1}):
            wanted = stored[row : row + 1].to(held.device, held.dtype)
            if not torch.equal(wanted, held[rows.first + row : rows.first + row + 1]):
                raise _cannot(f"{name} is served with other values than the checkpoint has")
    return changed


def _checkpoint(folder: Path) -> Iterator[tuple[Any, str]]:
    for path in served_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it has no __iter__
                yield file, name


def _cannot(why: str) -> UserError:
    return UserError(
        f"the served weights cannot be shared: {why}",
        remedy="A worker reads the model from its files instead.",
    )
