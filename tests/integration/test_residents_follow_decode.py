"""How many frozen layers a worker process holds follows what decode's requests leave of memory.

The worker is a process of its own with a real job; decode's side is its real step hook, lending
policy and arena, stepped here, whose KV grows and shrinks as the test says.
"""

from __future__ import annotations

import threading
import time

import pytest
from worker_pod import CHUNKS, Pod, layers_of_model, until

from windrow_sidecar.engines.harvest import HarvestHook, HarvestSettings
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.engines.streaming.schedule import LEAST_LAYERS
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.testing.stepping_engine import PROFILE

pytestmark = pytest.mark.paired

MIB = 1 << 20
# Two layers of 2.4 MB in fp32 and the rest of the model; a chunk has 1.5 MiB, so a layer takes two.
ROOM = 7 * MIB
STEP_S, STEP_US = 0.01, 5_000


class StepsWithKv(threading.Thread):
    """Decode's steps over a pod's arena; its requests hold `wanted` chunks as soon as they can.

    Attributes:
        longest_short_s: that requests had to wait for a chunk.
    """

    def __init__(self, pod: Pod) -> None:
        super().__init__(daemon=True)
        self._arena = pod.decode.arena
        self.hook = HarvestHook(self._arena, host_levels(2), PROFILE, HarvestSettings())
        self.hook.set_terms(
            HarvestTerms("p", "windrow", "harvest", 1_000_000, max_memory_percent=90)
        )
        self.wanted, self.held = 0, []
        self.longest_short_s = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        step, short_since = 0, None
        while not self.over.wait(STEP_S):
            while len(self.held) > self.wanted:
                self._arena.return_kv(self.held.pop())
            while len(self.held) < self.wanted and (chunk := self._arena.take_kv()) >= 0:
                self.held.append(chunk)
            short = len(self.held) < self.wanted
            now_s = time.monotonic()
            short_since = (short_since or now_s) if short else None
            if short_since:
                self.longest_short_s = max(self.longest_short_s, now_s - short_since)
            step += 1
            facts = StepInput(
                step=step,
                start_ns=time.monotonic_ns(),
                batch=2,
                context_tokens=1000,
                waiting=int(short),
                admitted_tokens=0,
                slack_us=0,
            )
            self.hook.before_step(facts)
            self.hook.after_step(time.monotonic_ns(), STEP_US)

    def close(self) -> None:
        self.over.set()
        self.join()
        self.hook.close()


@pytest.fixture
def pod(tmp_path_factory):
    pod = Pod(tmp_path_factory.mktemp("p"), weights=False)
    yield pod
    pod.close()


def test_residents_shrink_as_kv_needs_memory_and_grow_as_it_leaves(pod):
    decode = StepsWithKv(pod)
    decode.start()
    worker = pod.start(room_bytes=ROOM, maxSteps=100_000, maxSequenceLength=64)

    def holds(layers: int):
        offer = pod.decode.offer
        return offer if offer.resident_layers == layers else None

    def still_learns() -> None:
        done = pod.decode.offer.tokens_done
        until(lambda: pod.decode.offer.tokens_done > done, pod=pod, worker=worker)

    most = layers_of_model()
    try:
        until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
        for _ in range(2):
            idle = until(lambda: holds(most), pod=pod, worker=worker)
            assert idle.wanted_chunks <= CHUNKS
            still_learns()

            decode.wanted = CHUNKS - 3  # all but the reserve and one for activations
            until(lambda: len(decode.held) == decode.wanted, pod=pod, worker=worker)
            until(lambda: holds(LEAST_LAYERS), pod=pod, worker=worker)
            pod.decode.arena.check()
            still_learns()
            decode.wanted = 0
        until(lambda: holds(most), pod=pod, worker=worker)
        assert decode.longest_short_s < 5
    finally:
        decode.close()
