"""Ask the step hook before SGLang's decode steps, and hand over chunks between them.

Everything here runs on the scheduler's thread, between two of its own calls.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from windrow.errors import InvariantBroken
from windrow.eventlog import EventLog, RequestEvent, StepEvent
from windrow_sidecar._core import Arena
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.harvest import EngineAgentLink, HarvestHook
from windrow_sidecar.engines.hook import (
    FailClosed,
    StepInput,
    first_due_ns,
    least_slack_us,
    wait_for_turn,
)
from windrow_sidecar.engines.sglang.learning import StepTokens
from windrow_sidecar.engines.sglang.live_profile import LiveProfile
from windrow_sidecar.engines.sglang.queues import own_deferral_us, waiting_requests
from windrow_sidecar.engines.sglang.rank_lending import ChunkMoves, LeadingRank
from windrow_sidecar.engines.sglang.ranks import SchedulerRanks, raise_failure
from windrow_sidecar.engines.turns import Turns, turn_end_ns
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.view import Grant

_log = logging.getLogger(__name__)

# How often chunks are looked after while steps follow each other, and an idle scheduler asks.
_CHUNKS_EVERY_NS, _IDLE_EVERY_NS = 5_000_000, 5_000_000
# How long until empty chunks are looked for again, where there were none.
_NONE_EMPTY_NS = 100_000_000
# How long until they are looked for though decode's stream has never been found idle.
_LOOK_ANYWAY_NS = 1_000_000_000
# Of a long queue of prompts so many are looked at: more than that no instance computes in time.
_PROMPTS_SEEN = 64
# How long an idle scheduler may sleep while somebody reads its heartbeat.
IDLE_POLL_MS = 20


@dataclass(frozen=True, slots=True)
class HarvestParts:
    """Objects that a scheduler's steps are harvested with."""

    inner: HarvestHook
    hook: FailClosed
    link: EngineAgentLink
    partition: Partition
    splits: Partitioning
    arena: Arena
    allocator: Any  # LendingPagedAllocator
    log: EventLog | None
    reserved_tokens: int  # that each request is sure to find room for
    speculates: bool = False  # a step yields a request several tokens
    turns: Turns | None = None  # with a finetune thread of this process
    ranks: SchedulerRanks | None = None  # that the model is cut over
    lending: LeadingRank | None = None  # of their chunks; None with ranks: nothing is lent


@dataclass(frozen=True, slots=True)
class _Delivered:
    """Time and token count of a request's first delivered token here.

    0 until it has.
    """

    ns: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Step:
    """A decode step that has been launched and is not over."""

    facts: StepInput
    decision: Grant
    units: int
    hook_ns: int
    admitted: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A pass that computes prompts, launched and not over."""

    launched_ns: int
    tokens: int
    decision: Grant


class SchedulerHarvest:
    """The seam between one scheduler and the step hook.

    While no policy is known and nothing is lent it does nothing but ask whether that is still so.

    Args:
        parts: of the scheduler.
        profile: what steps are decided by; None: steps teach nothing.
        clock: nanoseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        parts: HarvestParts,
        profile: LiveProfile | None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._parts, self._profile, self._clock = parts, profile, clock
        self._step: _Step | None = None
        self._prompts: deque[_Prompt] = deque()  # with overlap scheduling two may be under way
        self._number = 0
        self._first: dict[str, _Delivered] = {}  # of each request here, by its ID
        self._tokens = StepTokens()
        self._processed_ns = self._looked_ns = self._idle_ns = 0
        self._hold_until_ns = self._free_again_ns = self._empty_looked_ns = 0
        self._confined = False

    @property
    def is_awake(self) -> bool:
        """True while a policy harvests or a worker still holds chunks."""
        return self._parts.inner.is_awake or self._parts.allocator.chunks.lent_pages > 0

    @property
    def holds_admission(self) -> bool:
        """True where the policy wants new requests to wait a moment longer."""
        return self._hold_until_ns > self._clock()

    def before_batch(self, scheduler: Any, batch: Any) -> None:  # noqa: ANN401
        """A batch is about to be launched."""
        now_ns = self._clock()
        previous_ns = self._end_step(now_ns)
        if not self.is_awake:
            self.leave()
            return
        mode = batch.forward_mode
        decodes = mode.is_decode()
        if not (decodes or mode.is_extend()):
            return
        if self._profile is not None:
            self._profile.before_batch(len(batch.reqs) if decodes else 0)
        facts = self._facts(scheduler, batch, previous_ns or now_ns, decodes=decodes)
        decision = self._take_share(self._parts.hook.before_step(facts), decodes=decodes)
        self._hold_until_ns = decision.hold_admission_until_ns
        self._parts.allocator.chunks.refresh()
        if decodes:
            # Ranks move together, with SGLang's next broadcast: this step runs where the last did.
            ranks = self._parts.ranks
            units = self._units_of(decision) if ranks is None else ranks.order.units
            hook_ns = self._clock() - now_ns
            self._step = _Step(facts, decision, units, hook_ns, facts.admitted_tokens)
        self._wait_for_turn(decision)
        if not decodes:
            self._prompts.append(_Prompt(self._clock(), facts.prefill_tokens, decision))

    def _wait_for_turn(self, decision: Grant) -> None:
        """Leave the device to finetuning until the grant's gap is over, wherever that runs."""
        parts, turns = self._parts, self._parts.turns
        if turns is None:
            wait_for_turn(decision, self._clock)
            return
        now_ns = self._clock()
        draining = parts.arena.counts()[4]
        until_ns = turn_end_ns(decision.gap_until_ns, now_ns, owed=draining > 0)
        if until_ns > now_ns:
            turns.lend(until_ns, self._clock)
            turns.lent += 1
            parts.partition.activate(parts.splits.units)  # it has set its own number of threads

    def after_batch(self, batch: Any) -> None:  # noqa: ANN401
        """The tokens of a batch have been delivered."""
        before_ns, self._processed_ns = self._processed_ns, self._clock()
        computed = self._prompt_of(batch)
        if computed is not None:
            # The device runs one pass after the other: this one began behind the one before.
            took_ns = self._processed_ns - max(computed.launched_ns, before_ns)
            self._parts.hook.after_prompt(
                computed.tokens, max(1, took_ns // 1000), computed.decision
            )
        if self._parts.speculates:
            self._tokens.delivered(batch.reqs)
        if self.is_awake:
            for request in batch.reqs:
                first = self._first.get(request.rid)
                if first is None:
                    continue
                if request.finished():
                    del self._first[request.rid]
                    self._finished(request, first.ns)
                elif not first.ns:
                    delivered = _Delivered(self._processed_ns, len(request.output_ids))
                    self._first[request.rid] = delivered
                    arrived_ns = _arrived_ns(request)
                    if computed is not None and arrived_ns:
                        after_us = (self._processed_ns - arrived_ns) // 1000
                        self._parts.hook.after_first_token(max(0, after_us))

    def _prompt_of(self, batch: Any) -> _Prompt | None:  # noqa: ANN401
        """Return the pass of a batch that computed prompts; None for another, or an unknown one."""
        if not self._prompts or not batch.forward_mode.is_extend():
            return None
        return self._prompts.popleft()

    def between_batches(self, scheduler: Any) -> None:  # noqa: ANN401
        """The safe point: nothing is being allocated. Chunks are set free, taken, given back."""
        if self._parts.ranks is not None:  # chunks move with a broadcast (`moves`)
            return
        now_ns = self._clock()
        if now_ns - self._looked_ns < _CHUNKS_EVERY_NS or not self.is_awake:
            return
        self._looked_ns = now_ns
        allocator = self._parts.allocator
        allocator.settle(now_ns)
        keep = self._pages_to_keep(scheduler)
        allocator.hold(keep)
        if self._parts.hook.failed:
            allocator.chunks.reclaim_of_the_dead(self._parts.arena)
        else:
            wanted = self._empty_chunks_wanted(now_ns)
            if wanted and not allocator.set_free(wanted, keep_pages=keep):
                self._free_again_ns = now_ns + _NONE_EMPTY_NS

    def moves(self, scheduler: Any) -> ChunkMoves | None:  # noqa: ANN401
        """Return the chunks that all ranks move with the broadcast that begins; None: none.

        Rank 0 of several. Every rank applies them where that broadcast ends.

        Raises InvariantBroken where a rank could not apply an order before.
        """
        parts, now_ns = self._parts, self._clock()
        if now_ns - self._looked_ns < _CHUNKS_EVERY_NS or not self.is_awake:
            return None
        self._looked_ns = now_ns
        harvests = not parts.hook.failed
        if parts.ranks is not None and harvests:
            raise_failure(parts.ranks)
        if parts.lending is None:
            return None
        keep = self._pages_to_keep(scheduler)
        if parts.lending.found_none_empty():
            self._free_again_ns = now_ns + _NONE_EMPTY_NS
        wanted = self._empty_chunks_wanted(now_ns) if harvests else 0
        found = parts.lending.moves(now_ns, harvests=harvests, keep_pages=keep, set_free=wanted)
        if parts.lending.group.off and harvests:  # the decision that says so has to travel
            self.give_up(InvariantBroken(parts.lending.group.off))
        return found

    def _empty_chunks_wanted(self, now_ns: int) -> int:
        """Return how many empty chunks to take out of use; 0: none, or it is no time to look."""
        if now_ns < self._free_again_ns:
            return 0
        wanted = self._chunks_to_set_free()
        return wanted if wanted > 0 and self._may_look(now_ns) else 0

    def _counts(self) -> tuple[int, int, int, int, int]:
        """Return chunks FREE, KV, LENT, RESERVED and DRAINING, over ranks as these have agreed."""
        lending = self._parts.lending
        return self._parts.arena.counts() if lending is None else lending.group.counts()

    def idle(self) -> None:
        """Note that nothing runs."""
        now_ns = self._clock()
        self._end_step(self._processed_ns or now_ns)
        if now_ns - self._idle_ns < _IDLE_EVERY_NS:
            return
        self._idle_ns = now_ns
        if not self.is_awake:
            self.leave()
            return
        if self._profile is not None:
            self._profile.idle()
        self._hold_until_ns = self._parts.hook.idle(now_ns).hold_admission_until_ns
        self._parts.allocator.chunks.refresh()

    def give_up(self, error: Exception) -> None:
        """Revoke everything after an error of ours, and decode on all units."""
        self._step = None
        self._profile = None
        self._hold_until_ns = 0
        self._parts.hook.give_up(error)
        self.leave()

    def close(self) -> None:
        """Hang up, then revoke what is granted."""
        self._parts.link.close()
        self._parts.hook.close()

    def _facts(
        self,
        scheduler: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        start_ns: int,
        *,
        decodes: bool,
    ) -> StepInput:
        self._number += 1
        if not decodes:
            tokens = int(batch.extend_num_tokens or 0)
            for request in batch.reqs:
                self._first.setdefault(request.rid, _Delivered())
            left, waited_us = self._prompts_left(scheduler, batch.reqs, start_ns, tokens)
            return StepInput(
                step=self._number,
                start_ns=start_ns,
                batch=0,
                context_tokens=0,
                waiting=len(waiting_requests(scheduler)),
                admitted_tokens=tokens,
                slack_us=0,
                prefill_tokens=tokens,
                prompts_left=left,
                first_token_waited_us=waited_us,
                due_ns=self._due_ns(scheduler),
            )
        if self._parts.speculates:
            # The batch's own lengths are those before drafts were accepted, or are not there yet.
            lengths = [len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs]
        else:
            lengths = batch.seq_lens_cpu.tolist()
        left, waited_us = self._prompts_left(scheduler, (), start_ns, 0)
        admitted = 0
        for request, length in zip(batch.reqs, lengths, strict=True):
            if request.rid not in self._first:
                self._first[request.rid] = _Delivered()
                admitted += length
        return StepInput(
            step=self._number,
            start_ns=start_ns,
            batch=len(lengths),
            context_tokens=sum(lengths),
            waiting=len(waiting_requests(scheduler)),
            admitted_tokens=admitted,
            slack_us=least_slack_us(
                self._begun(batch.reqs), start_ns, self._parts.hook.request_objective_us
            ),
            prompts_left=left,
            first_token_waited_us=waited_us,
            due_ns=self._due_ns(scheduler),
            tokens=self._tokens.mean,
        )

    def _prompts_left(
        self,
        scheduler: Any,  # noqa: ANN401
        computing: Iterable[Any],
        now_ns: int,
        tokens: int,
    ) -> tuple[int, int]:
        """Return the prompt tokens before the first token of each request, and the longest wait.

        `computing`: the requests of a pass that computes `tokens` of prompts. The wait is in
        microseconds. What the radix cache holds of a prompt in the queue is known when it runs.
        """
        if not self._parts.hook.first_token_objective_us:
            return 0, 0
        lacking = [request for request in computing if not request.output_ids]
        if getattr(scheduler, "disagg_decode_prealloc_queue", None) is None:
            queued = scheduler.waiting_queue[:_PROMPTS_SEEN]
            chunked = getattr(scheduler, "chunked_req", None)
            if chunked is not None:
                # Its pass computes it up to there.
                tokens += max(0, len(chunked.origin_input_ids) - chunked.extend_end)
                lacking.append(chunked)
            fresh = [request for request in queued if not request.output_ids]
            tokens += sum(len(request.origin_input_ids) for request in fresh)
            lacking += fresh
        arrivals = [arrived for request in lacking if (arrived := _arrived_ns(request))]
        return tokens if lacking else 0, max(0, now_ns - min(arrivals, default=now_ns)) // 1000

    def _due_ns(self, scheduler: Any) -> int:  # noqa: ANN401
        """Return when the first waiting request is due by its own bound; 0 where none has one."""
        deferral_us = self._parts.hook.deferral_us
        if not deferral_us:
            return 0
        return first_due_ns(
            (
                (_arrived_ns(request), own_deferral_us(request))
                for request in waiting_requests(scheduler)
            ),
            deferral_us,
        )

    def _begun(self, requests: Iterable[Any]) -> Iterator[tuple[int, int]]:
        """Yield when the first token of each request was delivered, and how many have been since.

        Yield running requests. With overlap scheduling the running step counts as not delivered.
        """
        for request in requests:
            first = self._first[request.rid]
            if first.ns:
                yield first.ns, len(request.output_ids) - first.tokens

    def _take_share(self, decision: Grant, *, decodes: bool) -> Grant:
        """Move to the units that the hook has decided on, or that are to be learned about."""
        parts = self._parts
        units = self._units_of(decision) if decodes else decision.decode_units
        try:
            parts.partition.activate(units or parts.splits.units)
            self._confined = bool(units) and units != parts.splits.units
        except InvariantBroken as error:
            parts.hook.give_up(error)
            with suppress(InvariantBroken):
                parts.partition.activate(parts.splits.units)
            return Grant()
        return decision

    def _units_of(self, decision: Grant) -> int:
        units = decision.decode_units or self._parts.splits.units
        alone = decision.finetune_units == 0 and units == self._parts.splits.units
        asked = self._profile.asks_for if alone and self._profile is not None else 0
        return asked or units

    def _finished(self, request: Any, first_ns: int) -> None:  # noqa: ANN401
        """Count a request that has ended, and log it."""
        reason = request.finished_reason
        error = getattr(reason, "message", "") or "" if _aborted(reason) else ""
        if not error:
            self._parts.link.request_completed()
        if self._parts.log is not None:
            self._parts.log.append(
                RequestEvent(
                    id=request.rid,
                    arrived_ns=_arrived_ns(request) or first_ns or self._processed_ns,
                    first_token_ns=first_ns or self._processed_ns,
                    end_ns=self._processed_ns,
                    prompt_tokens=len(request.origin_input_ids),
                    completion_tokens=len(request.output_ids),
                    error=error,
                )
            )

    def _end_step(self, end_ns: int) -> int:
        """Close the step that runs; returns when it ended, 0 where none did."""
        step, self._step = self._step, None
        if step is None:
            return 0
        latency_us = max(1, (end_ns - step.facts.start_ns) // 1000)
        self._parts.hook.after_step(end_ns, latency_us)
        if self._profile is not None and step.decision.finetune_units == 0:
            facts = step.facts
            self._profile.alone(step.units, facts.batch, facts.context_tokens, latency_us)
        if self._parts.log is not None:
            _, kv, lent, _, draining = self._counts()
            self._parts.log.append(
                StepEvent(
                    step=step.facts.step,
                    start_ns=step.facts.start_ns,
                    end_ns=end_ns,
                    batch=step.facts.batch,
                    context_tokens=step.facts.context_tokens,
                    admitted=int(step.admitted > 0),
                    prefill_tokens=0,
                    waiting=step.facts.waiting,
                    decode_units=step.units,
                    finetune_units=step.decision.finetune_units,
                    predicted_us=step.decision.predicted_us,
                    hook_us=step.hook_ns / 1000,
                    chunks_kv=kv,
                    chunks_lent=lent + draining,
                    tokens=step.facts.tokens,
                )
            )
        return end_ns

    def leave(self) -> None:
        """Give decode the whole device; nobody harvests."""
        self._prompts.clear()
        if self._confined:
            self._confined = False
            with suppress(InvariantBroken):
                self._parts.partition.activate(self._parts.splits.units)

    def _chunks_to_set_free(self) -> int:
        """Chunks that are not free yet, of those that the policy lets a worker have.

        Not only of those that one asks for: whether there is memory to lend is what the operator
        decides by where a worker starts.
        """
        parts = self._parts
        lacking, terms = parts.inner.chunks_lacking, parts.inner.controller.terms
        if terms is None or terms.mode != "harvest":
            return lacking
        free, kv, *others = self._counts()
        may_have = (free + kv + sum(others)) * terms.max_memory_percent // 100
        return max(lacking, may_have - free - sum(others))

    def _may_look(self, now_ns: int) -> bool:
        """Return whether to look for empty chunks now: where that waits for no work of decode's.

        A device that is never found idle here is waited for once in `_LOOK_ANYWAY_NS`.
        """
        due = now_ns - self._empty_looked_ns >= _LOOK_ANYWAY_NS
        if not (due or self._parts.allocator.is_idle()):
            return False
        self._empty_looked_ns = now_ns
        return True

    def _pages_to_keep(self, scheduler: Any) -> int:  # noqa: ANN401
        """Free pages that are not lent: room for every request to grow while a worker lets go."""
        allocator = self._parts.allocator
        growth = _requests(scheduler) * self._parts.reserved_tokens // allocator.page_size
        return max(int(allocator.chunks.pages_per_chunk), int(growth))


def _aborted(reason: Any) -> bool:  # noqa: ANN401
    return type(reason).__name__ == "FINISH_ABORT"


def _arrived_ns(request: Any) -> int:  # noqa: ANN401
    """Return when a request came to the scheduler; 0 where SGLang does not say.

    It counts in seconds.
    """
    times = getattr(request, "time_stats", None)
    seconds = getattr(times, "decode_prealloc_queue_entry_time", 0.0)
    return int((seconds or getattr(times, "wait_queue_entry_time", 0.0)) * 1e9)


def _requests(scheduler: Any) -> int:  # noqa: ANN401
    """Requests that hold KV or are about to."""
    n = len(scheduler.running_batch.reqs) + len(scheduler.waiting_queue)
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is not None:
        n += len(queue.retracted_queue) + len(scheduler.disagg_decode_transfer_queue.queue)
    return n
