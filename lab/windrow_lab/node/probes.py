"""Probes: what a container is asked, and what its answers in a row mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from windrow_lab.node.expansion import POD_ADDRESS, ConfigError

Json = dict[str, Any]

# Runs a command of a container; returns its exit status, or None when it took too long.
Execute = Callable[[Sequence[str], float], Awaitable[int | None]]


@dataclass(frozen=True)
class Probe:
    """One probe as the pod's spec says it, with the defaults of Kubernetes; times in seconds."""

    action: Json
    initial_delay: float
    period: float
    timeout: float
    success_threshold: int
    failure_threshold: int
    # Replaces the pod's grace period when this probe ends the container; None: it does not.
    grace_seconds: float | None

    @classmethod
    def of(cls, spec: Json | None) -> Probe | None:
        """Read a probe of a container's spec, None where there is none."""
        if spec is None:
            return None
        return cls(
            spec,
            spec.get("initialDelaySeconds", 0),
            spec.get("periodSeconds", 10),
            spec.get("timeoutSeconds", 1),
            spec.get("successThreshold", 1),
            spec.get("failureThreshold", 3),
            spec.get("terminationGracePeriodSeconds"),
        )


@dataclass(frozen=True)
class Streak:
    """Count of equal answers in a row."""

    probe: Probe
    ok: bool = False
    length: int = 0

    def after(self, ok: bool) -> Streak:
        """Return the streak that includes one more answer."""
        return Streak(self.probe, ok, self.length + 1 if ok == self.ok else 1)

    @property
    def verdict(self) -> bool | None:
        """True or False once the probe's threshold is reached, None before."""
        needed = self.probe.success_threshold if self.ok else self.probe.failure_threshold
        return self.ok if self.length >= needed else None


@dataclass(frozen=True)
class ProbeResult:
    """Result of one call of a probe."""

    ok: bool
    message: str


class Prober:
    """Asks containers; one HTTP client for all of them."""

    def __init__(self) -> None:
        # Certificates are not checked, as a kubelet does not.
        self._client = httpx.AsyncClient(verify=False, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(self, probe: Probe, ports: Mapping[str, int], execute: Execute) -> ProbeResult:
        """Call a probe once; raises ConfigError when it is of an unknown kind."""
        action = probe.action
        if "httpGet" in action:
            return await self._ask_http(action["httpGet"], ports, probe.timeout)
        if "tcpSocket" in action:
            return await _ask_tcp(action["tcpSocket"], ports, probe.timeout)
        if "exec" in action:
            status = await execute(action["exec"]["command"], probe.timeout)
            return ProbeResult(
                status == 0, "timed out" if status is None else f"exit status {status}"
            )
        raise ConfigError(
            "a process node knows httpGet, tcpSocket and exec probes only", field="probe"
        )

    async def _ask_http(
        self, action: Json, ports: Mapping[str, int], timeout_seconds: float
    ) -> ProbeResult:
        host = action.get("host") or POD_ADDRESS
        port = _port_number(action["port"], ports)
        scheme = action.get("scheme", "HTTP").lower()
        headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
        url = f"{scheme}://{host}:{port}/{action.get('path', '/').lstrip('/')}"
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._client.get(url, headers=headers, timeout=timeout_seconds)
        except (httpx.HTTPError, TimeoutError) as error:
            return ProbeResult(False, f"{url}: {error or type(error).__name__}")
        return ProbeResult(answer.status_code < 400, f"{url}: status {answer.status_code}")


async def _ask_tcp(action: Json, ports: Mapping[str, int], timeout_seconds: float) -> ProbeResult:
    host, port = action.get("host") or POD_ADDRESS, _port_number(action["port"], ports)
    try:
        async with asyncio.timeout(timeout_seconds):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        return ProbeResult(False, f"{host}:{port}: {error or type(error).__name__}")
    writer.close()
    return ProbeResult(True, "connected")


def _port_number(port: int | str, ports: Mapping[str, int]) -> int:
    if isinstance(port, int):
        return port
    if port in ports:
        return ports[port]
    raise ConfigError(f"no port of the container is named {port!r}", field="probe")
