"""Read the served files of an adapter from a bucket, a repository of the Hub or a volume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from windrow.conditions import Reason
from windrow.errors import Transient, UserError
from windrow.outputs import is_bucket
from windrow.redaction import redacted
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.remote import (
    Credentials,
    answers_later,
    is_of_client,
    open_file_system,
    remedy_of,
    storage_options,
)
from windrow_sidecar.finetune.data.source_access import SourceAccess

_FIELD = "spec.output"
_SECRET = "spec.output.secretRef"
_BLOCK_BYTES = 8 * 2**20


class SourceSilent(Transient):
    """The place of an adapter does not answer."""


class AdapterSource:
    """A folder with an adapter.

    Args:
        place: `s3://bucket/folder`, `hf://owner/name` or an absolute path.
        credentials: of the job's output.
        access: of the job, in this pod.

    Raises:
        UserError: the job may not read there, or there is no client.
    """

    def __init__(self, place: str, credentials: Credentials, access: SourceAccess) -> None:
        self.place = place
        self._files: ConfinedFiles | None = None
        self._system: Any = None
        if not urlsplit(place).scheme:
            self._files = ConfinedFiles(access.trees or (), access.never)
            return
        access.check_url(place, _FIELD)
        if is_bucket(place):
            access.check_bucket(credentials.secret, _SECRET)
            if endpoint := storage_options(place, credentials).get("endpoint_url"):
                access.check_endpoint(endpoint, _SECRET)
        anonymous = not credentials.secret and not access.pod_credentials
        self._system = open_file_system(place, credentials, anonymous=anonymous)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Yield one of its files, open for reading from its begin.

        Raises:
            UserError: it is not there, or may not be read.
            SourceSilent: the place does not answer.
        """
        try:
            if self._files is not None:
                # A pipe would hold the open itself until somebody writes.
                found = self._files.open(Path(self.place, name), os.O_RDONLY | os.O_NONBLOCK)
                with os.fdopen(found, "rb") as file:
                    yield file
            else:
                # Block by block: a file may be larger than what is wanted of it.
                path = f"{self.place}/{name}"
                with self._system.open(path, "rb", block_size=_BLOCK_BYTES) as file:
                    yield file
        except Exception as error:
            if not (isinstance(error, OSError) or is_of_client(error)):
                raise
            said = redacted(" ".join(str(error).split()))
            if answers_later(error):
                raise SourceSilent(f"{self.place} does not answer: {said}") from error
            raise UserError(
                f"{self.place}/{name} cannot be read: {said or type(error).__name__}",
                field=_FIELD,
                remedy=remedy_of(error)
                or "Keep the adapter where the job wrote it, and let its credentials read there.",
                reason=Reason.NOT_LOADED,
            ) from error
