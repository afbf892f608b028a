"""Environment that a sidecar gets of its decode, to reach the world outside as decode does."""

from __future__ import annotations

import pytest

from windrow.crd.harvestpolicy import SidecarSpec
from windrow_operator.injection import PodNamespace, SidecarTemplate, attached_sidecar, inject
from windrow_operator.surroundings import surroundings_of

TEMPLATE = SidecarTemplate("10.0.0.1:8443", "PEM")
HUB = ["--model-path", "Qwen/Qwen3-0.6B", "--disaggregation-mode", "decode"]


def decode_pod(form="attach", args=HUB, **container):
    engine = {"name": "main", "image": "sglang", "args": args, **container}
    names = [mount["name"] for mount in container.get("volumeMounts") or ()]
    volumes = [{"name": name, "emptyDir": {}} for name in names]
    body = {"metadata": {}, "spec": {"containers": [engine], "volumes": volumes}}
    asked = SidecarSpec(form=form)
    done = inject(body, TEMPLATE, asked, PodNamespace({}))
    for step in done.patch:
        _, parent, leaf = step["path"].split("/")
        body[parent][leaf] = step["value"]
    if form == "sidecar":
        return done, body["spec"]["initContainers"][-1]
    return done, attached_sidecar(TEMPLATE, body, asked)


def env_of(sidecar):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in sidecar["env"]}


def mounts_of(sidecar):
    return {m["mountPath"]: m for m in sidecar["volumeMounts"] if "windrow" not in m["name"]}


@pytest.mark.parametrize("form", ["attach", "sidecar"])
def test_the_cache_of_the_hub_is_read_where_decode_has_it(form):
    token = {"secretKeyRef": {"name": "hf", "key": "token"}}
    env = [
        {"name": "HF_HOME", "value": "/cache/hf"},
        {"name": "HF_HUB_OFFLINE", "value": "1"},
        {"name": "HF_TOKEN", "valueFrom": token},
        {"name": "DB_PASSWORD", "value": "x"},
    ]
    done, sidecar = decode_pod(form, env=env, volumeMounts=[{"name": "c", "mountPath": "/cache"}])
    found = env_of(sidecar)
    assert (found["HF_HOME"], found["HF_HUB_OFFLINE"], found["HF_TOKEN"]) == (
        "/cache/hf",
        "1",
        token,
    )
    assert "DB_PASSWORD" not in found
    assert mounts_of(sidecar)["/cache"]["readOnly"] is True
    assert done.notes == ()


@pytest.mark.parametrize(
    ("path", "env", "variable", "value"),
    [
        ("/root/.cache/huggingface", [], "HF_HOME", "/root/.cache/huggingface"),
        ("/root/.cache/huggingface/hub/", [], "HF_HUB_CACHE", "/root/.cache/huggingface/hub"),
        ("/root/.cache", [], "HF_HOME", "/root/.cache/huggingface"),
        ("/data", [{"name": "HOME", "value": "/data"}], "HF_HOME", "/data/.cache/huggingface"),
        ("/c", [{"name": "HF_HUB_CACHE", "value": "/c/hub"}], "HF_HUB_CACHE", "/c/hub"),
        ("/c", [{"name": "XDG_CACHE_HOME", "value": "/c"}], "XDG_CACHE_HOME", "/c"),
    ],
)
def test_a_cache_at_its_default_place_is_one_too(path, env, variable, value):
    done, sidecar = decode_pod(env=env, volumeMounts=[{"name": "c", "mountPath": path}])
    assert env_of(sidecar)[variable] == value
    assert path.rstrip("/") in mounts_of(sidecar)
    assert done.notes == ()


def test_a_model_that_is_fetched_again_is_told():
    (note,) = decode_pod()[0].notes
    assert "fetches it again" in note


def test_what_decode_takes_as_a_whole_is_referred_to_by_our_names_alone():
    sources = [
        {"secretRef": {"name": "hf-token-secret"}},
        {"prefix": "HF_", "configMapRef": {"name": "hub"}},
    ]
    found = env_of(decode_pod(envFrom=sources)[1])
    secret = {"name": "hf-token-secret", "key": "HF_TOKEN", "optional": True}
    assert found["HF_TOKEN"] == {"secretKeyRef": secret}
    home = {"name": "hub", "key": "HOME", "optional": True}
    assert found["HF_HOME"] == {"configMapKeyRef": home}
    assert "HTTPS_PROXY" not in found, "no key of the map can give it"


def test_the_sidecar_has_decodes_proxy_and_authorities():
    env = [
        {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
        {"name": "no_proxy", "value": ".svc"},
        {"name": "SSL_CERT_FILE", "value": "/etc/ssl/own/ca.pem"},
        {"name": "ROOT", "value": "/etc/ca"},
        {"name": "REQUESTS_CA_BUNDLE", "value": "$(ROOT)/all.pem"},
    ]
    mounts = [
        {"name": "own", "mountPath": "/etc/ssl/own"},
        {"name": "all", "mountPath": "/etc/ca"},
        {"name": "other", "mountPath": "/etc/other"},
    ]
    sidecar = decode_pod(env=env, volumeMounts=mounts)[1]
    found = env_of(sidecar)
    assert found["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert found["no_proxy"] == ".svc"
    assert found["REQUESTS_CA_BUNDLE"] == "/etc/ca/all.pem"
    assert set(mounts_of(sidecar)) == {"/etc/ssl/own", "/etc/ca"}


@pytest.mark.parametrize(("form", "mounted"), [("attach", False), ("sidecar", True)])
def test_a_part_of_a_volume_is_mounted_where_kubernetes_can(form, mounted):
    mounts = [{"name": "m", "mountPath": "/models", "subPath": "chat"}]
    args = ["--model-path", "/models/a", "--disaggregation-mode", "decode"]
    done, sidecar = decode_pod(form, args, volumeMounts=mounts)
    assert ("/models" in mounts_of(sidecar)) is mounted
    assert any("subPath" in note for note in done.notes) is not mounted
    if mounted:
        assert mounts_of(sidecar)["/models"]["subPath"] == "chat"


def test_a_container_that_says_nothing_gives_nothing():
    assert surroundings_of({"name": "d"}).env == ()


def test_the_run_volume_keeps_no_node_from_being_removed():
    body = {"metadata": {"annotations": {}}, "spec": {"containers": [{"name": "d", "args": HUB}]}}
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    for own, expected in ({}, "windrow-run"), ({key: "scratch"}, "scratch,windrow-run"):
        body["metadata"]["annotations"] = own
        done = inject(body, TEMPLATE, SidecarSpec(), PodNamespace({}))
        said = next(s["value"] for s in done.patch if s["path"] == "/metadata/annotations")
        assert said[key] == expected
