"""Meeting points of a decode pod's parts: files below the run directory, and the environment.

In a pod the directory is `/run/windrow`, an emptyDir that the webhook mounts into its containers.
It has one agent's socket, and of each slot files of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

DEFAULT_RUN_DIR = Path("/run/windrow")

# Set by the webhook on the injected sidecar (S) and the decode container (D).
ENV_RUN_DIR = "WINDROW_RUN_DIR"  # S D
ENV_OPERATOR_ADDRESS = "WINDROW_OPERATOR_ADDRESS"  # S: host:port of the Attach service
ENV_OPERATOR_CA = "WINDROW_OPERATOR_CA"  # S: PEM of the authorities that the operator may have
ENV_OPERATOR_CA_FILE = "WINDROW_OPERATOR_CA_FILE"  # S: more of them, read at each dialling
ENV_POD_NAMESPACE = "WINDROW_POD_NAMESPACE"  # S, downward API
ENV_POD_NAME = "WINDROW_POD_NAME"  # S D, downward API
ENV_POD_UID = "WINDROW_POD_UID"  # S, downward API
ENV_NODE_NAME = "WINDROW_NODE_NAME"  # S, downward API
# D, optional: which slot of its pod an engine is, 0 or more; else the first that no other one has
ENV_SLOT = "WINDROW_SLOT"
# D: directory with the latency profiles that pods of the namespace have measured (`profile_file`)
ENV_STORED_PROFILES = "WINDROW_STORED_PROFILES"
ENV_TOKEN_FILE = "WINDROW_TOKEN_FILE"  # S: projected service-account token, audience `windrow`
ENV_LOG_DIR = "WINDROW_LOG_DIR"  # S D, optional: event logs go here as well
ENV_METRICS_PORT = "WINDROW_METRICS_PORT"  # S: port of the agent's Prometheus endpoint; 0: any free

# S D: how decode and workers may share the GPU: auto (default), spatial or temporal
ENV_SHARING = "WINDROW_SHARING"
# D, optional: seconds that decode's start waits for the MPS daemon at most (2)
ENV_MPS_WAIT = "WINDROW_MPS_WAIT_SECONDS"
# S, taken over from D, optional: workers' priority as MPS clients: auto (default), normal or below
ENV_MPS_PRIORITY = "WINDROW_MPS_PRIORITY"
ENV_MPS = "WINDROW_MPS"  # S, of operators before WINDROW_SHARING: off for temporal
# S: how its container sees GPUs, where that may be more than decode's: env, or mps of the node
ENV_GPU_ACCESS = "WINDROW_GPU_ACCESS"
ENV_MAX_JOBS = "WINDROW_MAX_JOBS"  # S: how many jobs over one base may share a slot (4)

# S, taken over from D, optional: bytes a second that frozen layers may move, like 2Gi
ENV_COPY_RATE = "WINDROW_COPY_RATE"

# S, optional: what runs a worker's layers: eager (default), the model's own modules, or packed,
# graphs, compiled
ENV_LAYER_PROGRAM = "WINDROW_LAYER_PROGRAM"

# D of SGLang, optional: where jobs run: process (default), their own, or in-engine, decode's
ENV_FINETUNE = "WINDROW_FINETUNE"

# S, optional: directories that jobs may write besides the policy's volumes, with colons between
# them. Set by a process node, whose pods have the machine's own files.
ENV_OUTPUT_TREES = "WINDROW_OUTPUT_TREES"

# Of a worker: the GPU of its slot, where that is the only one that it is shown
ENV_ONLY_GPU = "WINDROW_ONLY_GPU"

TOKEN_AUDIENCE = "windrow"
# Trailing metadata of a refused stream: host:port of the replica of the operator that leads.
LEADER_METADATA = "windrow-leader"
PROTOCOL_VERSION = 1
# How long a policy holds without a word of the operator, where it does not say.
DEFAULT_LEASE_S = 300.0
WORKER_LOG = "worker.log"  # in the directory of its job
# Of a pod: more GPUs than any node has.
MOST_SLOTS = 64


@dataclass(frozen=True)
class RunDir:
    """The files of one decode pod, as one of its slots sees them.

    Attributes:
        root: the directory.
        slot: whose files are meant where each slot has its own.
        rank: of the slot's engine, where each of its ranks has its own.
    """

    root: Path
    slot: int = 0
    rank: int = 0

    def of_slot(self, slot: int) -> RunDir:
        """Return the same directory as another slot of the pod sees it."""
        return replace(self, slot=slot)

    def of_rank(self, rank: int) -> RunDir:
        """Return the same directory as another rank of the slot's engine sees it."""
        return replace(self, rank=rank)

    @property
    def _number(self) -> str:
        """Number of the slot, and of the rank where that is not the first one."""
        return f"{self.slot}.{self.rank}" if self.rank else str(self.slot)

    @property
    def agent_socket(self) -> Path:
        """gRPC: plugin and worker to agent (`proto/windrow/v1/agent.proto`)."""
        return self.root / "agent.sock"

    def arena_socket(self) -> Path:
        """Hands out the descriptors of arena, page and weights; served by the decode process."""
        return self.root / f"arena-{self._number}.sock"

    def in_engine_socket(self) -> Path:
        """Takes jobs where the engine runs them in its own process; served by that process."""
        return self.root / f"in-engine-{self.slot}.sock"

    def weights_manifest(self) -> Path:
        """Return the JSON that says where in the exported weights each parameter is."""
        return self.root / f"weights-{self._number}.json"

    def profile(self) -> Path:
        """JSON: the engine's latency profile, for people and for its next start."""
        return self.root / f"profile-{self.slot}.json"

    def profiles(self) -> list[Path]:
        """Return the paths of a profile of this pod's kind of device, the slot's own first."""
        others = sorted(self.root.glob("profile-*.json"))
        return [self.profile(), *(path for path in others if path != self.profile())]

    def claim(self) -> Path:
        """Locked by the engine that is this slot, for as long as it lives."""
        return self.root / f"slot-{self.slot}.lock"

    def decision_log(self) -> Path:
        """The ring of the engine's last decisions (`windrow.decisions`)."""
        return self.root / f"decisions-{self.slot}.ring"

    def breach_log(self) -> Path:
        """JSON lines: the decisions before each time that the guard or the breaker acted."""
        return self.root / f"breaches-{self.slot}.jsonl"

    def turn_note(self) -> Path:
        """Return the note of whose turn it is in the slot's worker, for after its death."""
        return self.root / f"worker-{self.slot}.turn"

    def worker_log(self) -> Path:
        """Return the log of the slot's worker itself, while it has, or has had, several jobs."""
        return self.root / f"worker-{self.slot}.log"

    @property
    def mps_folder(self) -> Path:
        """Pipes and logs of the private MPS daemon, where decode's start has brought one up."""
        return self.root / "mps"

    @property
    def mps_note(self) -> Path:
        """JSON: how to join that daemon, for the agent (`windrow_sidecar.compute.mps_joining`)."""
        return self.root / "mps.json"

    def refusal(self) -> Path:
        """JSON: why the plugin has switched harvesting off; there until the engine starts again."""
        return self.root / f"refused-{self._number}.json"

    @property
    def off_switch(self) -> Path:
        """A file that people make: while it is there, the sidecar harvests nothing."""
        return self.root / "off"

    def job_dir(self, job_uid: str) -> Path:
        """Scratch of one job: its spec as the worker reads it, logs."""
        return self.root / "jobs" / job_uid


def profile_cache(environment: Mapping[str, str]) -> Path:
    """Return the directory in which `windrow profile` leaves profiles for this user's engines."""
    root = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/")) / ".cache"
    return Path(root) / "windrow" / "profiles"


def stored_profiles(environment: Mapping[str, str]) -> Path | None:
    """Return where profiles of the namespace's other pods lie; None: in no such pod."""
    folder = environment.get(ENV_STORED_PROFILES)
    return Path(folder) if folder else None


def profile_file(key: str) -> str:
    """Return the name of the file that has the latency profile of a key, where many lie."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def worker_line(jobs: Iterable[str], text: str) -> str:
    """Return a line of a worker's log as the sidecar's own log has it.

    `jobs`: namespace/name of each that it is about; none: of the process alone, whose jobs are of
    several namespaces. Who may read the sidecar's log sees all.
    """
    return f"worker {', '.join(jobs)} | {text}"


def read_worker_line(line: str, job: str) -> str | None:
    """Return what a worker wrote while it had `job`, namespace/name; None: it is no such line."""
    names, found, text = line.partition(" | ")
    _, of_worker, jobs = names.rpartition("worker ")
    return text if found and of_worker and job in jobs.split(", ") else None
