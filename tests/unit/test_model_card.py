"""The card of an adapter names what it was made of."""

from __future__ import annotations

from huggingface_hub import ModelCard

from windrow.crd import parse_job_spec
from windrow_sidecar.finetune.data.split import DataSplit, Example
from windrow_sidecar.finetune.job.model_card import model_card
from windrow_sidecar.finetune.training.checkpoint import Completion

ROW = Example((1, 2), (-100, 2), "r:1")
SPEC = {
    "model": {"name": "owner/chat"},
    "dataset": {
        "source": "https://store/rows.jsonl?X-Amz-Signature=secret",
        "mixture": [{"source": "hf://datasets/owner/talk@main/part", "weight": 0.5}],
        "format": "preference",
    },
    "adapter": {"lora": {"rank": 8, "targetModules": "q_proj"}},
    "training": {"epochs": 2, "method": "dpo", "learningRate": "5e-6"},
    "output": {"destination": "/out"},
}


def test_a_card_says_what_the_hub_and_people_look_for():
    rows = DataSplit((ROW,) * 20, (ROW,) * 4, cut=3, together=2)
    done = Completion(10, 12345, "10 steps", 0.5, 0.6931, 0.41)
    card = ModelCard(model_card("tone", parse_job_spec(SPEC), rows, done))
    assert card.data.base_model == "owner/chat"
    assert card.data.datasets == ["owner/talk"]
    assert card.data.tags == ["lora", "dpo", "windrow"]
    for line in (
        "# tone",
        "| mixture[0].source | `hf://datasets/owner/talk@main/part`, weight 0.5 |",
        "| rows of an epoch | 10 |",
        "| rows cut to maxSequenceLength | 3 |",
        "| rank | `8` |",
        "| dpo.beta | `0.1` |",
        "| learningRate | `5e-06` |",
        "| tokens | 12,345 |",
        "| preference loss on 2 rows, base model | 0.6931 |",
        "| preference loss on 2 rows, with the adapter | 0.4100 |",
    ):
        assert line in card.text.splitlines(), line
    assert "secret" not in card.content


def test_a_base_on_a_volume_is_no_name_of_the_hub():
    spec = parse_job_spec(
        {
            **SPEC,
            "model": {"name": "/models/chat|x"},
            "dataset": {"source": "/data/rows.jsonl"},
            "training": {"maxSteps": 3},
        }
    )
    card = ModelCard(model_card("tone", spec, DataSplit((ROW,), ()), Completion(3, 6, "3 steps")))
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "| base model | `/models/chat&#124;x`, revision `main` |" in card.text
    assert "with the adapter" not in card.text
