"""Facts of decode's engine that decide about a job: who writes chats, which adapters it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from windrow.proto import agent_pb2
from windrow.served_chats import SERVERS


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of a server on the adapters that it loads.

    Attributes:
        off: it loads none.
        rank: the largest one; 0: not known.
        targets: names of modules that may be adapted; none: any.
    """

    off: bool = False
    rank: int = 0
    targets: tuple[str, ...] = ()


NO_LIMITS = AdapterLimits()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of the engine beside a worker.

    Attributes:
        chats: the form in which it gives requests with turns to its chat template, of
            `windrow.served_chats`; "": it takes none, or is not known.
        adapters: its limits on adapters.
    """

    chats: str = ""
    adapters: AdapterLimits = NO_LIMITS

    @classmethod
    def of_hello(cls, hello: agent_pb2.EngineHello | None) -> EngineFacts:
        """Return what an engine has said; None: none has called."""
        if hello is None:
            return cls()
        said = hello.adapters
        limits = AdapterLimits(said.off, said.rank, tuple(said.targets))
        # Of an engine of a later version it may be a form that is not known here.
        return cls(hello.chats if hello.chats in SERVERS else "", limits)

    @classmethod
    def of_document(cls, document: Mapping[str, Any] | None) -> EngineFacts:
        """Return what `document` has made."""
        if not document:
            return cls()
        limits = document.get("adapters") or {}
        targets = tuple(map(str, limits.get("targets") or ()))
        adapters = AdapterLimits(bool(limits.get("off")), int(limits.get("rank") or 0), targets)
        return cls(str(document.get("chats") or ""), adapters)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


NOTHING_KNOWN = EngineFacts()
