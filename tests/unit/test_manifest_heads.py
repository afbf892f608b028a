"""Heads of manifests are checked before anything is sent."""

import pytest

from windrow.client import check_head
from windrow.crd import API_VERSION, FINETUNE_JOB
from windrow.errors import UserError

HEAD = {"apiVersion": API_VERSION, "kind": FINETUNE_JOB.kind}


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        (
            {"labels": {"kueue.x-k8s.io/queue-name": 3}},
            "metadata.labels[kueue.x-k8s.io/queue-name]",
        ),
        ({"labels": [1]}, "metadata.labels"),
        ({"annotations": {"a": True}}, "metadata.annotations[a]"),
    ],
)
def test_labels_and_annotations_that_are_not_text_are_refused_by_their_name(metadata, field):
    with pytest.raises(UserError) as refused:
        check_head({**HEAD, "metadata": {"name": "a", **metadata}}, FINETUNE_JOB)
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize("labels", [None, {}, {"a": None}, {"kueue.x-k8s.io/queue-name": "tuning"}])
def test_labels_of_text_pass(labels):
    check_head({**HEAD, "metadata": {"name": "a", "labels": labels}}, FINETUNE_JOB)
