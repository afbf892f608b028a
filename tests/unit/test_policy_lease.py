"""Check when a policy ends that no operator renews, and when an operator renews it."""

from datetime import UTC, datetime, timedelta

import pytest

from windrow.proto import attach_pb2 as pb
from windrow_operator.model import Pod
from windrow_operator.session import Session
from windrow_sidecar.agent.policy_lease import PolicyLease


def leased(*, renews=True, lease_s=300.0):
    lease = PolicyLease()
    lease.hello(0.0, renews=renews)
    lease.told(lease_s)
    return lease


def test_a_policy_ends_when_the_operator_was_not_heard_for_its_lease():
    lease = leased()
    assert lease.ended(299.9, attached=True) == ""
    assert "not heard for 300 s" in lease.ended(300.0, attached=True)
    lease.heard(301.0)
    assert lease.ended(302.0, attached=False) == ""


def test_a_stream_of_an_operator_from_before_renewals_renews_while_it_is_open():
    lease = leased(renews=False)
    assert lease.ended(10_000.0, attached=True) == ""
    assert lease.ended(10_299.0, attached=False) == ""
    assert lease.ended(10_300.0, attached=False)


def test_without_any_policy_nothing_ends():
    lease = PolicyLease()
    assert lease.ended(10_000.0, attached=False) == ""


def test_a_policy_that_says_no_lease_holds_for_five_minutes():
    lease = leased(lease_s=0.0)
    assert lease.ended(299.0, attached=False) == ""
    assert lease.ended(300.0, attached=False)


@pytest.mark.parametrize(("lease_s", "least"), [(2.0, 4), (300.0, 5), (86_400.0, 5), (0.0, 5)])
def test_an_operator_renews_several_times_in_each_lease(lease_s, least):
    now = datetime(2025, 1, 1, tzinfo=UTC)
    session = Session(Pod("a", "b", "c"), 1, timedelta(seconds=1), timedelta(seconds=10))
    session.renew(now)
    assert session.outbox.empty(), "there is no policy to renew yet"
    session.configure(pb.PolicyConfig(name="chat", lease_seconds=lease_s))
    session.outbox.get_nowait()
    lasts_s, renewals = lease_s or 300.0, 0
    for tick in range(int(lasts_s / 0.4) if lasts_s < 1000 else 0):
        session.renew(now + timedelta(seconds=0.4 * tick))
    if lasts_s > 1000:
        for minute in range(10):
            session.renew(now + timedelta(minutes=minute))
    while not session.outbox.empty():
        assert session.outbox.get_nowait().WhichOneof("message") == "renewal"
        renewals += 1
    assert renewals >= least
