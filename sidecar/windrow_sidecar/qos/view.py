"""The records of the shared page: decode's view, the worker's offer, decode's grant.

`csrc/include/windrow/records.h` holds the same fields in the same order; a test keeps them equal.
A record passes whole: `page.publish_grant(grant)`, `Grant._make(page.read_grant())`. They are named
tuples, since decode makes one before every step: a frozen dataclass of 16 fields took 4.3 us, a
named tuple takes 0.8.
Times are nanoseconds of CLOCK_MONOTONIC. Compute units are cores on the host, SMs on a GPU.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

LEVELS_MAX = 9
UNKNOWN_US = (0,) * LEVELS_MAX  # of a tasklet that nobody has measured, by level


class Action(IntEnum):
    """Action that a grant asks of the worker."""

    PAUSE = 0
    GO = 1


class Phase(IntEnum):
    """Phase of a tasklet."""

    NONE = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    OPTIMIZER = 4


class View(NamedTuple):
    """Decode's state at the start of a step. Written by the decode process only."""

    step: int = 0
    start_ns: int = 0  # of this step
    batch: int = 0  # 0: idle
    context_tokens: int = 0
    waiting: int = 0
    admitted_tokens: int = 0  # context tokens that joined for this step
    free_chunks: int = 0
    objective_us: int = 0  # 0: no policy
    slack_us: int = 0  # perRequest: the least slack of a running request; below 0: in debt
    waited_us: int = 0  # how long requests have been waiting without a break; 0: none is
    heartbeat_ns: int = 0


class Offer(NamedTuple):
    """Next tasklet of the worker, as an offer. Written by the worker only."""

    job_epoch: int = 0  # 0: no job
    tasklet_id: int = 0  # next to run; grows by one with each
    phase: int = Phase.NONE
    layer_begin: int = 0
    layer_end: int = 0
    tokens: int = 0
    estimates_us: tuple[int, ...] = UNKNOWN_US  # by index of the level; 0: unknown
    memory_delta_bytes: int = 0  # of the next tasklet
    resident_layers: int = 0  # whose weights are in memory
    starving: int = 0  # 1: the next tasklet cannot run (data, memory, weights)
    in_flight_us: int = 0  # estimated time of what runs now; 0: quiet
    pause_epoch_seen: int = 0
    wanted_chunks: int = 0  # in all, with those held
    held_chunks: int = 0
    tokens_done: int = 0
    heartbeat_ns: int = 0


class Grant(NamedTuple):
    """Rights of both sides from now on. A policy answers with it; the guard may reduce it."""

    action: int = Action.PAUSE
    finetune_units: int = 0
    decode_units: int = 0  # what decode takes for itself (0: all)
    n_tasklets: int = 0  # at most so many until the next grant; 0: no such bound
    budget_us: int = 0  # at most so long until the next grant; 0: no such bound
    window_tokens: int = 0  # 0: no windows
    gap_until_ns: int = 0  # decode computes from then on, the worker until then; 0: no turns
    pause_epoch: int = 0  # grows whenever a grant is revoked; set by the hook
    hold_admission_until_ns: int = 0  # for the engine
    predicted_us: int = 0  # step latency under this decision
    chunks: int = 0  # how many the worker may hold; fewer than it has: give back
    in_flight_bound_us: int = 0
    heartbeat_ns: int = 0
