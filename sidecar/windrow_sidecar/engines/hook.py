"""The step hook: the interface that a decode engine calls before and after each step.

The built-in engine and the SGLang plugin call the same hook, on the thread of the decode loop. A
hook decides; the engine acts (it sets its own partition, holds admission back). What a hook raises
never reaches decode: `FailClosed` switches it off and gives everything back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from windrow_sidecar.qos.view import Grant

_log = logging.getLogger(__name__)

LONGEST_GAP_NS = 1_000_000_000  # whatever a grant says


class StepInput(NamedTuple):
    """State of the engine at the start of a step. Times: nanoseconds of CLOCK_MONOTONIC.

    A named tuple, since each step makes one and compiled code reads it: `STEP_FIELDS` are the same.
    """

    step: int
    start_ns: int  # as StepEvent counts it: the end of the step before, when one was running
    batch: int  # requests that will get a token; 0: only prefill, or requests that find no room
    context_tokens: int  # sum over those, before the step
    waiting: int  # requests that have arrived and do not run; above 0 with batch 0: KV is short
    admitted_tokens: int  # context tokens that joined for this step
    slack_us: int  # least slack of a running request against its own objective; 0: not known
    prefill_tokens: int = (
        0  # computed in this step; such a step does not count for decode's latency
    )
    # Of requests without a first token, where this instance prefills and a policy has an objective
    # for it: prompt tokens still to compute, and how long ago the oldest arrived, microseconds.
    prompts_left: int = 0
    first_token_waited_us: int = 0
    # Under a policy that defers: when the first waiting request has to be admitted, where any of
    # them has a bound of its own (ns of CLOCK_MONOTONIC); 0: none has, and the policy's counts.
    due_ns: int = 0
    # That a request gets from this step, on average; above 1 where decode speculates.
    tokens: float = 1.0


class StepHook(Protocol):
    """Called by one thread, in this order: before_step, after_step; idle instead when none runs.

    Each call is part of a step's latency: no waiting, no lock, no system call that may sleep.
    """

    @property
    def request_objective_us(self) -> int:
        """TPOT that a request is held to over its whole life; 0: nobody asks for slack.

        Above 0 the engine says in `StepInput.slack_us` how much running requests have left.
        """
        ...

    @property
    def first_token_objective_us(self) -> int:
        """Time to first token that the policy keeps; 0: nobody asks for prompts that wait.

        Above 0 an engine that prefills says in `StepInput.prompts_left` what waits, and calls
        `after_prompt` and `after_first_token`.
        """
        ...

    @property
    def deferral_us(self) -> int:
        """Bound on holding back a request that brings none of its own; 0: none is held.

        Above 0 the engine says in `StepInput.due_ns` when requests with bounds of their own are
        due.
        """
        ...

    def before_step(self, facts: StepInput) -> Grant:
        """Decide for the step that starts now. The engine obeys `decode_units` and admission."""
        ...

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Take note of how long it took. Its own cost counts for the next step."""
        ...

    def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
        """Take note of a pass that computed so many prompt tokens under `grant`."""
        ...

    def after_first_token(self, after_us: int) -> None:
        """Take note that a request got its first token so long after it arrived."""
        ...

    def idle(self, now_ns: int) -> Grant:
        """Decide for an engine that runs nothing: when it runs dry, then every 50 ms at most."""
        ...

    def close(self) -> None:
        """The engine ends: revoke what is granted. Nothing is called afterwards."""
        ...


def wait_for_turn(grant: Grant, clock: Callable[[], int]) -> None:
    """Leave the device to the worker until the grant's gap is over; a second at most.

    `clock`: nanoseconds of CLOCK_MONOTONIC.
    """
    if grant.gap_until_ns:
        left_ns = min(grant.gap_until_ns - clock(), LONGEST_GAP_NS)
        if left_ns > 0:
            time.sleep(left_ns / 1e9)


class NullHook:
    """Serves alone: every unit to decode."""

    request_objective_us = 0
    first_token_objective_us = 0
    deferral_us = 0

    def before_step(self, facts: StepInput) -> Grant:
        """Take all units."""
        return _ALL_TO_DECODE

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Keep nothing."""

    def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
        """Keep nothing."""

    def after_first_token(self, after_us: int) -> None:
        """Keep nothing."""

    def idle(self, now_ns: int) -> Grant:
        """Take all units."""
        return _ALL_TO_DECODE

    def close(self) -> None:
        """Hold nothing."""


_ALL_TO_DECODE = Grant()


def first_due_ns(waiting: Iterable[tuple[int, int]], deferral_us: int) -> int:
    """Return when the first of the waiting requests is due; 0 where none has a bound of its own.

    Args:
        waiting: of each request: when it arrived (ns of CLOCK_MONOTONIC), and how long it may be
            held back (microseconds; 0: as long as the policy says).
        deferral_us: see `StepHook.deferral_us`.
    """
    if not deferral_us:
        return 0
    bounds = [*waiting]
    if not any(own_us for _, own_us in bounds):
        return 0
    return min(arrived_ns + 1000 * (own_us or deferral_us) for arrived_ns, own_us in bounds)


def least_slack_us(begun: Iterable[tuple[int, int]], now_ns: int, objective_us: int) -> int:
    """Return how much sooner than the objective allows the tokens of a batch have come.

    That of the request that has saved the least; below 0 it is behind. 0 where no request is held
    to an objective, or one has only just begun.

    Args:
        begun: of each request that has had a token: when it came (ns of CLOCK_MONOTONIC), and how
            many have come since.
        now_ns: the step's start.
        objective_us: see `StepHook.request_objective_us`.
    """
    if not objective_us:
        return 0
    slacks = (tokens * objective_us - (now_ns - first_ns) // 1000 for first_ns, tokens in begun)
    return min(slacks, default=0)


class FailClosed:
    """A hook that cannot harm decode: its first exception switches it off for good.

    It is then closed (which revokes what it granted; what that raises is logged too), and
    `on_failure` hears of it, once. Decode goes on with all units.
    """

    def __init__(
        self, inner: StepHook, *, on_failure: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._inner, self._on_failure = inner, on_failure
        self.failed = False

    # Whatever a hook raises is our failure and not serving's, hence the blind excepts: they are the
    # one place where everything is caught, and they log and change the state.

    @property
    def request_objective_us(self) -> int:
        """Ask the inner hook."""
        try:
            return int(self._inner.request_objective_us)
        except Exception as error:  # noqa: BLE001
            self._switch_off("request_objective_us", error)
            return 0

    @property
    def first_token_objective_us(self) -> int:
        """Ask the inner hook."""
        try:
            return int(self._inner.first_token_objective_us)
        except Exception as error:  # noqa: BLE001
            self._switch_off("first_token_objective_us", error)
            return 0

    @property
    def deferral_us(self) -> int:
        """See `StepHook.deferral_us`; 0 once it is off."""
        if self.failed:
            return 0
        try:
            return int(self._inner.deferral_us)
        except Exception as error:  # noqa: BLE001 - decode goes on whatever it is
            self._switch_off("deferral_us", error)
            return 0

    def before_step(self, facts: StepInput) -> Grant:
        """Ask the inner hook."""
        try:
            return _grant_of(self._inner.before_step(facts))
        except Exception as error:  # noqa: BLE001
            return self._switch_off("before_step", error)

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Tell the inner hook."""
        try:
            self._inner.after_step(end_ns, latency_us)
        except Exception as error:  # noqa: BLE001
            self._switch_off("after_step", error)

    def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
        """Tell the inner hook."""
        try:
            self._inner.after_prompt(tokens, latency_us, grant)
        except Exception as error:  # noqa: BLE001
            self._switch_off("after_prompt", error)

    def after_first_token(self, after_us: int) -> None:
        """Tell the inner hook."""
        try:
            self._inner.after_first_token(after_us)
        except Exception as error:  # noqa: BLE001
            self._switch_off("after_first_token", error)

    def idle(self, now_ns: int) -> Grant:
        """Ask the inner hook."""
        try:
            return _grant_of(self._inner.idle(now_ns))
        except Exception as error:  # noqa: BLE001
            return self._switch_off("idle", error)

    def close(self) -> None:
        """Close the inner hook."""
        try:
            self._inner.close()
        except Exception as error:  # noqa: BLE001
            self._switch_off("close", error)

    def give_up(self, error: Exception) -> None:
        """Switch the inner hook off for a reason that the engine has found, once."""
        if not self.failed:
            self._switch_off("the engine's check", error)

    def _switch_off(self, method: str, error: Exception) -> Grant:
        _log.error("harvesting is switched off: %s failed", method, exc_info=error)
        self.failed = True
        broken, self._inner = self._inner, NullHook()
        self._on_failure(f"{method}: {error!r}")
        if method != "close":
            try:
                broken.close()
            except Exception:  # noqa: BLE001
                _log.exception("the step hook could not be closed either")
        return _ALL_TO_DECODE


def _grant_of(answer: object) -> Grant:
    if not isinstance(answer, Grant):
        raise TypeError(f"a step hook answers with a Grant, not {answer!r}")
    return answer
