"""Files that a dataset's source names, on any store that fsspec reaches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from windrow.conditions import Reason
from windrow.crd.texts import HUB_NAME
from windrow.errors import Transient, UserError
from windrow.redaction import redacted
from windrow.wheel import install_client
from windrow_sidecar.finetune.data.remote import (
    NO_CREDENTIALS,
    Credentials,
    answers_later,
    is_of_client,
    lacks_credentials,
    remedy_of,
    storage_options,
)
from windrow_sidecar.finetune.data.source_access import NO_ACCESS, UNCONFINED, SourceAccess

FIELD = "spec.dataset.source"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
DEFAULT_SPLIT = "train"
SPLITS = ("train", "test", "validation", "valid", "val", "eval", "dev")
# What `datasets` writes beside rows.
_NO_ROWS = ("dataset_infos.json", "dataset_info.json", "state.json")
# Words by which other tools name a split, and we do not.
_SPLIT_LIKE = ("training", "testing", "evaluation")
# In which part of a signed URL S3 and GCS, and Azure, have the name to save a file by.
_DISPOSITIONS = ("response-content-disposition", "rscd")
_FILE_NAME = re.compile(r"filename=\"?([^\";]+)")
# Files that one message names.
_NAMED = 5


class DatasetSilent(Transient):
    """The place where the rows are does not answer."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file. `system` is fsspec's, `path` is the file's there, `name` is what people read."""

    system: Any
    path: str
    name: str

    @property
    def suffix(self) -> str:
        """Member of SUFFIXES that it has; "": none of them."""
        return _suffix(_file_of(self.path))

    @property
    def packed(self) -> str:
        """Member of COMPRESSED that it has; "": none of them."""
        suffix = PurePosixPath(_file_of(self.path)).suffix.lower()
        return suffix if suffix in COMPRESSED else ""


def local_path(place: str, *, field: str) -> Path:
    """Return the path that a plain path or a `file://` URL names.

    Raises:
        UserError: another scheme.
    """
    parts = urlsplit(place)
    if parts.scheme == "":
        return Path(place)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    raise UserError(
        f"{redacted(place)!r} cannot be reached from a worker",
        field=field,
        remedy="Write a path, or file:///path, on a volume that the decode pods mount.",
    )


def find_files(
    source: str,
    split: str = "train",
    tell: Callable[[str], None] = lambda note: None,
    credentials: Credentials | None = None,
    access: SourceAccess = NO_ACCESS,
) -> list[DataFile]:
    """Return the files of a source, sorted by path.

    Of a directory, the files with a known suffix; where some are named after a split, only those of
    `split`.

    Args:
        source: a path, a URL, or the name of a dataset on the Hub.
        split: that is wanted.
        tell: called with files that look like rows and are not read.
        credentials: for the place (default: what the process's environment gives).
        access: what may be read; without it nothing.

    Raises:
        UserError: it is not there, may not be read, holds no file of a known kind or of the split,
            or holds the split in several folders, which are sets of their own.
        DatasetSilent: the place does not answer.
    """
    access.check_url(source)
    url, source = _url(source, access), redacted(source)
    with reaching(source):
        system, path = _open_system(url, credentials or NO_CREDENTIALS, access)
        # `isdir` and `exists` take a place that does not answer for one that is not there.
        about = system.info(path)
        # Whether a page is a directory a web server says in its text, which may be all rows.
        file = about["type"] != "directory" and _is_web(url) and _suffix(_file_of(path))
        if file or (about["type"] != "directory" and not system.isdir(path)):
            _refuse_endless(about, source)
            _refuse_unknown(_file_of(path), source)
            _refuse_split_of_file(_file_of(path), source, split)
            return [DataFile(system, path, source)]
        found = sorted(p for p in system.find(path) if not _is_hidden(p[len(path) :]))
    rows = [p for p in found if _suffix(p) and PurePosixPath(p).name not in _NO_ROWS]
    if not rows:
        others = f"; there are {_some(found, path)}" if found else ""
        raise UserError(
            f"{source} holds no file that ends in {', '.join(SUFFIXES)}{others}",
            field=FIELD,
            remedy="Name the directory that holds the files.",
            reason=Reason.DATASET_EMPTY,
        )
    place = _named(system, path)
    wanted, without = _of_split(rows, path, place, split)
    unread = [*without, *(p for p in found if not _suffix(p) and _may_be_rows(p))]
    if unread:
        why = (
            f"they name no split, do not end in {', '.join(SUFFIXES)}, or are links to directories"
        )
        tell(f"{place} holds files that are not read: {_some(unread, path)} ({why})")
    if doubtful := [p for p in wanted if _looks_like_another_split(p[len(path) :], split)]:
        tell(
            f"{place}: read as rows of the split {split!r}, though their names may say another: "
            f"{_some(doubtful, path)} (a split is what a file's or folder's name begins with)"
        )
    plain = {p: str(PurePosixPath(p).with_suffix("")) for p in wanted if _is_packed(p)}
    if twice := [p for p, unpacked in plain.items() if unpacked in wanted]:
        tell(f"{place}: read packed and unpacked, so their rows count twice: {_some(twice, path)}")
    return [DataFile(system, p, _named(system, p)) for p in wanted]


@contextmanager
def reaching(source: str) -> Iterator[None]:
    """Hold while something is asked of the place where `source` is.

    Raises:
        UserError, DatasetSilent: instead of what its client raises, see `failed`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or is_of_client(error):
            raise failed(source, error) from error
        raise


def failed(source: str, error: Exception) -> UserError | DatasetSilent:
    """Return the error for a place that gave `error`: a network may answer later, a disk not."""
    later = answers_later(error)
    if later is None:
        missing = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError)
        later = not missing and urlsplit(source).scheme not in ("", "file")
    if later:
        said = redacted(" ".join(str(error).split()))
        return DatasetSilent(f"{redacted(source)} does not answer: {said}")
    return unreadable(source, error)


def unreadable(source: str, error: Exception) -> UserError:
    """Return the error for a source that is not there or may not be read."""
    said = getattr(error, "strerror", None) or " ".join(str(error).split())
    remedy = (
        "Name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
        "spec.dataset.secretRef, or give the sidecar a role."
        if lacks_credentials(error)
        else remedy_of(error)
        or "Name a file or directory on a volume that the decode pods mount, s3://bucket/key, or "
        "a dataset of the Hub (owner/name)."
    )
    return UserError(
        f"{redacted(source)} cannot be read: {redacted(said)}",
        field=FIELD,
        remedy=remedy,
        reason=Reason.DATASET_UNREADABLE,
    )


def _url(source: str, access: SourceAccess) -> str:
    """Return what fsspec takes; a name like owner/name that is no path is one of the Hub."""
    scheme, host, *_ = urlsplit(source)
    if scheme in ("http", "https", "s3", "gs") and not host:
        raise UserError(
            f"{redacted(source)} names no {'host' if scheme.startswith('http') else 'bucket'}",
            field=FIELD,
            remedy=f"Write {scheme}://name/path.",
            reason=Reason.DATASET_UNREADABLE,
        )
    if scheme in ("", "file"):
        path = local_path(source, field=FIELD)
        hub = scheme == "" and HUB_NAME.fullmatch(source) and not _suffix(source)
        # What a job may not read does not count, and its presence is not revealed.
        seen = access.trees is None or any(map(path.absolute().is_relative_to, access.trees))
        here = seen and path.exists()
        return f"hf://datasets/{source}" if hub and not here else str(path.absolute())
    return source


def _open_system(
    url: str, credentials: Credentials, access: SourceAccess = UNCONFINED
) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    scheme = urlsplit(url).scheme
    if access.trees is not None and scheme == "":
        from windrow_sidecar.finetune.data.confined_files import ConfinedFiles, ConfinedFileSystem

        return ConfinedFileSystem(ConfinedFiles(access.trees, access.never)), url
    if scheme == "s3":
        access.check_bucket(credentials.secret, "spec.dataset.secretRef")
        if endpoint := storage_options(url, credentials).get("endpoint_url"):
            access.check_endpoint(endpoint, "spec.dataset.secretRef")

    options = storage_options(url, credentials)
    if scheme == "hf" and not credentials.secret and not access.pod_credentials:
        options["token"] = False  # decode's own token is not the job's
    if options:
        options["skip_instance_cache"] = True
    if _is_web(url) and urlsplit(url).query:
        options["encoded"] = True  # a signature is of the very characters
    try:
        system, path = url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(
            f"{redacted(url)}: this worker has no client for {scheme}:// ({error})",
            field=FIELD,
            remedy=f"In the sidecar's image: {install_client(scheme)}, or mount the data.",
            reason=Reason.DATASET_UNREADABLE,
        ) from error
    return system, str(path)


def _refuse_endless(about: Mapping[str, Any], source: str) -> None:
    """Refuse a pipe, a socket or a device: a reader would wait for its writer."""
    if about["type"] == "other":
        raise UserError(
            f"{source} is neither a file nor a directory",
            field=FIELD,
            remedy="Write its rows into a file.",
            reason=Reason.DATASET_UNREADABLE,
        )


def _refuse_unknown(path: str, source: str) -> None:
    if not _suffix(path):
        raise UserError(
            f"{source} is of no known kind",
            field=FIELD,
            remedy=f"Name a file that ends in one of {', '.join(SUFFIXES)} (and .gz, .zst, ...).",
            reason=Reason.DATASET_UNREADABLE,
        )


def _refuse_split_of_file(path: str, source: str, split: str) -> None:
    """A split chooses among files: of one file it can only be what that is named after."""
    if split not in (DEFAULT_SPLIT, _split_of(PurePosixPath(path).name, split)):
        raise UserError(
            f"{source} is one file, which holds no split {split!r}",
            field="spec.dataset.split",
            remedy="Leave it out, or name a directory whose files are named after splits.",
            reason=Reason.DATASET_EMPTY,
        )


def _of_split(paths: list[str], root: str, place: str, split: str) -> tuple[list[str], list[str]]:
    """Return the paths of `split`, and those that are of none.

    All of them are wanted where none is named after a split. `root`: their directory; `place`: what
    people read of it.
    """
    splits = {path: _split_of(path[len(root) :], split) for path in paths}
    if not any(splits.values()) and split == DEFAULT_SPLIT:
        return paths, []
    wanted = [path for path in paths if splits[path] == split]
    if not wanted:
        named = sorted({s for s in splits.values() if s})
        raise UserError(
            f"{split!r} is not a split of {place}",
            field="spec.dataset.split",
            remedy=f"Write one of {', '.join(named)}."
            if named
            else "Leave it out: none of the files is named after a split.",
            reason=Reason.DATASET_EMPTY,
        )
    folders = sorted({_folder_of(path[len(root) :], split) for path in wanted})
    _refuse_several_sets(folders, place, split)
    return wanted, [path for path in paths if not splits[path]]


def _refuse_several_sets(folders: list[str], place: str, split: str) -> None:
    """Refuse files of one split in several folders: subsets, of which a user wants one."""
    if len(folders) > 1:
        raise UserError(
            f"{place} holds several sets of rows with the split {split!r}, in "
            + ", ".join(folder or "itself" for folder in folders),
            field=FIELD,
            remedy=f"Name the folder of one of them: {place}/{folders[-1]}.",
            reason=Reason.DATASET_UNREADABLE,
        )


def _folder_of(path: str, split: str) -> str:
    """Return the part of a path before the name of its split."""
    parts = PurePosixPath(path.lstrip("/")).parts
    at = next(n for n, part in enumerate(parts) if _split_of(part, split))
    return "/".join(parts[:at])


def _split_of(path: str, wanted: str) -> str:
    """Return the split in a path like `train/part.jsonl` or `val-00000.parquet`; "": none.

    `wanted` is one, whatever its name.
    """
    for part in PurePosixPath(path).parts:
        first = re.split(r"[-_.]", part, maxsplit=1)[0]
        if wanted in (first, PurePosixPath(part).stem):
            return wanted
        if first in SPLITS:
            return first
    return ""


def _suffix(path: str) -> str:
    name = PurePosixPath(path)
    if _is_packed(path):
        name = name.with_suffix("")
    suffix = name.suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def _is_web(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https")


def _file_of(path: str) -> str:
    """Return the name of a file as its suffix tells: of a URL, without what follows `?`.

    A store may serve a file under another name than that by which its signed URL asks for it.
    """
    if not _is_web(path):
        return path
    parts = urlsplit(path)
    if not _suffix(name := unquote(parts.path)):
        for key, value in parse_qsl(parts.query):
            if key.lower() in _DISPOSITIONS and (found := _FILE_NAME.search(value)):
                return found[1]
    return name


def _looks_like_another_split(path: str, split: str) -> bool:
    words = set(re.split(r"[^a-z]+", path.lower()))
    return split not in words and bool(words & {*SPLITS, *_SPLIT_LIKE} - {split})


def _named(system: Any, path: str) -> str:  # noqa: ANN401 - fsspec's
    """Return what people read of a path: a local one as it is, another with its scheme."""
    return redacted(str(system.unstrip_protocol(path)).removeprefix("file://"))


def _is_packed(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in COMPRESSED


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(path.lstrip("/")).parts)


def _may_be_rows(path: str) -> bool:
    """Return whether a person may take a file for rows: all but documentation."""
    name = PurePosixPath(path)
    about = ("README", "LICENSE", "LICENCE", "NOTICE", "CITATION")
    return name.suffix not in (".md", ".py", ".yaml", ".yml", ".lock") and name.stem not in about


def _some(paths: list[str], root: str) -> str:
    """Name the first few."""
    names = [path[len(root) :].lstrip("/") for path in paths[:_NAMED]]
    more = [f"{len(paths) - _NAMED} more"] if len(paths) > _NAMED else []
    return ", ".join(names + more)
