"""Latency profiles that pods report are stored, and given to the new pods of their namespace."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from operator_process import install_crds

from windrow.crd import LATENCY_PROFILE
from windrow.proto import attach_pb2 as pb
from windrow.rundir import profile_file
from windrow_operator.injection import PROFILES_CONFIG_MAP
from windrow_operator.kube import Kube, ObjectNotFound, kind_path
from windrow_operator.model import Pod
from windrow_operator.profiles import Profiles

NOW = datetime(2025, 1, 1, tzinfo=UTC)
ROOM = 900 * 1024


@pytest.fixture
async def server(kube, control_plane):
    install_crds(kube)
    server = await Kube.connect(control_plane.kubeconfig)
    yield server
    await server.close()


def spec_of(key, hour=0, *, padding=0, c0_us=100.0):
    return {
        "key": key,
        "device": "host:2-cores" + padding * "-",
        "engine": "builtin",
        "solo": [{"units": 2, "c0Us": c0_us, "b0Us": 10.0, "k0NsPerToken": 5.0}],
        "takenAt": f"2025-01-01T{hour:02}:00:00Z",
    }


async def tell(profiles, namespace, spec):
    report = pb.ProfileReport(key=spec["key"], profile_json=json.dumps(spec))
    await profiles.store(Pod(namespace, "decode-0", "uid"), report)


async def given(server, namespace):
    """Return what new pods of a namespace find; None: nothing at all."""
    path = f"/api/v1/namespaces/{namespace}/configmaps/{PROFILES_CONFIG_MAP}"
    try:
        return (await server.get(path)).get("data", {})
    except ObjectNotFound:
        return None


async def test_a_new_pod_finds_the_newest_of_each_kind_in_a_file_that_the_key_names(
    server, namespace
):
    profiles = Profiles(server)
    for spec in (spec_of("a", 1), spec_of("b", 2), spec_of("a", 3, c0_us=7.0), spec_of("b", 1)):
        await tell(profiles, namespace, spec)
    await profiles.publish(NOW)
    found = await given(server, namespace)
    assert found.keys() == {profile_file("a"), profile_file("b")}
    assert json.loads(found[profile_file("a")])["solo"][0]["c0Us"] == 7
    assert json.loads(found[profile_file("b")])["takenAt"] == "2025-01-01T02:00:00Z"


async def test_the_next_leader_gives_what_the_last_one_has_stored(server, namespace):
    await tell(Profiles(server), namespace, spec_of("a"))
    profiles = Profiles(server)
    await profiles.load()
    await profiles.publish(NOW)
    assert profile_file("a") in await given(server, namespace)


async def test_a_profile_that_somebody_deletes_is_given_to_nobody(server, namespace):
    profiles = Profiles(server)
    for key in ("a", "b"):
        await tell(profiles, namespace, spec_of(key))
    await profiles.publish(NOW)
    stored = await server.list(kind_path(LATENCY_PROFILE, namespace))
    for left, body in enumerate(sorted(stored, key=lambda body: body["spec"]["key"])):
        await server.delete(kind_path(LATENCY_PROFILE, namespace, body["metadata"]["name"]))
        await profiles.load()
        await profiles.publish(NOW)
        expected = None if left else {profile_file("b")}
        found = await given(server, namespace)
        assert (found and found.keys()) == expected


async def test_a_config_map_that_somebody_deletes_is_written_again_after_a_while(server, namespace):
    profiles = Profiles(server)
    await tell(profiles, namespace, spec_of("a"))
    await profiles.publish(NOW)
    await server.delete(f"/api/v1/namespaces/{namespace}/configmaps/{PROFILES_CONFIG_MAP}")
    await profiles.publish(NOW + timedelta(minutes=9))
    assert await given(server, namespace) is None
    await profiles.publish(NOW + timedelta(minutes=10))
    assert await given(server, namespace)


async def test_where_there_is_no_room_for_all_the_newest_are_given(server, namespace):
    profiles = Profiles(server)
    for hour, key in enumerate("abc"):
        await tell(profiles, namespace, spec_of(key, hour, padding=ROOM // 2 - 4096))
    await profiles.publish(NOW)
    assert (await given(server, namespace)).keys() == {profile_file("b"), profile_file("c")}


async def test_the_config_map_belongs_to_the_profiles_that_are_in_it(server, namespace):
    profiles = Profiles(server)
    await tell(profiles, namespace, spec_of("a"))
    await profiles.publish(NOW)
    (stored,) = await server.list(kind_path(LATENCY_PROFILE, namespace))
    path = f"/api/v1/namespaces/{namespace}/configmaps/{PROFILES_CONFIG_MAP}"
    (owner,) = (await server.get(path))["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("LatencyProfile", stored["metadata"]["uid"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "abc"}', '{"solo": 3}'])
async def test_a_broken_one_is_stored_for_nobody(server, namespace, caplog, text):
    profiles = Profiles(server)
    report = pb.ProfileReport(key="abc", profile_json=text)
    await profiles.store(Pod(namespace, "decode-0", "uid"), report)
    assert "sent a broken profile" in caplog.text
    await profiles.publish(NOW)
    assert await given(server, namespace) is None
