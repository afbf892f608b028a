"""Loading of the frozen base model: decode's own weights where they are the same, or a file.

Shared weights are mapped read-only and become the parameters themselves; nothing is copied.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windrow.conditions import Reason
from windrow.errors import UserError, WindrowError
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice, available_bytes, out_of_memory
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.engines.streaming.copying import Copier, RateLimit
from windrow_sidecar.engines.streaming.streamed_layers import StreamedLayers
from windrow_sidecar.engines.streaming.tensor_files import read, stored_tensors
from windrow_sidecar.engines.weight_files import (
    MODEL_FIELD,
    check_files,
    read_header,
    unread_note,
    unusable,
    weight_files,
)
from windrow_sidecar.engines.weight_formats import PLAIN_REMEDY, weight_format
from windrow_sidecar.finetune.data.tokenizer_files import read_tokenizer
from windrow_sidecar.finetune.model.coded import CodedTensor, read_coded, stack_experts
from windrow_sidecar.finetune.model.hub_models import (
    THIS_PROCESS,
    HubReader,
    from_hub,
    not_found,
)
from windrow_sidecar.finetune.model.overlay import build_over
from windrow_sidecar.finetune.model.precision import WeightForm, keep_differentiable
from windrow_sidecar.finetune.model.whole import PLAIN, check_tensors, check_types
from windrow_sidecar.finetune.model.windowed import CannotWindow, load_windowed
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers

log = logging.getLogger(__name__)

# Of the memory that is free: what the frozen weights may take, the rest is for activations.
WEIGHTS_SHARE = 0.8
ADAPTER_CONFIG = "adapter_config.json"
# Parts of a configuration that are of a layer, not models of their own (MPT, DBRX).
_OF_LAYERS = ("attn_config", "ffn_config")
DECODER_REMEDY = "Use a decoder-only language model (Llama, Qwen, Mistral, ...)."
MODEL_REMEDY = "Use a decoder-only transformers checkpoint (safetensors) without code of its own."
CONFIG_REMEDY = (
    "Use the model's own config.json; its type has to be one that transformers has, without code "
    "of the model's own."
)
PICKLED_REMEDY = (
    "Write them as safetensors: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)."
)
# How Python's tempfile says that it has found none.
_NO_TEMPORARY = "No usable temporary directory"
TOKENIZER_REMEDY = "Copy the model's tokenizer.json and tokenizer_config.json beside its weights."


class NoTemporaryDirectory(WindrowError):
    """Error of a worker that can write no temporary file, which libraries do as they are loaded."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model and its tokenizer."""

    model: nn.Module
    config: Any
    tokenizer: Any
    shared: bool  # the weights are decode's
    frozen: FrozenLayers | None = None  # where memory does not hold all layers
    streamed: StreamedLayers | None = None  # the same, of decode's weights in its own process
    fingerprint: str = ""  # of the checkpoint's files
    notes: tuple[str, ...] = ()  # what a user has to know of them
    folder: str = ""  # of the tokenizer, where that was read by another name
    of_hub: bool = False  # that folder is of a cache of the Hub, which no job writes to

    @property
    def in_turns(self) -> FrozenLayers | StreamedLayers | None:
        """Return what brings its layers; None: memory holds all."""
        return self.frozen or self.streamed

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        weight: Tensor = self.model.get_input_embeddings().weight  # type: ignore[operator]
        return weight.dtype


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """Weights that decode exported: a manifest and the bytes (uint8, read-only)."""

    manifest: dict[str, Any]
    storage: Tensor

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that decode serves."""
        return str(self.manifest["fingerprint"])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights; of the widest where they differ."""
        found = {getattr(torch, at["dtype"]) for at in self.manifest["tensors"].values()}
        widest: torch.dtype = max(found, key=lambda dtype: dtype.itemsize)
        return widest

    def tensors(self) -> dict[str, Tensor | CodedTensor]:
        """Return each parameter, [...] in its own shape and dtype, as a view over the bytes."""
        found: dict[str, Tensor | CodedTensor] = {
            name: self._view(at) for name, at in self.manifest["tensors"].items()
        }
        for name, of in self.manifest.get("coded", {}).items():
            parts = {part: self._view(at) for part, at in of["parts"].items()}
            parts["codes"] = parts["codes"].view(torch.uint8)
            high, wide = of["group"]
            found[name] = CodedTensor(of["codec"], tuple(of["shape"]), (high, wide), parts)
        return found

    def _view(self, at: dict[str, Any]) -> Tensor:
        of_bytes = self.storage[at["offset"] :].view(torch.uint8)[: _n_bytes(at)]
        return of_bytes.view(getattr(torch, at["dtype"])).view(at["shape"])


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return decode's manifest of weights, or None where it exports none."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return manifest


def find_model(name: str, revision: str, reader: HubReader = THIS_PROCESS) -> Path:
    """Return the directory of a model that is named by path or by its Hub name.

    Args:
        name: a path, or a name like owner/name.
        revision: on the Hub.
        reader: who asks the Hub.

    Raises:
        UserError: there is none, it may not be read, or a file of its weights is missing or cut
            short.
        ModelSilent: the Hub does not answer; what this process may read and has already is used
            without it.
    """
    path = Path(name)
    if not path.is_dir():
        if path.is_absolute() or name.startswith("."):
            raise not_found(f"{path} is not a directory")
        path = from_hub(name, revision, reader)
    if (path / ADAPTER_CONFIG).is_file():
        raise _is_adapter(path)
    if not (path / "config.json").is_file():
        raise not_found(f"{path} holds no config.json")
    check_files(path)
    return path


def load_base(
    directory: Path,
    exported: ExportedWeights | None = None,
    form: WeightForm | None = None,
    room_bytes: int | None = None,
    device: ComputeDevice | None = None,
    random_weights: int | None = None,
    copy_rate: float | None = None,
    build: Callable[[Path, Any, WeightForm], nn.Module] | None = None,
) -> BaseModel:
    """Build the model, over `exported` where that is given, else from the directory's files.

    `form`: of weights that are read from files; fp32 where nothing is said. `room_bytes`: what they
    may take (default: most of what is free); where that is too little for all, layers take turns.
    `device`: where it computes (default: the host). `random_weights`: a seed; weights are made up
    on the device, as for measurements, and the directory needs none.
    `copy_rate`: bytes a second that layers which take turns may move, so that decode keeps the rest
    of the disk and the link; None: no limit.
    `build`: makes the model of the directory, its configuration and the form, where that is not all
    of it (see `tensor_parallel.shard`).

    Raises:
        UserError: a form whose library is not there, an architecture that transformers cannot
            build without code of the model's own, a checkpoint that cannot be read, or one too
            large for this machine.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with _told_as_unusable(str(directory / "config.json"), CONFIG_REMEDY):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    _check_kind(directory, config)
    with _told_as_unusable(f"the tokenizer in {directory}", TOKENIZER_REMEDY):
        tokenizer = read_tokenizer(directory)
    form, device = form or WeightForm(), device or HostDevice()
    frozen: FrozenLayers | None = None
    if build is not None:
        with _told_as_unusable(str(directory)):
            model = build(directory, config, form)
    elif random_weights is not None:
        with _told_as_unusable(str(directory)):
            model = _made_up(config, form, device, random_weights)
    elif exported is not None:
        model = _over(directory, config, exported)
    elif _wanted_bytes(directory, form) <= (room := room_bytes or _room_bytes(device)):
        model = _read_coded(directory, config, form) or _read(directory, config, form)
    elif form.quantization == "none":
        copier = Copier(RateLimit(copy_rate), device=device)
        model, frozen = _windowed(directory, config, form, room, copier, device)
    else:
        raise _too_large(directory, form, room)
    if frozen is None:
        model.to(device.torch)
    model.requires_grad_(requires_grad=False)
    found = model_fingerprint(directory) if weight_files(directory) else ""
    notes = (unread_note(directory), _untied_note(model), _own_code_note(config))
    told = tuple(note for note in notes if note)
    return BaseModel(
        *(model, model.config, tokenizer, exported is not None, frozen),
        fingerprint=found,
        notes=told,
    )


def _untied_note(model: Any) -> str:  # noqa: ANN401 - of transformers
    """Say where a model has a head of its own though its config.json ties it; else ""."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if not tied or any(end is None for end in ends) or ends[0].weight is ends[1].weight:
        return ""
    return (
        "config.json ties the model's head to its embeddings (tie_word_embeddings), and its files "
        "hold a head of its own: it is trained over that, where a server may take the embeddings"
    )


def _own_code_note(config: Any) -> str:  # noqa: ANN401 - of transformers
    """Say where a checkpoint names code of its own, which is never run; else ""."""
    named = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if not named:
        return ""
    return (
        f"config.json names code of the model's own ({named}), which is not run: the model is that "
        f"of transformers for the type {config.model_type}"
    )


def _check_kind(directory: Path, config: Any) -> None:  # noqa: ANN401
    """Refuse what is no language model of one decoder, before anything is read.

    Raises:
        UserError: names the kind of model that it is.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    of = [n for n in getattr(config, "sub_configs", {}) if n not in ("text_config", *_OF_LAYERS)]
    says = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    where = f"{directory / 'config.json'} says {says}"
    parts = f" with {' and '.join(of)}" if of else ""
    if architecture is None or (of and architecture.config_class is type(config)):
        raise unusable(
            f"{where}{parts}, which is not a decoder-only language model",
            DECODER_REMEDY,
        )
    halves = of or getattr(config, "is_encoder_decoder", False)
    if halves and says != architecture.__name__:
        # Servers serve the named class, whose modules have other names than the half's.
        raise unusable(
            f"{where}{parts}: a text-only adapter is one of {architecture.__name__}, whose modules "
            f"have other names than those of {says}, so servers would ignore it",
            "Use a checkpoint of the text model alone, whose config.json names "
            f"{architecture.__name__}.",
        )


def _made_up(
    config: Any,  # noqa: ANN401
    form: WeightForm,
    device: ComputeDevice,
    seed: int,
) -> nn.Module:
    """Build a model as transformers initialises it, directly on the device."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device(device.torch):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=form.dtype)
    return model.eval()


def _read(directory: Path, config: Any, form: WeightForm) -> nn.Module:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": form.dtype, "trust_remote_code": False}
    if (quantised := form.config()) is not None:
        options["quantization_config"] = quantised
    if not weight_files(directory):
        pickled = sorted(file.name for file in directory.glob("*.bin"))
        beside = f", only {pickled[0]}" if pickled else ""
        raise unusable(
            f"{directory} holds no weights as safetensors{beside}",
            PICKLED_REMEDY if pickled else "Use a model that is kept as safetensors.",
        )
    method = _quantisation_of(config)
    remedy = PLAIN_REMEDY if method else MODEL_REMEDY
    model: nn.Module
    with _told_as_unusable(str(directory), remedy):
        model, said = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            # Else it raises, without a name. None of them gets past the next line.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    check_tensors(
        model,
        str(directory),
        missing=said["missing_keys"],
        unexpected=said["unexpected_keys"],
        misshaped=said["mismatched_keys"],
    )
    if not getattr(model, "is_quantized", False):  # by what transformers made of config.json
        check_types(directory, model, method)
    keep_differentiable(model)
    return model


def _read_coded(directory: Path, config: Any, form: WeightForm) -> nn.Module | None:  # noqa: ANN401
    """Build a model over the codes of its files; None: they are no codes of a codec."""
    stored_as = weight_format(directory)
    if not stored_as.codings or form.quantization != "none":
        return None
    stored, consumed = stored_tensors(directory, codes=True), stored_as.consumed
    weights = {name: read_coded(coding, stored) for name, coding in stored_as.codings.items()}
    tensors: dict[str, Tensor | CodedTensor] = {**stack_experts(weights, str(directory))}
    for name, at in stored.items():
        if name not in consumed:
            tensors[name] = read(at, form.dtype if at.dtype in PLAIN else None)
    with _told_as_unusable(str(directory)):
        model = build_over(tensors, config, form.dtype, str(directory))
    check_types(directory, model, stored_as.method, consumed)
    return model


def _quantisation_of(config: Any) -> str:  # noqa: ANN401
    """Return the method by which config.json says that weights are stored; "": plainly."""
    named = getattr(config, "quantization_config", None)
    if named is None:
        return ""
    found = named.get("quant_method") if isinstance(named, dict) else named.quant_method
    return str(getattr(found, "value", found) or "an unnamed one")


def _over(directory: Path, config: Any, exported: ExportedWeights) -> nn.Module:  # noqa: ANN401
    """Build the model with decode's tensors as its parameters; nothing is copied."""
    with _told_as_unusable(str(directory)):
        where = f"what decode serves of {directory}"
        return build_over(exported.tensors(), config, exported.dtype, where)


def _windowed(
    directory: Path,
    config: Any,  # noqa: ANN401
    form: WeightForm,
    room: int,
    copier: Copier,
    device: ComputeDevice,
) -> tuple[nn.Module, FrozenLayers]:
    """Build a model of which memory holds some layers at a time."""
    if method := _quantisation_of(config):
        copier.close()
        why = f"; its layers cannot take turns: config.json says that they are stored by {method}"
        raise _too_large(directory, form, room, why)
    try:
        with _told_as_unusable(str(directory)):
            model, frozen = load_windowed(
                directory, config, room_bytes=room, dtype=form.dtype, copier=copier, device=device
            )
    except CannotWindow as error:
        copier.close()
        raise _too_large(
            directory, form, room, f"; its layers cannot take turns: {error}"
        ) from error
    except UserError:
        copier.close()
        raise
    log.info("%d layers of the model are in memory at a time", frozen.capacity)
    return model, frozen


def _wanted_bytes(directory: Path, form: WeightForm) -> float:
    """Return the bytes that the whole model takes."""
    config = json.loads((directory / "config.json").read_text())
    stored = {"float32": 4, "float64": 8}.get(config.get("dtype", config.get("torch_dtype")), 2)
    codes = weight_format(directory).consumed if form.quantization == "none" else set()
    kept, on_disk = 0, 0
    for file in weight_files(directory):
        on_disk += file.stat().st_size
        for name, at in read_header(file).tensors.items() if codes else ():
            if name in codes:
                kept += at["data_offsets"][1] - at["data_offsets"][0]
    return kept + (on_disk - kept) * form.bytes_per_weight / stored


def _room_bytes(device: ComputeDevice) -> int:
    """Return the bytes that frozen weights may take."""
    if device.torch.type != "cpu":
        return int(WEIGHTS_SHARE * device.free_bytes())
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(WEIGHTS_SHARE * max(free, available_bytes()))


def _too_large(directory: Path, form: WeightForm, room: int, why: str = "") -> UserError:
    wanted = _wanted_bytes(directory, form)
    return UserError(
        f"the model takes {wanted / 2**30:.1f} GiB, {room / 2**30:.1f} GiB are free for it{why}",
        field=MODEL_FIELD,
        remedy="Use a smaller model, training.precision bf16, model.quantization, or a slot "
        "that serves this model, whose weights are shared.",
        reason=Reason.MODEL_TOO_LARGE,
    )


def _n_bytes(at: dict[str, Any]) -> int:
    n = int(getattr(torch, at["dtype"]).itemsize)
    for size in at["shape"]:
        n *= size
    return n


def _is_adapter(path: Path) -> UserError:
    try:
        base = json.loads((path / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, LookupError):
        base = None
    return unusable(
        f"{path} holds an adapter ({ADAPTER_CONFIG}), which is not a base model",
        f"Name the model that it was made for{f': {base}' if base else ''}.",
    )


@contextmanager
def _told_as_unusable(what: str, remedy: str = MODEL_REMEDY) -> Iterator[None]:
    """Turn whatever libraries raise while they read `what` into a UserError for who named it.

    They raise anything: ImportError for a quantisation, KeyError for an activation, zero division.

    Raises:
        UserError: instead.
        CannotWindow, MemoryError, torch.OutOfMemoryError, RuntimeError for want of memory: as is.
        NoTemporaryDirectory: it is the machine's fault.
    """
    try:
        yield
    except (UserError, CannotWindow):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        if isinstance(error, FileNotFoundError) and _NO_TEMPORARY in str(error):
            raise NoTemporaryDirectory(
                f"{str(error).partition('] ')[2]}: free space there, mount a volume at /tmp, or "
                "set TMPDIR"
            ) from error
        said = str(error).strip().partition("\n")[0].rstrip(".:")
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise unusable(f"{what} cannot be loaded: {kind}{said}", remedy) from error
