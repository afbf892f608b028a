"""A real node on this machine, for as long as one command runs: `python -m windrow_lab.realnode`.

Control plane, scheduler, containerd, kubelet, kube-proxy and DNS run in namespaces of their own
(network, mounts, processes), so they take no port, route or mount of the machine, and all of it
ends with the command. What it needs, `windrow_lab.realnode.machine` says.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from windrow.errors import UserError, WindrowError
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings
from windrow_lab.machine.build import build_tools, ensure_tools
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand
from windrow_lab.machine.progress import progress_for
from windrow_lab.machine.tools import NODE, Tools
from windrow_lab.realnode.machine import CGROUPS, check, cni_folder

NODE_NAME = "node-a"
NODE_ADDRESS = "192.168.77.1"
PODS = "10.244.0.0/24"
PAUSE_IMAGE = "docker.io/windrow/pause:1"
# Set for the command: JSON that says where everything is (`NodeInfo`).
ENV_NODE = "WINDROW_NODE"
# Names of what a run keeps outside of its namespaces; its process id follows.
_RUN, _GROUP = "run-", "windrow-node-"
_READY_WITHIN_S = 120.0
_TAIL_LINES = 30


class NodeError(WindrowError):
    """A part of the node did not come up; the message ends with the tail of its log."""


@dataclass(frozen=True)
class NodeInfo:
    """Facts for the command on a running node.

    Attributes:
        kubeconfig: of a cluster administrator.
        containerd: its socket.
        bin: folder of kubectl, helm, ctr.
        logs: of all processes.
        kubelet: the kubelet's root directory, where drivers of devices put their sockets.
    """

    kubeconfig: str
    containerd: str
    bin: str
    logs: str
    kubelet: str

    @classmethod
    def of_environment(cls) -> NodeInfo | None:
        """Return the node that this process runs on, if any."""
        text = os.environ.get(ENV_NODE)
        return cls(**json.loads(text)) if text else None

    def kubectl(self, *words: str, body: object = None) -> str:
        """Run kubectl and return what it prints; `body`: is handed to it as JSON.

        Raises:
            NodeError: it refused.
        """
        done = subprocess.run(
            [f"{self.bin}/kubectl", f"--kubeconfig={self.kubeconfig}", *words],
            input=None if body is None else json.dumps(body),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NodeError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout


# --- from outside ---------------------------------------------------------------------------------


def run(command: Sequence[str], console: Console, pass_fds: Sequence[int] = ()) -> int:
    """Bring up a node, run `command` on it, end the node; return the command's exit status.

    Args:
        command: program and arguments.
        console: where a first build is shown.
        pass_fds: open files that the command gets as well. A socket of this machine stays one.

    Raises:
        UserError: the machine cannot run a node, this is one, or its executables cannot be built.
    """
    if NodeInfo.of_environment() is not None:
        raise UserError(
            "this command runs on a node already, and would clean up what that one keeps",
            remedy="Leave the shell of `make node` first.",
            reason="NodeNotPossible",
        )
    check()
    progress = progress_for(console)
    tools, built = ensure_tools(progress), build_tools(progress, os.environ, NODE)
    name = f"{_GROUP}{os.getpid()}"
    _forget_killed_runs(built.parent)
    # Beside the cache: an overlay cannot lie on another overlay, as a container's /tmp may.
    root = Path(tempfile.mkdtemp(prefix=f"{_RUN}{os.getpid()}-", dir=built.parent))
    plan = {
        **{"root": str(root), "bin": str(built), "tools": str(tools.etcd.parent), "cgroup": name},
        "fds": list(pass_fds),
    }
    inside = [sys.executable, "-m", "windrow_lab.realnode", f"--inside={json.dumps(plan)}"]
    namespaces = ["--net", "--mount", "--pid", "--ipc", "--uts", "--propagation=private"]
    # A run that gets SIGTERM cleans up as well; after one that is killed, the next run does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    unshared = ["unshare", *namespaces, "--fork", "--kill-child", "--mount-proc"]
    # Killed, this process takes the namespaces along.
    whole = ["setpriv", "--pdeathsig=KILL", *unshared, *inside, "--", *command]
    try:
        with _cgroup(name), subprocess.Popen(whole, pass_fds=pass_fds) as child:
            try:
                return child.wait()
            except KeyboardInterrupt:
                return child.wait()  # the command had the signal as well
            finally:
                child.kill()  # and with it all that it started
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _forget_killed_runs(cache: Path) -> None:
    for folder in cache.glob(f"{_RUN}*"):
        if not _is_process(folder.name.removeprefix(_RUN).partition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in [*CGROUPS.glob(f"{_GROUP}*"), *CGROUPS.glob(f"*/{_GROUP}*")]:
        if not _is_process(folder.name.removeprefix(_GROUP)):
            _remove_cgroup(folder)


def _is_process(pid: str) -> bool:
    return Path("/proc", pid).exists()


@contextlib.contextmanager
def _cgroup(name: str) -> Iterator[None]:
    """Have a cgroup of this name in every hierarchy that the kubelet uses."""
    unified = (CGROUPS / "cgroup.controllers").exists()
    parents = [CGROUPS] if unified else sorted(path for path in CGROUPS.iterdir())
    mine = [parent / name for parent in parents if os.access(parent / "tasks", os.W_OK) or unified]
    for folder in mine:
        with contextlib.suppress(OSError):
            folder.mkdir()
        if (cpus := folder / "cpuset.cpus").exists() and not cpus.read_text().strip():
            cpus.write_text((folder.parent / "cpuset.cpus").read_text())
            (folder / "cpuset.mems").write_text((folder.parent / "cpuset.mems").read_text())
    try:
        yield
    finally:
        # Container runtimes make groups in hierarchies that we do not, too.
        for folder in [CGROUPS / name, *CGROUPS.glob(f"*/{name}")]:
            _remove_cgroup(folder)


def _remove_cgroup(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while folder.exists():
        # From the leaves up; the last processes may just be ending.
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(below).rmdir()
        if time.monotonic() > deadline:
            return
        if folder.exists():
            time.sleep(0.1)


# --- inside the namespaces ------------------------------------------------------------------------


class RealNode:
    """The parts of one node, all children of one supervisor. A context manager."""

    def __init__(self, root: Path, binaries: Path, tools: Tools, cgroup: str) -> None:
        self._root, self._bin, self._tools, self._cgroup_name = root, binaries, tools, cgroup
        self._logs = root / "logs"
        self._socket = root / "containerd.sock"
        self._kubelet = root / "kubelet"
        self._keeper = Keeper()
        self._children: dict[str, Child] = {}
        self._plane: ControlPlane | None = None

    def __enter__(self) -> NodeInfo:
        self._logs.mkdir()
        _prepare_namespaces()
        settings = ControlPlaneSettings(
            self._tools, directory=self._root / "c", log_dir=self._logs, pods_reach=NODE_ADDRESS
        )
        self._plane = ControlPlane(settings, self._keeper)
        self._start_containerd()
        self._plane.start()
        kubeconfig = self._plane.kubeconfig
        self._start_others(kubeconfig)
        self._await("kubelet", self._is_ready)
        folders = (self._bin, self._logs, self._kubelet)
        return NodeInfo(str(kubeconfig), str(self._socket), *(str(folder) for folder in folders))

    def __exit__(self, *_: object) -> None:
        if self._plane is not None:
            self._plane.stop()
        self._keeper.close()

    def _start(self, name: str, *arguments: str) -> None:
        command = ProcessCommand(
            [str(self._bin / name), *arguments],
            log=self._logs / f"{name}.log",
            env={"PATH": f"{self._bin}:{os.environ['PATH']}", "HOME": str(self._root)},
            cwd=self._root,
        )
        self._children[name] = self._keeper.start(command)

    def _start_containerd(self) -> None:
        config = self._root / "containerd.toml"
        config.write_text(_containerd_config(self._root, self._socket), encoding="utf-8")
        (self._root / "cni").mkdir()
        (self._root / "cni" / "10-pods.conflist").write_text(json.dumps(_NETWORK))
        self._start("containerd", "--config", str(config))
        self._await("containerd", lambda: self._ctr("version").returncode == 0)
        archive = self._root / "pause.tar"
        write_image(archive, PAUSE_IMAGE, {"pause": self._bin / "pause"}, ["/pause"])
        imported = self._ctr("images", "import", str(archive))
        if imported.returncode != 0:
            raise NodeError(f"the pause image was not imported: {imported.stderr.decode()}")

    def _start_others(self, kubeconfig: Path) -> None:
        kubelet = self._root / "kubelet.yaml"
        kubelet.write_text(yaml.safe_dump(self._kubelet_config()), encoding="utf-8")
        corefile = self._root / "Corefile"
        corefile.write_text(_dns_config(kubeconfig), encoding="utf-8")
        access = f"--kubeconfig={kubeconfig}"
        self._start(
            "kubelet",
            *(f"--config={kubelet}", access, f"--root-dir={self._kubelet}"),
            *(f"--hostname-override={NODE_NAME}", f"--node-ip={NODE_ADDRESS}"),
            f"--cert-dir={self._kubelet}/pki",
        )
        self._start("kube-scheduler", access, "--leader-elect=false", "--secure-port=0")
        self._start(
            "kube-proxy",
            *(access, f"--hostname-override={NODE_NAME}", f"--cluster-cidr={PODS}"),
            # Settings of the machine's, which a namespace may not change.
            *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            *("--conntrack-tcp-timeout-close-wait=0", "--proxy-mode=iptables"),
        )
        self._start("coredns", "-conf", str(corefile))

    def _kubelet_config(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            # Reached from within the namespace alone.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup_name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "enforceNodeAllocatable": [],
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "clusterDNS": [NODE_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "volumePluginDir": f"{self._root}/volume-plugins",
            "podLogsDir": f"{self._root}/pod-logs",
            "registerWithTaints": [],
        }

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        program = [str(self._bin / "ctr"), "--address", str(self._socket), "--namespace", "k8s.io"]
        return subprocess.run([*program, *arguments], capture_output=True, check=False)

    def _is_ready(self) -> bool:
        assert self._plane is not None
        with self._plane.client() as client:
            answer = client.get(f"/api/v1/nodes/{NODE_NAME}")
        if answer.is_error:
            return False
        conditions = answer.json().get("status", {}).get("conditions") or []
        return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        while not ready():
            ended = [each for each, child in self._children.items() if child.poll() is not None]
            if ended or time.monotonic() > deadline:
                blamed = ended[0] if ended else name
                path = self._logs / f"{blamed}.log"
                tail = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                what = "ended" if ended else f"is not ready after {_READY_WITHIN_S:g} s"
                raise NodeError("\n".join([f"{blamed} {what}; the end of its log:", *tail]))
            time.sleep(0.2)


def _prepare_namespaces() -> None:
    """Give the fresh namespaces an address, a route for Services, and folders that go with them."""
    for folder in ("/run", "/var/lib", "/var/log"):
        _must("mount", "-t", "tmpfs", "windrow", folder)
    for arguments in (
        ("link", "set", "lo", "up"),
        # A pair, since not every kernel has dummy devices; both ends are here.
        ("link", "add", "node0", "type", "veth", "peer", "name", "node1"),
        ("link", "set", "node1", "up"),
        ("address", "add", f"{NODE_ADDRESS}/24", "dev", "node0"),
        ("link", "set", "node0", "up"),
        # To nowhere, but a Service's address is looked up before it is translated.
        ("route", "add", "default", "dev", "node0", "src", NODE_ADDRESS),
    ):
        _must("ip", *arguments)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NodeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


_NETWORK = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": PODS}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}


def _dns_config(kubeconfig: Path) -> str:
    return f"""\
.:53 {{
    bind {NODE_ADDRESS}
    errors
    cache 5
    kubernetes cluster.local {{
        kubeconfig {kubeconfig}
    }}
}}
"""


def _containerd_config(root: Path, socket: Path) -> str:
    folder = cni_folder()
    assert folder is not None, "missing() has looked"
    return f"""\
version = 3
root = "{root}/containerd"
state = "{root}/containerd-state"
[grpc]
  address = "{socket}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{folder}"]
    conf_dir = "{root}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


# --- the program ----------------------------------------------------------------------------------


def _run_inside(plan: dict[str, Any], command: Sequence[str]) -> int:
    binaries = Path(plan["bin"])
    tools = Tools.in_directory(Path(plan["tools"]), origin="given")
    with RealNode(Path(plan["root"]), binaries, tools, plan["cgroup"]) as info:
        environment = {
            **os.environ,
            "KUBECONFIG": info.kubeconfig,
            "PATH": f"{info.bin}:{os.environ['PATH']}",
            ENV_NODE: json.dumps(info.__dict__),
        }
        done = subprocess.run(command, env=environment, pass_fds=plan["fds"], check=False)
        return done.returncode


def main() -> int:
    """Run the command line; return the command's exit status, 3 when no node can be run here."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_lab.realnode",
        description="Run a command on a real Kubernetes node that exists as long as it runs.",
    )
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="only say whether it can be")
    parser.add_argument("command", nargs="*", help="default: a shell, with KUBECONFIG set")
    options = parser.parse_args()
    command = options.command or [os.environ.get("SHELL", "/bin/sh")]
    try:
        if options.inside:
            return _run_inside(options.inside, command)
        if options.check:
            check()
            return 0
        return run(command, Console(stderr=True))
    except UserError as error:
        print(error, file=sys.stderr)
        return 3
    except (WindrowError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


# --- images of one layer, which a container runtime imports without a registry --------------------


def write_image(
    archive: Path, name: str, files: dict[str, Path], entrypoint: Sequence[str]
) -> None:
    """Write an OCI archive of an image with one layer that holds `files`, by their paths in it.

    Args:
        archive: the file to write.
        name: full, with registry and tag: else the runtime looks for it on a network.
        files: path in the image -> file of this machine.
        entrypoint: what a container runs.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as made:
        for path, source in files.items():
            made.add(source, arcname=path)
    blobs: dict[str, bytes] = {}

    def keep(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return f"sha256:{digest}"

    oci = "application/vnd.oci.image"
    diff = keep(layer.getvalue())
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/bin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    }
    encoded = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{oci}.manifest.v1+json",
        "config": {
            "mediaType": f"{oci}.config.v1+json",
            "digest": keep(encoded),
            "size": len(encoded),
        },
        "layers": [
            {
                "mediaType": f"{oci}.layer.v1.tar",
                "digest": diff,
                "size": len(layer.getvalue()),
            }
        ],
    }
    described = json.dumps(manifest).encode()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": f"{oci}.manifest.v1+json",
                "digest": keep(described),
                "size": len(described),
                "annotations": {"io.containerd.image.name": name},
            }
        ],
    }
    with tarfile.open(archive, "w") as out:
        _add(out, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(out, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _add(out, f"blobs/sha256/{digest}", content)


def _add(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
