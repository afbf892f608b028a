"""Devices, pods, policy and job of a demo, as plain data."""

from pathlib import Path

import pytest
import yaml

from windrow.crd import parse_job_spec, parse_policy_spec
from windrow.errors import UserError
from windrow_lab.cluster import manifests
from windrow_lab.cluster.manifests import DecodePod
from windrow_lab.demo import run
from windrow_lab.machine import resources, sglang
from windrow_lab.machine.devices import Device, devices
from windrow_lab.realnode import pods as realpods

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("cores", "pods", "expected"),
    [
        (2, None, ["0,1"]),
        (3, None, ["0,1,2"]),
        (4, None, ["0,1", "2,3"]),
        (16, None, ["0,1,2,3,4,5,6,7", "8,9,10,11,12,13,14,15"]),
        (2, 2, ["0,1", "0,1"]),
        (4, 1, ["0,1,2,3"]),
        (5, 3, ["0,1", "2,3", "0,1"]),
    ],
)
def test_cores_become_devices_of_two_and_more(cores, pods, expected):
    found = devices(range(cores), pods)
    assert [d.cpuset for d in found] == expected
    assert found[0].oversubscribed == (pods is not None and pods > cores // 2)


def test_one_core_is_no_device():
    with pytest.raises(UserError, match="too few"):
        devices([0])


def test_a_decode_pod_looks_like_one_of_sglang():
    pod = manifests.decode_pod(DecodePod("decode-0", 8001, Device((0, 1)), Path("/m")))
    container = pod["spec"]["containers"][0]
    assert pod["metadata"]["labels"]["rbg.workloads.x-k8s.io/role-name"] == "decode"
    assert "--disaggregation-mode=decode" in container["args"]
    assert pod["metadata"]["annotations"]["windrow.dev/cpuset"] == "0,1"
    assert "windrow.dev/inject" not in pod["metadata"]["labels"]
    plain = manifests.decode_pod(DecodePod("a-0", 1, Device((0, 1)), Path("/m"), inject=False))
    assert plain["metadata"]["labels"]["windrow.dev/inject"] == "disabled"


def test_a_decode_pod_over_ranks_is_asked_for_by_sglangs_flag():
    decode = DecodePod("decode-0", 8001, Device((0, 1)), Path("/m"), ranks=2)
    (container,) = manifests.decode_pod(decode)["spec"]["containers"]
    assert "--tp-size=2" in container["args"]


def test_ranks_that_cannot_share_the_models_heads_are_refused_before_anything_starts():
    run.check_ranks(ROOT / "models" / "windrow-tiny", 2)
    with pytest.raises(UserError, match="8 attention heads, which 3 ranks") as refused:
        run.check_ranks(ROOT / "models" / "windrow-tiny", 3)
    assert refused.value.field == "--tp"


def test_a_pod_of_sglang_starts_its_server_from_the_environment_that_was_made_for_it():
    decode = DecodePod("decode-0", 8001, Device((0, 1)), Path("/m"), sglang=Path("/e"))
    (container,) = manifests.decode_pod(decode)["spec"]["containers"]
    assert container["command"] == ["windrow", "run", "--", "python", "-m", "sglang.launch_server"]
    assert {"--model-path=/m", "--port=8001", "--disaggregation-mode=decode"} <= {
        *container["args"]
    }
    assert "--page-size=16" in container["args"]  # pages of one token cannot be lent
    path = next(entry["value"] for entry in container["env"] if entry["name"] == "PATH")
    assert path.startswith("/e/bin:")


def test_an_environment_that_holds_no_sglang_is_named_with_what_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_VENV", str(tmp_path))
    with pytest.raises(UserError, match="make sglang"):
        sglang.find_environment()
    for program in ("python", "windrow"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / program).touch()
    assert sglang.find_environment() == tmp_path


def test_policy_and_job_of_the_demo_are_valid(tmp_path):
    policy = manifests.harvest_policy("demo", 18.3, "windrow")
    assert parse_policy_spec(policy["spec"]).objective.tpot.total_seconds() == 0.0183
    example = yaml.safe_load((ROOT / "examples/finetunejob.yaml").read_text())
    job = manifests.finetune_job(
        example, model=tmp_path, rows=tmp_path / "r", destination=tmp_path / "o", steps=7
    )
    spec = parse_job_spec(job["spec"])
    assert spec.training.max_steps == 7
    assert spec.output.destination == str(tmp_path / "o")
    assert example["spec"]["training"]["maxSteps"] != 7, "the example itself stays as it was"


def test_on_a_real_node_pods_run_this_python_on_their_devices_cores(tmp_path):
    plain = manifests.decode_pod(DecodePod("decode-0", 8001, Device((0, 1)), tmp_path))
    pod = realpods.on_the_node(plain, tmp_path, tmp_path / "pods")
    (container,) = pod["spec"]["containers"]
    assert container["command"][:3] == ["taskset", "--cpu-list", "0,1"]
    assert {"name": "WINDROW_LOG_DIR", "value": str(tmp_path / "pods" / "decode-0")} in (
        container["env"]
    )
    names = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert names == {mount["name"] for mount in container["volumeMounts"]}
    assert "hostNetwork" not in plain["spec"], "what was given stays as it was"
    policy = realpods.on_the_node(
        manifests.harvest_policy("demo", 18.3, "windrow"), tmp_path, tmp_path
    )
    written = [v for v in parse_policy_spec(policy["spec"]).sidecar.volumes if v.name == "out"]
    assert [volume.mount_path for volume in written] == [str(tmp_path)]


@pytest.mark.parametrize("name", ["finetunejob", "harvestpolicy", "decode-pod"])
def test_the_examples_are_valid(name):
    found = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    if found["kind"] == "FinetuneJob":
        spec = parse_job_spec(found["spec"])
        assert (ROOT / spec.dataset.source).is_file()
        assert (ROOT / spec.model.name / "config.json").is_file()
    elif found["kind"] == "HarvestPolicy":
        labels = yaml.safe_load((ROOT / "examples/decode-pod.yaml").read_text())["metadata"][
            "labels"
        ]
        assert parse_policy_spec(found["spec"]).selector.matches(labels)
    else:
        assert "--disaggregation-mode=decode" in found["spec"]["containers"][0]["args"]


def test_the_job_is_sized_to_last_through_the_load():
    def steps(seconds, rate=5000.0):
        return manifests.steps_through(
            seconds=seconds, dedicated_tokens_per_second=rate, tokens_per_step=1500
        )

    assert steps(60) == int(manifests.BEST_SHARE * 5000 * (60 - manifests.START_S) / 1500)
    assert steps(600) > steps(60)
    assert steps(1, rate=1.0) == manifests.FEWEST_STEPS


def test_assets_are_found_in_the_checkout_or_by_hand(tmp_path):
    assert resources.find(resources.MODEL, option="--model") == ROOT / resources.MODEL
    assert resources.find(resources.MODEL, option="--model", given=tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"--model: .* does not exist"):
        resources.find(resources.MODEL, option="--model", given=tmp_path / "no")
    with pytest.raises(UserError, match="--rows"):
        resources.find(Path("no/such/rows"), option="--rows")
