"""Decide whether what the operator last said of the policy still holds. Time is an argument."""

from __future__ import annotations

from windrow.rundir import DEFAULT_LEASE_S


class PolicyLease:
    """A policy that holds for a while after each word of the operator. Seconds of one clock."""

    def __init__(self) -> None:
        self._lease_s = DEFAULT_LEASE_S
        self._heard_s = 0.0
        self._renews = False
        self._has_policy = False

    def hello(self, now_s: float, *, renews: bool) -> None:
        """Note an operator's hello. One that does not renew holds by its open stream."""
        self._renews, self._heard_s = renews, now_s

    def heard(self, now_s: float) -> None:
        """Note any word of the operator."""
        self._heard_s = now_s

    def told(self, lease_s: float) -> None:
        """Note a policy and its lease; 0: the default one."""
        self._lease_s, self._has_policy = lease_s or DEFAULT_LEASE_S, True

    def ended(self, now_s: float, *, attached: bool) -> str:
        """Return why the policy no longer holds; empty: it holds, or none was received."""
        if attached and not self._renews:
            self._heard_s = now_s
        if not self._has_policy or now_s - self._heard_s < self._lease_s:
            return ""
        return (
            f"the operator was not heard for {self._lease_s:g} s, the lease of the policy; "
            "harvesting goes on when it is heard again"
        )
