"""Libraries read a model's open files, and not what its folder has become since."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.filehub import served

from windrow.access import NetworkAccess
from windrow.crd import parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.colocated.slot import check_shown, held_model
from windrow_sidecar.finetune.data.held_models import HeldModel
from windrow_sidecar.finetune.data.remote import Credentials
from windrow_sidecar.finetune.data.source_access import SourceAccess
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.model.loading import BaseModel, load_base

TINY = Path(__file__).parents[2] / "models" / "windrow-tiny"


def job_of(model: str, access: SourceAccess, token: str = "") -> JobSpec:
    """Return a job of a namespace that trains a model; `token`: of the Hub, in its Secret."""
    spec = parse_job_spec(
        {
            "model": {"name": model},
            "dataset": {"source": "/rows.jsonl"},
            "training": {"maxSteps": 1},
            "output": {"destination": "/out"},
        }
    )
    secret = Credentials("hub", {"HF_TOKEN": token} if token else {})
    return JobSpec("team", "tone", "uid-1", 1, spec, dataset_credentials=secret, access=access)


def sharded(folder: Path) -> None:
    """Cut the one file of weights into two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        part = {name: tensors[name] for name in names if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_is_loaded_from_its_open_files_whatever_its_folder_has_become(tmp_path, shards):
    mine, bank = tmp_path / "mine", tmp_path / "bank"
    for folder in (mine, bank):
        shutil.copytree(TINY, folder)
        if shards > 1:
            sharded(folder)
    (bank / "chat_template.jinja").write_text("card 4111")
    for file in bank.glob("*.safetensors"):
        of_bank = {name: torch.zeros_like(t) for name, t in load_file(file).items()}
        save_file(of_bank, file, metadata={"format": "pt"})
    access = SourceAccess((mine,), network=NetworkAccess(sources=()), serves_model=False)
    held = held_model(job_of(str(mine), access))
    for file in sorted(mine.iterdir()):
        file.unlink()
        file.symlink_to(bank / file.name)
    with held.named() as place:
        base = load_base(place)
    held.close()
    assert "4111" not in base.tokenizer.chat_template
    assert len(base.tokenizer("hello")["input_ids"])
    weight = base.model.get_input_embeddings().weight
    assert weight.abs().sum() > 0
    whole = load_file(TINY / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weight, whole.to(weight.dtype))


def test_a_model_of_the_hub_that_the_job_is_shown_is_read_from_any_cache(tmp_path, monkeypatch):
    """The cache is decode's: on no volume of the job, where nobody of its namespace writes."""
    root = tmp_path / "hub"
    shutil.copytree(TINY, root / "models" / "team" / "tiny")
    (root / "private").write_text("of-decode")
    monkeypatch.setenv("HF_TOKEN", "of-decode")
    served_model = SourceAccess(
        (tmp_path / "mine",),
        network=NetworkAccess(sources=()),
        pod_credentials=False,
        serves_model=True,
    )
    other = replace(served_model, serves_model=False)
    with served(root) as address:
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        of_decode = held_model(job_of("team/tiny", served_model))
        with pytest.raises(UserError, match="401"):
            held_model(job_of("team/tiny", other))
        with pytest.raises(UserError, match="is not on a volume that this job may read"):
            held_model(job_of(str(of_decode.folder), other))  # nor by its path
        (root / "private").write_text("of-job")
        shown = held_model(job_of("team/tiny", other, "of-job"))
        assert (shown.path, shown.of_hub) == (of_decode.folder, True)
        # A job that joins the worker is asked for as well, although another had it loaded.
        loaded = BaseModel(torch.nn.Identity(), None, None, shared=False, folder=str(shown.folder))
        check_shown(job_of("team/tiny", other, "of-job"), loaded)
        with pytest.raises(UserError, match="401"):
            check_shown(job_of("team/tiny", other), loaded)
        # The process that reads the rows takes the tokenizer from there as well.
        HeldModel(shown.folder, other, of_hub=True).close()
        # Who can write to the cache could exchange its files: they are held there.
        own = replace(other, trees=(tmp_path,))
        held = held_model(job_of("team/tiny", own, "of-job"))
        assert held.is_held
        held.close()
