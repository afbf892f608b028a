"""Push a finished adapter to a repository of the Hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.data.remote import answers_later, is_of_client, storage_options
from windrow_sidecar.finetune.job.assembly import JobSpec

log = logging.getLogger(__name__)

_FIELD = "spec.output.hub"
# Characters of an error that are repeated.
_SHOWN = 200


class HubRepository:
    """A repository that a job's adapter is pushed to.

    Args:
        name: owner/name.
        private: whether one that is made is private.
        token: that may write to it; None: that of this process's environment.
    """

    def __init__(self, name: str, *, private: bool, token: str | None) -> None:
        from huggingface_hub import HfApi

        self._name, self._private = name, private
        self._hub = HfApi(token=token)

    @classmethod
    def of(cls, job: JobSpec) -> HubRepository | None:
        """Return that of a job; None: it names none.

        Raises:
            UserError: its Secret holds no token.
        """
        hub = job.spec.output.hub
        if hub is None:
            return None
        try:
            token = storage_options("hf://", job.output_credentials).get("token")
        except UserError as error:
            raise UserError(
                error.problem,
                field="spec.output.secretRef",
                remedy=error.remedy,
                reason=error.reason,
            ) from error
        return cls(hub.repository, private=hub.private, token=token)

    def check(self) -> None:
        """Make the repository where there is none, before anything is trained.

        A Hub that does not answer is asked again with the adapter.

        Raises:
            UserError: the token may not, or the name cannot be one.
        """
        try:
            self._make()
        except Exception as error:
            if not _is_of_hub(error):
                raise
            if answers_later(error):
                log.warning("%s cannot be reached yet: %s", self._name, _told(error))
                return
            raise UserError(
                f"{self._name} cannot be written: {_told(error)}",
                field=_FIELD,
                remedy="Name a repository that HF_TOKEN of spec.output.secretRef may write to.",
                reason=Reason.OUTPUT_NOT_WRITABLE,
            ) from error

    def push(self, fill: Callable[[Path], None]) -> str:
        """Push what `fill` writes into a folder, as one commit; return what to say of it."""
        from huggingface_hub import CommitOperationAdd

        try:
            with TemporaryDirectory(prefix="windrow-hub-") as folder, _by_python_alone():
                fill(Path(folder))
                files = [CommitOperationAdd(f.name, f) for f in sorted(Path(folder).iterdir())]
                self._make()
                self._hub.create_commit(
                    self._name, files, commit_message="Adapter and model card", num_threads=1
                )
        except Exception as error:
            # The adapter is at its destination: what goes wrong from here on does not undo that.
            log.exception("the adapter is not pushed to %s", self._name)
            return f"not pushed to {self._name}: {_told(error)}"
        return f"pushed to {self._hub.endpoint}/{self._name}"

    def _make(self) -> None:
        self._hub.create_repo(self._name, private=self._private, exist_ok=True)


@contextmanager
def _by_python_alone() -> Iterator[None]:
    """Hold while files are uploaded: a native client would pass by the guard of the network."""
    from huggingface_hub import constants

    before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


def _is_of_hub(error: Exception) -> bool:
    own = type(error).__module__.partition(".")[0] == "huggingface_hub"
    return own or is_of_client(error) or answers_later(error) is not None


def _told(error: BaseException | None) -> str:
    """Return the first line of what the Hub's client says, and of its causes: it adds advice."""
    said, cause = [], error
    while cause is not None:
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        said.append((lines[0] if lines else type(cause).__name__)[:_SHOWN])
        cause = cause.__cause__
    return ": ".join(dict.fromkeys(said))
