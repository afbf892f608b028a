"""The default load is shaped like the trace that it is named after; traces are read or refused."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from windrow.errors import UserError
from windrow.local import generator, load
from windrow.local.trace import TraceRequest, paced, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
AZURE = TRACES / "AzureLLMInferenceTrace_conv.csv"
BURSTGPT = TRACES / "BurstGPT_1_head_slice.csv"
LONG_S = 60_000.0


def figures(requests: list[TraceRequest]) -> dict[str, float]:
    contexts = sorted(r.prompt_tokens for r in requests)
    outputs = sorted(r.output_tokens for r in requests)
    n = len(requests)
    return {
        "requests per second": n / requests[-1].at_s,
        "dispersion of counts in 10 s": generator.dispersion(requests),
        "context mean": sum(contexts) / n,
        "context p50": contexts[n // 2],
        "context p99": contexts[n * 99 // 100],
        "generated mean": sum(outputs) / n,
        "generated p50": outputs[n // 2],
        "generated p99": outputs[n * 99 // 100],
    }


@pytest.fixture(scope="module")
def generated() -> list[TraceRequest]:
    return generator.generate(per_second=generator.TRACE_PER_SECOND, seconds=LONG_S, seed=17)


@pytest.mark.skipif(not AZURE.exists(), reason=f"the Azure trace is not at {AZURE}")
def test_the_generator_is_within_five_percent_of_the_real_trace(generated):
    real, ours = figures(read_trace(AZURE)), figures(generated)
    off = {name: round(ours[name] / real[name] - 1, 3) for name in real}
    assert max(map(abs, off.values())) <= 0.05, off


@pytest.mark.skipif(not AZURE.exists(), reason=f"the Azure trace is not at {AZURE}")
def test_lengths_are_joint_as_in_the_real_trace(generated):
    for low, high in ((1025, 1185), (3001, 1 << 30)):  # of 408 and of 73 tokens in the trace
        real, ours = (
            [r.output_tokens for r in requests if low <= r.prompt_tokens <= high]
            for requests in (read_trace(AZURE), generated)
        )
        # Five percent, as of all lengths, and two standard errors of the trace's own mean.
        within = 0.05 * mean(real) + 2 * stdev(real) / math.sqrt(len(real))
        assert mean(ours) == pytest.approx(mean(real), abs=within)


def test_the_generator_is_seeded_and_ordered():
    def once(seed):
        return generator.generate(per_second=3, seconds=60, seed=seed)

    assert once(1) == once(1) != once(2)
    times = [r.at_s for r in once(1)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 60


def test_the_tables_of_quantiles_rise(generated):
    ranks = [rank for rank, _ in generator.CONTEXT]
    assert ranks == sorted(set(ranks))
    assert (ranks[0], ranks[-1]) == (0, 1)
    for row in (tuple(v for _, v in generator.CONTEXT), *generator.GENERATED):
        assert list(row) == sorted(row)
    assert max(r.prompt_tokens for r in generated) <= 14050


@pytest.mark.skipif(not BURSTGPT.exists(), reason=f"the BurstGPT slice is not at {BURSTGPT}")
def test_the_burstgpt_format_is_read_without_its_failed_rows():
    assert len(read_trace(BURSTGPT)) == 400 - 17


def trace_file(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_a_trace_begins_at_its_first_request(tmp_path):
    path = trace_file(
        tmp_path,
        AZURE_HEADER,
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:15:46.6805900,374,44",
    )
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)  # of a trace, microseconds count


@pytest.mark.parametrize(
    ("lines", "where", "problem"),
    [
        (("a,b",), ":1", "neither format"),
        ((AZURE_HEADER, "2023-11-16 18:15:46.68,12,x"), ":2", "'x'"),
        ((AZURE_HEADER, "2023-11-16 18:15:46.68,12,3", "yesterday,12,4"), ":3", "yesterday"),
        ((AZURE_HEADER, "2023-11-16 18:15:46.68,12"), ":2", "NoneType"),
        ((AZURE_HEADER, "2023-11-16 18:15:46.68,-12,3"), ":2", "below 0"),
        ((AZURE_HEADER,), "trace.csv", "no request"),
    ],
)
def test_a_malformed_trace_is_refused_with_file_and_line(tmp_path, lines, where, problem):
    with pytest.raises(UserError) as caught:
        read_trace(trace_file(tmp_path, *lines))
    assert caught.value.field.endswith(where)
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_a_trace_is_played_at_the_asked_rate_and_again_when_it_ends():
    trace = [TraceRequest(float(i), 10 + i, 5) for i in range(10)]
    played = paced(trace, per_second=2.0, seconds=20.0)
    assert len(played) == 40
    assert played[1].at_s == pytest.approx(0.5)
    assert [r.prompt_tokens for r in played[10:12]] == [10, 11]
    assert all(a.at_s <= b.at_s for a, b in pairwise(played))


@pytest.mark.parametrize(("seconds", "rate"), [(0, 1), (60, 0), (60, -1), (60, float("nan"))])
def test_a_rate_or_length_that_is_not_above_zero_is_refused(seconds, rate):
    with pytest.raises(UserError, match="not above zero"):
        load.schedule(seconds=seconds, rate=rate, seed=1, endpoints=1, trace=None)


def test_each_endpoint_gets_its_share():
    requests = load.schedule(seconds=60, rate=1.0, seed=1, endpoints=2, trace=None)
    shares = [load.share_of(requests, i, 2) for i in range(2)]
    assert sorted(shares[0] + shares[1], key=lambda r: r.at_s) == requests
    assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_a_request_arrives_as_on_a_decode_instance():
    body = json.loads(load.body_of(TraceRequest(0, 1000, 77), 5, random.Random(1)))
    assert len(body["prompt"]) == 1000
    assert body["max_tokens"] == 77
    assert body["ignore_eos"] is True
    assert (body["bootstrap_host"], body["bootstrap_room"]) == ("2.2.2.2", 5)
