"""Choose which requests run: admit while there is room, retract the youngest when there is none.

A request's KV covers all of its tokens but the last, which is the input of its next decode step. So
a fresh prompt, one whose KV arrived and one that was retracted in mid-answer are the same thing: so
many tokens to fill or to compute, then decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.kv.paging import PagePool
from windrow_sidecar.engines.builtin.web.messages import Submit
from windrow_sidecar.engines.hook import first_due_ns


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request inside the engine."""

    submit: Submit
    tokens: list[int]  # prompt, then what was generated
    kv: SequenceKv = field(default_factory=SequenceKv)
    turn: int = 0  # grows with every admission: the youngest has the highest
    first_token_ns: int = 0
    generator: torch.Generator | None = None  # sampled requests only
    deferred_us: float = 0.0  # that it has waited for finetuning (see `qos.deferred_passes`)

    @property
    def id(self) -> int:
        """The front's number for it."""
        return self.submit.id

    @property
    def n_completed(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def n_final(self) -> int:
        """Tokens at the end, prompt included, if nothing stops it before."""
        return len(self.submit.prompt) + self.submit.max_tokens


class Scheduler:
    """Moves requests from waiting over prefilling to running, and owns their pages.

    Args:
        pool: where pages come from.
        cache: which knows how many tokens a page holds.
        max_running: most requests that have KV at a time.
        reserve_tokens: room that is kept for every admitted request to grow into.
    """

    def __init__(
        self, pool: PagePool, cache: KvCache, *, max_running: int, reserve_tokens: int
    ) -> None:
        self._pool, self._cache = pool, cache
        self._max_running, self._reserve_tokens = max_running, reserve_tokens
        self.waiting: deque[EngineRequest] = deque()
        self.prefilling: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self._turn = 0
        self.retractions = 0

    @property
    def is_empty(self) -> bool:
        """True where there is nothing to do."""
        return not (self.running or self.prefilling or self.waiting)

    def submit(self, submit: Submit) -> None:
        """Queue a request."""
        generator = None
        if submit.temperature > 0:
            generator = torch.Generator().manual_seed(submit.seed)
        self.waiting.append(EngineRequest(submit, list(submit.prompt), generator=generator))

    def find(self, request_id: int) -> EngineRequest | None:
        """Return a request in whichever state, None when it is not here (any more)."""
        return next((r for r in self.requests() if r.id == request_id), None)

    def requests(self) -> tuple[EngineRequest, ...]:
        """Return all requests that are here, in whichever state."""
        return (*self.running, *self.prefilling, *self.waiting)

    def remove(self, request: EngineRequest) -> None:
        """Forget a request and give its pages back."""
        for place in (self.running, self.prefilling, self.waiting):
            if request in place:
                place.remove(request)
        self._drop_kv(request)

    def clear(self) -> None:
        """Forget all requests."""
        for request in self.requests():
            self.remove(request)

    def admit(self) -> list[EngineRequest]:
        """Give pages to waiting requests, in order, as far as there is room.

        Those whose KV arrives come back as running, to be filled by the caller; the others are
        prefilling.
        """
        arrived = []
        while self.waiting and self._has_room_for(self.waiting[0]):
            request = self.waiting[0]
            pages = self._pool.allocate(self._cache.pages_for(len(request.tokens)))
            if pages is None:
                break
            self.waiting.popleft()
            self._cache.extend(request.kv, pages)
            self._turn += 1
            request.turn = self._turn
            if request.submit.kv_arrives:
                arrived.append(request)
                self.running.append(request)
            else:
                self.prefilling.append(request)
        return arrived

    def next_prefill(self, budget_tokens: int) -> tuple[EngineRequest, list[int]] | None:
        """Return the oldest prefilling request and the next of its tokens to compute, if any.

        One that has nothing left to compute starts to run.
        """
        while self.prefilling:
            request = self.prefilling[0]
            begin = request.kv.n_tokens
            tokens = request.tokens[begin : min(begin + budget_tokens, len(request.tokens) - 1)]
            if tokens:
                return request, tokens
            self.running.append(self.prefilling.popleft())
        return None

    def prompts_left(self, now_ns: int) -> tuple[int, int]:
        """Return the prompt tokens that requests without a first token lack, and the longest wait.

        The wait is in microseconds since the oldest of them arrived. Requests whose KV arrives, or
        that have had a token before they were retracted, are left out.
        """
        lacking = [
            r
            for r in (*self.prefilling, *self.waiting)
            if not (r.submit.kv_arrives or r.first_token_ns)
        ]
        left = sum(len(r.tokens) - r.kv.n_tokens for r in lacking)
        oldest_ns = min((r.submit.arrived_ns for r in lacking), default=now_ns)
        return left, max(0, now_ns - oldest_ns) // 1000

    def first_due_ns(self, deferral_us: int) -> int:
        """Return when the first waiting request is due (see `hook.first_due_ns`)."""
        bounds = ((r.submit.arrived_ns, r.submit.deferral_us) for r in self.waiting)
        return first_due_ns(bounds, deferral_us)

    def make_room(self) -> None:
        """Give every running request its next slot's page, retracting the youngest if need be."""
        for request in list(self.running):
            while request in self.running and self._needs_page(request):
                pages = self._pool.allocate(1)
                if pages is None:
                    self._retract_youngest()
                else:
                    self._cache.extend(request.kv, pages)

    def check_integrity(self) -> None:
        """Verify that every page is accounted for. Raises InvariantBroken."""
        self._pool.check(page for r in self._holders() for page in r.kv.pages)

    def _holders(self) -> Iterable[EngineRequest]:
        return (*self.running, *self.prefilling)

    def _needs_page(self, request: EngineRequest) -> bool:
        return len(request.kv.pages) < self._cache.pages_for(len(request.tokens))

    def _has_room_for(self, request: EngineRequest) -> bool:
        holders = [*self._holders()]
        if not holders:
            return True  # whatever the reserve: it could never start otherwise
        if len(holders) >= self._max_running:
            return False
        growth = sum(self._pages_to_come(r) for r in (*holders, request))
        return growth <= self._pool.available

    def _pages_to_come(self, request: EngineRequest) -> int:
        ahead = min(len(request.tokens) + self._reserve_tokens, request.n_final)
        return max(0, self._cache.pages_for(ahead) - len(request.kv.pages))

    def _retract_youngest(self) -> None:
        victim = max(self._holders(), key=lambda r: r.turn)
        (self.running if victim in self.running else self.prefilling).remove(victim)
        self._drop_kv(victim)
        self.waiting.appendleft(victim)
        self.retractions += 1

    def _drop_kv(self, request: EngineRequest) -> None:
        self._pool.release(request.kv.pages)
        request.kv = SequenceKv()


def finish_reason(request: EngineRequest, token: int) -> str:
    """Return why a request has ended with that token, which is its last; "": it goes on."""
    if token in request.submit.stop_token_ids:
        return "stop"
    return "length" if request.n_completed >= request.submit.max_tokens else ""
