"""Check where a job may write its adapter: a bucket, or below the places that it was given."""

from __future__ import annotations

import contextlib
import os
import posixpath
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from windrow.conditions import Reason
from windrow.errors import UserError

_FIELD = "spec.output.destination"
BUCKET_SCHEMES = ("s3",)
# Below a destination: what jobs leave there beside the adapter, each in a folder of its own.
OWN_FOLDER = ".windrow"
# Below it each descriptor of this process has a name, which leads to what it was opened for.
HELD_DIRECTORIES = "/proc/self/fd"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def is_bucket(destination: str) -> bool:
    """Return whether a destination is in object storage, which every pod reaches by its name."""
    return urlsplit(destination).scheme in BUCKET_SCHEMES


def path_of(destination: str) -> str:
    """Return the one name that a destination, a path, a `file:` or an `s3:` URL, can have.

    Links are not followed: the directory may be on another machine.
    """
    if is_bucket(destination):
        scheme, _, place = destination.partition("://")
        return f"{scheme}://{posixpath.normpath(place)}"
    parts = urlsplit(destination)
    path = unquote(parts.path) if parts.scheme == "file" else destination
    name = posixpath.normpath(path)
    # POSIX leaves two slashes at the begin to the system; to Linux they are one.
    return f"/{name.lstrip('/')}" if name.startswith("//") else name


def folder_of(about: Mapping[str, object], manifest: Path) -> str:
    """Return the name of a job's own folder below its destination: its uid, else the manifest's.

    Args:
        about: the job's metadata.
        manifest: where they were read.

    Raises:
        UserError: it would be another directory than one of its own.
    """
    name = str(about.get("uid", manifest.stem))
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(
            f"{name!r} cannot be the name of the job's folder",
            field="metadata.uid",
            remedy="Write a name without slashes, or leave it out and name the file like JOB.yaml.",
        )
    return name


def is_below(trees: Iterable[str], destination: str) -> bool:
    """Return whether a destination is in one of `trees` by its name.

    A bucket is in none and needs none; a relative path may be.
    """
    if is_bucket(destination):
        return True
    path = path_of(destination)
    if not posixpath.isabs(path):
        return True
    return any(f"{path}/".startswith(f"{posixpath.normpath(tree)}/") for tree in trees)


def check_within(destination: Path, trees: Sequence[Path]) -> Path:
    """Return the directory that a worker beside decode writes to, without any link in it.

    A link would lead out of a volume, or into the directory of another job, whose name is compared
    with this one as it was written.

    Args:
        destination: as the job names it; a relative one is below the working directory.
        trees: what may be written.

    Raises:
        UserError: it is in none of `trees`, or a link leads elsewhere.
    """
    place = Path(os.path.abspath(destination))
    around = [tree for tree in trees if place.is_relative_to(tree)]
    if not around:
        given = ", ".join(map(str, trees)) or "nothing"
        raise _refusal(
            f"{destination} is not in what this slot may write, which is {given}",
            "Name a directory on a volume of the HarvestPolicy (spec.sidecar.volumes) that is not "
            "readOnly.",
        )
    tree = max(around, key=lambda tree: len(tree.parts))
    if not tree.is_dir():
        raise _refusal(
            f"{tree} is not there: the volume is not mounted in this pod",
            "Restart the pod, so that it gets the volumes of its policy.",
        )
    named, actual = tree.resolve() / place.relative_to(tree), place.resolve()
    if actual != named:
        raise _refusal(f"{destination} leads by a link to {actual}", "Name a path without links.")
    return actual


def make_trees(trees: Iterable[str], mounts: Iterable[str]) -> None:
    """Make the folders of a namespace on its volumes that nobody has made yet, through no link.

    What cannot be made stays missing: `check_within` then says so of the job that writes there.

    Args:
        trees: that may be written; one that is below none of `mounts` is not made.
        mounts: directories where volumes are mounted.
    """
    mounted = tuple(mounts)
    for tree in trees:
        around = [mount for mount in mounted if tree.startswith(f"{mount}/")]
        if around:
            mount = max(around, key=len)
            parts = posixpath.relpath(tree, mount).split("/")
            with contextlib.suppress(OSError):
                os.close(_walk(os.open(mount, _FOLDER), parts, make=True))


def _walk(at: int, parts: Iterable[str], *, make: bool = False) -> int:
    """Return a descriptor (O_PATH) of the directory to which names lead, none of them a link.

    Args:
        at: descriptor of the directory where they begin; it is closed.
        parts: names of directories, each in the one before.
        make: whether directories that are missing are made.

    Raises:
        OSError: ELOOP or ENOTDIR where a name is a link; else what `open` and `mkdir` raise.
    """
    try:
        for name in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=at)
            below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
    except OSError:
        os.close(at)
        raise
    return at


def folder_below(root: Path, parts: Iterable[str], *, make: bool) -> int:
    """Return a descriptor (O_PATH) of a folder below `root`, to which no link leads.

    Args:
        root: a directory; links on the way to it are followed.
        parts: names of directories, each in the one before.
        make: whether directories that are missing are made.

    Raises:
        OSError: ELOOP or ENOTDIR where a name is a link; else what `open` and `mkdir` raise.
    """
    return _walk(os.open(root, _FOLDER), parts, make=make)


def place_here(bucket: str) -> Path:
    """Return the directory of this user for what a job that writes to a bucket leaves here.

    That is its log, report and TensorBoard files, and each checkpoint until it is uploaded.
    """
    home = os.path.expanduser("~/.cache")
    # A user of a container may have no home.
    own = home if os.path.isabs(home) else tempfile.gettempdir()
    cache = os.environ.get("XDG_CACHE_HOME") or own
    return Path(cache, "windrow", "buckets", path_of(bucket).partition("://")[2])


def check_alone(place: str) -> Path:
    """Return the directory that a worker alone on a machine writes to.

    Args:
        place: as the job names it; for a bucket see `place_here`.

    Raises:
        UserError: it is relative and leads by a link out of the working directory, or it is the
            root of the file system.
    """
    if is_bucket(place):
        return place_here(place)
    destination = Path(path_of(place))
    actual, here = destination.resolve(), Path.cwd().resolve()
    if actual == Path(actual.anchor):
        raise _refusal(f"{destination} is the root of the file system", "Name a directory.")
    for named in () if destination.is_absolute() else (destination, destination / OWN_FOLDER):
        if not (actual := named.resolve()).is_relative_to(here):
            raise _refusal(
                f"{named} leads by a link to {actual}, out of the working directory",
                f"Write {actual} if that is meant."
                if named == destination
                else "Remove the link, or name another directory.",
            )
    return destination


def _refusal(problem: str, remedy: str) -> UserError:
    return UserError(problem, field=_FIELD, remedy=remedy, reason=Reason.OUTPUT_NOT_WRITABLE)


def open_without_links(path: Path, flags: int) -> int:
    """Return a descriptor of a file or directory none of whose path is a link.

    Component by component from the root, so that no rename meanwhile leads elsewhere.

    Args:
        path: absolute, or relative to the working directory; below /proc/self/fd it begins at the
            directory of that descriptor.
        flags: of `open`; O_NOFOLLOW and O_CLOEXEC are added.

    Raises:
        OSError: ELOOP or ENOTDIR where a part is a link; else what `open` raises.
    """
    place = Path(os.path.abspath(path))
    if place.is_relative_to(HELD_DIRECTORIES):
        number, *parts = place.relative_to(HELD_DIRECTORIES).parts
        at = os.dup(int(number))
    else:
        at, parts = os.open("/", _FOLDER), [*place.parts[1:]]
    *folders, name = parts or (".",)
    try:
        at = _walk(at, folders)
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        error.filename = str(path)
        raise
