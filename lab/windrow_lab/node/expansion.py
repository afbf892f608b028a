"""Expand a container's command and environment for this machine; pure functions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windrow.errors import UserError

Json = dict[str, Any]

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
POD_ADDRESS = "127.0.0.1"


class ConfigError(UserError):
    """Error of a container or volume that asks for something missing or unknown to the node."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value; unknown names stay, and `$$` gives one `$`."""

    def replaced(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return variables.get(match.group(1), match.group())

    return _REFERENCE.sub(replaced, text)


def relocate(text: str, mounts: Mapping[str, Path]) -> str:
    """Replace each mount path in `text` by the real directory behind it.

    A mount path counts where a path begins (start of the text, after a separator or `://`) and
    where a path component ends, so `/data` is not found in `/data2` or `/var/data`.
    """
    if not mounts:
        return text
    longest_first = sorted((mount.rstrip("/") for mount in mounts), key=len, reverse=True)
    real = {mount.rstrip("/"): path for mount, path in mounts.items()}
    pattern = "|".join(re.escape(mount) for mount in longest_first if mount)
    if not pattern:
        return text
    found = re.compile(rf"(?:(?<=://)|(?<![\w./-]))(?:{pattern})(?![\w.-])")
    return found.sub(lambda match: str(real[match.group()]), text)


def field_value(pod: Json, path: str) -> str:
    """Return what the downward API says for a field path; raises ConfigError for an unknown one."""
    metadata, spec = pod["metadata"], pod["spec"]
    if keyed := _KEYED_FIELD.fullmatch(path):
        values: Mapping[str, str] = metadata.get(keyed.group(1)) or {}
        return values.get(keyed.group(2), "")
    plain: dict[str, str] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": POD_ADDRESS,
        "status.podIPs": POD_ADDRESS,
        "status.hostIP": POD_ADDRESS,
        "status.hostIPs": POD_ADDRESS,
        "metadata.labels": _as_lines(metadata.get("labels")),
        "metadata.annotations": _as_lines(metadata.get("annotations")),
    }
    if path not in plain:
        raise ConfigError(f"unknown field path {path!r}", field="fieldRef")
    return plain[path]


def _as_lines(values: Mapping[str, str] | None) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted((values or {}).items()))


# (kind, name) of a config map or secret -> its decoded data, or None where there is none.
Lookup = Callable[[str, str], Mapping[str, str] | None]


def container_environment(
    pod: Json, container: Json, lookup: Lookup, mounts: Mapping[str, Path]
) -> dict[str, str]:
    """Return the variables that the container's spec defines, in order, expanded and relocated.

    Raises ConfigError when a config map, a secret or a key is missing and not optional.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix", "")
        for kind in ("configMap", "secret"):
            if reference := source.get(f"{kind}Ref"):
                data = _data_of(kind, reference, lookup)
                found |= {prefix + key: value for key, value in data.items()}
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            value = _value_from(pod, container, entry, lookup)
        else:
            value = expand(entry.get("value", ""), found)
        if value is not None:
            found[entry["name"]] = value
    return {name: relocate(value, mounts) for name, value in found.items()}


def _value_from(pod: Json, container: Json, entry: Json, lookup: Lookup) -> str | None:
    source = entry["valueFrom"]
    if reference := source.get("fieldRef"):
        return field_value(pod, reference["fieldPath"])
    if reference := source.get("resourceFieldRef"):
        return _resource_value(container, reference)
    for kind in ("configMap", "secret"):
        if reference := source.get(f"{kind}KeyRef"):
            data = _data_of(kind, reference, lookup)
            if reference["key"] not in data and not reference.get("optional"):
                raise ConfigError(
                    f"{kind} {reference['name']} has no key {reference['key']!r}",
                    field=f"env {entry['name']}",
                )
            return data.get(reference["key"])
    raise ConfigError(f"unknown source {sorted(source)}", field=f"env {entry['name']}")


def _data_of(kind: str, reference: Json, lookup: Lookup) -> Mapping[str, str]:
    data = lookup(kind, reference["name"])
    if data is None and not reference.get("optional"):
        raise ConfigError(f"{kind} {reference['name']!r} not found")
    return data or {}


_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def quantity(text: str) -> float:
    """Return a Kubernetes quantity (`1500m`, `2Gi`) as a number of base units."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", text)
    if match is None or match.group(2) not in _UNITS:
        raise ConfigError(f"{text!r} is not a quantity")
    return float(match.group(1)) * _UNITS[match.group(2)]


def _resource_value(container: Json, reference: Json) -> str:
    kind, _, name = reference["resource"].partition(".")
    amount = ((container.get("resources") or {}).get(kind) or {}).get(name, "0")
    divisor = quantity(reference.get("divisor") or "1") or 1.0
    # Rounded up, as the downward API does: half a core is one.
    return str(-int(-quantity(str(amount)) // divisor))


def command_line(
    container: Json, variables: Mapping[str, str], mounts: Mapping[str, Path]
) -> list[str]:
    """Return the argument vector; `python` and `python3` become the node's own interpreter.

    Raises ConfigError when there is no command, since what the image would run is unknown here.
    """
    command: Sequence[str] = container.get("command") or []
    if not command:
        raise ConfigError(
            "has no command, and a process node knows no image's entry point",
            field=f"container {container['name']}",
            remedy="Write the command.",
        )
    words = [*command, *(container.get("args") or [])]
    argv = [relocate(expand(word, variables), mounts) for word in words]
    if argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    return argv


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as `0,2-3`; raises ConfigError for anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{text!r} is not a list of CPUs such as '0,2-3'", field="cpuset")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))
