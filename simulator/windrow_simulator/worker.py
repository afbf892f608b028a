"""The worker beside a simulated decode: tokens by the time and the units that it is granted.

It is a stream of tasklets of equal length, counted and not queued one by one: a grant takes effect
at the end of the tasklet that runs, its budget bounds what runs until the next grant, and what its
frozen layers and activations want of the lent memory bounds its rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from windrow_sidecar.qos.view import LEVELS_MAX, Action, Grant, Offer, Phase
from windrow_simulator.truth import Truth, WorkerQueue

# Of its shortest useful run; what is smaller is not worth a launch.
_LEAST_TASKLET_US = 200.0
_FORWARD_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory that a job wants of the lent chunks.

    Attributes:
        needed: below so many chunks nothing runs (boundaries of a micro-batch; two layers).
        wanted: beyond so many nothing gets faster.
        frozen: of those, chunks that hold frozen layers; 0: decode's own weights are shared.
        layers: frozen layers of the model.
        swapped_us: to bring all frozen layers in once from the host.
        group_tokens: that pass the layers together while they are in.
        rate_at_least: share of the full rate with `needed` chunks only, where every layer's
            activations are computed a second time.
    """

    needed: int = 0
    wanted: int = 0
    frozen: int = 0
    layers: int = 1
    swapped_us: float = 0.0
    group_tokens: int = 2048
    rate_at_least: float = 0.75


class SimulatedWorker:
    """Obeys grants, makes tokens and says so in its offers. Times: nanoseconds."""

    def __init__(
        self,
        truth: Truth,
        levels: tuple[int, ...],
        memory: WorkerMemory,
        *,
        layer_tokens: int,
        layers: int,
        draw: random.Random,
        queue: WorkerQueue | None = None,
    ) -> None:
        self._truth, self._levels, self._memory = truth, levels[:LEVELS_MAX], memory
        self._queue = queue or WorkerQueue()
        self._layer_tokens, self._layers, self._draw = layer_tokens, layers, draw
        self.clock: Callable[[], int] = lambda: 0
        self.held_chunks = 0
        self.job_epoch = 0
        self.tokens = 0.0
        self.unit_ns = 0.0
        self._grant = Grant()
        self._used_us, self._ran = 0.0, 0
        self._until_ns = 0  # until when what was launched under an older grant still runs
        self._until_units = 0
        self._epoch_seen = 0
        self._rates: dict[tuple[int, bool, int], float] = {}
        self._estimates: dict[int, tuple[int, ...]] = {}
        self._memory_share = 1.0
        self._heed_memory()

    def assign(self, job_epoch: int) -> None:
        """Work for that placement from now on; 0: no job."""
        self.job_epoch = job_epoch

    @property
    def starving(self) -> bool:
        """True where its memory does not hold one tasklet's tensors."""
        return self.held_chunks < self._memory.needed

    def hold(self, chunks: int) -> None:
        """Note that it has so many lent chunks now."""
        if chunks != self.held_chunks:
            self.held_chunks = chunks
            self._heed_memory()

    def granted(self, grant: Grant) -> None:
        """A new grant is on the page."""
        now_ns = self.clock()
        old = self._units_at(now_ns)
        new = self._units(grant)
        if new < old and now_ns >= self._until_ns and not self._grant.gap_until_ns:
            # The tasklet that runs has an even chance to be anywhere in its length.
            left_us = self._draw.random() * self._tasklet_us(old)
            self._until_ns, self._until_units = now_ns + int(left_us * 1e3), old
        self._grant, self._used_us, self._ran = grant, 0.0, 0

    def offer(self) -> Offer:
        """Return what the page shows of it at this moment."""
        if not self.job_epoch:
            return Offer()
        memory = self._memory
        now_ns = self.clock()
        units = self._units_at(now_ns)
        quiet = now_ns >= self._until_ns
        if quiet:
            self._epoch_seen = self._grant.pause_epoch
        in_flight = 0
        if not quiet:
            in_flight = max(1, (self._until_ns - now_ns) // 1000)
        elif units and not self.starving:
            in_flight = int(self._tasklet_us(units))
        position = self.tokens / memory.group_tokens
        share = position - int(position)
        forward = share < _FORWARD_SHARE
        done = share / _FORWARD_SHARE if forward else (share - 0.5) / (1 - _FORWARD_SHARE)
        layer = int(done * self._layers)
        return Offer(
            job_epoch=self.job_epoch,
            tasklet_id=int(self.tokens),
            phase=Phase.FORWARD if forward else Phase.BACKWARD,
            layer_begin=layer,
            layer_end=min(self._layers, layer + 1),
            tokens=self._tasklet_tokens(units),
            estimates_us=self._estimates_us(units),
            resident_layers=self._resident(),
            starving=int(self.starving),
            in_flight_us=in_flight,
            pause_epoch_seen=self._epoch_seen,
            wanted_chunks=memory.wanted,
            held_chunks=self.held_chunks,
            tokens_done=int(self.tokens),
        )

    def interference_units(self, now_ns: int) -> int:
        """Units on which it works at this moment, as decode feels it."""
        if now_ns < self._until_ns:
            return self._until_units
        if not self.job_epoch or self.starving:
            return 0
        return self._units_at(now_ns)

    def run(self, begin_ns: int, end_ns: int, *, beside_decode: bool) -> float:
        """Work from one moment to another under the newest grant; returns the tokens made."""
        if not self.job_epoch or end_ns <= begin_ns or self.starving:
            return 0.0
        made = 0.0
        if begin_ns < self._until_ns:  # what an older grant had launched
            until = min(end_ns, self._until_ns)
            made += self._make(self._until_units, (until - begin_ns) / 1e3, beside_decode)
            begin_ns = until
        units = self._units_at(begin_ns)
        if units and end_ns > begin_ns:
            us = self._within_budget(units, (end_ns - begin_ns) / 1e3)
            made += self._make(units, us, beside_decode)
        return made

    def work_share(self, now_ns: int, us: float) -> float:
        """Share of so long a stretch from now on during which it works."""
        left_us = max(0.0, (self._until_ns - now_ns) / 1e3)
        units = self._units_at(now_ns)
        working = min(us, left_us)
        if units:
            working += self._left_us(units, us - working)
        return working / us

    def boundary_ns(self) -> int:
        """Return how long until the tasklet that runs has ended; 0: none does."""
        now_ns = self.clock()
        if now_ns < self._until_ns:
            return self._until_ns - now_ns
        return int(self._draw.random() * self._tasklet_us(self._units_at(now_ns)) * 1e3)

    def _within_budget(self, units: int, us: float) -> float:
        us = self._left_us(units, us)
        self._used_us += us
        return us

    def _left_us(self, units: int, us: float) -> float:
        """Return what the grant leaves of so long; of a budget and of a gap, whole tasklets."""
        grant = self._grant
        if not (grant.budget_us or grant.n_tasklets or grant.gap_until_ns):
            return us
        one_us = self._tasklet_us(units)
        if grant.budget_us:
            whole_us = grant.budget_us // one_us * one_us
            us = min(us, max(0.0, whole_us - self._used_us))
        if grant.n_tasklets:
            us = min(us, max(0.0, grant.n_tasklets * one_us - self._used_us))
        if grant.gap_until_ns:
            us = us // one_us * one_us
        return us

    def _make(self, units: int, us: float, beside_decode: bool) -> float:
        made = self._rate(units, beside_decode) * us
        self.tokens += made
        self.unit_ns += units * us * 1e3
        return made

    def _rate(self, units: int, beside_decode: bool) -> float:
        tokens = self._tasklet_tokens(units)
        key = (units, beside_decode, tokens)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._truth.finetune_rate(units, beside_decode=beside_decode)
            rate = self._queue.bound(rate, tokens)
            rate = min(rate * self._memory_share, self._swap_bound())
            self._rates[key] = rate
        return rate

    def _heed_memory(self) -> None:
        """The rate that the chunks allow: layers brought in again, activations computed again."""
        memory = self._memory
        self._rates.clear()
        room = memory.wanted - memory.needed
        spare = self.held_chunks - memory.needed
        filled = min(1.0, max(0.0, spare / room)) if room > 0 else 1.0
        self._memory_share = memory.rate_at_least + (1 - memory.rate_at_least) * filled
        if memory.wanted == memory.needed:
            self._memory_share = 1.0

    def _resident(self) -> int:
        memory = self._memory
        if not memory.frozen:
            return memory.layers
        return min(memory.layers, self.held_chunks * memory.layers // memory.frozen)

    def _swap_bound(self) -> float:
        """Tokens a microsecond that the host's link allows: each pass brings in what is not in."""
        memory = self._memory
        missing = memory.layers - self._resident()
        if not memory.frozen or missing <= 0:
            return float("inf")
        return memory.group_tokens / (2 * memory.swapped_us * missing / memory.layers)

    def _tasklet_us(self, units: int) -> float:
        """A layer's forward or backward, cut to the bound of the grant or to its window."""
        if units <= 0:
            return 0.0
        return self._layer_us(units) * self._tasklet_tokens(units) / self._layer_tokens

    def _tasklet_tokens(self, units: int) -> int:
        """Return the tokens of the next tasklet: as many as the bound allows on so many units."""
        grant, tokens = self._grant, self._layer_tokens
        whole_us = self._layer_us(units or self._levels[-1])
        if grant.window_tokens:
            tokens = min(tokens, grant.window_tokens)
        if grant.in_flight_bound_us:
            bound_us = max(_LEAST_TASKLET_US, grant.in_flight_bound_us)
            tokens = min(tokens, int(self._layer_tokens * bound_us / whole_us))
        return max(1, tokens)

    def _layer_us(self, units: int) -> float:
        """One phase of one layer for its tokens."""
        rate = self._truth.finetune_rate(units, beside_decode=False)
        return self._layer_tokens / rate / (2 * self._layers)

    def _estimates_us(self, units: int) -> tuple[int, ...]:
        """Return the estimate of the next tasklet on each level, the whole device last."""
        tokens = self._tasklet_tokens(units)
        known = self._estimates.get(tokens)
        if known is None:
            share = tokens / self._layer_tokens
            each = [max(1, int(self._layer_us(level) * share)) for level in self._levels]
            known = self._estimates[tokens] = tuple(each + [0] * (LEVELS_MAX - len(each)))
        return known

    def _units_at(self, now_ns: int) -> int:
        """Return the units of the newest grant; none once its gap is over."""
        grant = self._grant
        if grant.gap_until_ns and now_ns >= grant.gap_until_ns:
            return 0
        return self._units(grant)

    @staticmethod
    def _units(grant: Grant) -> int:
        return grant.finetune_units if grant.action == Action.GO else 0


class PlainWorker(SimulatedWorker):
    """A plain process beside decode: on all units at all times, whatever is granted."""

    def granted(self, grant: Grant) -> None:
        """Ignore it."""

    def hold(self, chunks: int) -> None:
        """Have memory of its own."""
        super().hold(self._memory.wanted)

    def run_freely(self) -> None:
        """Begin."""
        self.hold(0)
        self._grant = Grant(Action.GO, self._levels[-1])
