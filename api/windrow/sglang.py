"""Say which SGLang can be harvested: its version and its command line. Imports nothing of it.

The plugin asks this of a server that starts, `windrow inject` of a manifest before there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from windrow.errors import UserError

# Versions on which the tests of tests/sglang have passed (docs/sglang.md has the table).
TESTED = ("0.5.22", "0.5.23")
ENV_UNTESTED = "WINDROW_SGLANG_UNTESTED"  # "1": run on another version as well
# trtllm_mha, trtllm_mla and dsa compute on views of the pool by page, of whatever strides.
_BACKENDS = (
    *("torch_native", "triton", "flashinfer", "fa3"),
    *("trtllm_mha", "trtllm_mla", "dsa", "nsa"),
)
_DEVICES = ("cuda", "cpu")  # of "cuda" some are AMD's, which only the process can tell
_HOST_TRANSFERS = ("mooncake", "fake")
# Drafts with a KV pool of their own under the target's page numbers. NEXTN is EAGLE's other name.
_DRAFTS = ("EAGLE", "EAGLE3", "NEXTN")
_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# Options that put other memory, other ranks or other loops where the plugin expects SGLang's own:
# attribute of ServerArgs, the value that is fine, what to write ("": leave the switch out).
_PLAIN: tuple[tuple[str, object, str], ...] = (
    # Before the sizes that come with them: an error names the first.
    (
        "nnodes",
        1,
        "--nnodes 1: the ranks of a slot are in one pod, not in a LeaderWorkerSet's group",
    ),
    ("enable_dp_attention", False, ""),
    ("pp_size", 1, "--pp-size 1"),
    ("dp_size", 1, "--dp-size 1, and a server on each GPU"),
    ("dcp_size", 1, "--dcp-size 1"),
    ("attn_cp_size", 1, "--attn-cp-size 1"),
    ("ep_size", 1, "--ep-size 1: a worker's ranks cut no experts"),
    ("enable_multi_layer_eagle", False, ""),
    ("enable_pdmux", False, ""),
    ("enable_memory_saver", False, ""),
    ("enable_unified_memory", False, ""),
    ("enable_page_major_kv_layout", False, ""),
    ("enable_hierarchical_cache", False, ""),
    ("enable_hisparse", False, ""),
    ("enable_kv_cache_sharding", False, ""),
    ("enable_pd_role_switch", False, ""),
    ("cpu_offload_gb", 0, "--cpu-offload-gb 0"),
)


# Other names of the options above, as SGLang's own parser has them.
_ALIASES: Final = {
    "--tp": "tp_size",
    "--tensor-parallel-size": "tp_size",
    "--pp": "pp_size",
    "--pipeline-parallel-size": "pp_size",
    "--dp": "dp_size",
    "--data-parallel-size": "dp_size",
    "--ep": "ep_size",
    "--expert-parallel-size": "ep_size",
    "--speculative-algo": "speculative_algorithm",
}
# What the other options are where the command line is silent, attribute of ServerArgs by name.
_DEFAULTS: Final[dict[str, object]] = {
    "tp_size": 1,
    "disaggregation_mode": "null",
    "disaggregation_transfer_backend": "mooncake",
    "device": "cuda",
    "page_size": None,
    "kv_cache_dtype": "auto",
    "attention_backend": None,
    "decode_attention_backend": None,
    "speculative_algorithm": None,
    "speculative_eagle_topk": None,
}
# Parts of a model's path by which SGLang takes a chat template of its own, before the model's.
_OWN_TEMPLATE = re.compile(
    r"\bpoints\b|moss.*vl|internvl|janus|vicuna|llava-v1\.[56]|llava-next-video"
    r"|llava-onevision-qwen2|deepseek.*vl2|minicpm-[vo]|phi-4-multimodal|deepseek-ocr|unlimited"
    r"|paddleocr|whisper",
    re.IGNORECASE,
)
# Parts of an architecture's name for which it writes chats by code of its own.
_OWN_CODE = ("DeepseekV4", "DeepseekV41", "KimiK3", "InklingForConditionalGeneration")
# Parsers of calls that switch it to such code whatever the model is.
_PARSERS_WITH_CODE = ("deepseekv32", "deepseekv4", "deepseekv41", "kimi_k3")
# Images of stacks that hold SGLang (sglang-runtime, sglang-router) have versions of their own.
_IMAGE_VERSION = re.compile(r"(?:^|/)sglang:v?(\d+\.\d+\.\d+)")


def check_version(version: str, *, insisted: bool) -> None:
    """Refuse a version that nobody has tested, unless the user insists. Raises UserError."""
    if version not in TESTED and not insisted:
        raise UserError(
            f"SGLang {version} is not one that the plugin was tested with ({', '.join(TESTED)})",
            remedy=f"Install one of those, or set {ENV_UNTESTED}=1 to try this one.",
        )


def check_arguments(args: Any) -> None:  # noqa: ANN401  SGLang's ServerArgs
    """Refuse a command line whose KV cannot be lent. Raises UserError with what to change."""
    mode = args.disaggregation_mode
    if mode not in ("decode", "null"):
        raise UserError(
            f"a {mode} instance has no decode steps to harvest beside",
            field="--disaggregation-mode",
            remedy="Run the sidecar in the decode instances.",
        )
    if (device := args.device or "cuda").partition(":")[0] not in _DEVICES:
        raise UserError(
            f"the plugin shares NVIDIA's GPUs and cores, not {device}",
            field="--device",
            remedy="Decode on one of those.",
        )
    if (tokens := args.page_size or 1) < 2:
        raise UserError(
            f"pages of {tokens} token cannot be lent in chunks",
            field="--page-size",
            remedy="Use --page-size 16 or more.",
        )
    for name, fine, remedy in _PLAIN:
        value = getattr(args, name, fine)
        if value != fine and not (fine in (False, None) and not value):
            flag = "--" + name.replace("_", "-")
            if fine is False:
                raise UserError("is not supported yet", field=flag, remedy="Leave it out.")
            raise UserError(f"{value} is not supported yet", field=flag, remedy=f"Use {remedy}.")
    tp_size = getattr(args, "tp_size", 1)
    if tp_size > 1 and not (args.device or "cuda").startswith("cpu"):
        raise UserError(
            f"{tp_size} is not supported yet on GPUs: a worker over ranks runs on cores only",
            field="--tp-size",
            remedy="Use --tp-size 1, and a server on each GPU.",
        )
    check_speculation(
        getattr(args, "speculative_algorithm", None), getattr(args, "speculative_eagle_topk", None)
    )
    backend = args.disaggregation_transfer_backend
    if mode == "decode" and args.device == "cpu" and backend not in _HOST_TRANSFERS:
        raise UserError(
            f"untested: transfers by {backend} into the memory of cores beside lent chunks",
            field="--disaggregation-transfer-backend",
            remedy=f"Use {' or '.join(_HOST_TRANSFERS)}, or decode on a GPU.",
        )
    if args.kv_cache_dtype not in _KV_DTYPES:
        raise UserError(
            f"KV of {args.kv_cache_dtype} has a layout that the plugin does not know",
            field="--kv-cache-dtype",
            remedy="Use --kv-cache-dtype auto or fp8_e4m3.",
        )
    for field in ("attention_backend", "decode_attention_backend"):
        if (backend := getattr(args, field, None)) not in (None, *_BACKENDS):
            raise UserError(
                f"the plugin does not know how {backend} lays out KV",
                field="--" + field.replace("_", "-"),
                remedy=f"Use one of {', '.join(_BACKENDS)}.",
            )


def own_rendering(
    model: str = "", architectures: Sequence[str] | None = None, parser: str = ""
) -> str:
    """Return why SGLang writes chats otherwise than by the model's template; empty: it does not.

    Args:
        model: its path or name, as the server has it.
        architectures: that its config.json names.
        parser: the server's --tool-call-parser.
    """
    architecture = next(iter(architectures or ()), "")
    if parser in _PARSERS_WITH_CODE:
        return f"SGLang writes chats by code of its own under --tool-call-parser {parser}"
    if any(part in architecture for part in _OWN_CODE):
        return f"SGLang writes chats of {architecture} by code of its own"
    if found := _OWN_TEMPLATE.search(model):
        return (
            f"SGLang takes a chat template of its own for {model}, since the path holds "
            f"{found[0]!r}"
        )
    return ""


def check_speculation(algorithm: str | None, topk: object) -> None:
    """Refuse a way of speculating that nobody has looked at. Raises UserError.

    Args:
        algorithm: as SGLang names it; None: decode does not speculate.
        topk: branches of a draft; None: as SGLang chooses.
    """
    if not algorithm:
        return
    if algorithm.upper() not in _DRAFTS:
        raise UserError(
            f"the plugin does not know what KV {algorithm} keeps for its drafts",
            field="--speculative-algorithm",
            remedy=f"Use one of {', '.join(_DRAFTS)}, or none.",
        )
    if topk is not None and str(topk) != "1":
        raise UserError(
            f"untested: drafts with {topk} branches, whose KV is moved between pages",
            field="--speculative-eagle-topk",
            remedy="Use --speculative-eagle-topk 1.",
        )


def arguments_of(words: Iterable[str]) -> SimpleNamespace:
    """Return the options of a command line that `check_arguments` looks at, as ServerArgs has them.

    A value that is filled in later (`$(TP)`) counts as fine, as does what a file may say that the
    command line names (`--config`).
    """
    known = {**_DEFAULTS, **{name: fine for name, fine, _ in _PLAIN}}
    found, given = dict(known), list(words)
    if any(word.partition("=")[0] == "--config" for word in given):
        found["page_size"] = 16
    for place, word in enumerate(given):
        flag, equals, value = word.partition("=")
        name = _ALIASES.get(flag) or flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in known:
            continue
        following = "" if equals else next(iter(given[place + 1 : place + 2]), "")
        text = value if equals else ("" if following.startswith("-") else following)
        found[name] = _value(known[name], name, text)
    return SimpleNamespace(**found)


def _value(fine: object, name: str, text: str) -> object:
    if fine is False:
        return text.lower() not in ("false", "0")
    if "$" in text:
        return 16 if name == "page_size" else fine
    if name == "page_size" or isinstance(fine, int):
        return int(text) if text.isdecimal() else fine
    return text or fine


def version_of_image(image: str) -> str:
    """Return the version in the tag of an image of SGLang's project; empty: it has none."""
    found = _IMAGE_VERSION.search(image)
    return found.group(1) if found else ""


def refusal(words: Sequence[str], image: str, *, insisted: bool = False) -> str:
    """Return why a server of this command line and image would not be harvested; empty: it would.

    `insisted`: the container sets ENV_UNTESTED.
    """
    try:
        if version := version_of_image(image):
            check_version(version, insisted=insisted)
        check_arguments(arguments_of(words))
    except UserError as error:
        return str(error)
    return ""
