"""Tell which pods decode, in which container and with which engine: pure functions over pods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from windrow.crd import LABEL_INJECT

Body = dict[str, Any]

RUN_VOLUME = "windrow-run"  # a container that mounts it was prepared by us


@dataclass(frozen=True, slots=True)
class Rule:
    """How the pods of one stack say that they decode.

    Attributes:
        matches: the test of a pod.
        expression: the same in CEL, so that the API server asks us about no other pod.
    """

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    expression: str


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod.get("metadata", {}).get("labels") or {}


def annotations_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of a pod."""
    return pod.get("metadata", {}).get("annotations") or {}


def _label_is(key: str, value: str) -> str:
    return f"object.metadata.?labels[?'{key}'].orValue('') == '{value}'"


def _label(name: str, key: str, value: str) -> Rule:
    return Rule(name, lambda pod: _labels(pod).get(key) == value, _label_is(key, value))


def _ome(pod: Mapping[str, Any]) -> bool:
    labels = _labels(pod)
    return labels.get("component") == "decoder" and "ome.io/inferenceservice" in labels


def _words(container: Mapping[str, Any]) -> list[str]:
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    # A shell line (`sh -c "exec python -m ... --disaggregation-mode decode"`) is one word.
    return " ".join(words).split()


def option_of(container: Mapping[str, Any], *names: str) -> str:
    """Return the value of an option of the container's command line, or nothing."""
    for word, following in pairwise([*_words(container), ""]):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return ""


def _is_decoder(container: Mapping[str, Any]) -> bool:
    return option_of(container, "--disaggregation-mode") == "decode"


def _arguments(pod: Mapping[str, Any]) -> bool:
    return any(_is_decoder(container) for container in containers_of(pod))


# In this order; the first that matches is named in the pod's annotation.
RULES: tuple[Rule, ...] = (
    _label("rbg", "rbg.workloads.x-k8s.io/role-name", "decode"),
    _label("lws-disaggregatedset", "disaggregatedset.x-k8s.io/role", "decode"),
    Rule(
        "ome",
        _ome,
        f"{_label_is('component', 'decoder')} && "
        "object.metadata.?labels[?'ome.io/inferenceservice'].hasValue()",
    ),
    _label("dynamo", "nvidia.com/dynamo-component-type", "decode"),
    _label("dynamo-sub-component", "nvidia.com/dynamo-sub-component-type", "decode"),
    _label("llm-d", "llm-d.ai/role", "decode"),
    Rule(
        "arguments",
        _arguments,
        "object.spec.containers.exists(c, (c.?command.orValue([]) + c.?args.orValue([]))"
        ".exists(word, word.contains('--disaggregation-mode')))",
    ),
)
REQUESTED = "requested"  # the rule of a pod that asks by its label


def _wish_is(value: str) -> str:
    annotation = f"object.metadata.?annotations[?'{LABEL_INJECT}'].orValue('') == '{value}'"
    return f"({_label_is(LABEL_INJECT, value)} || {annotation})"


# What the API server evaluates before it calls the webhook.
NOT_DISABLED = f"!{_wish_is('disabled')}"
IS_REQUESTED = _wish_is("enabled")
DECODES = " || ".join(f"({rule.expression})" for rule in RULES)


def matching_rule(pod: Mapping[str, Any]) -> str:
    """Return the name of the rule by which `pod` decodes; empty: it does not, or opted out."""
    wishes = {_labels(pod).get(LABEL_INJECT), annotations_of(pod).get(LABEL_INJECT)}
    if "disabled" in wishes:
        return ""
    if "enabled" in wishes:
        return REQUESTED
    return next((rule.name for rule in RULES if rule.matches(pod)), "")


# Programs and modules of engines that Windrow cannot drive, and what their images are called.
_OTHER_ENGINES = frozenset(
    {"vllm", "trtllm", "trtllm-serve", "tensorrt_llm", "lmdeploy", "tritonserver"}
)
_OTHER_IMAGES = re.compile(r"vllm|tensorrtllm|trtllm|lmdeploy|tritonserver")


def other_engine(container: Mapping[str, Any]) -> str:
    """Return the name of an engine that Windrow cannot drive; empty: none is recognised."""
    if _is_decoder(container):
        return ""  # SGLang's own option, and the built-in engine's
    words = _words(container)
    for before, word in pairwise(["", *words]):
        parts = word.split(".") if before == "-m" else [word.rpartition("/")[2]]
        found = next((part for part in parts if part in _OTHER_ENGINES), "")
        if found and not before.startswith("--"):
            return found
    name = str(container.get("image", "")).rpartition("/")[2].partition(":")[0]
    found_in_name = _OTHER_IMAGES.search(name)
    return found_in_name.group() if found_in_name and not _mentions_sglang(words) else ""


def _mentions_sglang(words: Iterable[str]) -> bool:
    return any("sglang" in word for word in words)


def decoders_of(pod: Mapping[str, Any]) -> list[Body]:
    """Return the containers that decode: prepared already, by their arguments, else the first."""
    containers = containers_of(pod)
    for decodes in (_mounts_run_volume, _is_decoder):
        if found := [container for container in containers if decodes(container)]:
            return found
    return containers[:1]


def decoder_of(pod: Mapping[str, Any]) -> Body:
    """Return the container that decodes; of several the first, as which the sidecar is made."""
    return decoders_of(pod)[0]


def _mounts_run_volume(container: Mapping[str, Any]) -> bool:
    return any(mount["name"] == RUN_VOLUME for mount in container.get("volumeMounts") or ())


def serving_container(pod: Mapping[str, Any]) -> Body:
    """Return the container that says its part in disaggregated serving, else the first."""
    containers = containers_of(pod)
    said = (c for c in containers if option_of(c, "--disaggregation-mode"))
    return next(said, containers[0])


def served_model(pod: Mapping[str, Any]) -> str:
    """Return the model that the decode container's command line names, or nothing."""
    return option_of(decoder_of(pod), "--model-path", "--model") if containers_of(pod) else ""


def containers_of(pod: Mapping[str, Any]) -> list[Body]:
    """Return the containers of a pod, init containers aside."""
    return list(pod.get("spec", {}).get("containers") or ())
