"""Read from a checkpoint's config.json and headers which weights are codes, and of which codec.

A codec's weight is several tensors: codes, and what they are multiplied by. Methods and names are
those of https://huggingface.co/docs/transformers/quantization (fp8, mxfp4, gptq, awq), of
compressed-tensors and of NVIDIA's ModelOpt. No tensor is read; knows no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

from windrow.errors import UserError
from windrow_sidecar.engines.weight_files import MODEL_FIELD, read_header, unusable, weight_files

# Of tensors that belong to a coded layer, and of which the weight does not consist.
_BESIDE = ("input_scale", "k_scale", "v_scale", "weight_shape", "input_global_scale", "g_idx")
_FLOATS = ("F32", "BF16", "F16")
CONFIG_REMEDY = "Use the config.json that belongs to these weights."
PLAIN_REMEDY = "Use the model's plain weights; spec.model.quantization quantises them."
_MODELOPT_FILE = "hf_quant_config.json"

Tensors = Mapping[str, Mapping[str, Any]]  # by name: dtype and shape, as headers have them


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Coded(Generic[Part]):
    """A weight that is codes.

    Attributes:
        codec: its name.
        shape: of the weight that the codes stand for: [out, in], or [experts, out, in].
        group: rows and columns that share a scale.
        parts: as the codec names them.
        is_transposed: whether the model has the last two dimensions the other way round.
    """

    codec: str
    shape: tuple[int, ...]
    group: tuple[int, int]
    parts: Mapping[str, Part]
    is_transposed: bool = False


class Coding(Coded[str]):
    """Coding in which one weight is stored: its parts are names of the checkpoint's tensors."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format in which a checkpoint stores its weights.

    Attributes:
        method: the words for it; "": plainly, or in a way that has no codec here.
        codings: of weights that are codes, by the name that a plain weight would have.
        beside: tensors of which no weight consists (scales of activations and of KV).
    """

    method: str = ""
    codings: Mapping[str, Coding] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()

    @property
    def consumed(self) -> set[str]:
        """Names of tensors that are parts of weights, not weights."""
        parts = {name for coding in self.codings.values() for name in coding.parts.values()}
        return parts | self.beside


def weight_format(directory: Path, *, of: str = MODEL_FIELD) -> WeightFormat:
    """Return how the checkpoint in a folder stores its weights.

    Args:
        directory: of the model.
        of: where the user named it, for errors.

    Raises:
        UserError: scales are missing or of another shape; config.json and tensors disagree; the
            scheme is one of a known method for which there is no codec.
    """
    stated = _stated(directory)
    method = str(stated.get("quant_method", ""))
    reader = _READERS.get(method)
    if reader is None:
        return WeightFormat()
    tensors = {
        name: at
        for path in weight_files(directory, field=of)
        for name, at in read_header(path, field=of).tensors.items()
    }
    if not tensors:
        return WeightFormat()
    checkpoint = _Checkpoint(directory, of, method, stated, tensors)
    codings = dict(reader(checkpoint))
    if not codings:
        raise checkpoint.refused(
            f"config.json says that weights are stored by {method}, and no tensor is"
        )
    checkpoint.check_ignored(codings)
    beside = {name for name in tensors if name.rpartition(".")[2] in _BESIDE}
    return WeightFormat(method, codings, frozenset(beside))


def _stated(directory: Path) -> dict[str, Any]:
    """Return what config.json, or ModelOpt's file beside it, says of quantisation."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        found = config.get("quantization_config") or config.get("compression_config")
        found = found or (config.get("text_config") or {}).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return {}  # loading the model says what is wrong with it
    if not found and (file := directory / _MODELOPT_FILE).is_file():
        try:
            inner = json.loads(file.read_bytes())["quantization"]
            found = {"quant_method": "modelopt", **inner}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise unusable(f"{file} cannot be read ({error})", CONFIG_REMEDY) from error
    return dict(found) if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Statements of a checkpoint and what its headers say."""

    directory: Path
    field: str
    method: str
    stated: Mapping[str, Any]
    tensors: Tensors

    def refused(self, why: str, remedy: str = CONFIG_REMEDY) -> UserError:
        """Return the error for it."""
        return unusable(f"{self.directory}: {why}", remedy, self.field)

    def no_codec(self, what: str) -> UserError:
        """Return the error for a scheme that is known, and cannot be computed with."""
        return self.refused(f"{what} of {self.method} has no codec here", PLAIN_REMEDY)

    def named(self, suffix: str, dtypes: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the module (dotted) and shape of each tensor with that last name and a dtype."""
        for name, at in self.tensors.items():
            module, _, last = name.rpartition(".")
            if last == suffix and at["dtype"] in dtypes:
                yield module, tuple(at["shape"])

    def part(self, of: str, *names: str) -> str:
        """Return which of some tensors is there, for the weight `of`. Raises UserError: none."""
        for name in names:
            if name in self.tensors:
                return name
        raise self.refused(f"{of} is stored by {self.method} and has no {names[0]}")

    def check(
        self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return a tensor's shape. Raises UserError unless type and shape are as expected."""
        at = self.tensors[name]
        found = tuple(at["shape"])
        if at["dtype"] not in dtypes:
            wanted = " or ".join(dtypes)
            raise self.refused(f"{name} is stored as {at['dtype']}, {self.method} has {wanted}")
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.refused(f"{name} has shape {list(found)}, by config.json it has {wanted}")
        return found

    def check_ignored(self, codings: Mapping[str, Coding]) -> None:
        """Refuse codes in a module that config.json keeps plain: a server would read it so."""
        keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
        plain = [str(entry) for key in keys for entry in self.stated.get(key) or ()]
        for name in codings:
            module = name.rpartition(".")[0]
            for entry in plain:
                if _names_module(entry, module):
                    raise self.refused(
                        f"config.json leaves {module} plain ({entry}), and its weight is stored "
                        f"by {self.method}"
                    )


def _names_module(entry: str, module: str) -> bool:
    """Return whether an entry of config.json names a module: in full, as a pattern, or by a *."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), module) is not None
    return entry in (module, module.removeprefix("model."))


Reader = Callable[[_Checkpoint], Iterator[tuple[str, Coding]]]
_SCALES = (*_FLOATS, "F8_E8M0", "U8")


def _fp8(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    """Yield DeepSeek's and Qwen's scales (one for each block), and AutoFP8's (one for a weight)."""
    block = at.stated.get("weight_block_size")
    if (fmt := at.stated.get("fmt", "e4m3")) != "e4m3":
        raise at.no_codec(f"the type {fmt}")
    yield from _eight_bits(at, tuple(block) if block else None, ("tensor", "channel"))


def _modelopt(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    algorithm = str(at.stated.get("quant_algo", "")).upper()
    if algorithm == "FP8":
        yield from _eight_bits(at, None, ("tensor",))
    elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        yield from _eight_bits(at, None, ("channel",))
    elif algorithm == "NVFP4":
        yield from _nvfp4(at, "weight", "weight_scale_2", "factor")
    else:
        raise at.no_codec(f"{algorithm or 'a scheme without a name'}")


def _compressed(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    groups = [g for g in (at.stated.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    formats = {str(g.get("format") or at.stated.get("format")) for g in groups}
    if not groups:
        raise at.no_codec("a scheme without config_groups")
    for name in sorted(formats):
        of = [g.get("weights") or {} for g in groups]
        of = [w for w, g in zip(of, groups, strict=True) if _format_of(at, g) == name]
        if name in ("float-quantized", "naive-quantized") and all(
            (w.get("type"), w.get("num_bits")) == ("float", 8) for w in of
        ):
            blocks = {tuple(w["block_structure"]) for w in of if w.get("block_structure")}
            kinds = tuple({str(w.get("strategy")) for w in of} - {"block"})
            if len(blocks) > 1 or not {*kinds} <= {"tensor", "channel"}:
                raise at.no_codec(f"the strategy {', '.join(kinds)}")
            yield from _eight_bits(at, blocks.pop() if blocks else None, kinds)
        elif name == "nvfp4-pack-quantized":
            yield from _nvfp4(at, "weight_packed", "weight_global_scale", "divisor")
        elif name == "mxfp4-pack-quantized":
            yield from _packed_mxfp4(at)
        elif name == "int-quantized" and all(
            (w.get("type"), w.get("num_bits"), w.get("strategy")) == ("int", 8, "channel")
            and w.get("symmetric", True)
            for w in of
        ):
            yield from _eight_bits(at, None, ("channel",), codec="int8")
        elif name == "pack-quantized" and all(
            (w.get("type"), w.get("num_bits")) == ("int", 4) for w in of
        ):
            yield from _packed_int4(at, of)
        else:
            bits = ", ".join(sorted({f"{w.get('type')} of {w.get('num_bits')} bits" for w in of}))
            raise at.no_codec(f"the format {name} ({bits})")


def _format_of(at: _Checkpoint, group: Mapping[str, Any]) -> str:
    return str(group.get("format") or at.stated.get("format"))


def _eight_bits(
    at: _Checkpoint,
    block: tuple[int, ...] | None,
    others: tuple[str, ...],
    codec: str = "fp8",
) -> Iterator[tuple[str, Coding]]:
    """Weights of E4M3, or of int8; `others`: strategies of scales beside that of blocks."""
    for module, _ in at.named("weight", ("F8_E5M2",)):
        raise at.no_codec(f"{module}.weight in E5M2")
    for module, shape in at.named("weight", ("F8_E4M3",) if codec == "fp8" else ("I8",)):
        if len(shape) != 2:
            raise at.refused(f"{module}.weight has shape {list(shape)}, which is not a matrix")
        weight = f"{module}.weight"
        scales = at.part(weight, *_scale_names(weight, block))
        allowed = _grids(shape, block, others)
        found = at.check(scales, _SCALES, *allowed)
        group = allowed[found]
        yield weight, Coding(codec, shape, group, {"codes": weight, "scales": scales})


def _scale_names(weight: str, block: tuple[int, ...] | None) -> tuple[str, str]:
    names = f"{weight}_scale_inv", f"{weight}_scale"
    return names if block else (names[1], names[0])


def _grids(
    shape: tuple[int, ...], block: tuple[int, ...] | None, others: tuple[str, ...]
) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return the shapes that scales may have, each with the rows and columns that share one."""
    rows, columns = shape
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    if "tensor" in others and not block:
        found |= dict.fromkeys([(), (1,), (1, 1)], (rows, columns))
    if "channel" in others and not block:
        found |= dict.fromkeys([(rows,), (rows, 1)], (1, columns))
    if block:
        found[-(-rows // block[0]), -(-columns // block[1])] = (block[0], block[1])
    return found


def _nvfp4(at: _Checkpoint, codes: str, factor: str, kind: str) -> Iterator[tuple[str, Coding]]:
    """Two codes of E2M1 a byte, a scale of E4M3 for 16 of them, and one for the weight."""
    for module, (rows, half) in _matrices(at, codes, ("U8",)):
        weight, columns = f"{module}.weight", 2 * half
        scales = at.part(weight, f"{module}.weight_scale")
        at.check(scales, ("F8_E4M3",), (rows, columns // 16))
        whole = at.part(weight, f"{module}.{factor}")
        at.check(whole, ("F32",), (), (1,))
        parts = {"codes": f"{module}.{codes}", "scales": scales, kind: whole}
        yield weight, Coding(f"nvfp4-{kind}", (rows, columns), (1, 16), parts)
    if codes == "weight":  # ModelOpt keeps some layers in 8 bits beside them
        yield from _eight_bits(at, None, ("tensor",))


def _packed_mxfp4(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    for module, (rows, half) in _matrices(at, "weight_packed", ("U8",)):
        weight, columns = f"{module}.weight", 2 * half
        scales = at.part(weight, f"{module}.weight_scale")
        at.check(scales, ("U8", "F8_E8M0"), (rows, columns // 32))
        parts = {"codes": f"{module}.weight_packed", "scales": scales}
        yield weight, Coding("mxfp4", (rows, columns), (1, 32), parts)


def _packed_int4(
    at: _Checkpoint, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Coding]]:
    """Eight codes of a row a word, about a zero of 8, and a scale for each group of a row."""
    if not all(w.get("symmetric", True) for w in groups):
        raise at.no_codec("the format pack-quantized with zero points")
    for module, _ in at.named("weight_g_idx", ("I32", "I64")):
        raise at.no_codec(f"{module}.weight, whose groups are in an order of its own,")
    sizes = {w.get("group_size") or -1 for w in groups}
    for module, (rows, words) in _matrices(at, "weight_packed", ("I32",)):
        weight, columns = f"{module}.weight", 8 * words
        scales = at.part(weight, f"{module}.weight_scale")
        shapes = {(rows, _groups(at, size, columns)): size for size in sizes}
        found = at.check(scales, _FLOATS, *shapes)
        parts = {"codes": f"{module}.weight_packed", "scales": scales}
        yield weight, Coding("int4", (rows, columns), (1, columns // found[1]), parts)


def _gptq(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    """AutoGPTQ's and GPTQModel's four bits, [in / 8, out], as both write them."""
    if (layout := at.stated.get("checkpoint_format") or "gptq") != "gptq":
        raise at.no_codec(f"the layout {layout}")
    if at.stated.get("dynamic"):
        raise at.no_codec("a scheme that differs by module (dynamic)")
    ordered = bool(at.stated.get("desc_act"))
    for module, (words, rows) in _of_four_bits(at):
        weight, columns = f"{module}.weight", 8 * words
        parts = _zeros_and_scales(at, module, rows, columns)
        if ordered:
            parts["order"] = at.part(weight, f"{module}.g_idx")
            at.check(parts["order"], ("I32",), (columns,))
        codec, size = "gptq-ordered" if ordered else "gptq", _group_size(at, columns)
        yield weight, Coding(codec, (rows, columns), (1, size), parts)


def _awq(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    """AutoAWQ's four bits, [in, out / 8], as its GEMM has them."""
    if (layout := str(at.stated.get("version") or "gemm").lower()) != "gemm":
        raise at.no_codec(f"the layout {layout}")
    if not at.stated.get("zero_point", True):
        raise at.no_codec("a scheme without zero points")
    for module, (columns, words) in _of_four_bits(at):
        rows = 8 * words
        parts = _zeros_and_scales(at, module, rows, columns)
        shape, group = (rows, columns), (1, _group_size(at, columns))
        yield f"{module}.weight", Coding("awq", shape, group, parts)


def _of_four_bits(at: _Checkpoint) -> Iterator[tuple[str, tuple[int, int]]]:
    bits = at.stated.get("bits", at.stated.get("w_bit", 4))
    if bits != 4:
        raise at.no_codec(f"a scheme of {bits} bits")
    yield from _matrices(at, "qweight", ("I32",))


def _zeros_and_scales(at: _Checkpoint, module: str, rows: int, columns: int) -> dict[str, str]:
    """Return the parts of a weight that GPTQ or AWQ has packed, by their name."""
    weight, groups = f"{module}.weight", _groups(at, _group_size(at, columns), columns)
    zeros = at.part(weight, f"{module}.qzeros")
    at.check(zeros, ("I32",), (groups, rows // 8))
    scales = at.part(weight, f"{module}.scales")
    at.check(scales, _FLOATS, (groups, rows))
    return {"codes": f"{module}.qweight", "zeros": zeros, "scales": scales}


def _group_size(at: _Checkpoint, columns: int) -> int:
    size = at.stated.get("group_size", at.stated.get("q_group_size", 128))
    return columns if size == -1 else int(size)


def _groups(at: _Checkpoint, size: int, columns: int) -> int:
    """Return how many groups a row has. Raises UserError: they do not divide it."""
    size = columns if size == -1 else size
    if size < 1 or columns % size:
        raise at.refused(f"groups of {size} do not divide rows of {columns}")
    return columns // size


def _mxfp4(at: _Checkpoint) -> Iterator[tuple[str, Coding]]:
    """GPT-OSS: experts in one tensor, 16 bytes of codes for each scale."""
    for name, tensor in at.tensors.items():
        if not name.endswith("_blocks"):
            continue
        weight, shape = name.removesuffix("_blocks"), tuple(tensor["shape"])
        if len(shape) != 4 or tensor["dtype"] != "U8" or shape[3] != 16:
            raise at.refused(
                f"{name} is {tensor['dtype']} of shape {list(shape)}, mxfp4 has U8 of "
                "[experts, rows, groups, 16]"
            )
        scales = at.part(weight, f"{weight}_scales")
        at.check(scales, ("U8", "F8_E8M0"), shape[:3])
        experts, rows, groups = shape[:3]
        parts = {"codes": name, "scales": scales}
        yield weight, Coding("mxfp4", (experts, rows, groups * 32), (1, 32), parts, True)


def _matrices(
    at: _Checkpoint, last: str, dtypes: tuple[str, ...]
) -> Iterator[tuple[str, tuple[int, int]]]:
    for module, shape in at.named(last, dtypes):
        if len(shape) != 2 or not prod(shape):
            raise at.refused(f"{module}.{last} has shape {list(shape)}, which is not a matrix")
        yield module, (shape[0], shape[1])


_READERS: dict[str, Reader] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
}
