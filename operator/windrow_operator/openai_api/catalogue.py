"""Base models that a namespace may train: those that slots of its policies serve."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from windrow.crd import HARVEST_POLICY, HARVEST_SLOT
from windrow_operator import policies, tenancy
from windrow_operator.kube import Kube, ObjectNotFound, kind_path
from windrow_operator.openai_api.jobs import unix
from windrow_operator.openai_api.refusals import invalid
from windrow_operator.rate_limit import Forgetful

_KNOWN_S: Final = 5.0
_MOST_REMEMBERED: Final = 1024
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model that at least one slot serves.

    Attributes:
        name: as decode was started with.
        created_at: Unix seconds since which a slot has it.
    """

    name: str
    created_at: int

    @property
    def body(self) -> dict[str, Any]:
        """The answer of the API."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created_at,
            "owned_by": "windrow",
        }


class ModelCatalogue:
    """Knows what slots serve.

    Args:
        kube: lists slots and policies.
        named: `spec.policies` of the jobs that the endpoint makes.
        offering: namespaces whose policies are offered to every job.
    """

    def __init__(self, kube: Kube, named: Sequence[str], offering: Collection[str]) -> None:
        self._kube, self._named, self._offering = kube, tuple(named), frozenset(offering)
        self._known: Forgetful[list[ServedModel]] = Forgetful(_KNOWN_S, _MOST_REMEMBERED)

    async def models(self, namespace: str) -> list[ServedModel]:
        """Return the models that jobs of a namespace may train, by name."""
        now_s = asyncio.get_running_loop().time()
        if (known := self._known.get(namespace, now_s)) is not None:
            return known
        try:
            about = await self._kube.get(f"/api/v1/namespaces/{namespace}")
        except ObjectNotFound:
            about = {"metadata": {}}
        labels = about["metadata"].get("labels") or {}
        slots, bodies = await asyncio.gather(
            self._kube.list(kind_path(HARVEST_SLOT)), self._kube.list(kind_path(HARVEST_POLICY))
        )
        found = self._of(slots, bodies, namespace, labels)
        self._known.put(namespace, found, now_s)
        return found

    def _of(
        self,
        slots: Sequence[Mapping[str, Any]],
        bodies: Sequence[Mapping[str, Any]],
        namespace: str,
        labels: Mapping[str, str],
    ) -> list[ServedModel]:
        open_policies = set()
        for body in bodies:
            offered = body["metadata"]["namespace"] in self._offering
            policy = replace(policies.policy_of(body), offered=offered)
            if tenancy.may_run_under(policy, namespace, labels, self._named):
                open_policies.add(policy.key)
        since: dict[str, int] = {}
        for slot in slots:
            meta = slot["metadata"]
            policy_key = f"{meta['namespace']}/{(slot.get('status') or {}).get('policy')}"
            model = slot["spec"].get("model")
            if model and policy_key in open_policies:
                created = unix(meta.get("creationTimestamp")) or 0
                since[model] = min(created, since.get(model, created))
        return [ServedModel(name, at) for name, at in sorted(since.items())]

    async def resolve(self, namespace: str, name: str) -> str:
        """Return the served model that a caller means: by its whole name, or its last part.

        Raises:
            CallRefused: no slot serves it; names those that are served.
        """
        served = [model.name for model in await self.models(namespace)]
        plain = posixpath.normpath(name)
        if found := [each for each in served if posixpath.normpath(each) == plain]:
            return found[0]
        parts = [each for each in served if posixpath.basename(posixpath.normpath(each)) == name]
        if len(parts) == 1:
            return parts[0]
        listed = ", ".join(served[:_SHOWN]) or "none at the moment"
        raise invalid(
            "model",
            f"{name[:128]!r} {'means several models' if parts else 'is not served by any slot'}",
            f"Write one of those that are served: {listed}.",
            code="model_not_found",
        )
