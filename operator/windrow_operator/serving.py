"""Find the serving instances of a model among pods: where each is, and which part it computes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from windrow.conditions import get_condition
from windrow_operator.command_line import commands_of, is_open, option_of
from windrow_operator.decode_pods import matching_rule, model_of, serving_container, serving_option
from windrow_operator.engine_evidence import MODE, other_engine
from windrow_operator.model import Job, key_of
from windrow_operator.planning import same_model

BOOTSTRAP_PORT: Final = "--disaggregation-bootstrap-port"
_DEFAULT_BOOTSTRAP_PORT: Final = "8998"  # SGLang's, as the next
_DEFAULT_PORT: Final = "30000"
# In this order adapters are loaded: nobody may ask decode for what prefill does not know.
_ROLES: Final = ("prefill", "decode")
_BOTH_PARTS: Final = ("", "null")  # of `--disaggregation-mode`: not disaggregated


@dataclass(frozen=True, slots=True)
class Instance:
    """A serving process."""

    key: str  # of its pod
    uid: str
    role: str
    url: str
    token: str = field(default="", repr=False)  # that its server asks for
    node: str = ""
    # Where a prefill instance hands over KV, as address and port; "": it does not.
    bootstrap: str = ""
    is_whole: bool = False  # it computes prompts and tokens


def instances(pods: Iterable[Mapping[str, Any]], job: Job) -> list[Instance]:
    """Return the ready decode and prefill instances of the job's model, prefill first.

    One that says no part and is harvested computes its prompts itself: it counts as decode.
    """
    found = []
    for pod in pods:
        metadata, state = pod["metadata"], pod.get("status") or {}
        container = serving_container(pod)
        role = option_of(container, MODE)
        is_whole = role in _BOTH_PARTS and bool(matching_rule(pod))
        if is_whole:
            role = "decode"
        if role not in _ROLES or not same_model(job, model_of(container)) or not _is_ready(pod):
            continue
        if other_engine(container) or _is_of_dynamo(container):  # they have other calls
            continue
        url = _url_of(state["podIP"], _port_of(container))
        key = key_of(metadata["namespace"], metadata["name"])
        if url:
            found.append(
                Instance(
                    key,
                    metadata["uid"],
                    role,
                    url,
                    node=pod["spec"].get("nodeName", ""),
                    bootstrap=_bootstrap_of(state["podIP"], container, role),
                    is_whole=is_whole,
                )
            )
    return sorted(found, key=lambda each: (_ROLES.index(each.role), each.key))


def workers_of_dynamo(pods: Iterable[Mapping[str, Any]], job: Job) -> list[str]:
    """Return the ready pods of the job's model that run SGLang in a worker of Dynamo, in order.

    Such a worker has no server of SGLang's: it loads adapters by calls of Dynamo alone.
    """
    return sorted(
        key_of(pod["metadata"]["namespace"], pod["metadata"]["name"])
        for pod in pods
        if _is_of_dynamo(container := serving_container(pod))
        and same_model(job, model_of(container))
        and _is_ready(pod)
    )


def _is_of_dynamo(container: Mapping[str, Any]) -> bool:
    return any(
        (option, module) == ("-m", "dynamo.sglang")
        for command in commands_of(container)
        for option, module in pairwise(command)
    )


def _bootstrap_of(address: str, container: Mapping[str, Any], role: str) -> str:
    port = serving_option(container, BOOTSTRAP_PORT) or _DEFAULT_BOOTSTRAP_PORT
    known = role == "prefill" and not is_open(port) and port.isdecimal()
    return f"{address} {port}" if known else ""


def _port_of(container: Mapping[str, Any]) -> str:
    """Return the port of a server: by its command line, else the one that it declares."""
    declared = [str(port["containerPort"]) for port in container.get("ports") or ()]
    written = serving_option(container, "--port")
    if is_open(written):
        # A variable whose value is not in the pod's spec: what is declared says it.
        return (declared or [_DEFAULT_PORT])[0]
    return written or _DEFAULT_PORT


def _url_of(address: str, port: str) -> str:
    """Return where a pod serves; empty: its command line names no port, whatever else it holds."""
    try:
        host = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        return ""
    return f"http://[{host}]:{port}" if host.version == 6 else f"http://{host}:{port}"


def _is_ready(pod: Mapping[str, Any]) -> bool:
    state = pod.get("status") or {}
    ready = get_condition(state.get("conditions"), "Ready")
    gone = pod["metadata"].get("deletionTimestamp") is not None
    return not gone and bool(state.get("podIP")) and ready is not None and ready["status"] == "True"
