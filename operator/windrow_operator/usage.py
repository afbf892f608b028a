"""Count the device seconds that jobs have had today (UTC), by policy and namespace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from windrow_operator.model import Usage


class UsageLedger:
    """Use under each policy, by the policy's key, on its newest day."""

    def __init__(self) -> None:
        self._used: dict[str, Usage] = {}

    def clear(self) -> None:
        """Forget everything: another leader has counted."""
        self._used.clear()

    def take_up(self, policy_key: str, status: Mapping[str, Any]) -> None:
        """Go on from a policy's status, unless this leader has counted already."""
        written = status.get("usage")
        if written and policy_key not in self._used:
            by_namespace = {
                entry["namespace"]: float(entry["gpuSeconds"])
                for entry in written.get("namespaces") or ()
            }
            seconds = float(written["gpuSeconds"])
            self._used[policy_key] = Usage(written["day"], seconds, by_namespace)

    def charge(
        self, policy_key: str, seconds: float, tenants: Iterable[str], now: datetime
    ) -> None:
        """Count device seconds of a slot of this policy, shared by the jobs of `tenants`."""
        usage = self.today(policy_key, now)
        sharers = list(tenants)
        by_namespace = dict(usage.by_namespace)
        for namespace in sharers:
            before = by_namespace.get(namespace, 0.0)
            by_namespace[namespace] = before + seconds / len(sharers)
        self._used[policy_key] = Usage(_day(now), usage.seconds + seconds, by_namespace)

    def today(self, policy_key: str, now: datetime) -> Usage:
        """Return what jobs have had under this policy today."""
        usage = self.newest(policy_key)
        return usage if usage.day == _day(now) else Usage(_day(now))

    def newest(self, policy_key: str) -> Usage:
        """Return what jobs have had on the newest day on which they had anything."""
        return self._used.get(policy_key, Usage())


def _day(now: datetime) -> str:
    return now.astimezone(UTC).date().isoformat()
