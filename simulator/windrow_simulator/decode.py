"""One GPU that decodes: continuous batching, KV in chunks, and the step hook of production.

Each step asks `HarvestHook` as an engine does; nothing of what it decides is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, cast

from windrow_sidecar._core import Arena
from windrow_sidecar.engines.harvest.ablation import Protection
from windrow_sidecar.engines.harvest.hook import HarvestHook
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.predictor import PredictorForm
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_simulator.arena import ArenaGeometry, SimulatedArena, SimulatedPage
from windrow_simulator.figures import SlotFigures
from windrow_simulator.traffic import DecodeRequest
from windrow_simulator.truth import Noise, RooflineTruth, Truth
from windrow_simulator.worker import SimulatedWorker

# Prompt tokens of one pass: SGLang's `--chunked-prefill-size` on GPUs of 80 GB and more.
CHUNK_TOKENS = 8192
IDLE_TICK_NS = 50_000_000  # how often an idle engine asks its hook
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Settings of an engine's admission and harvesting.

    Attributes:
        max_batch: requests at once.
        reserve_tokens: room that each request is given to grow into when one is admitted.
        predictor: what steps teach it.
        without: protections that are off.
        harvest: as the engine gives them to the hook.
    """

    max_batch: int = 64
    reserve_tokens: int = 512
    predictor: PredictorForm = "windrow"
    without: frozenset[Protection] = frozenset()

    @property
    def harvest(self) -> HarvestSettings:
        """Settings of the step hook."""
        return HarvestSettings(
            max_batch=self.max_batch, gaps=True, predictor=self.predictor, without=self.without
        )


class DecodeGpu:
    """Serves what arrives and lends the rest. Times: nanoseconds since the simulation began."""

    def __init__(
        self,
        levels: Partitioning,
        profile: Mapping[str, Any],
        truth: Truth,
        noise: Noise,
        worker: SimulatedWorker,
        geometry: ArenaGeometry,
        figures: SlotFigures,
        settings: DecodeSettings | None = None,
        *,
        prompts: RooflineTruth | None = None,
    ) -> None:
        """Take the parts; `prompts`: how long prompts take that it computes itself."""
        self.settings = settings or DecodeSettings()
        self._truth, self._noise, self.worker, self.figures = truth, noise, worker, figures
        self._units, self._prompts = levels.units, prompts
        self.now_ns = SECOND_NS  # the hook takes 0 for "never"
        worker.clock = self._clock
        page = SimulatedPage(worker.offer, self._granted)
        self.arena = SimulatedArena(geometry, page, reserved=1)
        self._slots = geometry.slots_per_chunk
        self.hook = HarvestHook(
            cast(Arena, self.arena),  # the same calls, see there
            levels,
            profile,
            self.settings.harvest,
            clock=self._clock,
        )
        self._coming: list[tuple[int, int, DecodeRequest]] = []
        self._waiting: deque[DecodeRequest] = deque()
        self._ends: dict[int, list[DecodeRequest]] = {}
        self._running: list[DecodeRequest] = []
        self._context = 0  # tokens of KV of what runs
        self._step = 0
        self._drained_at_ns = 0
        self._hold_until_ns = 0  # no request is admitted before
        self.counted_share = 1.0  # of what the worker makes: of the slots that this represents
        self.on_finished: Callable[[DecodeRequest], None] = lambda request: None

    def _clock(self) -> int:
        return self.now_ns

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """A policy has come."""
        self.hook.set_terms(terms)

    def submit(self, request: DecodeRequest) -> None:
        """A request whose KV will be there at its `ready_ns`."""
        heappush(self._coming, (request.ready_ns, request.number, request))

    @property
    def in_flight(self) -> int:
        """Requests that have come and not ended."""
        return len(self._coming) + len(self._waiting) + len(self._running)

    @property
    def context_tokens(self) -> int:
        """Tokens of KV that are held."""
        return self._context

    def run_until(self, end_ns: int) -> None:
        """Simulate until the first step boundary at or after that moment."""
        while self.now_ns < end_ns:
            self._receive()
            if self._running or self._waiting:
                self._take_step()
            else:
                self._idle(end_ns)

    def _receive(self) -> None:
        coming = self._coming
        while coming and coming[0][0] <= self.now_ns:
            self._waiting.append(heappop(coming)[2])

    def _idle(self, end_ns: int) -> None:
        """Run dry: ask the hook, then wait for a request, 50 ms at most."""
        begin_ns = self.now_ns
        self._hold_until_ns = self.hook.idle(begin_ns).hold_admission_until_ns
        end_ns = min(end_ns, begin_ns + IDLE_TICK_NS)
        if self._coming:
            end_ns = min(end_ns, max(begin_ns + 1, self._coming[0][0]))
        self.figures.idle(end_ns - begin_ns)
        self._work(begin_ns, end_ns, beside_decode=False)
        self.now_ns = end_ns

    def _take_step(self) -> None:
        begin_ns = self.now_ns
        held = begin_ns < self._hold_until_ns
        admitted, admitted_tokens = ([], 0) if held else self._admit()
        if self._prompts is not None and admitted:
            self._compute_prompts(self._prompts, admitted)
            begin_ns, admitted_tokens = self.now_ns, 0
        self._make_room()
        batch, context = len(self._running), self._context
        left, waited_us = self._prompts_left(())
        grant = self.hook.before_step(
            StepInput(
                self._step,
                begin_ns,
                batch,
                context,
                len(self._waiting),
                admitted_tokens,
                self._slack_us(begin_ns) if self.hook.request_objective_us else 0,
                prompts_left=left,
                first_token_waited_us=waited_us,
            )
        )
        self._hold_until_ns = grant.hold_admission_until_ns
        if not batch:  # nothing is admitted, or nothing fits until memory has been given back
            self._wait(held)
            return
        units = grant.decode_units or self._units
        if grant.gap_until_ns > begin_ns:
            self._work(begin_ns, grant.gap_until_ns, beside_decode=False)
            self.now_ns = grant.gap_until_ns
        computed_us = self._latency_us(batch, context, units, admitting=admitted_tokens > 0)
        end_ns = self.now_ns + int(computed_us * 1e3)
        self._work(self.now_ns, end_ns, beside_decode=True)
        latency_us = (end_ns - begin_ns) / 1e3
        self.now_ns = end_ns
        self.hook.after_step(end_ns, int(latency_us))
        self.figures.step(latency_us, batch, grant.finetune_units > 0)
        self._context += batch
        if admitted:
            for request in admitted:
                request.first_ns = request.first_ns or end_ns
        ended = self._ends.pop(self._step, None)
        if ended:
            self._finish(ended, end_ns)
        self._step += 1

    def _compute_prompts(self, truth: RooflineTruth, admitted: list[DecodeRequest]) -> None:
        """Compute the prompts of requests before decode goes on, in passes, as SGLang does.

        A request that was retracted computes its own tokens again, and has had its first one.
        """
        for number, request in enumerate(admitted):
            for begin in range(0, request.held_tokens, CHUNK_TOKENS):
                end = min(begin + CHUNK_TOKENS, request.held_tokens)
                self._prompt_pass(truth, begin, end, admitted[number:])
            if not request.first_ns:
                request.first_ns = self.now_ns
                self.hook.after_first_token((self.now_ns - request.arrived_ns) / 1e3)

    def _prompt_pass(
        self, truth: RooflineTruth, begin: int, end: int, lacking: list[DecodeRequest]
    ) -> None:
        left, waited_us = self._prompts_left(lacking)
        grant = self.hook.before_step(
            StepInput(
                self._step,
                self.now_ns,
                batch=0,
                context_tokens=0,
                waiting=len(self._waiting),
                admitted_tokens=end - begin,
                slack_us=0,
                prefill_tokens=end - begin,
                prompts_left=left - begin if left else 0,
                first_token_waited_us=waited_us,
            )
        )
        units = grant.decode_units or self._units
        took_us = truth.prompt_us(begin, end, units, 0)
        beside = self.worker.interference_units(self.now_ns)
        if beside:
            both_us = truth.prompt_us(begin, end, units, beside)
            took_us += self.worker.work_share(self.now_ns, both_us) * (both_us - took_us)
        end_ns = self.now_ns + int(took_us * 1e3)
        self._work(self.now_ns, end_ns, beside_decode=True)
        self.figures.prompt(took_us)
        self.now_ns = end_ns
        self.hook.after_prompt(end - begin, took_us, grant)

    def _prompts_left(self, computing: Sequence[DecodeRequest]) -> tuple[int, int]:
        """See `StepInput`: tokens, and microseconds since the oldest arrived."""
        if self._prompts is None or not self.hook.first_token_objective_us:
            return 0, 0
        lacking = [r for r in (*computing, *self._waiting) if not r.first_ns]
        oldest_ns = min((r.arrived_ns for r in lacking), default=self.now_ns)
        return sum(r.prompt_tokens for r in lacking), max(0, self.now_ns - oldest_ns) // 1000

    def _latency_us(self, batch: int, context: int, units: int, *, admitting: bool) -> float:
        """Return what the step takes; as much of it beside the worker as that works meanwhile."""
        truth, worker = self._truth, self.worker
        beside = worker.interference_units(self.now_ns)
        alone_us = truth.step_us(batch, context, units, 0)
        if beside:
            both_us = truth.step_us(batch, context, units, beside)
            share = worker.work_share(self.now_ns, both_us)
            alone_us += share * (both_us - alone_us)
        return alone_us * self._noise.factor(
            beside=beside > 0, admitting=admitting, now_ns=self.now_ns
        )

    def _wait(self, held: bool) -> None:
        """Wait for memory, a millisecond; for the end of a hold, or a request, 20 ms at most."""
        end_ns = self.now_ns + 1_000_000
        if held:
            end_ns = max(end_ns, min(self._hold_until_ns, self.now_ns + 20_000_000))
            if self._coming:
                end_ns = max(self.now_ns + 1000, min(end_ns, self._coming[0][0]))
        self._work(self.now_ns, end_ns, beside_decode=False)
        if held:
            self.figures.idle(end_ns - self.now_ns)
        else:
            self.figures.starved(end_ns - self.now_ns)
        self.now_ns = end_ns

    def _work(self, begin_ns: int, end_ns: int, *, beside_decode: bool) -> None:
        made = self.worker.run(begin_ns, end_ns, beside_decode=beside_decode)
        self.figures.finetuned(made * self.counted_share)
        if self._drained_at_ns and end_ns >= self._drained_at_ns:
            self.arena.give_back_draining()
            self._drained_at_ns = 0
            self.worker.hold(self.arena.counts()[2])

    def _granted(self, grant: Any) -> None:  # noqa: ANN401 - a Grant
        self.worker.granted(grant)
        _, _, lent, _, draining = self.arena.counts()
        if draining and not self._drained_at_ns:
            # It gives back at its next tasklet boundary.
            self._drained_at_ns = self.now_ns + self.worker.boundary_ns()
        self.worker.hold(lent + draining)

    def _admit(self) -> tuple[list[DecodeRequest], int]:
        admitted: list[DecodeRequest] = []
        tokens = 0
        waiting = self._waiting
        while waiting and len(self._running) < self.settings.max_batch:
            request = waiting[0]
            if not self._has_room(request):
                request.waited_for_kv = True
                break
            waiting.popleft()
            request.held_tokens = request.prompt_tokens + request.done
            if not self._take_chunks(request.held_tokens):
                request.waited_for_kv = True
                waiting.appendleft(request)
                break
            tokens += request.held_tokens
            self._context += request.held_tokens
            request.joined_ns = self.now_ns
            request.joined_step = self._step
            request.end_step = self._step + max(1, request.output_tokens - request.done) - 1
            self._ends.setdefault(request.end_step, []).append(request)
            self._running.append(request)
            admitted.append(request)
        return admitted, tokens

    def _has_room(self, request: DecodeRequest) -> bool:
        if not self._running:
            return True
        free, kv, _, reserved, _ = self.arena.counts()
        room = (free + reserved + kv) * self._slots - self._context
        step, ahead = self._step, self.settings.reserve_tokens
        room -= request.prompt_tokens + request.done + min(ahead, request.output_tokens)
        if ahead * len(self._running) <= room:
            return True  # whatever each of them still grows by
        return sum(min(ahead, r.end_step - step + 1) for r in self._running) <= room

    def _take_chunks(self, tokens: int) -> bool:
        arena = self.arena
        needed = -(-(self._context + tokens) // self._slots)
        while arena.counts()[1] < needed:
            if arena.take_kv() < 0:
                return False
        return True

    def _make_room(self) -> None:
        """A slot for each running request's next token; the youngest goes back if there is none."""
        while self._running and not self._take_chunks(len(self._running)):
            youngest = max(self._running, key=lambda r: (r.joined_step, r.number))
            self._running.remove(youngest)
            self._ends[youngest.end_step].remove(youngest)
            self._context -= youngest.held_tokens + self._step - youngest.joined_step
            youngest.done += self._step - youngest.joined_step
            self._waiting.appendleft(youngest)
            self.figures.retracted()

    def _finish(self, ended: list[DecodeRequest], end_ns: int) -> None:
        for request in ended:
            self._running.remove(request)
            self._context -= request.held_tokens + self._step + 1 - request.joined_step
            self.figures.finished(request, end_ns)
            self.on_finished(request)
        needed = -(-self._context // self._slots) + 1  # one empty chunk is kept for the next page
        while self.arena.counts()[1] > needed:
            self.arena.return_kv()

    def _slack_us(self, now_ns: int) -> int:
        objective_us = self.hook.request_objective_us
        slacks = [
            (r.done + self._step - r.joined_step - 1) * objective_us - (now_ns - r.first_ns) // 1000
            for r in self._running
            if r.first_ns
        ]
        return min(slacks, default=0)

    def check(self) -> None:
        """Verify that chunks and tokens add up. Raises InvariantBroken."""
        self.arena.check(self._context)
