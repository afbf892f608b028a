"""`windrow doctor`: what this machine and this cluster have of what Windrow needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from windrow.errors import Transient, UserError
from windrow.wheel import install_extra
from windrow_cli.output import Json, Kubeconfig, client, is_lab, print_json, print_line, table

# A minute of checks, and what a first compilation may take on a busy machine.
GPU_WITHIN_S = 240


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `remedy` is empty where it is as it should be."""

    what: str
    found: str
    ok: bool
    remedy: str = ""


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Try everything that a GPU must have, in a minute.")
    ] = False,
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check Python, compiler, native module, torch, cores, memory, control plane, GPU, cluster.

    Ends with 1 when something is missing that the demo needs. GPU and cluster need not be there.
    With --gpu: driver, torch, MPS, memory between processes, shares of SMs, NVML, Triton and pinned
    memory instead, each tried on the first GPU; ends with 1 where one fails.

    Example: windrow doctor --gpu
    """
    if gpu:
        findings = _gpu_checks()
        _show(findings, as_json=as_json)
        if any(not finding.ok for finding in findings):
            raise typer.Exit(1)
        return
    findings = [check() for check in (_python, _compiler, _native, _torch, _cores, _memory, _tools)]
    failed = any(not finding.ok for finding in findings)
    findings += [*_gpu(), _cluster(kubeconfig)]
    _show(findings, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _show(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print_json(findings)
    else:
        rows = [(f.what, "ok" if f.ok else "missing", f.found, f.remedy) for f in findings]
        print_line(table(("WHAT", "STATE", "FOUND", "REMEDY"), rows))


def _gpu_checks() -> list[Finding]:
    """Return what `windrow_sidecar.compute.gpu_check` finds; a GPU fault ends it, not us."""
    command = [sys.executable, "-m", "windrow_sidecar.compute.gpu_check"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=GPU_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return [Finding("gpu", f"no answer in {GPU_WITHIN_S} s", ok=False, remedy="See nvidia-smi")]
    if run.returncode:
        said = (run.stderr.strip().splitlines() or ["the checks ended without output"])[-1]
        return [Finding("gpu", said, ok=False, remedy="make setup; see nvidia-smi")]
    return [Finding(**check) for check in json.loads(run.stdout.splitlines()[-1])["checks"]]


def _python() -> Finding:
    return Finding("python", sys.version.split()[0], sys.version_info >= (3, 11))


def _compiler() -> Finding:
    found = next((p for name in ("c++", "g++", "clang++") if (p := shutil.which(name))), "")
    return Finding("compiler", found, bool(found), "" if found else "apt-get install g++")


def _native() -> Finding:
    # In a process of its own: the client knows the sidecar's package by name only.
    run = _python_says("import windrow_sidecar._core as c; print('layout', c.LAYOUT_VERSION)")
    return Finding("native module", *run, "" if run[1] else "make setup")


def _gpu() -> list[Finding]:
    """The GPU, and how it would be shared between decode and a worker."""
    run = subprocess.run(
        [sys.executable, "-m", "windrow_sidecar.compute.survey"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if run.returncode:
        return [Finding("gpu", (run.stderr.strip().splitlines() or [""])[-1], False, "make setup")]
    found = json.loads(run.stdout)
    if not found["gpu"]:
        return [Finding("gpu", found["why"], ok=False, remedy="the host driver is used")]
    remedy = "" if found["mode"] == "spatial" else "docs/gpu.md: what sharing in space needs"
    return [
        Finding("gpu", f"{found['gpu']} {found['units']} SMs", ok=True),
        Finding(
            "gpu sharing",
            f"{found['mode']}: {found['reason']}",
            ok=found["mode"] == "spatial",
            remedy=remedy,
        ),
    ]


def _torch() -> Finding:
    try:
        return Finding("torch", importlib.metadata.version("torch"), ok=True)
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "", ok=False, remedy=install_extra("sidecar"))


def _cores() -> Finding:
    n = len(os.sched_getaffinity(0))
    return Finding("cores", str(n), n >= 2, "" if n >= 2 else "two cores make one device")


def _memory() -> Finding:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("memory", f"{gib:.1f} GiB", gib >= 4, "" if gib >= 4 else "the demo needs 4 GiB")


def _tools() -> Finding:
    try:
        from windrow_lab.machine.tools import find_tools
    except ModuleNotFoundError as missing:
        if not is_lab(missing):
            raise
        return Finding("control plane", "not in this installation: no `windrow up`", ok=True)

    tools = find_tools()
    if tools is not None:
        return Finding("control plane", f"{tools.kube_apiserver} ({tools.origin})", ok=True)
    return Finding(
        "control plane", "not built yet", ok=True, remedy="built by the first `windrow demo`"
    )


def _cluster(kubeconfig: Path | None) -> Finding:
    try:
        talk = client(kubeconfig)
        version, jobs = talk.version(), talk.jobs()
    except (UserError, Transient) as e:
        return Finding("cluster", str(e), ok=False, remedy="windrow up, or set KUBECONFIG")
    return Finding("cluster", f"{version}, {len(jobs)} FinetuneJobs", ok=True)


def _python_says(code: str) -> tuple[str, bool]:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    text = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    return (text[-1] if text else ""), run.returncode == 0
