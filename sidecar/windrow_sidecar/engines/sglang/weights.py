"""SGLang's loaded weights in memory that the worker may map, under the names of the checkpoint.

SGLang fuses q, k and v, and gate and up, by rows, and pads the vocabulary; so every tensor of the
checkpoint is still a run of rows of one parameter. Which one is found by name and shape, and proved
by value: what differs from the checkpoint in a first, middle or last row is not shared at all.
Vectors are compared whole, and one that differs is stored beside the others as the checkpoint has
it: SGLang adds one to Gemma's norms when it loads them.

Codes and their scales are found in the same way: SGLang keeps fp8 with a scale for each block as
the checkpoint has it, and gives each row a scale where the checkpoint has one for a tensor. What it
makes of them otherwise for a kernel (one scale for fused parts, packed scales) differs from the
checkpoint, and is not shared.

Over ranks each shares the part that it holds (`weight_cuts`), found and proved in the same way.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.dlpack import from_dlpack

from windrow.errors import UserError
from windrow_sidecar._core import Error, SharedWeights
from windrow_sidecar.engines.fingerprint import served_files
from windrow_sidecar.engines.sglang.weight_cuts import WHOLE, ModelCut, has_zero_padding
from windrow_sidecar.engines.weight_files import SERVED_FIELD
from windrow_sidecar.engines.weight_formats import WeightFormat, weight_format

_ALIGN_BYTES = 64
# Parts of a fused parameter, in the order of their rows.
_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


# Of experts, which SGLang has in one tensor: its name there, and whether rows of gates come first.
_EXPERT = re.compile(
    r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<last>\w+)$"
)
_HELD = {"gate_proj": "w13", "w1": "w13", "up_proj": "w13", "w3": "w13"}
_SECOND = ("up_proj", "w3")
_STACKED = {"w13": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class FusedRows:
    """A tensor of the checkpoint inside of a parameter, whose experts lie below each other."""

    parameter: str
    first: int  # row
    shape: tuple[int, ...]
    rows: int = 0  # that hold a single number; 0: it is none


@dataclass(slots=True)
class SharedModel:
    """A model whose parameters lie in shared memory, sealed: a write would end the process."""

    shared: SharedWeights
    n_bytes: int
    tensors: dict[str, dict[str, Any]]  # by the checkpoint's names: offset, shape, dtype
    model: Any
    # Weights that are codes: codec, shape, group, and of each part offset, shape and dtype.
    coded: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: int = 1  # that share the model, of which this is one's part

    def write_manifest(self, path: Path, fingerprint: str) -> None:
        """Write for the worker where each tensor is; a reader sees nothing or all of it."""
        draft = path.with_suffix(".tmp")
        manifest = {"fingerprint": fingerprint, "tensors": self.tensors, "coded": self.coded}
        # KV of every rank is lent wherever weights are shared.
        draft.write_text(json.dumps({**manifest, "ranks": self.ranks, "lends": True}))
        os.replace(draft, path)

    def make_private(self) -> None:
        """Give the model memory of its own again, so that its weights can be replaced."""
        own: dict[int, torch.Tensor] = {}  # tied parameters stay tied
        for parameter in self.model.parameters():
            at = parameter.data_ptr()
            if at not in own:
                own[at] = parameter.data.clone()
            parameter.data = own[at]


def share_model(model: Any, folder: Path, driver: str, cut: ModelCut = WHOLE) -> SharedModel:  # noqa: ANN401
    """Move the parameters of a loaded model into sealed memory of the driver's device.

    `cut`: the part of the checkpoint that the model is, where several ranks share it.

    Raises:
        UserError: a matrix of the checkpoint is not in the model as it is in the file, or the
            device has no room for the copy. The model is as it was then.
    """
    parameters = dict(model.named_parameters())
    stored_as = weight_format(folder, of=SERVED_FIELD)
    rows = {name: _by_rows(parameter.data) for name, parameter in parameters.items()}
    places = _find(folder, {name: tuple(p.shape) for name, p in rows.items()}, stored_as, cut)
    changed = _prove(folder, rows, places, cut)
    offsets: dict[int, int] = {}  # of a parameter's storage; tied parameters have one
    end = 0
    for parameter in parameters.values():
        if not (parameter.data.is_contiguous() or parameter.data.t().is_contiguous()):
            raise _cannot("a parameter is not contiguous")
        at = parameter.data_ptr()
        if at not in offsets:
            offsets[at] = end
            end += -(-parameter.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    beside: dict[str, int] = {}  # where the checkpoint's values of a changed vector begin
    for name, vector in changed.items():
        beside[name] = end
        end += -(-vector.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    try:
        if driver != "host":
            torch.cuda.empty_cache()  # what loading has left over is room too
        shared = SharedWeights.create(end, driver=driver)
    except Error as error:
        # Decode keeps its weights where they are, and is harvested all the same.
        raise _cannot(
            f"there is no room for a copy of {end} bytes beside the loaded weights ({error})"
        ) from error
    storage = from_dlpack(shared.tensor())
    tensors = {}
    for name, place in places.items():
        held = rows[place.parameter]
        row_bytes = held.element_size() * (held.stride(0) if held.dim() else 1)
        lies_within = offsets[held.data_ptr()] + place.first * row_bytes
        shape = place.shape
        if held.dim() == 2 and len(shape) < 2:  # a number for each row, of a tensor's one
            shape = (place.rows, held.shape[1])
        tensors[name] = {
            "offset": beside.get(name, lies_within),
            "shape": list(shape),
            "dtype": str(held.dtype).removeprefix("torch."),
        }
    coded = _coded(tensors, stored_as)
    tensors, coded = _stack(tensors, coded, parameters)
    for name, vector in changed.items():
        storage[beside[name] : beside[name] + vector.nbytes].view(vector.dtype).copy_(vector)
    for parameter in parameters.values():
        offset = offsets[parameter.data_ptr()]
        view = storage[offset : offset + parameter.nbytes].view(parameter.dtype)
        turned = not parameter.data.is_contiguous()
        view = view.view(parameter.data.t().shape if turned else parameter.shape)
        view = view.t() if turned else view
        view.copy_(parameter.data)
        parameter.data = view
    if storage.is_cuda:
        torch.cuda.synchronize()
    shared.seal()
    return SharedModel(shared, end, tensors, model, coded, cut.ranks)


def _by_rows(held: torch.Tensor) -> torch.Tensor:
    """Return a parameter as rows: experts below each other, what is kept transposed turned."""
    if held.dim() == 2 and not held.is_contiguous():
        return held.t()
    return held.flatten(0, 1) if held.dim() == 3 and held.is_contiguous() else held


def _coded(tensors: dict[str, dict[str, Any]], stored_as: WeightFormat) -> dict[str, Any]:
    """Take the parts of codes out of `tensors`; returns each weight with its parts."""
    found = {}
    for name, coding in stored_as.codings.items():
        parts = {part: tensors[at] for part, at in coding.parts.items()}
        scales, rows = parts["scales"]["shape"], coding.shape[-2]
        by_row = len(scales) == 2 and scales[0] == rows and coding.group[0] != 1
        found[name] = {
            "codec": coding.codec,
            "shape": list(coding.shape),
            "group": [1, coding.shape[-1]] if by_row and scales[1] == 1 else list(coding.group),
            "parts": parts,
        }
    for coding in stored_as.codings.values():
        for at in coding.parts.values():
            tensors.pop(at, None)
    return found


def _stack(
    tensors: dict[str, dict[str, Any]],
    coded: dict[str, dict[str, Any]],
    parameters: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Put single experts together, [experts, rows, columns], as transformers has them."""

    def whole(at: dict[str, Any], held: Any) -> dict[str, Any]:  # noqa: ANN401
        return {**at, "shape": list(held.shape)}

    plain, codes = {}, {}
    for name, at in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            plain[name] = at
        elif match["number"] == "0" and match["part"] not in _SECOND:
            kind = _HELD.get(match["part"], "w2")
            held = parameters[f"{match['experts']}.{kind}_{match['last']}"]
            plain[f"{match['experts']}.{_STACKED[kind]}"] = whole(at, held)
    for name, of in coded.items():
        match = _EXPERT.match(name)
        if match is None:
            codes[name] = of
        elif match["number"] == "0" and match["part"] not in _SECOND:
            kind = _HELD.get(match["part"], "w2")
            prefix = f"{match['experts']}.{kind}_weight"
            scales = next(n for n in (f"{prefix}_scale_inv", f"{prefix}_scale") if n in parameters)
            held = parameters[prefix]
            parts = {
                "codes": whole(of["parts"]["codes"], held),
                "scales": whole(of["parts"]["scales"], parameters[scales]),
            }
            codes[f"{match['experts']}.{_STACKED[kind]}"] = {
                **of,
                "shape": list(held.shape),
                "parts": parts,
            }
    return plain, codes


def _find(
    folder: Path,
    parameters: Mapping[str, tuple[int, ...]],
    stored_as: WeightFormat,
    cut: ModelCut,
) -> dict[str, FusedRows]:
    """Return the place of each tensor of the checkpoint; `parameters`: their shapes as rows."""
    shapes = {
        name: cut.shape(name, tuple(file.get_slice(name).get_shape()))
        for file, name in _checkpoint(folder)
        if name not in stored_as.beside
    }
    rows_of = {
        coding.parts["scales"]: coding.shape[0]
        for coding in stored_as.codings.values()
        if len(coding.shape) == 2
    }
    return {name: _place(name, shapes, parameters, rows_of) for name in shapes}


def _place(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, tuple[int, ...]],
    rows_of: Mapping[str, int],
) -> FusedRows:
    """Return the place of a tensor; `rows_of`: of the weight that a scale belongs to."""
    shape = shapes[name]
    one_for_all = name in rows_of and torch.Size(shape).numel() == 1
    of_rows = {**shapes, **{n: (rows,) for n, rows in rows_of.items()}} if one_for_all else shapes
    if name in parameters:
        holder, first = name, 0
    elif (match := _EXPERT.match(name)) is not None:
        holder, first = _expert_place(match, of_rows)
    else:
        holder, first = _fused_place(name, of_rows)
    held = parameters.get(holder)
    if one_for_all and held is not None:
        if len(held) == 2 and held[1] == 1 and first + rows_of[name] <= held[0]:
            return FusedRows(holder, first, shape, rows_of[name])
        if torch.Size(held).numel() == 1:
            return FusedRows(holder, 0, shape)
    if held is None or held[1:] != shape[1:] or first + shape[0] > held[0]:
        raise _cannot(f"{name} {list(shape)} has no place in the served model")
    return FusedRows(holder, first, shape)


def _expert_place(match: re.Match[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
    """Return the place of an expert's tensor, as a row of all experts below each other."""
    part, number, last = match["part"], int(match["number"]), match["last"]
    kind = _HELD.get(part, "w2")
    first_half = {"up_proj": "gate_proj", "w3": "w1"}.get(part)
    own = shapes[match[0]][0]
    before = shapes[f"{match['experts']}.{number}.{first_half}.{last}"][0] if first_half else 0
    each = own if kind == "w2" else 2 * own
    return f"{match['experts']}.{kind}_{last}", number * each + before


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
    folder: Path,
    held_rows: Mapping[str, torch.Tensor],
    places: Mapping[str, FusedRows],
    cut: ModelCut,
) -> dict[str, torch.Tensor]:
    """Compare rows of every tensor with the checkpoint's, and all of a vector.

    Returns the checkpoint's values of vectors that are served with others. Raises UserError for any
    other tensor that is.
    """
    changed = {}
    for file, name in _checkpoint(folder):
        if name not in places:
            continue
        rows = places[name]
        held = held_rows[rows.parameter]
        if not rows.shape or rows.rows:
            number = file.get_tensor(name).to(held.device, held.dtype).reshape(())
            flat = held.reshape(-1)
            if not bool((flat[rows.first : rows.first + max(1, rows.rows)] == number).all()):
                raise _cannot(f"{name} is served with another value than the checkpoint has")
            continue
        stored = file.get_slice(name)
        begin, end = cut.rows(name, stored.get_shape()[0])
        n, columns = end - begin, cut.columns(name)
        if len(rows.shape) == 1:
            whole = stored[begin:end].to(held.device, held.dtype)
            if not torch.equal(whole, held[rows.first : rows.first + n]):
                changed[name] = whole
            continue
        same = has_zero_padding(name, held[rows.first : rows.first + rows.shape[0]], n)
        for row in sorted({0, n // 2, n - 1}) if n else ():
            wanted = stored[begin + row : begin + row + 1][:, columns].to(held.device, held.dtype)
            found = held[rows.first + row : rows.first + row + 1].contiguous()
            same &= torch.equal(wanted.contiguous().view(torch.uint8), found.view(torch.uint8))
        if not same:
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
