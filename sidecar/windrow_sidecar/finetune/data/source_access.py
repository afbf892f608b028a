"""Access of a job: directories, hosts, and credentials that are not its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from windrow.access import NetworkAccess
from windrow.conditions import Reason
from windrow.errors import UserError

# What a confined job may name. Others of fsspec reach files by another name (`local://`, `a::b`).
SCHEMES = ("", "file", "http", "https", "s3", "hf")
_PORTS = {"http": 80, "https": 443}
_FIELD = "spec.dataset.source"


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """Sources that a job may read from.

    Attributes:
        trees: directories with models and rows; None: every file that the process can read.
        never: directories that are not read although a tree holds them.
        network: hosts; None: all of them.
        pod_credentials: whether a bucket or the Hub may be asked with the credentials of the pod or
            its node.
        serves_model: whether decode serves the job's model, which is read where decode reads it;
            None: an older operator does not say.
        preparation_s: computing time that the job's rows may take; None: as many rows need.
        namespace: of the job; what jobs of others have left is not read as an adapter.
    """

    trees: tuple[Path, ...] | None = None
    never: tuple[Path, ...] = ()
    network: NetworkAccess | None = None
    pod_credentials: bool = True
    serves_model: bool | None = None
    namespace: str = ""
    preparation_s: float | None = None

    def check_url(self, url: str, field: str = _FIELD) -> None:
        """Refuse a URL that the job may not read, by its scheme and host as they are written.

        Raises:
            UserError: says what may be read, and who can allow more.
        """
        if self.trees is None and self.network is None:
            return
        if "::" in url and url.partition("://")[0].lower() in _PORTS:
            raise _refusal(
                f"{url.partition('?')[0]!r} has a ::, by which clients join two sources",
                field,
                "Write an IPv6 address with all its parts, like [2001:db8:0:0:0:0:0:1].",
            )
        if "::" in url or (scheme := urlsplit(url).scheme) not in SCHEMES:
            raise _refusal(
                f"{url.partition('?')[0]!r} is not a source that a job beside decode may read",
                field,
                "Name a path on a volume, or a URL of http(s), s3 or hf.",
            )
        if scheme in _PORTS:
            self.check_endpoint(url, field)

    def check_endpoint(self, url: str, field: str) -> None:
        """Refuse a host of a URL of http(s) that the job may not ask; addresses are checked later.

        Raises:
            UserError: see `check_url`.
        """
        if self.network is None:
            return
        parts = urlsplit(url)
        try:
            port = parts.port or _PORTS.get(parts.scheme, 443)
        except ValueError as error:
            raise _refusal(f"{url.partition('?')[0]!r}: {error}", field, "Correct it.") from error
        if why := self.network.host_refusal(parts.hostname or "", port):
            raise _refusal(why.partition(". ")[0], field, f"{why.partition('. ')[2]}.")

    def check_bucket(self, secret: str, field: str) -> None:
        """Refuse a bucket without a Secret where the pod's own credentials are not the job's.

        Raises:
            UserError: names the field that the job can set, and the one of the policy.
        """
        if not secret and not self.pod_credentials:
            raise UserError(
                "the job may not use the credentials of the pod or its node",
                field=field,
                remedy="Name a Secret of the job's namespace with AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY. Who keeps the HarvestPolicy can set "
                "spec.access.podCredentials.",
                reason=Reason.CREDENTIALS_MISSING,
            )

    @classmethod
    def of(
        cls, document: Mapping[str, Any] | None, writable: Iterable[str], namespace: str = ""
    ) -> SourceAccess:
        """Return what the agent wrote of a job's access (`as_document`); None: no limits are known.

        Args:
            document: `access` of a job's file.
            writable: the trees that the job may write, which it may read as well.
            namespace: of the job.
        """
        if document is None:
            return cls()
        trees = (*writable, *document["readableTrees"])
        sources = tuple(document["sources"]) if document["listsSources"] else None
        return cls(
            trees=tuple(map(Path, dict.fromkeys(trees))),
            never=tuple(map(Path, document["never"])),
            network=NetworkAccess(sources, private=bool(document["privateSources"])),
            pod_credentials=bool(document["podCredentials"]),
            serves_model=document.get("servesModel"),
            namespace=namespace,
            preparation_s=document.get("preparationSeconds") or None,
        )


# Of a user's own machine.
UNCONFINED = SourceAccess()
NO_ACCESS = SourceAccess((), network=NetworkAccess(sources=()), pod_credentials=False)


def _refusal(problem: str, field: str, remedy: str) -> UserError:
    return UserError(problem, field=field, remedy=remedy, reason=Reason.DATASET_UNREADABLE)
