"""Copies of one digest in two namespaces are two orders; each has answers of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from windrow.proto import attach_pb2 as pb
from windrow_operator.adapter_caches import AdapterCaches
from windrow_operator.server_calls import NotLoaded

DIGEST = "d" * 64


class Caches(AdapterCaches):
    """Caches whose orders name a job alone: what else is in them is another test's."""

    async def _order(self, job, policy, keep) -> pb.StoreAdapter:
        del policy, keep
        return pb.StoreAdapter(job_uid=job.uid, digest=DIGEST)


def job_of(namespace: str) -> SimpleNamespace:
    status = {"adapter": {"digest": DIGEST}}
    return SimpleNamespace(uid=f"job-of-{namespace}", namespace=namespace, status=status)


@pytest.mark.parametrize("error", ["", "the files of bank are not there"])
async def test_what_is_said_of_a_copy_is_not_said_of_another_namespaces(error):
    sent = []
    stream = SimpleNamespace(stores_adapters=True, send=sent.append)
    caches = Caches(None, lambda uid: stream, lambda: 0.0)
    instance = SimpleNamespace(uid="pod", key="serving/pod", node="n")
    policy = SimpleNamespace(name="p", key="serving/p", spec=None)
    bank, evil = job_of("bank"), job_of("evil")
    for job in (bank, evil):
        assert not await caches._ordered(job, policy, [instance], [])
    assert [message.adapter.job_uid for message in sent] == [bank.uid, evil.uid]
    caches.answered("pod", pb.AdapterStored(job_uid=bank.uid, digest=DIGEST, error=error))
    assert not await caches._ordered(evil, policy, [instance], [])  # still on its way
    if error:
        with pytest.raises(NotLoaded, match="of bank"):
            await caches._ordered(bank, policy, [instance], [])
    else:
        assert await caches._ordered(bank, policy, [instance], [])
