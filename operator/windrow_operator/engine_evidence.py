"""Tell which engine a container runs, by what it starts and what it shows: pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from windrow_operator.command_line import commands_of, option_of

MODE = "--disaggregation-mode"
SGLANG = "sglang"  # the name of every engine that Windrow can drive, the built-in one among them
# What a command line starts: a program by its name, or a part of a module's.
_ENGINES = {
    "sglang": SGLANG,
    "windrow": SGLANG,
    "windrow_sidecar": SGLANG,
    "vllm": "vllm",
    "trtllm": "trtllm",
    "trtllm-serve": "trtllm",
    "tensorrt_llm": "tensorrt_llm",
    "lmdeploy": "lmdeploy",
    "tritonserver": "tritonserver",
    "text-generation-launcher": "text-generation-inference",
    "llama-server": "llama.cpp",
    "llama_cpp": "llama.cpp",
    "ollama": "ollama",
    "lightllm": "lightllm",
    "mindieservice_daemon": "mindie",
    "mlc_llm": "mlc_llm",
    "aphrodite": "aphrodite",
    "ktransformers": "ktransformers",
    "fastdeploy": "fastdeploy",
    "mocker": "mocker",
}
_NAMES_ENGINE = re.compile("|".join(map(re.escape, _ENGINES)))
_IN_IMAGES = {
    "sglang": SGLANG,
    "vllm": "vllm",
    "tensorrtllm": "tensorrtllm",
    "tensorrt-llm": "tensorrt-llm",
    "trtllm": "trtllm",
    "lmdeploy": "lmdeploy",
    "tritonserver": "tritonserver",
    "text-generation-inference": "text-generation-inference",
    "llama.cpp": "llama.cpp",
    "ollama": "ollama",
    "lightllm": "lightllm",
    "mindie": "mindie",
    "fastdeploy": "fastdeploy",
}
# Variables by which engines are set up; SGLang's first, whose images may set some of others.
_VARIABLES = {
    "SGLANG_": SGLANG,
    "SGL_": SGLANG,
    "VLLM_": "vllm",
    "TRTLLM_": "trtllm",
    "TLLM_": "trtllm",
    "LMDEPLOY_": "lmdeploy",
}
# llm-d's images of vLLM, one for each kind of device; its routers and proxies are helpers.
_OF_LLM_D = re.compile(r"(^|/)llm-d-(cuda|cpu|rocm|xpu|hpu|aws|gb200|inference-sim)\b")
# Of SGLang's package, but no server.
_NO_SERVERS = (
    *("bench", "check_env", "compile", "eval", "mini_lb", "profiler", "test", "version"),
    "global_config",
)
# They name engines and start none of them.
_NO_STARTERS = frozenset({"pip", "pip3", "uv", "apt", "apt-get", "echo", "printf", "cd", "curl"})
_NO_STARTERS |= {
    "wget",
    "mkdir",
    "cp",
    "mv",
    "ln",
    "ls",
    "cat",
    "until",
    "while",
    "test",
    "[",
    "hf",
}
# Containers that stand beside an engine, by their names and those of their images.
HELPERS = re.compile(
    r"proxy|envoy|mesh|linkerd|kuma|consul|vault|router|routing|gateway|sidecar|frontend|epp|dapr"
    r"|fluent|filebeat|promtail|vector|otel|opentelemetry|jaeger|datadog|exporter|prometheus|nginx"
    r"|patio|monitor|logs?(ger|ging)?$|logrotate|tailer|^pause$|^busybox$"
)

NO_SIGN = "no sign of another one"


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine that a container runs, and the evidence for it.

    Attributes:
        name: `sglang`, or that of one that Windrow cannot drive.
        why: the evidence, in words.
        doubt: how the evidence contradicts itself; empty: it does not.
    """

    name: str
    why: str
    doubt: str = ""


def engine_of(container: Mapping[str, Any]) -> Engine:
    """Return the engine of a container, by what it starts, then by its image."""
    commanded, shown = started(container), shown_by_image(container)
    image = str(container.get("image", ""))
    if len(commanded) > 1:
        names = " and ".join(sorted(commanded))
        doubt = f"the command of container {container['name']} starts {names}"
        return Engine(SGLANG if SGLANG in commanded else min(commanded), "its command", doubt)
    if commanded:
        (name,) = commanded
        doubt = ""
        if name == SGLANG and shown and SGLANG not in shown:
            doubt = (
                f"the command of container {container['name']} starts sglang, and its image "
                f"{image} is one of {min(shown)}"
            )
        return Engine(name, "its command", doubt)
    if shown:
        return Engine(SGLANG if SGLANG in shown else min(shown), f"its image {image}")
    if option_of(container, MODE):
        return Engine(SGLANG, f"the option {MODE}")
    if hinted := _hinted(container):
        return Engine(*hinted)
    return Engine(SGLANG, NO_SIGN)


def shows_engine(container: Mapping[str, Any]) -> bool:
    """Return whether a container shows by command, image or option which engine it runs."""
    return engine_of(container).why != NO_SIGN


def other_engine(container: Mapping[str, Any]) -> str:
    """Return the name of an engine that Windrow cannot drive; empty: none is recognised."""
    name = engine_of(container).name
    return "" if name == SGLANG else name


def started(container: Mapping[str, Any]) -> frozenset[str]:
    """Return the engines that a container's commands start."""
    return _started_by_any(tuple(map(tuple, commands_of(container))))


@lru_cache(maxsize=128)
def _started_by_any(commands: tuple[tuple[str, ...], ...]) -> frozenset[str]:
    return frozenset(engine for command in commands for engine in started_by(command))


def started_by(command: Sequence[str]) -> frozenset[str]:
    """Return the engine that a command starts: what follows its name is its own, a model's path."""
    if not _NAMES_ENGINE.search("\n".join(command)):
        return frozenset()
    words = [word for word in command if "=" not in word or word.startswith("-")]
    if not words or words[0].rpartition("/")[2] in _NO_STARTERS:
        return frozenset()
    for (before, word), following in zip(pairwise(["", *words]), [*words[1:], ""], strict=True):
        if before.startswith("-") and before not in ("-m", "--"):
            continue
        if before == "-m":
            parts = word.split(".")
        elif word.endswith(".py"):
            parts = word.removesuffix(".py").split("/")[-2:]
        else:
            parts = [word.rpartition("/")[2]]
        if any(part.startswith(_NO_SERVERS) for part in parts):
            continue
        if found := {_ENGINES[part] for part in parts if part in _ENGINES}:
            return frozenset() if following.startswith(_NO_SERVERS) else frozenset(found)
    return frozenset()


def shown_by_image(container: Mapping[str, Any]) -> frozenset[str]:
    """Return the engines that the name of a container's image names."""
    repository = str(container.get("image", "")).partition("@")[0]
    path, _, name = repository.rpartition("/")
    name, _, tag = name.partition(":")
    if HELPERS.search(name):
        return frozenset()
    for text in (name, path, tag):
        if found := {engine for word, engine in _IN_IMAGES.items() if word in text}:
            return frozenset(found)
    return frozenset()


def _hinted(container: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the engine that a container is set up for, and the evidence; None: it shows none.

    It counts where command and image name no engine: a controller writes the command later, or the
    image has it (KServe's LLMInferenceService, llm-d's charts).
    """
    repository = str(container.get("image", "")).partition("@")[0]
    variables = [str(entry.get("name", "")) for entry in container.get("env") or ()]
    for prefix, engine in _VARIABLES.items():
        if named := [name for name in variables if name.startswith(prefix)]:
            return engine, f"its variable {named[0]}"
    if _OF_LLM_D.search(repository):
        return "vllm", f"its image {container['image']}"
    name = str(container["name"])
    meant = {engine for word, engine in _IN_IMAGES.items() if word in name}
    return (min(meant), f"its name {name}") if len(meant) == 1 else None
