"""Say whether a process may join the MPS daemon that decode's start has brought up.

Clients of one server must see its pipes, share one `/dev/shm` and run as one user: the server lets
another user's clients wait without end.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from windrow.conditions import Reason
from windrow.rundir import RunDir
from windrow_sidecar.compute.sharing import CONTROL_PIPE, PIPE_DIRECTORY, Lack

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class DaemonNote:
    """Facts that decode's start writes about the daemon, for containers that join (`mps.json`).

    Attributes:
        environment: the variables that make a process its client.
        uid: of the user that the daemon runs as.
        shared_memory: which `/dev/shm` decode has (`shared_memory_of`).
        pid_namespace: of the daemon.
        starter: number of the process that started it, in that namespace; 0: nobody knows.
    """

    environment: dict[str, str]
    uid: int
    shared_memory: str
    pid_namespace: str
    starter: int = 0

    @classmethod
    def here(cls, environment: dict[str, str]) -> DaemonNote:
        """Return the note of a daemon that this process has started."""
        memory, space = shared_memory_of(SHARED_MEMORY), pid_namespace()
        return cls(environment, os.getuid(), memory, space, os.getpid())

    def write(self, run_dir: RunDir) -> None:
        """Replace the note of the run directory as a whole."""
        draft = run_dir.mps_note.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(draft, run_dir.mps_note)

    @classmethod
    def read(cls, run_dir: RunDir) -> DaemonNote | None:
        """Return the note of the run directory; None: there is none."""
        try:
            return cls(**json.loads(run_dir.mps_note.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def starter_is_gone(self) -> bool:
        """True where the process that started the daemon is known to have ended."""
        is_ours = self.pid_namespace == pid_namespace()
        return is_ours and self.starter > 0 and not Path(f"/proc/{self.starter}").exists()


@dataclass(frozen=True, slots=True)
class JoiningContainer:
    """Facts about a container that wants to join.

    Attributes:
        uid: its user.
        shared_memory: which `/dev/shm` it has.
        sees_pipes: whether the daemon's pipes are where decode's start says.
        has_control: whether it has the program that asks the daemon.
    """

    uid: int
    shared_memory: str
    sees_pipes: bool
    has_control: bool

    @classmethod
    def here(cls, note: DaemonNote, *, has_control: bool) -> JoiningContainer:
        """Look at the container of this process."""
        pipes = Path(note.environment[PIPE_DIRECTORY]) / CONTROL_PIPE
        memory = shared_memory_of(SHARED_MEMORY)
        return cls(os.getuid(), memory, pipes.exists(), has_control)


def find_joining_lack(note: DaemonNote, container: JoiningContainer) -> Lack | None:
    """Return what keeps a container from joining the daemon of that note; None: nothing does."""
    if not container.sees_pipes:
        folder = note.environment[PIPE_DIRECTORY]
        text = f"the sidecar's container does not see the daemon's pipes in {folder}"
        return Lack(Reason.OTHER_PIPE_DIRECTORY, text)
    if container.shared_memory != note.shared_memory:
        text = f"{SHARED_MEMORY} of the sidecar's container is not decode's"
        return Lack(Reason.OTHER_SHARED_MEMORY, text)
    if container.uid != note.uid:
        text = f"the sidecar runs as user {container.uid} and the daemon as user {note.uid}"
        return Lack(Reason.OTHER_USER, text)
    if not container.has_control:
        text = "nvidia-cuda-mps-control is not on PATH in the sidecar's container"
        return Lack(Reason.MPS_MISSING, text)
    return None


def shared_memory_of(folder: Path) -> str:
    """Return what tells one `/dev/shm` from another: device and inode, the same in each container.

    A part of a volume (`subPath`) has the volume's device and an inode of its own.
    """
    try:
        found = folder.stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def pid_namespace(pid: int | str = "self") -> str:
    """Return the PID namespace of a process, like `pid:[4026531836]`; "": nobody knows."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
