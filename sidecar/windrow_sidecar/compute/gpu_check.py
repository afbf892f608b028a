"""Check that this machine's GPU has all that Windrow needs: `windrow doctor --gpu`.

`python -m windrow_sidecar.compute.gpu_check` prints it as JSON. Each check tries the thing itself,
takes seconds, and says what to do where it fails. A process of its own, so that the caller keeps no
context on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from windrow.errors import WindrowError
from windrow.rundir import ENV_RUN_DIR, RunDir
from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.mps import MpsDaemon
from windrow_sidecar.compute.mps_across import PIDS, try_across, try_decodes_daemon
from windrow_sidecar.compute.mps_joining import DaemonNote
from windrow_sidecar.compute.sharing import find_mps_lack
from windrow_sidecar.compute.utilization import GpuMeter, gpu_name
from windrow_sidecar.torch_cuda import look_at_torch, require_torch_cuda

GPU = "cuda"
_MODULE = "windrow_sidecar.compute.gpu_check"
_Child = subprocess.Popen[str]
_CHILD_WITHIN_S = 60.0
_MIB = 1 << 20
# What a layer's weights travel in (see `engines.streaming.copying`).
_PINNED_BYTES = 64 * _MIB
_PATTERN = 0x5A


class CheckFailed(Exception):
    """A failed check: what was found, and what to do about it."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a GPU machine must have.

    Attributes:
        what: its name.
        run: tries it and returns what was found.
        remedy: where it fails and does not say more itself.
    """

    what: str
    run: Callable[[], str]
    remedy: str


def driver() -> str:
    """Open NVIDIA's driver and look at the first GPU."""
    facts = _core.driver(GPU).facts
    gib = facts["memory_bytes"] / 2**30
    return f"{facts['name']}, {facts['units']} SMs, {gib:.0f} GiB, {look_at_torch().versions}"


def wheel() -> str:
    """Let torch see the GPU."""
    found = look_at_torch()
    if found.missing:
        raise CheckFailed(found.missing, found.remedy)
    return f"{found.versions}; it sees {found.gpus} GPU(s)"


def mps() -> str:
    """Start a private daemon and let a second process become its client."""
    # A short path: it holds a socket.
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        daemon = MpsDaemon(Path(name))
        daemon.start()
        try:
            with _child("context", environ=daemon.environment) as child:
                if missing := _first_line(child).strip():
                    raise CheckFailed(
                        missing,
                        "Run daemon and processes as one user and in one PID namespace (or with "
                        "hostPID). Without MPS the GPU is shared in time only.",
                    )
            with _child("memory", environ=daemon.environment) as child:
                if wrong := _first_line(child).strip():
                    raise CheckFailed(
                        f"between two clients of the daemon, {wrong}",
                        "With sharing: temporal the GPU is shared in time, without the daemon.",
                    )
        finally:
            daemon.stop()
    return "a second process is a client of a private daemon, and shares memory with a third"


def across() -> str:
    """Become a client across what containers have apart; in a pod also of decode's own daemon."""
    run_dir = RunDir(Path(os.environ.get(ENV_RUN_DIR, "")))
    note = DaemonNote.read(run_dir) if ENV_RUN_DIR in os.environ else None
    tried = [] if note is None else [try_decodes_daemon(note, MpsDaemon(run_dir.mps_folder))]
    # A short path: it holds a socket.
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        daemon = MpsDaemon(Path(name))
        daemon.start()
        try:
            tried += try_across(daemon, _meter())
        finally:
            daemon.stop()
    found = "; ".join(f"{one.what}: {one.text}" for one in tried)
    # Containers of a pod share IPC; another /dev/shm and another user are refused before a client
    # is tried. The sidecar's own PID namespace is what has to work, where it could be tried.
    unknown = [one.what for one in tried if one.works is False or (one.works and not one.known)]
    if note is not None and tried[0].what in unknown:
        raise CheckFailed(found, "See the reasons of the condition SharedInSpace.")
    if PIDS.what in unknown:
        raise CheckFailed(found, "Use `sidecar.form: attach`, or `shareProcessNamespace`.")
    return f"with another {found}" if note is None else found


def _meter() -> GpuMeter | None:
    import pynvml

    try:
        return GpuMeter(gpu_name(GPU, str(_core.driver(GPU).facts["uuid"])))
    except pynvml.NVMLError:
        return None


def memory() -> str:
    """Make memory, export it, and let a second process import and write it."""
    import torch
    from torch.utils.dlpack import from_dlpack

    granularity = max(2 * _MIB, int(_core.driver(GPU).facts["granularity_bytes"]))
    geometry = _core.Geometry(
        layers=1,
        kv_heads=1,
        head_dim=64,
        dtype_bytes=2,
        block_bytes=granularity,
        chunks=2,
        layout="token-major",
    )
    arena = _core.Arena.create(geometry, reserved_chunks=0, driver=GPU)
    try:
        arena.lend(geometry.chunks, owner=1)
        with tempfile.TemporaryDirectory(prefix="wr-") as name:
            arena.serve(path := f"{name}/a.sock")
            with _child("import", path) as child:
                _first_line(child)
        tensor = from_dlpack(arena.tensor(0, geometry.arena_bytes))
        right = bool((tensor == _PATTERN).all())
        where = tensor.device.type
        del tensor
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        arena.close()
    if not right:
        raise CheckFailed(
            "imported memory does not show what a second process wrote",
            "Look for a sandbox between processes (gVisor, MIG, vGPU without unified memory).",
        )
    mib = geometry.arena_bytes // _MIB
    return f"{mib} MiB exported, imported and written by a second process ({where} tensors)"


def counters() -> str:
    """Find the GPU in NVML by the UUID that CUDA tells, and this process among those on it."""
    import pynvml

    uuid = str(_core.driver(GPU).facts["uuid"])  # this process has a context from now on
    try:
        meter = GpuMeter(gpu_name(GPU, uuid))
        running = meter.processes()
        meter.sample(0, 0)
    except pynvml.NVMLError as error:
        raise CheckFailed(
            f"NVML: {error}",
            "Give the container the driver capability `utility`. Without NVML only the figures of "
            "the GPU's use are missing.",
        ) from error
    if os.getpid() not in running:
        raise CheckFailed(
            f"NVML finds {meter.name} by its UUID, but not this process among the {len(running)} "
            "there: it names processes of another PID namespace",
            "Use hostPID, or count all of the GPU's use as decode's: only that figure suffers.",
        )
    return f"{meter.name} by its UUID, with {len(running)} process(es), this one among them"


def shares() -> str:
    """Cut the GPU by green contexts and measure on which SMs the shares run."""
    worker, gpu = CudaPartition("finetune", GPU, use_stream=lambda _: None), _core.driver(GPU)
    least = worker.levels()[0]
    ours, shares = worker.measure(least), gpu.partition()
    rest = shares.groups - least // shares.group_units
    theirs = frozenset(shares.measure("decode", rest))
    if ours & theirs:
        raise CheckFailed(
            f"the worker's {least} SMs and decode's {len(theirs)} meet on {len(ours & theirs)}",
            "Decode runs on every SM then, and only the worker's share is capped: nothing to do.",
        )
    levels = ", ".join(map(str, worker.levels()))
    return f"levels of {levels} SMs; the least was measured on {len(ours)} SMs of its own"


def triton() -> str:
    """Compile and launch a kernel."""
    require_torch_cuda("triton")
    import torch

    from windrow_sidecar.compute.triton_launch import NEEDS, try_triton

    if why := try_triton(torch.device(GPU)):
        raise CheckFailed(why, f"Triton needs {NEEDS}. Without it: --attention-backend torch.")
    return "a kernel was compiled and launched"


def pinned() -> str:
    """Pin host memory and copy from it."""
    from windrow_sidecar.compute.cuda_device import CudaDevice

    device = CudaDevice(0, field="pinned memory")
    import torch

    host, copies = device.host_copy(_PINNED_BYTES).fill_(_PATTERN), device.copies()
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device.torch)
    copies.start(there, host)  # the first one sets things up
    begun = copies.mark()
    copies.start(there, host)
    ended = copies.mark()
    seconds = max(1e-9, (ended.at_ns() - begun.at_ns()) / 1e9)
    if int(there[-1].cpu()) != _PATTERN:
        raise CheckFailed(
            "copied data differs from its source", "See what `dmesg` says of the GPU."
        )
    return f"{_PINNED_BYTES // _MIB} MiB pinned, copied at {_PINNED_BYTES / seconds / 1e9:.0f} GB/s"


CHECKS = (
    Check("driver", driver, "Install NVIDIA's driver, or give the container a GPU."),
    Check("torch", wheel, "Install a torch that is built for CUDA."),
    Check(
        "mps",
        mps,
        "Put nvidia-cuda-mps-control, of NVIDIA's driver, on PATH. Without it the GPU is shared in "
        "time only.",
    ),
    Check("mps across containers", across, "See mps first."),
    Check("memory between processes", memory, "See the driver first."),
    Check("shares of SMs", shares, "Without them the GPU is shared in time only (CUDA 12.5)."),
    Check("nvml", counters, "Without NVML only the figures of the GPU's use are missing."),
    Check("triton", triton, "See torch first. Without Triton: --attention-backend torch."),
    Check("pinned memory", pinned, "See torch first."),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Finding of a check; `remedy` is empty where all is well."""

    what: str
    found: str
    ok: bool
    remedy: str = ""


def run(checks: Sequence[Check] = CHECKS) -> list[Found]:
    """Run each; none ends the others."""
    found = []
    for check in checks:
        try:
            found.append(Found(check.what, check.run(), ok=True))
        except CheckFailed as failed:
            found.append(Found(check.what, str(failed), ok=False, remedy=failed.remedy))
        except WindrowError as error:
            remedy = getattr(error, "remedy", "") or check.remedy
            problem = getattr(error, "problem", "") or str(error)
            found.append(Found(check.what, problem, ok=False, remedy=remedy))
        except (_core.Error, OSError, RuntimeError, ImportError, subprocess.SubprocessError) as e:
            said = (str(e).strip() or type(e).__name__).splitlines()[-1]
            found.append(Found(check.what, said, ok=False, remedy=check.remedy))
    return found


@contextmanager
def _child(role: str, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[_Child]:
    """A second process in one of the roles below; it ends when this one closes its input."""
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "--role", role, *arguments],
        env=os.environ | (environ or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
        child.communicate(timeout=_CHILD_WITHIN_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()


def _first_line(child: _Child) -> str:
    assert child.stdout is not None
    assert child.stderr is not None
    if line := child.stdout.readline():
        return line
    said = child.stderr.read().strip().splitlines()
    raise RuntimeError(f"a second process failed: {said[-1] if said else 'it said nothing'}")


def _be_a_client() -> None:
    """Have a context until stdin ends; say why it is not a client of the daemon."""
    lack = find_mps_lack(GPU, os.environ)
    print(lack.text if lack else "", flush=True)
    sys.stdin.read()


def _share_memory() -> None:
    """Try it in this process's environment; say what is wrong."""
    (found,) = run([check for check in CHECKS if check.run is memory])
    print("" if found.ok else found.found, flush=True)
    sys.stdin.read()


def _write_imported(path: str) -> None:
    """Write all of an arena."""
    from torch.utils.dlpack import from_dlpack

    arena = _core.Arena.attach(path)
    tensor = from_dlpack(arena.tensor(0, arena.geometry.arena_bytes)).fill_(_PATTERN)
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize()
    del tensor
    print("written", flush=True)
    sys.stdin.read()
    arena.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found, as JSON."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--role", choices=["context", "import", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("path", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role == "context":
        _be_a_client()
    elif options.role == "import":
        _write_imported(options.path)
    elif options.role == "memory":
        _share_memory()
    else:
        began_s = time.monotonic()
        found = [asdict(one) for one in run()]
        json.dump({"checks": found, "seconds": time.monotonic() - began_s}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
