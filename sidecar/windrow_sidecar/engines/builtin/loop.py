"""The decode loop: continuous batching, one step after the other, and nothing else.

Everything that a step costs, from admission to the hook's own accounting, happens between the two
times that its StepEvent carries.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from windrow.errors import InvariantBroken
from windrow.eventlog import EventLog, RequestEvent, StepEvent
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.kv.paging import ChunkSource
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.riding import RidingPass
from windrow_sidecar.engines.builtin.ranks.group import RankLeader
from windrow_sidecar.engines.builtin.scheduler import EngineRequest, Scheduler, finish_reason
from windrow_sidecar.engines.builtin.step.decoder import Decoder
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.streamed import StreamedWeights
from windrow_sidecar.engines.builtin.web.channel import SocketChannel
from windrow_sidecar.engines.builtin.web.messages import Cancel, Finished, Submit
from windrow_sidecar.engines.builtin.web.token_batcher import TokenBatcher
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.hook import (
    FailClosed,
    StepInput,
    least_slack_us,
    wait_for_turn,
)
from windrow_sidecar.engines.turns import SETTLES_NS, IterationTurn, Ride, Turns, turn_end_ns
from windrow_sidecar.qos.deferred_passes import DeferredPasses
from windrow_sidecar.qos.hybrid_tokens import plan_iteration
from windrow_sidecar.qos.rank_group import GroupDecision
from windrow_sidecar.qos.view import Grant, Phase

_log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # how often an idle engine asks its hook
# Requests wait for memory that the worker is about to give back: long enough to leave it the core,
# short against a step.
_STARVED_WAIT_S = 0.001
_STEPS_PER_COLLECTION = 4096


@dataclass(frozen=True, slots=True)
class LoopParts:
    """Parts that the loop drives."""

    scheduler: Scheduler
    model: LlamaModel  # computes prompts
    decoder: Decoder
    cache: KvCache
    arena: ChunkSource
    partition: Partition
    hook: FailClosed
    log: EventLog | None
    clock_ns: Callable[[], int]
    units: int  # compute units of the device
    on_completed: Callable[[], None]  # a request has ended, without an error
    turns: Turns | None = None  # with a finetune thread of this process; None: there is none
    rider: GatheredDecode | None = None  # the decoder, where finetune rows may join its products
    streamed: StreamedWeights | None = None  # layers that memory does not hold; None: it holds all
    deferred: DeferredPasses | None = None  # which of their passes carry a finetune batch
    others: RankLeader | None = None  # ranks that compute with this one; None: there are none
    lending: GroupChunks | None = None  # over those ranks; None: nothing is lent over ranks


class DecodeLoop:
    """Serves what arrives on the channel until it is stopped or the front is gone.

    One thread. `stop` may be called from a signal handler.
    """

    def __init__(
        self, parts: LoopParts, channel: SocketChannel, outbox: TokenBatcher, *, prefill_tokens: int
    ) -> None:
        self._parts, self._channel, self._outbox = parts, channel, outbox
        self._scheduler = parts.scheduler
        self._prefill_tokens = prefill_tokens
        self._stopping = False
        self._step = 0
        self._running_since_ns = 0  # end of the step before, while a request goes on; else 0
        self._hold_until_ns = 0
        self._hook_ns = 0  # what the hook has cost since the step before began
        self._collected = True
        self._owed = 0  # chunks that were revoked and are not back

    def stop(self) -> None:
        """End before the next step."""
        self._stopping = True

    @torch.inference_mode()
    def run(self) -> None:
        """Serve. Raises PeerGone when the front is gone."""
        while not self._stopping:
            self._take_messages()
            if self._scheduler.is_empty:
                self._idle()
            else:
                self.step()

    def submit(self, message: Submit) -> None:
        """Queue a request, on every rank."""
        if self._parts.others is not None:
            self._parts.others.hear(message)
        self._scheduler.submit(message)

    def clear(self) -> None:
        """Forget all requests, on every rank; no client hears of their ends."""
        if self._parts.others is not None:
            for request in self._scheduler.requests():
                self._parts.others.hear(Cancel(request.id, ""))
        self._scheduler.clear()

    @torch.inference_mode()
    def step(self) -> StepEvent | None:
        """Admit, decide, compute, deliver. Returns the event, None when no request got a token."""
        parts, scheduler = self._parts, self._scheduler
        start_ns = self._running_since_ns or parts.clock_ns()
        admits = start_ns >= self._hold_until_ns
        admitted = scheduler.admit() if admits else []
        for request in admitted:
            parts.cache.fill(request.kv, len(request.tokens) - 1)
        prefill = scheduler.next_prefill(self._prefill_tokens)
        scheduler.make_room()
        batch = list(scheduler.running)
        if prefill is not None and prefill[0] not in scheduler.prefilling:
            prefill = None  # retracted to make room
        carried: Ride[RidingPass] | None = None
        if parts.deferred is not None:
            for request in admitted:
                request.deferred_us = (start_ns - request.submit.arrived_ns) / 1e3
            carried = self._carry(parts.deferred, batch, prompts=prefill is not None)
        left, waited_us = 0, 0
        if parts.hook.first_token_objective_us:
            left, waited_us = scheduler.prompts_left(start_ns)
        facts = StepInput(
            step=self._step,
            start_ns=start_ns,
            batch=len(batch),
            context_tokens=sum(request.kv.n_tokens for request in batch),
            waiting=len(scheduler.waiting),
            admitted_tokens=sum(request.kv.n_tokens for request in admitted),
            slack_us=least_slack_us(
                ((r.first_token_ns, r.n_completed - 1) for r in batch if r.first_token_ns),
                start_ns,
                parts.hook.request_objective_us,
            ),
            prefill_tokens=len(prefill[1]) if prefill else 0,
            prompts_left=left,
            first_token_waited_us=waited_us,
            due_ns=scheduler.first_due_ns(parts.hook.deferral_us) if scheduler.waiting else 0,
        )
        asked_ns = parts.clock_ns()
        decision = self._take_share(parts.hook.before_step(facts))
        self._hold_until_ns = decision.hold_admission_until_ns
        hook_ns = self._hook_ns + parts.clock_ns() - asked_ns
        if parts.deferred is None:
            ride = self._wait_for_turn(decision, start_ns, [] if prefill else batch)
        else:
            ride = carried
            if ride is None and self._owed and parts.turns is not None:
                # Nothing may run: chunks come back.
                parts.turns.lend(parts.clock_ns() + SETTLES_NS, parts.clock_ns)

        if parts.others is not None:
            parts.others.meter.begin()
            self._tell_ranks(parts.others, decision, admits=admits)
        if prefill is not None:
            begin_ns = parts.clock_ns()
            parts.model.prefill(prefill[1], prefill[0].kv)
            took_us = (parts.clock_ns() - begin_ns) // 1000
            parts.hook.after_prompt(len(prefill[1]), took_us, decision)
        if not batch:
            if parts.others is not None:
                parts.others.meter.end()
            self._after_bare_pass(computed=prefill is not None)
            return None
        began_ns = parts.clock_ns()
        tokens = self._finish_ride(ride, batch) if ride else parts.decoder.step(batch)
        end_ns = parts.clock_ns()
        if parts.deferred is not None and not ride and prefill is None:
            parts.deferred.ran_alone((end_ns - began_ns) / 1e3)
        if parts.others is not None:
            parts.others.chose(tokens)
            parts.others.meter.end()
        if ride and parts.deferred is None:
            self._learn_joined(ride, len(batch), end_ns - start_ns)
        parts.hook.after_step(end_ns, (end_ns - start_ns) // 1000)
        self._hook_ns = parts.clock_ns() - end_ns
        self._deliver(batch, tokens, end_ns)
        self._running_since_ns = end_ns if scheduler.running else 0
        self._step += 1
        self._collected = False
        _, kv_chunks, lent, _, draining = parts.arena.counts()
        self._owed = draining
        event = StepEvent(
            step=facts.step,
            start_ns=start_ns,
            end_ns=end_ns,
            batch=facts.batch,
            context_tokens=facts.context_tokens,
            admitted=len(admitted),
            prefill_tokens=facts.prefill_tokens,
            waiting=facts.waiting,
            decode_units=decision.decode_units or parts.units,
            finetune_units=decision.finetune_units,
            predicted_us=decision.predicted_us,
            hook_us=hook_ns / 1000,
            chunks_kv=kv_chunks,
            chunks_lent=lent + draining,
        )
        if parts.log is not None:
            parts.log.append(event)
        if self._step % _STEPS_PER_COLLECTION == 0:
            gc.collect(0)
        return event

    def _take_share(self, decision: Grant) -> Grant:
        """Move to the units that the hook has decided on; returns what the step goes by.

        A level that is none, or a device that refuses one, ends harvesting: decode takes all units.
        Where it is refused those too, it serves on what it has and asks again at the next step.
        """
        parts = self._parts
        try:
            parts.partition.activate(decision.decode_units or parts.units)
        except InvariantBroken as error:
            parts.hook.give_up(error)
            with suppress(InvariantBroken):
                parts.partition.activate(parts.units)
            return Grant()
        return decision

    def _tell_ranks(self, others: RankLeader, decision: Grant, *, admits: bool) -> None:
        """Have the other ranks compute the pass, on the units that were decided for all of them.

        One that could not move to its units ends harvesting: the next pass has all of them again.
        """
        moves = self._move_chunks(others)
        units = decision.decode_units or self._parts.units
        others.tell(admits=admits, units=units, moves=moves)
        if others.refused:
            self._parts.hook.give_up(InvariantBroken(others.refused))

    def _move_chunks(self, others: RankLeader) -> GroupDecision | None:
        """Return the chunks that move on every rank in this pass; on this one they have."""
        hook, lending = self._parts.hook, self._parts.lending
        if lending is None:
            return None
        if lending.waits:
            others.listen()
        moves = lending.decide(harvests=not hook.failed)
        if lending.off:
            hook.give_up(InvariantBroken(lending.off))
        return moves

    def _wait_for_turn(
        self, decision: Grant, start_ns: int, batch: list[EngineRequest]
    ) -> Ride[RidingPass] | None:
        """Leave the device to finetuning until the grant's gap is over, wherever that runs.

        Returns:
            a step of `batch` that has been begun with finetune rows in its products.
        """
        parts = self._parts
        if parts.turns is None:
            wait_for_turn(decision, parts.clock_ns)
            return None
        now_ns = parts.clock_ns()
        until_ns = turn_end_ns(decision.gap_until_ns, now_ns, owed=bool(self._owed))
        ride = None
        if parts.rider and batch and decision.gap_until_ns > now_ns and parts.turns.wants_ride:
            gap_ns = decision.gap_until_ns - start_ns
            if not self._choose_window(parts.turns, len(batch), gap_ns / 1e3):
                return None
            alone_ns = max(0, decision.predicted_us * 1000 - gap_ns)
            ride = Ride(parts.rider.ride(batch), alone_ns)
            until_ns += alone_ns
        if until_ns > now_ns:
            if not parts.turns.lend(until_ns, parts.clock_ns, ride) and ride:
                ride.step.give_up()
            parts.turns.lent += 1
            parts.turns.rode += bool(ride and ride.step.joined)
            parts.partition.activate(parts.units)  # it has set its own number of threads
        return ride

    def _carry(
        self, plan: DeferredPasses, batch: list[EngineRequest], *, prompts: bool
    ) -> Ride[RidingPass] | None:
        """Let a finetune batch pass the streamed layers, where no request waits too long for it.

        What is left of the batch before (backward, update) comes first, so that each pass over the
        layers carries the tokens of all requests.

        Args:
            plan: says whether.
            batch: that gets a token.
            prompts: whether one is computed in this pass: decode comes first.

        Returns:
            a step of `batch` that the batch's forward has carried; None: it did not.
        """
        parts, turns = self._parts, self._parts.turns
        waiting = [*batch, *self._scheduler.waiting]
        if turns is None or not batch or prompts:
            return None
        # A request with a bound of its own counts as one that has waited for the difference.
        deferred = [
            request.deferred_us + plan.bound_us - (request.submit.deferral_us or plan.bound_us)
            for request in waiting
        ]
        if not plan.carries(deferred):
            return None
        begun_ns = parts.clock_ns()
        until_ns = begun_ns + round(plan.left_us(deferred) * 1e3)
        ride: Ride[RidingPass] | None = None
        turn = IterationTurn(taken=False, whole=True, back=True)
        if not (turns.wants_ride and parts.rider):
            turn = self._lend_iteration(turns, until_ns, None)
        if turn.back and turn.whole and turns.wants_ride and parts.rider:
            ride = Ride(parts.rider.ride(batch), 0)
            riding = self._lend_iteration(turns, until_ns, ride)
            if not riding.back:
                ride.step.give_up()
            turn = IterationTurn(
                taken=turn.taken or riding.taken,
                whole=riding.whole,
                back=riding.back,
            )
            turns.rode += bool(ride.step.joined)
        if turn.taken:
            turns.lent += 1
            took_us = (parts.clock_ns() - begun_ns) / 1e3
            # With a step on board it has computed that as well.
            took_us += 0.0 if ride else plan.alone_us
            fitted = plan.ever_carries
            more_us = plan.ran_iteration(took_us, whole=turn.whole)
            if fitted and not plan.ever_carries:
                _log.warning(
                    "while requests run no pass carries a finetune batch: that costs each of them "
                    "%.1f s, and --finetune-deferral allows %.1f s",
                    *(plan.extra_us / 1e6, plan.bound_us / 1e6),
                )
            for request in waiting:
                request.deferred_us += more_us
            parts.partition.activate(parts.units)  # it has set its own number of threads
        return ride

    def _lend_iteration(
        self, turns: Turns, until_ns: int, ride: Ride[RidingPass] | None
    ) -> IterationTurn:
        """Leave the device to the finetune thread to the end of its iteration, or of the ride."""
        parts = self._parts
        turns.by_iteration = True
        try:
            return turns.lend_iteration(
                until_ns, parts.clock_ns, ride, beat=lambda: parts.hook.idle(parts.clock_ns())
            )
        finally:
            turns.by_iteration = False

    def _choose_window(self, turns: Turns, batch: int, gap_us: float) -> bool:
        """Choose how many tokens of a forward may join (FlexLLM); False: the step has no room."""
        turns.window_tokens = 0
        if turns.hybrid is None or turns.policy() != "flexllm":
            return True  # as much as fits, layer by layer
        plan = plan_iteration(
            Phase.FORWARD, batch, turns.hybrid.us(batch, 0) + gap_us, turns.hybrid
        )
        turns.window_tokens = plan.tokens
        return plan.form == "joined"

    def _learn_joined(self, ride: Ride[RidingPass], batch: int, step_ns: int) -> None:
        """Teach what finetune rows cost, by a step with which nothing but a forward has run."""
        turns = self._parts.turns
        if turns is None or turns.hybrid is None or not turns.wants_ride or not ride.step.joined:
            return
        more_us = (step_ns - ride.alone_ns) / 1e3
        turns.hybrid.learn(
            batch, round(ride.step.tokens), turns.hybrid.us(batch, 0) + max(0.0, more_us)
        )

    def _finish_ride(self, ride: Ride[RidingPass], batch: list[EngineRequest]) -> list[int]:
        """Compute what is left of a step; all of it where another thread still has a hand in it."""
        rider = self._parts.rider
        assert rider is not None
        return rider.again(batch) if ride.step.given_up else rider.finish(ride.step, batch)

    def _after_bare_pass(self, *, computed: bool) -> None:
        """A pass without a decode step: only prefill, or nothing could start."""
        self._running_since_ns = 0
        if not computed:
            self._outbox.flush()
            self._wait(_STARVED_WAIT_S)

    def _idle(self) -> None:
        parts = self._parts
        self._running_since_ns = 0
        self._outbox.flush()
        if parts.others is not None:
            parts.others.listen()  # one that has ended is not found out by a request
        decision = parts.hook.idle(parts.clock_ns())
        self._hold_until_ns = decision.hold_admission_until_ns
        if parts.others is not None and (moves := self._move_chunks(parts.others)) is not None:
            units = decision.decode_units or parts.units
            parts.others.tell(admits=False, units=units, moves=moves)
        if not self._collected:
            self._tidy()
        self._wait(IDLE_WAIT_S)

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a message comes; a finetune thread of this process has the device."""
        turns = self._parts.turns
        if turns is not None:
            turns.offer()
        self._channel.wait(timeout_s)
        if turns is not None:
            turns.recall()

    def _tidy(self) -> None:
        """Do the work that steps have no time for. An inconsistent table ends lending only."""
        self._collected = True
        gc.collect()
        try:
            self._scheduler.check_integrity()
        except InvariantBroken as broken:
            self._parts.hook.give_up(broken)

    def _take_messages(self) -> None:
        others = self._parts.others
        for message in self._channel.receive():
            if isinstance(message, Submit):
                self.submit(message)
            elif isinstance(message, Cancel):
                if others is not None:
                    others.hear(message)
                self._cancel(message)

    def _cancel(self, cancel: Cancel) -> None:
        request = self._scheduler.find(cancel.id)
        if request is not None:
            self._finish(request, "stop", self._parts.clock_ns(), error=cancel.error)

    def _deliver(self, batch: list[EngineRequest], tokens: list[int], end_ns: int) -> None:
        for request, token in zip(batch, tokens, strict=True):
            request.tokens.append(token)
            if not request.first_token_ns:
                request.first_token_ns = end_ns
                if not request.submit.kv_arrives:
                    self._parts.hook.after_first_token((end_ns - request.submit.arrived_ns) // 1000)
            self._outbox.token(request.id, token)
            reason = finish_reason(request, token)
            if reason:
                self._finish(request, reason, end_ns)
        self._outbox.end_step()

    def _finish(self, request: EngineRequest, reason: str, end_ns: int, *, error: str = "") -> None:
        self._scheduler.remove(request)
        self._outbox.finished(Finished(request.id, reason, request.first_token_ns, end_ns))
        if not error:
            self._parts.on_completed()
        if self._parts.log is not None:
            self._parts.log.append(
                RequestEvent(
                    id=request.submit.name,
                    arrived_ns=request.submit.arrived_ns,
                    first_token_ns=request.first_token_ns,
                    end_ns=end_ns,
                    prompt_tokens=len(request.submit.prompt),
                    completion_tokens=request.n_completed,
                    error=error,
                )
            )
