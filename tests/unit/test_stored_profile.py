"""A stored profile lies where the engine looks, and never over the engine's own."""

import json

import pytest

from windrow.proto import attach_pb2 as pb
from windrow.rundir import RunDir
from windrow_sidecar.agent.stored_profile import keep_profile

SPEC = {
    "key": "abc",
    "device": "host:2-cores",
    "engine": "builtin",
    "solo": [{"units": 2, "c0Us": 100.0, "b0Us": 10.0, "k0NsPerToken": 5.0}],
    "takenAt": "2025-01-01T00:00:00Z",
}


def stored(spec=SPEC, slot=0):
    return pb.StoredProfile(slot=slot, profile_json=json.dumps(spec))


def test_it_lies_where_the_engine_looks(tmp_path):
    run_dir = RunDir(tmp_path)
    assert keep_profile(run_dir, stored(slot=1))
    assert json.loads(run_dir.of_slot(1).profile().read_text()) == SPEC
    assert [path.name for path in tmp_path.iterdir()] == [run_dir.of_slot(1).profile().name]


def test_an_engines_own_profile_stays(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.profile().write_text("{}")
    assert not keep_profile(run_dir, stored())
    assert run_dir.profile().read_text() == "{}"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "abc"}', '{"solo": 3}'])
def test_a_broken_one_is_left_out(tmp_path, text):
    assert not keep_profile(RunDir(tmp_path), pb.StoredProfile(profile_json=text))
    assert not list(tmp_path.iterdir())
