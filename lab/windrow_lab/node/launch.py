"""Start of a pod's container as a process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from windrow.rundir import ENV_LOG_DIR
from windrow_lab.machine.child_processes import ENV_MARK
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand
from windrow_lab.node.api import Api, Json, NodeApiError
from windrow_lab.node.configs import fetch, references_of
from windrow_lab.node.expansion import (
    ConfigError,
    command_line,
    container_environment,
    parse_cpus,
    relocate,
)
from windrow_lab.node.volumes import Volumes

ANNOTATION_CPUSET = "windrow.dev/cpuset"
ANNOTATION_NICE = "windrow.dev/nice."


@dataclass(frozen=True)
class LaunchSettings:
    """Settings that the node adds to every container.

    Attributes:
        environment: variables that the container's own are added to.
        log_root: WINDROW_LOG_DIR is the directory of the pod's name below it; None: not set.
    """

    environment: Mapping[str, str]
    log_root: Path | None


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what containers take over from the node: what an image would have brought along.

    Settings of Windrow itself stay out, since a pod's come from its own spec, and so does the way
    to the API server.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("WINDROW_") and name not in ("KUBECONFIG", ENV_MARK)
    }


def pod_logs(logs_dir: Path, pod: Json) -> Path:
    """Return the directory with one log file per container of a pod."""
    return logs_dir / f"{pod['metadata']['namespace']}_{pod['metadata']['name']}"


class Launcher:
    """Starts the containers of one pod."""

    def __init__(
        self, api: Api, keeper: Keeper, settings: LaunchSettings, volumes: Volumes, logs: Path
    ) -> None:
        self._api, self._keeper, self._settings = api, keeper, settings
        self._volumes, self._logs = volumes, logs

    async def start(self, pod: Json, spec: Json) -> Child:
        """Start a container; raises ConfigError or OSError when it cannot be started (yet)."""
        command = await self._command(pod, spec)
        return await asyncio.wrap_future(self._keeper.launch(command))

    async def execute(
        self, pod: Json, spec: Json, words: Sequence[str], timeout_seconds: float
    ) -> int | None:
        """Run a command as in the container; returns its exit status, None: it took too long."""
        try:
            command = await self._command(pod, {**spec, "command": list(words), "args": []})
            probe_log = self._logs / f"{spec['name']}.probes.log"
            child = await asyncio.wrap_future(self._keeper.launch(replace(command, log=probe_log)))
        except OSError:
            return 127
        exited = asyncio.wrap_future(child.exited)
        try:
            await asyncio.wait({exited}, timeout=timeout_seconds)
            return exited.result() if exited.done() else None
        finally:
            child.signal(signal.SIGKILL)

    async def _command(self, pod: Json, spec: Json) -> ProcessCommand:
        namespace = pod["metadata"]["namespace"]
        try:
            lookup = await fetch(self._api, namespace, references_of(spec))
        except (NodeApiError, httpx.TransportError) as error:
            raise OSError(f"config maps or secrets could not be read: {error}") from error
        mounts = self._volumes.mounts_of(spec)
        variables = container_environment(pod, spec, lookup, mounts)
        annotations = pod["metadata"].get("annotations") or {}
        working_directory = relocate(spec.get("workingDir", ""), mounts)
        return ProcessCommand(
            command_line(spec, variables, mounts),
            log=self._logs / f"{spec['name']}.log",
            env=self._node_environment(pod) | variables,
            cwd=Path(working_directory) if working_directory else None,
            nice=_niceness(annotations.get(ANNOTATION_NICE + spec["name"], "0")),
            cpus=_usable_cpus(annotations.get(ANNOTATION_CPUSET)),
        )

    def _node_environment(self, pod: Json) -> dict[str, str]:
        name = pod["metadata"]["name"]
        environment = {**self._settings.environment, "HOSTNAME": name}
        if self._settings.log_root is not None:
            folder = self._settings.log_root / name
            folder.mkdir(parents=True, exist_ok=True)
            environment[ENV_LOG_DIR] = str(folder)
        return environment


def _niceness(text: str) -> int:
    try:
        nice = int(text)
    except ValueError:
        nice = -1
    # Below zero would need rights that a node need not have.
    if not 0 <= nice <= 19:
        raise ConfigError(f"{text!r} is not a niceness from 0 to 19", field=ANNOTATION_NICE)
    return nice


def _usable_cpus(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    cpus = parse_cpus(text)
    available = os.sched_getaffinity(0)
    if not available.issuperset(cpus):
        raise ConfigError(
            f"CPUs {text!r} are not all among those of the node, {sorted(available)}",
            field=ANNOTATION_CPUSET,
        )
    return cpus
