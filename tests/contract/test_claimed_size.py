"""A configuration that describes more than a model's files hold builds nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from windrow.errors import UserError
from windrow_sidecar.finetune.model import claimed_size
from windrow_sidecar.finetune.model.claimed_size import check_claimed_size

MODEL = Path(__file__).parents[2] / "models" / "windrow-tiny"


def changed(folder: Path, **changes) -> Path:
    shutil.copytree(MODEL, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "more layers than any model"),
        ({"text_config": {"num_hidden_layers": 10**9}}, r"text_config\.num_hidden_layers"),
        ({"num_hidden_layers": 64}, "the model's files hold"),
        ({"vocab_size": 10**9}, "the model's files hold"),
        ({"hidden_size": 10**7, "head_dim": 32}, "the model's files hold"),
        ({"intermediate_size": 10**9}, "the model's files hold"),
    ],
)
def test_a_configuration_larger_than_its_files_builds_nothing(tmp_path, change, said):
    with pytest.raises(UserError, match=said) as refused:
        check_claimed_size(changed(tmp_path / "m", **change))
    assert refused.value.field == "spec.model.name"
    assert refused.value.remedy


def test_a_model_as_it_was_written_passes(tmp_path):
    check_claimed_size(MODEL)
    check_claimed_size(changed(tmp_path / "m", tie_word_embeddings=False))


def test_a_model_that_takes_too_long_to_be_built_is_refused(monkeypatch):
    monkeypatch.setattr(claimed_size, "_BUILT_WITHIN_S", 0.0)

    def build(*_, **__):
        while True:
            pass

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", build)
    with pytest.raises(UserError, match="is not built within"):
        check_claimed_size(MODEL)
