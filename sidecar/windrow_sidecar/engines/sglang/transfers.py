"""Check that a decode instance's transfer library can write KV into an arena on a GPU.

A prefill instance writes KV into memory that the decode instance has registered at its start. An
arena is one range of addresses over many handles of CUDA's virtual memory, which not every release
of a library registers whole: the server then starts healthy and fails at its first transfer, or
writes into the first handle only. So before the KV pool takes an arena, the release and its
settings are checked, and a process beside this one registers a range of two handles.

Sources: Mooncake issue 2511 and pull request 3538; UCX pull requests 11461, 11183 and 11283.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from packaging.version import Version

from windrow.errors import UserError
from windrow.rundir import ENV_RUN_DIR

_log = logging.getLogger(__name__)

_FLAG = "--disaggregation-transfer-backend"
# Builds of Mooncake for CUDA 12, CUDA 13 and no CUDA, in the order in which one is looked for.
_MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
_MOONCAKE_LAST_WITHOUT = Version("0.3.12.post1")
ENV_NIXL_BACKEND = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
# UCX widens a range to the handle in which it begins, and so cuts one of several handles short.
ENV_UCX_WHOLE = "UCX_CUDA_COPY_REG_WHOLE_ALLOC"
# UCX's cuda_ipc opens the first handle of a range and takes it for all of them.
ENV_UCX_TRANSPORTS = "UCX_TLS"
_IPC, _WITH_IPC = "cuda_ipc", ("all", "cuda", "cuda_ipc")
# The probe imports SGLang and torch beside a server that loads a model.
_ANSWERS_WITHIN_S = 180.0


def check_library(
    backend: str,
    environment: Mapping[str, str],
    version: Callable[[str], str] = installed_version,
) -> dict[str, str]:
    """Check the release and the settings of a transfer library on a GPU.

    Args:
        backend: of `--disaggregation-transfer-backend`.
        environment: of this process.
        version: returns the version of an installed distribution (default: the one that is
            installed here).

    Returns:
        the variables that this process needs before the library is loaded.

    Raises:
        UserError: it is known not to write into memory of several handles, or is not known.
    """
    if backend == "mooncake":
        _check_mooncake(version)
        return {}
    if backend == "nixl":
        return _check_nixl(environment)
    raise UserError(
        f"the plugin does not know how {backend} registers memory of several CUDA handles",
        field=_FLAG,
        remedy="Use nixl or mooncake.",
    )


def _check_mooncake(version: Callable[[str], str]) -> None:
    for name in _MOONCAKE:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if Version(found) <= _MOONCAKE_LAST_WITHOUT:
            raise UserError(
                f"{name} {found} cannot register memory of several CUDA handles "
                "(Mooncake issue 2511)",
                field=_FLAG,
                remedy=f"Install a later release than {_MOONCAKE_LAST_WITHOUT}, or use nixl.",
            )
        return


def _check_nixl(environment: Mapping[str, str]) -> dict[str, str]:
    if (backend := environment.get(ENV_NIXL_BACKEND) or "UCX") != "UCX":
        raise UserError(
            f"the plugin does not know how NIXL's {backend} registers memory of several CUDA "
            "handles",
            field=ENV_NIXL_BACKEND,
            remedy="Use UCX.",
        )
    wanted = {ENV_UCX_WHOLE: "off", ENV_UCX_TRANSPORTS: f"^{_IPC}"}
    if (whole := environment.get(ENV_UCX_WHOLE, "off")).lower() not in ("off", "n", "no", "0"):
        raise UserError(
            f"with {whole} UCX may register the first handle of several only (UCX pull request "
            "11461)",
            field=ENV_UCX_WHOLE,
            remedy="Unset it, or write off.",
        )
    transports = environment.get(ENV_UCX_TRANSPORTS, "").strip()
    if transports and _has_ipc(transports):
        raise UserError(
            f"with {transports} UCX may use {_IPC}, which opens the first handle of several only "
            "(UCX pull request 11283)",
            field=ENV_UCX_TRANSPORTS,
            remedy=f"Unset it, or exclude {_IPC}: ^{_IPC}.",
        )
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def _has_ipc(transports: str) -> bool:
    """Return whether a value of UCX_TLS allows cuda_ipc: a list, or a list of those left out."""
    names = {name.strip() for name in transports.removeprefix("^").split(",")}
    if transports.startswith("^"):
        return names.isdisjoint(("cuda", _IPC))
    return not names.isdisjoint(_WITH_IPC)


class RangeProbe:
    """A process that registers a range of two handles as the server will register its KV.

    It runs while the server loads its model.

    Args:
        command: of the process; its last line of output is the answer, `{"refused": "why"}` with
            an empty reason where the range was registered.
        environment: of it.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._until_s = time.monotonic() + _ANSWERS_WITHIN_S
        self._process = subprocess.Popen(
            command,
            env={name: value for name, value in environment.items() if name != ENV_RUN_DIR},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def check(self) -> None:
        """Wait for the answer. Raises UserError where the range was not registered."""
        try:
            said, _ = self._process.communicate(timeout=max(0.0, self._until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise self._refused(f"no answer within {_ANSWERS_WITHIN_S:g} s") from None
        try:
            reason = str(json.loads(said.strip().splitlines()[-1])["refused"])
        except (IndexError, KeyError, TypeError, ValueError):
            reason = f"the probe ended with exit code {self._process.returncode}"
        if reason:
            raise self._refused(reason)
        _log.info("windrow: the transfer library registers memory of several handles")

    @staticmethod
    def _refused(why: str) -> UserError:
        return UserError(
            f"the transfer library did not register memory of several CUDA handles: {why}",
            field=_FLAG,
            remedy="Use a release that docs/sglang.md names; the log has the library's own words.",
        )


def probe(args: Any, environment: Mapping[str, str]) -> RangeProbe:  # noqa: ANN401
    """Start the probe for a server's command line (`args`: SGLang's ServerArgs)."""
    words = [
        *("--backend", str(args.disaggregation_transfer_backend)),
        *("--device", f"{args.device}:{args.base_gpu_id}" if args.device == "cuda" else "cpu"),
    ]
    if args.disaggregation_ib_device:
        words += ["--ib-device", str(args.disaggregation_ib_device)]
    module = "windrow_sidecar.engines.sglang.transfer_probe"
    return RangeProbe([sys.executable, "-m", module, *words], environment)


def receives_by_transfer(args: Any) -> bool:  # noqa: ANN401
    """Return whether a server's KV is written by a transfer library into memory of a GPU."""
    return bool(
        args.disaggregation_mode == "decode"
        and args.device == "cuda"
        and args.disaggregation_transfer_backend != "fake"
    )
