"""Contract of engines towards their step hook, checked on the calls that it has really made."""

from __future__ import annotations

from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.view import Grant


class RecordingHook:
    """Decides for decode alone and keeps each call (see `engines.hook.StepHook`).

    Attributes:
        calls: name, and StepFacts of `before_step`, (end_ns, latency_us) of `after_step`, or the
            time of `idle`.
    """

    request_objective_us = 0
    first_token_objective_us = 0
    deferral_us = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def before_step(self, facts: StepInput) -> Grant:
        """Keep it."""
        self.calls.append(("before_step", facts))
        return Grant()

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Keep it."""
        self.calls.append(("after_step", (end_ns, latency_us)))

    def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
        """Keep it."""
        self.calls.append(("after_prompt", (tokens, latency_us)))

    def after_first_token(self, after_us: int) -> None:
        """Keep it."""
        self.calls.append(("after_first_token", after_us))

    def idle(self, now_ns: int) -> Grant:
        """Keep it."""
        self.calls.append(("idle", now_ns))
        return Grant()

    def close(self) -> None:
        """Keep it."""
        self.calls.append(("close", None))


def check_calls(calls: list[tuple[str, object]]) -> int:
    """Verify the contract over all calls; returns how many decode steps they tell of.

    Raises:
        AssertionError: with the call that breaks it.
    """
    open_step: StepInput | None = None
    last_end_ns, last_number, steps = 0, -1, 0
    for i, (name, what) in enumerate(calls):
        if name == "before_step":
            assert isinstance(what, StepInput)
            assert open_step is None, f"call {i}: a step begins before the last one has ended"
            assert what.step > last_number, f"call {i}: step {what.step} comes a second time"
            assert what.start_ns >= last_end_ns, f"call {i}: it begins before the last one's end"
            assert what.batch > 0 or what.prefill_tokens or what.waiting, f"call {i}: of nothing"
            assert what.context_tokens >= what.batch, f"call {i}: requests without a token"
            assert what.admitted_tokens <= what.context_tokens + what.prefill_tokens, f"call {i}"
            open_step = what if what.batch else None
        elif name == "after_step":
            assert isinstance(what, tuple)
            assert open_step is not None, f"call {i}: the end of a step that nobody has begun"
            end_ns, latency_us = what
            took_us = (end_ns - open_step.start_ns) // 1000
            assert abs(took_us - latency_us) <= 1, f"call {i}: {latency_us} us are not {took_us}"
            last_number = open_step.step
            last_end_ns, open_step, steps = end_ns, None, steps + 1
        elif name == "after_prompt":
            assert isinstance(what, tuple)
            tokens, latency_us = what
            assert tokens > 0, f"call {i}: a prompt without a token"
            assert latency_us >= 0, f"call {i}: a pass that ends before it begins"
        elif name == "after_first_token":
            assert isinstance(what, int)
            assert what >= 0, f"call {i}: a first token before its request"
        elif name == "idle":
            assert open_step is None, f"call {i}: idle in the middle of a step"
    assert open_step is None, "the last step has no end"
    return steps
