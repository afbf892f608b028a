"""The policies that a HarvestPolicy may name are those that the sidecar has."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from windrow.crd import HarvestPolicySpec
from windrow_sidecar.qos.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]


def test_every_policy_of_the_schema_exists_and_no_other():
    assert set(get_args(HarvestPolicySpec.model_fields["policy"].annotation)) == set(POLICIES)


def test_every_policy_has_its_section_and_its_picture():
    page = (ROOT / "docs" / "policies.md").read_text()
    for name in POLICIES:
        assert f"\n## {name}\n\n![{name}](images/policy-{name}.svg)\n" in page
        assert (ROOT / "docs" / "images" / f"policy-{name}.svg").exists()
