"""Check how the sidecar gets at decode's GPU: as the pod has it, and never at a second one."""

from __future__ import annotations

import copy

import pytest

from windrow.crd.harvestpolicy import SidecarSpec
from windrow_operator.gpu_access import as_one, choose_access
from windrow_operator.injection import PodNamespace, SidecarTemplate, attached_sidecar, inject
from windrow_operator.model import Refusal

TEMPLATE = SidecarTemplate("10.0.0.1:8443", "PEM")
AROUND = PodNamespace({})
PLUGIN = {"resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "4", "memory": "8Gi"}}}
CLAIMS = {"resources": {"claims": [{"name": "gpu", "request": "decode"}, {"name": "nic"}]}}
NAMED = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}]}
CUDA = {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}
PIPES = {
    "env": [{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/mps/pipe"}, *NAMED["env"]],
    "volumeMounts": [{"name": "mps", "mountPath": "/mps", "readOnly": False}],
}


def asked(access="auto", form="sidecar", **more):
    return SidecarSpec(gpu_access=access, form=form, **more)


def pod(container):
    decoder = {"name": "main", "image": "i", "args": ["--disaggregation-mode=decode"], **container}
    return {"metadata": {}, "spec": {"containers": [decoder]}}


def native(container, spec):
    done = inject(pod(container), TEMPLATE, spec, AROUND)
    values = {operation["path"]: operation["value"] for operation in done.patch}
    return done, values["/spec/initContainers"][-1], values["/metadata/annotations"]


def variables(sidecar):
    return {entry["name"]: entry.get("value") for entry in sidecar["env"]}


@pytest.mark.parametrize("container", [CLAIMS, {**CLAIMS, **NAMED}])
@pytest.mark.parametrize("access", ["auto", "dra"])
def test_a_native_sidecar_shares_the_very_claims_and_requests_of_decode(container, access):
    before = copy.deepcopy(container)
    done, sidecar, annotations = native(container, asked(access))
    assert done.gpu.way == "dra"
    assert sidecar["resources"]["claims"] == CLAIMS["resources"]["claims"]
    assert "resourceClaims" not in str(done.patch)
    assert "gpu/decode, nic" in annotations["windrow.dev/gpu-access"]
    assert container == before


def test_a_sidecar_sees_what_all_containers_that_decode_have():
    def engine(name, gpu, claim):
        return {
            "name": name,
            "args": ["--disaggregation-mode=decode"],
            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": gpu}, {**CUDA, "value": gpu[-1]}],
            "resources": {"claims": [{"name": "gpus", "request": claim}]},
        }

    one, two = engine("one", "GPU-1", "a"), engine("two", "GPU-2", "b")
    by_claims = choose_access(as_one([one, two]), asked())
    assert by_claims.claims == ({"name": "gpus", "request": "a"}, {"name": "gpus", "request": "b"})
    by_variables = {
        e["name"]: e["value"] for e in choose_access(as_one([one, two]), asked("env")).env
    }
    assert by_variables["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert "CUDA_VISIBLE_DEVICES" not in by_variables, "each engine's own GPU is told by its agent"
    assert as_one([one]) is one


def test_claims_keep_the_qos_class_that_requests_and_limits_give():
    amounts = {"cpu": "4", "memory": "8Gi"}
    container = {"resources": {**CLAIMS["resources"], "limits": amounts}}
    assert native(container, asked())[1]["resources"]["limits"] == {"cpu": "1", "memory": "4Gi"}
    assert native(CLAIMS, asked())[1]["resources"].keys() == {"claims"}


@pytest.mark.parametrize("access", ["auto", "env"])
@pytest.mark.parametrize("form", ["attach", "sidecar"])
def test_the_limit_of_a_device_plugin_is_never_copied(access, form):
    done = inject(pod(PLUGIN), TEMPLATE, asked(access, form), AROUND)
    added = [op["value"] for op in done.patch if op["path"] == "/spec/initContainers"]
    assert "nvidia.com/gpu" not in str(added)
    assert done.gpu.way == ("env" if access == "env" else "none")
    # What the sidecar may see beyond decode's GPU is for the policy to say, not for us.
    assert bool(done.said) == (access == "auto")


def test_variables_show_the_sidecar_what_they_show_decode():
    entry = {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}
    for env in (NAMED["env"], [entry], [*NAMED["env"], CUDA]):
        done, sidecar, _ = native({"env": env}, asked())
        assert done.gpu.way == "env"
        assert [mine for mine in sidecar["env"] if mine in env] == env
        assert variables(sidecar)["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_where_only_the_node_knows_the_gpu_all_are_shown_and_the_agent_is_told():
    # Numbers of decode's own would be of other GPUs among all of them.
    for container in (PLUGIN, {**PLUGIN, "env": [CUDA]}):
        found = variables(native(container, asked("env"))[1])
        assert found["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert "CUDA_VISIBLE_DEVICES" not in found
        assert found["WINDROW_GPU_ACCESS"] == "env"


@pytest.mark.parametrize("nothing", ["", "void", "none"])
def test_a_container_that_hides_all_devices_names_none(nothing):
    hidden = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": nothing}]}
    assert choose_access({"name": "main", **hidden}, asked()).way == "none"


@pytest.mark.parametrize("access", ["auto", "mps"])
@pytest.mark.parametrize("form", ["attach", "sidecar"])
def test_a_client_of_the_nodes_daemon_has_decodes_pipes_and_nothing_of_the_hosts(access, form):
    body = pod(PIPES)
    body["spec"]["volumes"] = [{"name": "mps", "hostPath": {"path": "/run/mps"}}]
    spec = asked(access, form)
    if form == "sidecar":
        sidecar = native(PIPES, spec)[1]
    else:
        prepared = copy.deepcopy(body)
        for operation in inject(body, TEMPLATE, spec, AROUND).patch:
            _, parent, leaf = operation["path"].split("/")
            prepared[parent][leaf] = operation["value"]
        sidecar = attached_sidecar(TEMPLATE, prepared, spec)
    found = variables(sidecar)
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/pipe"
    assert found["WINDROW_GPU_ACCESS"] == "mps"
    assert {"name": "mps", "mountPath": "/mps"} in sidecar["volumeMounts"]
    assert "hostIPC" not in sidecar


def test_no_daemon_of_the_node_is_used_where_the_gpu_is_shared_in_time():
    assert choose_access({"name": "main", **PIPES}, asked(), "temporal").way == "env"


@pytest.mark.parametrize(
    ("container", "access", "form", "reason"),
    [
        (PLUGIN, "dra", "sidecar", "NoClaims"),
        ({}, "mps", "attach", "NoMpsPipes"),
        ({"env": PIPES["env"]}, "mps", "attach", "NoMpsPipes"),
    ],
)
def test_a_way_that_the_pod_does_not_have_leaves_it_as_it_came(container, access, form, reason):
    with pytest.raises(Refusal) as caught:
        inject(pod(container), TEMPLATE, asked(access, form), AROUND)
    assert caught.value.reason == reason
    assert "let the policy say auto" in str(caught.value)


def test_what_attached_sidecars_cannot_have_of_claims_is_told_and_the_pod_is_prepared():
    done = inject(pod(CLAIMS), TEMPLATE, asked(form="attach"), AROUND)
    assert (done.gpu.way, bool(done.patch)) == ("none", True)
    assert "sidecar.form: sidecar" in done.said[0]


def test_a_pod_without_a_gpu_is_told_nothing():
    done = inject(pod({}), TEMPLATE, asked(form="attach"), AROUND)
    assert not done.said
    assert "windrow.dev/gpu-access" not in str(done.patch)
