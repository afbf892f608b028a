"""Sum up what was harvested by tenant, from Prometheus where there is one, else from jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import httpx

from windrow.errors import Transient, UserError
from windrow.metrics import HARVESTED_SECONDS, HARVESTED_TOKENS

_PERIOD = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIMEOUT_S = 30.0
# Bars of the page's plot.
_BARS = 28
_SHORTEST_BAR_MS = 15_000
_REMEMBERED = "1d"  # how long a counter that is not scraped is known


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Harvest of the jobs of a namespace.

    Attributes:
        tenant: namespace of the jobs.
        tokens: real ones of finished optimizer steps.
        device_hours: that workers had a device beside decode, those in which decode's guard kept
            them paused included; None: not known.
        worth: device hours at the price; None: not known, or no price was given.
    """

    tenant: str
    tokens: float
    device_hours: float | None
    worth: float | None


@dataclass(frozen=True, slots=True)
class UsageBar:
    """A stretch of time in the page's plot.

    Attributes:
        begin: of it, aware.
        tenant: namespace of the jobs.
        device_hours: in it.
        tokens: in it.
    """

    begin: datetime
    tenant: str
    device_hours: float
    tokens: float


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Harvest of a period.

    Attributes:
        begin: aware.
        end: aware.
        source: where the figures come from, in words.
        price: of a device hour; None: none was given.
        tenants: those with the most tokens first.
        bars: over time; empty without Prometheus.
    """

    begin: datetime
    end: datetime
    source: str
    price: float | None
    tenants: Sequence[TenantUsage]
    bars: Sequence[UsageBar] = ()

    @property
    def total(self) -> TenantUsage:
        """All tenants together."""
        hours = [t.device_hours for t in self.tenants if t.device_hours is not None]
        known = sum(hours) if hours or not self.tenants else None
        return TenantUsage(
            "all", sum(t.tokens for t in self.tenants), known, _worth(known, self.price)
        )


def parse_period(text: str) -> timedelta:
    """Return a period like `7d`, `12h`, `90m`.

    Raises:
        UserError: it is none.
    """
    found = _PERIOD.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise UserError(
            f"{text!r} is not a period", field="--since", remedy="Write it like 90m, 12h, 7d or 4w."
        )
    return timedelta(seconds=float(found[1]) * _UNITS[found[2]])


def from_prometheus(url: str, begin: datetime, end: datetime, price: float | None) -> UsageReport:
    """Return what a Prometheus knows of a period.

    Raises:
        Transient: it does not answer.
        UserError: what answers is no Prometheus.
    """
    bars = _bars(url, begin, end)
    tokens: dict[str, float] = {}
    hours: dict[str, float] = {}
    for bar in bars:
        tokens[bar.tenant] = tokens.get(bar.tenant, 0.0) + bar.tokens
        hours[bar.tenant] = hours.get(bar.tenant, 0.0) + bar.device_hours
    tenants = [
        TenantUsage(name, tokens[name], hours[name], _worth(hours[name], price)) for name in tokens
    ]
    return UsageReport(begin, end, f"Prometheus at {url}", price, _ordered(tenants), bars)


def from_status(
    jobs: Sequence[Mapping[str, Any]], begin: datetime, end: datetime, price: float | None
) -> UsageReport:
    """Return what the jobs themselves tell: tokens of those that ran in the period.

    All tokens of a job count, also those from before the period; deleted jobs are missing.
    """
    tokens: dict[str, float] = {}
    for body in jobs:
        status = body.get("status") or {}
        started, ended = (_time(status.get(name)) for name in ("startTime", "completionTime"))
        if started is None or started > end or (ended is not None and ended < begin):
            continue
        done = float((status.get("progress") or {}).get("tokens") or 0)
        tenant = body["metadata"]["namespace"]
        tokens[tenant] = tokens.get(tenant, 0.0) + done
    tenants = [TenantUsage(tenant, done, None, None) for tenant, done in tokens.items()]
    source = "status of the jobs (no Prometheus: device hours are not known)"
    return UsageReport(begin, end, source, price, _ordered(tenants))


def _ordered(tenants: Sequence[TenantUsage]) -> list[TenantUsage]:
    return sorted(tenants, key=lambda one: (-one.tokens, one.tenant))


def _worth(hours: float | None, price: float | None) -> float | None:
    return hours * price if hours is not None and price is not None else None


def _gained(series: str, within: str) -> str:
    """Return what counters gained in the time before; new or reset ones count from zero."""
    # Of a slot that is gone: as it last stood. One that comes back goes on from there.
    last = f"last_over_time({series}[{within}])"
    before = f"last_over_time({series}[{_REMEMBERED}] offset {within})"
    return f"sum by (job_namespace) (({last} - {before}) >= 0 or {last})"


def _bars(url: str, begin: datetime, end: datetime) -> list[UsageBar]:
    """Return bars that cover the whole period, so that they add up to what was gained in it."""
    period_ms, end_ms = round((end - begin).total_seconds() * 1e3), round(end.timestamp() * 1e3)
    count = max(1, min(_BARS, period_ms // _SHORTEST_BAR_MS))
    step_ms = max(1, period_ms // count)
    sums: dict[tuple[float, str], list[float]] = {}
    for index, (name, scale) in enumerate(
        ((HARVESTED_SECONDS.name, 1 / 3600), (HARVESTED_TOKENS.name, 1.0))
    ):
        asked = {
            "query": _gained(name, f"{step_ms}ms"),
            "start": (end_ms - (count - 1) * step_ms) / 1e3,
            "end": end_ms / 1e3,
            "step": step_ms / 1e3,
        }
        for one in _ask(url, "query_range", asked):
            for at, value in one["values"]:
                key = (float(at) - step_ms / 1e3, one["metric"].get("job_namespace", ""))
                sums.setdefault(key, [0.0, 0.0])[index] = float(value) * scale
    return [
        UsageBar(datetime.fromtimestamp(at, begin.tzinfo), tenant, *both)
        for (at, tenant), both in sorted(sums.items())
    ]


def _ask(url: str, path: str, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/{path}", params=asked, timeout=_TIMEOUT_S)
        body = answer.json()
    except httpx.HTTPError as error:
        later = timedelta(seconds=5)
        raise Transient(f"Prometheus at {url}: {error}", retry_after=later) from error
    except ValueError as error:
        raise UserError(
            f"{url} is not a Prometheus server: it answers {answer.status_code} without JSON",
            field="--prometheus",
            remedy="Give the address of its pages, like http://prometheus:9090.",
        ) from error
    if body.get("status") != "success":
        raise UserError(
            f"Prometheus at {url} refuses: {body.get('error', answer.status_code)}",
            field="--prometheus",
            remedy="Ask for a shorter period, or look at its log.",
        )
    return list(body["data"]["result"])


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
