"""Tell which pods decode, in which container and with which engine: pure functions over pods."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windrow import builtin_engine, sglang
from windrow.crd import LABEL_INJECT
from windrow_operator.command_line import (
    commands_of,
    is_open,
    option_of,
    options_in,
    options_of,
)
from windrow_operator.engine_evidence import (
    HELPERS,
    MODE,
    NO_SIGN,
    SGLANG,
    engine_of,
    shown_by_image,
    started,
    started_by,
)
from windrow_operator.gpu_access import other_gpu

Body = dict[str, Any]

RUN_VOLUME = "windrow-run"  # a container that mounts it was prepared by us
MODEL_OPTIONS = ("--model-path", "--model")
CHAT_TEMPLATE, CONFIG = "--chat-template", "--config"
TEMPLATE_SETTINGS = "--default-chat-template-kwargs"
TEMPLATE_NAME = "--hf-chat-template-name"
TOOL_PARSER = "--tool-call-parser"
ANNOTATION_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule by which the pods of one stack are recognised as decode.

    Attributes:
        matches: the test of a pod.
        expression: the same in CEL, so that the API server asks us about no other pod.
    """

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    expression: str


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return (pod.get("metadata") or {}).get("labels") or {}


def annotations_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of a pod."""
    return (pod.get("metadata") or {}).get("annotations") or {}


def _label_is(key: str, value: str) -> str:
    return f"object.metadata.?labels[?'{key}'].orValue('') == '{value}'"


def _label(name: str, key: str, value: str) -> Rule:
    return Rule(name, lambda pod: _labels(pod).get(key) == value, _label_is(key, value))


def _ome(pod: Mapping[str, Any]) -> bool:
    labels = _labels(pod)
    return labels.get("component") == "decoder" and "ome.io/inferenceservice" in labels


def _is_decoder(container: Mapping[str, Any]) -> bool:
    # A script with branches for both parts says neither.
    return {value for value in options_of(container, MODE) if not is_open(value)} == {"decode"}


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
        ".exists(word, word.contains('--disaggregation-mode')) || c.?env.orValue([])"
        ".exists(e, e.?value.orValue('').contains('--disaggregation-mode')))",
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


# --- which container decodes, with which engine ---------------------------------------------------

# Images without an engine, which demos and placeholders give a GPU.
_NO_ENGINES = frozenset({"nginx", "pause", "busybox"})
_GPUS = re.compile(r"^(nvidia\.com/(gpu|mig-)|amd\.com/gpu|gpu\.intel\.com/|huawei\.com/)")


@dataclass(frozen=True, slots=True)
class Decoders:
    """The containers that decode, and by which evidence.

    Attributes:
        containers: one or more, never none where the pod has any.
        why: the evidence, in words.
        doubt: why it is not known which container decodes; empty: it is.
    """

    containers: tuple[Body, ...]
    why: str
    doubt: str = ""


def _serving(container: Mapping[str, Any]) -> list[list[str]]:
    """Return the commands that start SGLang; all of them, where none shows that it does.

    A script may do more: fetch the model, or send a server its first requests.
    """
    commands = commands_of(container)
    return [command for command in commands if SGLANG in started_by(command)] or commands


def serving_option(container: Mapping[str, Any], *names: str) -> str:
    """Return the value of a server's option as it is written, open or not; empty: it has none."""
    return (options_in(_serving(container), *names) or [""])[-1]


def find_decoders(pod: Mapping[str, Any]) -> Decoders:
    """Return which containers of a pod decode.

    What counts first: prepared already; the option of disaggregation; a command that starts
    SGLang; then the pod's default container, an image, a GPU; then the only one that no proxy or
    agent is.
    """
    containers = containers_of(pod)
    if doubt := _decodes_in_init(pod):
        return Decoders(tuple(containers[:1]), "the first one", doubt)
    for why, decodes in (
        ("prepared already", _mounts_run_volume),
        (f"{MODE} decode", _is_decoder),
        ("its command starts sglang", _starts_decode),
    ):
        if found := [container for container in containers if decodes(container)]:
            return Decoders(tuple(found), why)
    engines = [container for container in containers if not _is_helper(container)]
    if len(engines) == 1:
        return Decoders(tuple(engines), "the only container that can")
    if not engines:
        named = [c for c in containers if c["name"] == _default_container(pod)]
        names = ", ".join(str(container["name"]) for container in containers)
        doubt = (
            f"by name and image {names} decode nothing: if one does, name it by the pod's "
            f"annotation {ANNOTATION_DEFAULT_CONTAINER}"
        )
        why = "the pod's default container"
        return Decoders(tuple(named or containers[:1]), why, "" if named else doubt)
    return _by_signs(pod, engines)


def _decodes_in_init(pod: Mapping[str, Any]) -> str:
    """Return how a pod has its engine in an init container that stays, which is not prepared."""
    if any(_starts_decode(container) or _is_decoder(container) for container in containers_of(pod)):
        return ""
    for container in (pod.get("spec") or {}).get("initContainers") or ():
        if container.get("restartPolicy") == "Always" and _starts_decode(container):
            return (
                f"its engine runs in the init container {container['name']}, which cannot be "
                "prepared: run it in one of the pod's containers"
            )
    return ""


def _by_signs(pod: Mapping[str, Any], engines: list[Body]) -> Decoders:
    named = _default_container(pod)
    by_name = [container for container in engines if container["name"] == named]
    signs = {
        "its command": [c for c in engines if started(c)],
        "its image": [c for c in engines if shown_by_image(c)],
        "its GPU": [c for c in engines if _has_gpu(c)],
    }
    if by_name:
        doubts = [
            f"the pod's annotation names container {named} as its default, and {sign} shows "
            f"container {found[0]['name']}"
            for sign, found in signs.items()
            if found and by_name[0] not in found
        ]
        return Decoders(tuple(by_name), "the pod's default container", (doubts or [""])[0])
    narrowed, used = engines, []
    for sign, found in signs.items():
        if kept := [container for container in narrowed if container in found]:
            if len(kept) < len(narrowed):
                used.append(sign)
            narrowed = kept
    if len(narrowed) == 1:
        return Decoders(tuple(narrowed), " and ".join(used))
    names = ", ".join(str(container["name"]) for container in narrowed)
    doubt = (
        f"nothing shows which of containers {names} decodes: name it by the pod's annotation "
        f"{ANNOTATION_DEFAULT_CONTAINER}"
    )
    return Decoders(tuple(narrowed[:1]), "the first one", doubt)


def _starts_decode(container: Mapping[str, Any]) -> bool:
    return SGLANG in started(container) and set(options_of(container, MODE)) != {"prefill"}


def _is_helper(container: Mapping[str, Any]) -> bool:
    if started(container):
        return False
    image = str(container.get("image", "")).partition("@")[0].rpartition("/")[2].partition(":")[0]
    if _has_gpu(container):
        return image in _NO_ENGINES
    programs = [command[0].rpartition("/")[2] for command in commands_of(container)]
    return any(HELPERS.search(text) for text in (str(container["name"]), image, *programs))


def _has_gpu(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources") or {}
    limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return bool(resources.get("claims")) or any(_GPUS.search(str(name)) for name in limits)


def _default_container(pod: Mapping[str, Any]) -> str:
    said = annotations_of(pod)
    legacy = said.get("kubectl.kubernetes.io/default-logs-container", "")
    return said.get(ANNOTATION_DEFAULT_CONTAINER, legacy)


def harvest_refusal(container: Mapping[str, Any]) -> str:
    """Return why SGLang in `container` would not be harvested, as its plugin would say it.

    Of the built-in engine, which checks its command line alone: why it would not start.

    Empty: it would, as far as a manifest tells, or it is not SGLang.
    """
    engine = engine_of(container)
    words = [word for command in _serving(container) for word in command]
    if runs_builtin(container):
        return builtin_engine.refusal(words)
    if engine.name != SGLANG or engine.why == NO_SIGN:
        return ""
    if other := other_gpu(container):
        return f"{other} is not a GPU that workers can use. Decode on NVIDIA's, or on cores."
    set_to = {str(e.get("name")): e.get("value") for e in container.get("env") or ()}
    insisted = set_to.get(sglang.ENV_UNTESTED) == "1"
    return sglang.refusal(words, str(container.get("image", "")), insisted=insisted)


def runs_builtin(container: Mapping[str, Any]) -> bool:
    """Return whether a container's command starts Windrow's own engine."""
    return any(builtin_engine.MODULE in command for command in _serving(container))


def decoders_of(pod: Mapping[str, Any]) -> list[Body]:
    """Return the containers that decode; where that is in doubt, the first that may."""
    return list(find_decoders(pod).containers)


def decoder_of(pod: Mapping[str, Any]) -> Body:
    """Return the container that decodes; of several the first, as which the sidecar is made."""
    return decoders_of(pod)[0]


def part_in_doubt(pod: Mapping[str, Any]) -> str:
    """Return how a pod that decodes by its labels says by its arguments that it prefills."""
    containers = containers_of(pod)
    parts = {value for each in containers for value in options_of(each, MODE)}
    if parts != {"prefill"}:
        return ""
    said = next(each["name"] for each in containers if options_of(each, MODE))
    return f"the pod's labels say decode, and container {said} says {MODE} prefill"


def _mounts_run_volume(container: Mapping[str, Any]) -> bool:
    return any(mount["name"] == RUN_VOLUME for mount in container.get("volumeMounts") or ())


def serving_container(pod: Mapping[str, Any]) -> Body:
    """Return the container that says its part in disaggregated serving, else that which decodes."""
    said = (c for c in containers_of(pod) if option_of(c, MODE))
    return next(said, None) or decoder_of(pod)


def served_model(pod: Mapping[str, Any]) -> str:
    """Return the model that the decode container's command line names, or nothing."""
    return model_of(decoder_of(pod)) if containers_of(pod) else ""


def model_of(container: Mapping[str, Any]) -> str:
    """Return the model that a container's command line names, or nothing.

    A path within the folder in which the server starts is one from the root, where that is known.
    """
    written = serving_option(container, *MODEL_OPTIONS) or _served_by_place(container)
    if is_open(written):
        return ""
    if not written.startswith(("./", "../")):
        return written
    path = posixpath.normpath(posixpath.join(_started_in(container), written))
    return path if path.startswith("/") else written


def _served_by_place(container: Mapping[str, Any]) -> str:
    """Return the model of `sglang serve MODEL`, as it is written; empty: there is none."""
    for command in _serving(container):
        for program, part, model in zip(command, command[1:], command[2:], strict=False):
            if program.rpartition("/")[2] == "sglang" and part == "serve":
                return "" if model.startswith("-") else model
    return ""


def _started_in(container: Mapping[str, Any]) -> str:
    """Return the folder in which a container's server starts; empty: the image says it."""
    folder = str(container.get("workingDir") or "")
    for command in commands_of(container):
        if SGLANG in started_by(command):
            break
        if command[0] == "cd" and len(command) > 1:
            folder = "" if is_open(command[1]) else posixpath.join(folder, command[1])
    return folder


def containers_of(pod: Mapping[str, Any]) -> list[Body]:
    """Return the containers of a pod, init containers aside."""
    return list((pod.get("spec") or {}).get("containers") or ())
