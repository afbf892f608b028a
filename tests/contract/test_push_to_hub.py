"""A finished adapter is pushed by the Hub's own client to a Hub on this machine."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard, constants
from support.filehub import served

from windrow.crd import parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.data.remote import Credentials
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.hub import HubRepository

SPEC = {
    "model": {"name": "owner/base"},
    "dataset": {"source": "/rows.jsonl"},
    "training": {"maxSteps": 1},
    "output": {
        "destination": "/out",
        "hub": {"repository": "team/tone"},
        "secretRef": {"name": "hub"},
    },
}
WEIGHTS = bytes(range(256)) * 4


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("hf_good")
    with served(tmp_path) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield tmp_path


def repository(token: str = "hf_good") -> HubRepository:
    secret = Credentials("hub", {"HF_TOKEN": token})
    spec = parse_job_spec(SPEC)
    found = HubRepository.of(JobSpec("team", "tone", "u", 1, spec, output_credentials=secret))
    assert found is not None
    return found


def fill(folder) -> None:
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n\n# tone\n")


# The Hub's client calls its own by an older name.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_weights_configuration_and_card_come_in_one_commit(hub):
    ours = repository()
    ours.check()
    assert (hub / "visibility").read_text() == "private"
    assert ours.push(fill) == f"pushed to {constants.ENDPOINT}/team/tone"
    pushed = hub / "models" / "team" / "tone"
    assert (pushed / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (pushed / "adapter_config.json").read_text() == "{}"
    assert ModelCard.load(pushed / "README.md").data.library_name == "peft"
    assert len(list((hub / "large").iterdir())) == 1  # by LFS, not by a native client


def test_a_token_that_may_not_write_is_refused_before_anything_is_trained(hub):
    with pytest.raises(UserError, match=r"team/tone cannot be written: .*401") as caught:
        repository("hf_bad").check()
    assert caught.value.field == "spec.output.hub"
    assert "hf_bad" not in str(caught.value)
    job = JobSpec(
        *("team", "tone", "u", 1, parse_job_spec(SPEC)),
        output_credentials=Credentials("hub", {"AWS_REGION": "x"}),
    )
    with pytest.raises(UserError, match="has no HF_TOKEN") as caught:
        HubRepository.of(job)
    assert caught.value.field == "spec.output.secretRef"


def test_a_hub_that_does_not_take_the_adapter_is_named_and_ends_no_job(hub):
    (hub / "refuses").write_text("507")
    repository().check()  # it may answer later
    assert repository().push(fill).startswith("not pushed to team/tone: ")


def test_a_hub_needs_a_secret_and_a_name():
    for wrong, said in (
        ({"hub": {"repository": "team/tone"}}, "HF_TOKEN may write"),
        ({"hub": {"repository": "tone"}, "secretRef": {"name": "hub"}}, "repository"),
        ({"secretRef": {"name": "hub"}}, "secretRef has no use"),
    ):
        with pytest.raises(UserError, match=said):
            parse_job_spec({**SPEC, "output": {"destination": "/out", **wrong}})
