"""The default load is shaped like the trace that it is named after; traces are read or refused."""

import gzip
import json
import math
import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from windrow.errors import UserError
from windrow_lab.load import client as load
from windrow_lab.load import generator
from windrow_lab.load.trace import TraceRequest, busy_stretch, paced, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
AZURE = TRACES / "AzureLLMInferenceTrace_conv.csv"
CODE = TRACES / "AzureLLMInferenceTrace_code.csv"
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


def spread(requests: list[TraceRequest], seconds: int) -> tuple[float, float]:
    """Variance by mean of the counts in windows of so many seconds, and the share of empty ones."""
    counts = [0] * int(requests[-1].at_s // seconds)
    for r in requests:
        if (n := int(r.at_s // seconds)) < len(counts):
            counts[n] += 1
    middle = mean(counts)
    return mean((n - middle) ** 2 for n in counts) / middle, counts.count(0) / len(counts)


@pytest.fixture(scope="module")
def coded() -> list[TraceRequest]:
    rate = generator.CODE_PER_SECOND
    return generator.generate(per_second=rate, seconds=LONG_S, seed=17, like="code")


def test_the_code_generator_comes_in_bursts_and_silence_like_the_trace(coded):
    # The trace's own figures, of one hour; an hour of it holds 72 bursts, so ten percent.
    assert len(coded) / LONG_S == pytest.approx(generator.CODE_PER_SECOND, rel=0.1)
    for seconds, dispersion, empty in ((1, 13.19, 0.734), (10, 71.6, 0.563)):
        found = spread(coded, seconds)
        assert found[0] == pytest.approx(dispersion, rel=0.1)
        assert found[1] == pytest.approx(empty, rel=0.1)
    assert mean(r.prompt_tokens for r in coded) == pytest.approx(2047.8, rel=0.05)
    assert mean(r.output_tokens for r in coded) == pytest.approx(27.88, rel=0.1)


@pytest.mark.skipif(not CODE.exists(), reason=f"the Azure code trace is not at {CODE}")
def test_the_figures_that_the_code_generator_is_held_to_are_the_traces():
    real = read_trace(CODE)
    assert spread(real, 1) == pytest.approx((13.19, 0.734), rel=0.01)
    assert spread(real, 10) == pytest.approx((71.6, 0.563), rel=0.01)


def test_a_stretch_of_a_bursty_trace_holds_as_many_requests_as_its_mean_rate_makes():
    quiet = [TraceRequest(1.0, 5, 5), TraceRequest(14.0, 6, 6)]
    burst = [TraceRequest(20.0 + i / 10, 7, 7) for i in range(30)]
    found = busy_stretch([*quiet, *burst], per_second=2.0, seconds=10.0)
    assert [r.at_s for r in found[:2]] == pytest.approx([0.0, 0.1])
    assert len(found) == 30
    assert busy_stretch(quiet, per_second=9.0, seconds=10.0) == [quiet[0]], "the fullest there is"
    both = [
        load.schedule(seconds=10, rate=1, seed=5, endpoints=1, trace=None, busy=True, like="code")
        for _ in range(2)
    ]
    assert both[0] == both[1]
    assert len(both[0]) >= 10 * load.DEVICE_PER_SECOND


def test_a_packed_trace_is_read_like_a_plain_one(tmp_path):
    plain = trace_file(tmp_path, AZURE_HEADER, "2023-11-16 18:15:46.6805900,374,44")
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_the_generator_is_seeded_and_ordered():
    def once(seed):
        return generator.generate(per_second=3, seconds=60, seed=seed)

    assert once(1) == once(1) != once(2)
    times = [r.at_s for r in once(1)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 60


def test_the_tables_of_quantiles_rise(generated):
    for table in (generator.CONTEXT, generator.CODE_CONTEXT, generator.CODE_GENERATED):
        ranks = [rank for rank, _ in table]
        assert ranks == sorted(set(ranks))
        assert (ranks[0], ranks[-1]) == (0, 1)
        assert [v for _, v in table] == sorted(v for _, v in table)
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
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
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
        ((AZURE_HEADER, "2023-11-16 18:15:46.68,12"), ":2", "fewer columns"),
        ((AZURE_HEADER, "2023-11-16 18:15:46.68,-12,3"), ":2", "below 0"),
        ((AZURE_HEADER, "2023-11-16 18:15:46,1,2", "2023-11-16 18:15:45,1,2"), ":3", "before"),
        (("Timestamp,Request tokens,Response tokens", "-1,5,5"), ":2", "-1 s"),
        (("Timestamp,Request tokens,Response tokens", "nan,5,5"), ":2", "not a time"),
        (("Timestamp,Request tokens,Response tokens", "1,5,5", "inf,5,5"), ":3", "not a time"),
        ((AZURE_HEADER, f"{'x' * 140_000},1,2"), "trace.csv", "field limit"),
        ((AZURE_HEADER,), "trace.csv", "no request"),
    ],
)
def test_a_malformed_trace_is_refused_with_file_and_line(tmp_path, lines, where, problem):
    with pytest.raises(UserError) as caught:
        read_trace(trace_file(tmp_path, *lines))
    assert caught.value.field.endswith(where)
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_a_trace_that_a_table_has_written_is_read(tmp_path):
    """Spreadsheets put a mark of the byte order first, tables write counts as fractions."""
    path = trace_file(
        tmp_path,
        f"\ufeff{AZURE_HEADER}",
        "2023-11-16 18:15:46,374.0,44.00",
        "2023-11-16 18:15:50,5,5",
    )
    assert read_trace(path)[0] == TraceRequest(0.0, 374, 44)
    with pytest.raises(UserError, match=r"'0\.5'"):
        read_trace(trace_file(tmp_path, AZURE_HEADER, "2023-11-16 18:15:46,374,0.5"))


def test_a_load_is_made_of_no_trace_with_a_hole(tmp_path):
    times = (*(f"18:00:{i:02}" for i in range(60)), "19:00:00")
    path = trace_file(tmp_path, AZURE_HEADER, *(f"2023-11-16 {at},5,5" for at in times))
    with pytest.raises(UserError, match="hole of 3541 s"):
        load.schedule(trace=path, rate=1.0, seconds=5.0, seed=1, endpoints=1)


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


def times_of(tmp_path, *written: str) -> list[float]:
    file = tmp_path / "trace.csv"
    lines = [f"{at},100,20" for at in written]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return [request.at_s for request in read_trace(file)]


@pytest.mark.parametrize(
    "written",
    [
        ("2024-05-12 00:00:00.5+00:00", "2024-05-12 00:00:05.5+00:00"),
        ("2024-05-12 00:00:00.5", "2024-05-12 00:00:05.5000000"),
        ('"2024-05-12T00:00:00,25Z"', '"2024-05-12T00:00:05,25Z"'),
        ("2024-03-31 01:59:58+01:00", "2024-03-31 03:00:03+02:00"),
        ("2024-10-27 02:59:58+02:00", "2024-10-27 02:00:03+01:00"),
        ("1715472000", "1715472005"),
        ("1715472000123", "1715472005123"),
        ("1715472000123456", "1715472005123456"),
        ("2024-05-12 00:00:00 UTC", "2024-05-12 00:00:05 UTC"),
        ("2024-05-12 00:00:00.5 +0000 UTC", "2024-05-12 00:00:05.5 +0000 UTC"),
        ("2024-05-12t00:00:00z", "2024-05-12t00:00:05z"),
        ("2024/05/12 00:00:00", "2024/05/12 00:00:05"),
        ("20240512000000", "20240512000005"),
        ("20240512000000250", "20240512000005250"),
        ("2016-12-31 23:59:55Z", "2016-12-31T23:59:60.7Z"),
    ],
)
def test_times_of_a_trace_are_read_with_their_offsets_and_fractions(tmp_path, written):
    assert times_of(tmp_path, *written) == pytest.approx([0.0, 5.0])


def test_a_leap_second_runs_into_the_next_second(tmp_path):
    written = ("2016-12-31T23:59:59.5Z", "2016-12-31T23:59:60.5Z", "2017-01-01T00:00:00Z")
    assert times_of(tmp_path, *written) == pytest.approx([0.0, 0.5, 0.5])


@pytest.mark.parametrize("written", ["17154720001", "11/16/2023 18:15:46", "1.7e9"])
def test_a_time_of_another_form_is_named(tmp_path, written):
    with pytest.raises(UserError, match="is not a time as ISO 8601 writes it") as refused:
        times_of(tmp_path, written)
    assert refused.value.field.endswith("trace.csv:2")
