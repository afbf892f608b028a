"""The policies that a HarvestPolicy may name are those that the sidecar has."""

from __future__ import annotations

from typing import get_args

from windrow.crd import HarvestPolicySpec
from windrow_sidecar.qos.policies import POLICIES


def test_every_policy_of_the_schema_exists_and_no_other():
    assert set(get_args(HarvestPolicySpec.model_fields["policy"].annotation)) == set(POLICIES)
