"""Rest of a sidecar: it reports seldom while nothing runs and placement would see no change."""

import pytest

from windrow.proto import attach_pb2 as pb
from windrow_sidecar.agent.operator_link import is_at_rest


def beat(**changes):
    known = {"engine_state": "serving", "predicted_tokens_per_second": 1000.0, "chunks_free": 9}
    return pb.SlotHeartbeat(**{**known, **changes})


@pytest.mark.parametrize(
    ("after", "rests"),
    [
        ({}, True),
        ({"predicted_tokens_per_second": 1400.0}, True),
        ({"tpot_p99_seconds": 0.5, "steps": 7, "batch": 3}, True),  # Prometheus has these
        ({"predicted_tokens_per_second": 1600.0}, False),
        ({"predicted_tokens_per_second": 0.0}, False),
        ({"engine_state": "gone"}, False),
        ({"breaker": "too many slow steps"}, False),
        ({"chunks_free": 0}, False),
        ({"chunks_free": 0, "chunks_lent": 9}, True),
        ({"jobs": [pb.RunningJob(job_uid="u")]}, False),
        ({"job": pb.RunningJob(job_uid="u")}, False),
    ],
)
def test_a_slot_rests_until_something_that_placement_looks_at_changes(after, rests):
    assert is_at_rest(beat(), beat(**after)) is rests
    assert is_at_rest(beat(**after), beat()) is rests
