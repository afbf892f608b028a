"""Keep the engine's stream to the agent: report once a second, take policies.

Decode never waits for it. An agent that is away is dialled again; meanwhile the last policy holds,
and without any policy nothing is harvested.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from windrow.errors import UserError
from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow_sidecar.cgroup import Throttled, read_throttled
from windrow_sidecar.engines.harvest.hook import HarvestHook
from windrow_sidecar.engines.harvest.stats import BucketCounts, StepStatistics
from windrow_sidecar.engines.rank_pages import RankFigures
from windrow_sidecar.qos.terms import HarvestTerms, make_terms

_log = logging.getLogger(__name__)

# A sidecar that restarts is back within a second or two.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 2.0


@dataclass(frozen=True)
class Profile:
    """A latency profile to report: its key and `LatencyProfileSpec` as JSON."""

    key: str
    json: str


# A tenth of a period in which limits are counted; less is a limit that is just met.
_THROTTLED_FOR_S = 0.01


class Throttling:
    """Watches what CPU limits cost decode.

    Attributes:
        total: since this began to watch.

    `read`: since the control groups were made, which may be older than this process.
    """

    def __init__(self, read: Callable[[], Throttled]) -> None:
        self._read = read
        self._newest = read()
        self.total = Throttled(0, 0.0)
        self._unit_seconds = 0.0

    def beside_the_worker(self, unit_seconds: float) -> float:
        """Return the seconds since the last call; 0 where they are few, or no worker ran then.

        `unit_seconds`: that a worker was granted since the start.
        """
        before, ran = self._newest, unit_seconds > self._unit_seconds
        self._newest, self._unit_seconds = self._read(), unit_seconds
        # Another control group's counters begin elsewhere: what they differ by is nobody's time.
        periods = max(0, self._newest.periods - before.periods)
        seconds = max(0.0, self._newest.seconds - before.seconds)
        self.total = Throttled(self.total.periods + periods, self.total.seconds + seconds)
        return seconds if ran and seconds >= _THROTTLED_FOR_S else 0.0


class EngineAgentLink:
    """Keeps one `Agent.Engine` stream open for as long as the engine lives."""

    def __init__(
        self,
        socket: Path,
        hello: agent_pb2.EngineHello,
        hook: HarvestHook,
        profile: Profile | None = None,
        *,
        keep_profile: Callable[[Mapping[str, Any]], None] = lambda profile: None,
        interval_s: float = 1.0,
        throttled: Callable[[], Throttled] = read_throttled,
    ) -> None:
        self._target = f"unix:{socket}"
        self._hello, self._hook, self._profile = hello, hook, profile
        self._keep_profile = keep_profile
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._refusal = ""  # why the last policy is not in force
        self._requests_completed = 0
        self._throttled = Throttling(throttled)
        self._read_adapters: Callable[[], agent_pb2.ServedAdapters | None] = lambda: None
        self._read_ranks: Callable[[], list[RankFigures]] = list
        self._thread = threading.Thread(target=self._run, name="windrow-agent-link", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def request_completed(self) -> None:
        """Count one request; called by the engine's thread."""
        self._requests_completed += 1

    def set_profile(self, profile: Profile) -> None:
        """Report this profile with the next figures, and whenever the agent is dialled again."""
        self._profile = profile

    def show_adapters(self, read: Callable[[], agent_pb2.ServedAdapters | None]) -> None:
        """Report with each figures what `read` returns; it is called on the link's thread."""
        self._read_adapters = read

    def show_ranks(self, read: Callable[[], list[RankFigures]]) -> None:
        """Report the figures of each rank as `read` returns them, on the link's thread."""
        self._read_ranks = read

    def close(self) -> None:
        """Hang up; waits for the thread for at most two seconds."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        said = False
        while not self._closed.is_set():
            if self._talk(quiet=said):
                backoff_s, said = _FIRST_BACKOFF_S, False
            else:  # where no agent ever comes, once is enough
                said = True
            self._closed.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _talk(self, *, quiet: bool) -> bool:
        """One connection, from dialling to its end; whether the agent ever answered."""
        answered = False
        over = threading.Event()
        with grpc.insecure_channel(self._target) as channel:
            stub = agent_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
            self._call = call = stub.Engine(self._reports(over))
            try:
                for command in call:
                    answered = True
                    self._obey(command)
            except grpc.RpcError as error:
                if not self._closed.is_set() and (answered or not quiet):
                    _log.info("no agent at %s: %s", self._target, error.code().name)
            finally:
                over.set()
                self._call = None
        return answered

    def _reports(self, over: threading.Event) -> Iterator[agent_pb2.EngineReport]:
        yield agent_pb2.EngineReport(hello=self._hello)
        reported: Profile | None = None
        while True:
            if (profile := self._profile) is not None and profile is not reported:
                reported = profile
                yield agent_pb2.EngineReport(
                    profile=agent_pb2.EngineProfile(key=profile.key, profile_json=profile.json)
                )
            if over.wait(self._interval_s) or self._closed.is_set():
                return
            stats = self._stats()
            self._look_beside()
            yield agent_pb2.EngineReport(stats=stats)

    def _look_beside(self) -> None:
        """Report and keep what steps beside a worker add to the latency profile."""
        profile = self._hook.take_profile_beside()
        if profile is None:
            return
        _log.info(
            "latency profile: %d kinds of steps beside a worker, b1 %.3f, k1 %.3f",
            *(profile["coRun"]["samples"], profile["coRun"]["b1"], profile["coRun"]["k1"]),
        )
        self.set_profile(Profile(str(profile["key"]), json.dumps(profile)))
        self._keep_profile(profile)

    def _stats(self) -> agent_pb2.EngineStats:
        s: StepStatistics = self._hook.snapshot()
        if seconds := self._throttled.beside_the_worker(s.unit_seconds):
            self._hook.throttled(seconds)
        throttled = self._throttled.total
        controller, moved = self._hook.controller, self._hook.lending_counts
        predictor = controller.predictor
        return agent_pb2.EngineStats(
            steps=s.steps,
            steps_over_objective=s.steps_over_objective,
            tpot_p50_seconds=s.tpot_p50_s,
            tpot_p99_seconds=s.tpot_p99_s,
            batch=s.view.batch,
            context_tokens=s.view.context_tokens,
            waiting=s.view.waiting,
            decode_units=s.decode_units,
            finetune_units=s.finetune_units,
            busy_seconds=s.busy_s,
            breaker=self._refusal or controller.refusal or controller.guard.reason,
            predicted_tokens_per_second=round(self._hook.predicted_tokens_per_second(s)),
            predicted_from=self._hook.predicted_from,
            decision_p50_seconds=s.decision_p50_s,
            decision_p99_seconds=s.decision_p99_s,
            requests_completed=self._requests_completed,
            tpot_histogram=s.tpot.counts,
            tpot_sum_seconds=s.tpot.sum,
            objective_seconds=s.objective_us / 1e6,
            paused=controller.why_paused,
            decision_seconds=_histogram(s.decision),
            tpot_objective_ratio=_histogram(s.objective_ratio),
            predictor_ratio=_histogram(s.predictor_ratio),
            chunk_return_seconds=_histogram(moved.return_seconds),
            chunks_lent=moved.lent,
            chunks_revoked=moved.revoked,
            chunks_reclaimed=moved.reclaimed,
            guard_trips=controller.guard.trips,
            granted_unit_seconds=s.unit_seconds,
            predictor_margin=predictor.margin if predictor else 0.0,
            throttled_periods=throttled.periods,
            throttled_seconds=throttled.seconds,
            first_tokens=s.first_tokens,
            first_tokens_over_objective=s.first_tokens_over_objective,
            adapters=self._read_adapters(),
            ranks=[
                agent_pb2.RankStats(computed_seconds=r.computed_s, chunks_lent=r.chunks_lent)
                for r in self._read_ranks()
            ],
        )

    def _obey(self, command: agent_pb2.EngineCommand) -> None:
        kind = command.WhichOneof("message")
        if kind == "policy":
            self._hook.set_terms(self._terms(command.policy))
        elif kind == "worker":
            self._hook.worker_lives(command.worker.epoch)

    def _terms(self, policy: agent_pb2.EnginePolicy) -> HarvestTerms | None:
        """A policy that cannot be followed counts as none; the report says why."""
        self._refusal = ""
        try:
            return make_terms(
                name=policy.name,
                policy=policy.policy,
                mode=policy.mode,
                objective_seconds=policy.objective_seconds,
                percentile=policy.percentile,
                scope=policy.scope,
                max_compute_percent=policy.max_compute_percent,
                max_memory_percent=policy.max_memory_percent,
                deferral_seconds=policy.deferral_seconds,
                first_token_seconds=policy.first_token_seconds,
            )
        except UserError as error:
            _log.warning("policy %s is not in force: %s", policy.name, error)
            self._refusal = str(error)
            return None


def _histogram(counted: BucketCounts) -> agent_pb2.Histogram:
    return agent_pb2.Histogram(counts=counted.counts, sum=counted.sum)
