"""A job whose adapter no server can load as it was trained is refused before it is trained."""

from __future__ import annotations

import pytest

from windrow.crd import parse_job_spec
from windrow.crd.servable import check_servable
from windrow.errors import UserError


def spec_of(adapter, *, deploy=True, destination="/out/a", evaluates=True, **more):
    return parse_job_spec(
        {
            "model": {"name": "/models/m"},
            "dataset": {"source": "/data/rows.jsonl", "evalFraction": 0.1 * evaluates},
            "adapter": adapter,
            "training": {"maxSteps": 1},
            "output": {"destination": destination, "deploy": {"enabled": deploy, **more}},
        }
    )


REFUSED = {
    "spec.adapter.type": [{"type": "ia3"}, {"type": "prefix", "prefix": {"virtualTokens": 2}}],
    "spec.adapter.lora.useDora": [{"lora": {"useDora": True}}],
    "spec.adapter.lora.bias": [{"lora": {"bias": "all"}}, {"lora": {"bias": "lora_only"}}],
    "spec.adapter.lora.modulesToSave": [{"lora": {"modulesToSave": ["lm_head"]}}],
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_servers_leave_out_is_refused_by_its_field_where_it_is_to_be_loaded(field):
    for adapter in REFUSED[field]:
        with pytest.raises(UserError) as refused:
            check_servable(spec_of(adapter))
        assert refused.value.field == field
        check_servable(spec_of(adapter, deploy=False))


def test_plain_and_rank_stabilised_lora_is_served():
    check_servable(spec_of({"lora": {"useRslora": True, "rankPattern": {"q_proj": 4}}}))
    check_servable(spec_of({}))


def test_an_adapter_in_a_bucket_is_served():
    check_servable(spec_of({}, destination="s3://team/tone"))


def test_a_canary_by_loss_needs_rows_to_evaluate_on():
    canary = {"canary": {"maxLossIncrease": "0.1"}}
    with pytest.raises(UserError, match="has no losses to compare"):
        spec_of({}, **canary, evaluates=False)
    assert spec_of({}, **canary).output.deploy.canary.max_loss_increase == 0.1
