"""Read what a kubeconfig says that the Kubernetes client for Python passes over.

kubectl and client-go act as another user (`as`, `as-groups`, `as-uid`, `as-user-extra`) and stop
where a credential plugin cannot run; the library would go on as the owner, or as nobody.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import quote

import yaml
from kubernetes.config import exec_provider

from windrow.errors import UserError

_DEFAULT: Final = "~/.kube/config"
# What the library knows of auth-provider, which kubectl itself has no more.
_PROVIDERS: Final = ("gcp", "oidc")


@dataclass(frozen=True, slots=True)
class ConfiguredUser:
    """The user of a context.

    Attributes:
        fields: as the file has them.
        file: that has them.
        name: of the user.
    """

    fields: Mapping[str, Any]
    file: Path
    name: str


class Kubeconfig:
    """The files of a kubeconfig, read once, and the context that is chosen of them.

    Args:
        files: with the separator of paths between them; empty: kubectl's own.
        context: its name; empty: the current one. The first file that says something counts, as for
            kubectl.

    Attributes:
        context: the name; empty: none is current.

    Raises:
        OSError: a file cannot be read.
        yaml.YAMLError: likewise.
        UserError: a file is something else.
    """

    def __init__(self, files: str, context: str = "") -> None:
        # Where a user has no home, as in a container, `~` stays as it is.
        written = (name for name in (files or _DEFAULT).split(os.pathsep) if name)
        named = (Path(os.path.expanduser(name)) for name in written)
        self._read = [(file, _content(file)) for file in named if file.is_file()]
        bodies = [body for _, body in self._read]
        current = (str(found) for body in bodies if (found := body.get("current-context")))
        self.context = context or next(current, "")
        self._fields: Mapping[str, Any] = next(
            (
                entry.get("context") or {}
                for body in bodies
                for entry in body.get("contexts") or ()
                if str(entry.get("name")) == self.context
            ),
            {},
        )

    @property
    def namespace(self) -> str:
        """Namespace that the context names; empty: none."""
        return str(self._fields.get("namespace") or "")

    @property
    def proxy(self) -> str:
        """Proxy of the context's cluster, which counts whatever NO_PROXY says; empty: none."""
        clusters = (dict(entry) for _, body in self._read for entry in body.get("clusters") or ())
        named = (entry for entry in clusters if entry.get("name") == self._fields.get("cluster"))
        cluster: Mapping[str, Any] = next(named, {}).get("cluster") or {}
        return str(cluster.get("proxy-url") or "")

    @property
    def filled(self) -> str:
        """Files that say something, with the separator between them; empty: none does.

        kubectl reads an empty file as one that says nothing; the library ends there.
        """
        return os.pathsep.join(str(file) for file, body in self._read if body)

    def user(self) -> ConfiguredUser | None:
        """Return the user of the context; None: it names none.

        Raises:
            UserError: it names a user whom no file has: kubectl refuses it too.
        """
        user = str(self._fields.get("user") or "")
        if not user:
            return None
        for file, body in self._read:
            for entry in body.get("users") or ():
                if entry.get("name") == user:
                    return ConfiguredUser(entry.get("user") or {}, file, user)
        raise UserError(
            f"user {user!r}, whom context {self.context!r} names, is in none of {self._names}",
            field="users",
            remedy="Log in again, or correct the context (`kubectl config set-context`).",
        )

    def require_context(self) -> None:
        """Raise UserError where contexts exist and none is current, or no client can reach it."""
        if any(body.get("contexts") for _, body in self._read) and not self.context:
            raise UserError(
                f"there is no current context in {self._names}",
                field="--kubeconfig",
                remedy="Name one by --context, or choose it by `kubectl config use-context NAME`.",
            )
        if self.proxy.startswith("socks") and find_spec("socks") is None:
            raise UserError(
                f"context {self.context!r} reaches its cluster by a SOCKS proxy, and this "
                "environment has no client for one",
                field="proxy-url",
                remedy="pip install PySocks, or give a proxy of HTTP.",
            )

    @property
    def _names(self) -> str:
        return ", ".join(str(file) for file, _ in self._read)


def _content(file: Path) -> Mapping[str, Any]:
    body = yaml.safe_load(file.read_text(encoding="utf-8"))
    if body is not None and not isinstance(body, Mapping):
        raise UserError(
            f"{file} is not a kubeconfig",
            field="--kubeconfig",
            remedy="Name a file with clusters, users and contexts.",
        )
    return body or {}


def impersonation_headers(user: ConfiguredUser | None) -> list[tuple[str, str]]:
    """Return the headers by which requests are made as another user; groups have one each.

    Raises:
        UserError: groups or other attributes are given, and no user to act as.
    """
    if user is None:
        return []
    fields = user.fields
    headers: list[tuple[str, str]] = []
    if name := fields.get("as"):
        headers.append(("Impersonate-User", str(name)))
    if uid := fields.get("as-uid"):
        headers.append(("Impersonate-Uid", str(uid)))
    headers += [("Impersonate-Group", str(group)) for group in fields.get("as-groups") or ()]
    for key, values in (fields.get("as-user-extra") or {}).items():
        headers += [(f"Impersonate-Extra-{quote(str(key), safe='')}", str(v)) for v in values or ()]
    if headers and headers[0][0] != "Impersonate-User":
        raise UserError(
            f"user {user.name!r} of {user.file} has attributes to impersonate, and no user",
            field="as",
            remedy="Add as: NAME beside them, or take them out.",
        )
    return headers


def require_usable(user: ConfiguredUser | None) -> None:
    """Raise UserError where the user's credentials come from a program that is not there."""
    if user is None:
        return
    where = f"user {user.name!r} of {user.file}"
    plugin = user.fields.get("exec")
    if isinstance(plugin, Mapping):
        command = str(plugin.get("command") or "")
        # As client-go: a relative path is one of the file's folder, a bare name one of PATH.
        at = str(user.file.parent / command) if os.sep in command else command
        if not shutil.which(at):
            hint = " ".join(str(plugin.get("installHint") or "").split())
            raise UserError(
                f"{where} gets its credentials from {command!r}, which is not installed",
                field="exec.command",
                remedy=hint or "Install it, or put its folder on PATH.",
            )
    provider = (user.fields.get("auth-provider") or {}).get("name")
    if provider and provider not in _PROVIDERS:
        raise UserError(
            f"{where} gets its credentials from auth-provider {provider!r}, which is not supported",
            field="auth-provider",
            remedy="Use the provider's credential plugin (exec), as kubectl does.",
        )


def token_of_file(user: ConfiguredUser | None) -> str:
    """Return the token in the file that a user names, without blanks; empty: it names none.

    A relative path is one of the folder of the user's file. The token there counts before one in
    the kubeconfig, and is replaced while it is valid: read it for each request.

    Raises:
        UserError: there is none.
    """
    named = str(user.fields.get("tokenFile") or "") if user else ""
    if user is None or not named:
        return ""
    at = user.file.parent / named
    try:
        token = at.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_token(user, f"{at}, which cannot be read ({error})") from error
    if not token or any(character.isspace() for character in token):
        raise _no_token(user, f"{at}, which holds no token")
    return token


def _no_token(user: ConfiguredUser, why: str) -> UserError:
    return UserError(
        f"user {user.name!r} of {user.file} takes a token from {why}",
        field="tokenFile",
        remedy="Write the token there, or name another file.",
    )


class _Heard(subprocess.Popen[str]):
    """A credential plugin whose user sees what it says."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as the library calls
        super().__init__(*args, **{**options, "stderr": None})

    def communicate(self, *args: Any, **options: Any) -> tuple[str, str]:  # noqa: ANN401
        said, _ = super().communicate(*args, **options)
        return said, ""


def let_plugins_be_heard() -> None:
    """Let credential plugins speak to the user wherever this process's output goes.

    The library keeps their standard error to itself where standard output is no terminal: a plugin
    that asks its user to log in by a code then waits, and nobody knows. kubectl shows it.
    """
    exec_provider.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=_Heard)


def has_plugin(user: ConfiguredUser | None) -> bool:
    """Return whether the user's credentials come from a program."""
    return user is not None and isinstance(user.fields.get("exec"), Mapping)
