"""Say how decode's container reaches the world outside, for the sidecar to reach it likewise.

Its cache of the Hub, its proxy and its authorities: variables, with the volumes on which the files
lie that they name. Nothing else of decode's environment leaves its container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windrow_operator.command_line import expanded, is_open, variables_of

Body = dict[str, Any]

_HUB = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
    "XDG_CACHE_HOME",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_ENDPOINT",
    "HF_HUB_DISABLE_XET",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "HF_HUB_ETAG_TIMEOUT",
)
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
_PROXY = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_AUTHORITIES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE",
)
_NAMES = (*_HUB, *_TOKENS, *_PROXY, *(name.lower() for name in _PROXY), *_AUTHORITIES)
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
_PLACES = (*_CACHES, "XDG_CACHE_HOME", "HF_TOKEN_PATH", *_AUTHORITIES)
_DEFAULT_CACHE = ".cache/huggingface"
# Chunks of downloads are kept beside the Hub's cache, which the sidecar may only read.
_XET_CACHE = {"name": "HF_XET_CACHE", "value": "/tmp/windrow-xet"}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Parts of decode's surroundings that the sidecar gets.

    Attributes:
        env: variables, as decode's container has them.
        places: absolute paths whose volumes the sidecar reads.
        cache: where decode's cache of the Hub is, by its variables or mounts; empty: not known.
    """

    env: tuple[Body, ...]
    places: tuple[str, ...]
    cache: str = ""


def surroundings_of(decoder: Mapping[str, Any]) -> Surroundings:
    """Return what a sidecar beside the container `decoder` needs to reach what that reaches."""
    known = variables_of(decoder)
    given = {entry["name"]: entry for entry in decoder.get("env") or ()}
    env = [_as_known(given[name], known) for name in _NAMES if name in given]
    env += _from_sources(decoder.get("envFrom") or (), given)
    values = {name: known[name] for name in _PLACES if known.get(name)}
    cache = _cache_of(values)
    if not cache:
        found = _mounted_cache(decoder, known.get("HOME", ""))
        env = [*(entry for entry in env if entry["name"] not in found), *_entries(found)]
        values |= found
        cache = _cache_of(found)
    if cache:
        env.append(dict(_XET_CACHE))
    places = [path for path in values.values() if path.startswith("/") and not is_open(path)]
    # Directories of authorities are lists, as a PATH is.
    places = [part for path in places for part in path.split(":") if part.startswith("/")]
    return Surroundings(tuple(env), tuple(dict.fromkeys(places)), cache)


def is_of_modelscope(decoder: Mapping[str, Any]) -> bool:
    """Return whether SGLang fetches its model from ModelScope instead of the Hub."""
    return variables_of(decoder).get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true", "yes")


def _as_known(entry: Mapping[str, Any], known: Mapping[str, str]) -> Body:
    if entry.get("valueFrom"):
        return dict(entry)
    return {"name": entry["name"], "value": known.get(entry["name"], "")}


def _from_sources(sources: Iterable[Mapping[str, Any]], given: Mapping[str, Any]) -> list[Body]:
    """Return references to our variables in what decode takes as a whole, one for each at most.

    Which keys a source has is not known here, so each is optional. A token is looked for in
    Secrets, everything else in ConfigMaps, where decode has both.
    """
    secrets = [source for source in sources if source.get("secretRef")]
    maps = [source for source in sources if source.get("configMapRef")]
    named = [each for each in secrets if _is_of_hub(str(each["secretRef"].get("name", "")))]
    found = []
    for name in _NAMES:
        choice = (named or secrets or maps) if name in _TOKENS else (maps or secrets)
        fitting = [each for each in choice if name.startswith(str(each.get("prefix") or ""))]
        if name not in given and fitting:
            found.append(_reference(name, fitting[-1]))
    return found


def _is_of_hub(name: str) -> bool:
    return any(word in name for word in ("hf", "hugging", "hub", "token"))


def _reference(name: str, source: Mapping[str, Any]) -> Body:
    key = name.removeprefix(str(source.get("prefix") or ""))
    kind, ref = ("secretKeyRef", "secretRef"), ("configMapKeyRef", "configMapRef")
    (of_key, of_whole) = kind if source.get("secretRef") else ref
    where = {"name": source[of_whole].get("name", ""), "key": key, "optional": True}
    return {"name": name, "valueFrom": {of_key: where}}


def _cache_of(values: Mapping[str, str]) -> str:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "TRANSFORMERS_CACHE"):
        if values.get(name):
            return values[name]
    return f"{values['XDG_CACHE_HOME']}/huggingface" if values.get("XDG_CACHE_HOME") else ""


def _mounted_cache(decoder: Mapping[str, Any], home: str) -> dict[str, str]:
    """Return the variable that says where a volume holds the cache at its place by default."""
    homes = [home] if home.startswith("/") else []
    for mount in decoder.get("volumeMounts") or ():
        path = expanded(mount["mountPath"].rstrip("/"), {})
        if path.endswith(f"/{_DEFAULT_CACHE}/hub"):
            return {"HF_HUB_CACHE": path}
        if path.endswith(f"/{_DEFAULT_CACHE}"):
            return {"HF_HOME": path}
        if path.endswith("/.cache"):
            return {"HF_HOME": f"{path}/huggingface"}
        if path and path in [each.rstrip("/") for each in homes]:
            return {"HF_HOME": f"{path}/{_DEFAULT_CACHE}"}
    return {}


def _entries(values: Mapping[str, str]) -> list[Body]:
    return [{"name": name, "value": value} for name, value in values.items()]
