"""Libraries read a model's open files, and not what its folder has become since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from windrow.access import NetworkAccess
from windrow_sidecar.finetune.colocated.slot import held_model
from windrow_sidecar.finetune.data.source_access import SourceAccess
from windrow_sidecar.finetune.model.loading import load_base

TINY = Path(__file__).parents[2] / "models" / "windrow-tiny"


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
    held = held_model(str(mine), "main", access)
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
