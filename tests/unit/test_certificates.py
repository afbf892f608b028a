"""Check when an authority and a server's certificate are renewed, step by step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from windrow_operator import pki

START = datetime(2026, 1, 1, tzinfo=UTC)
SPREAD = timedelta(hours=6)
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def first():
    return pki.Authorities(pki.make_authority(START))


def names(authorities):
    """Return the serial numbers of what is trusted."""
    return [c.serial_number for c in x509.load_pem_x509_certificates(authorities.trusted)]


def test_nothing_is_due_while_the_authority_has_more_than_a_year(first):
    assert first.renewed(START + 3284 * DAY, SPREAD) is first
    assert len(names(first)) == 1


def test_a_successor_is_trusted_before_it_signs_and_the_former_one_to_its_end(first):
    begun = START + 3286 * DAY
    both = first.renewed(begun, SPREAD)
    assert both.current == first.current
    assert names(both)[0] == names(first)[0]
    assert len(names(both)) == 2
    assert both.renewed(begun + SPREAD - timedelta(minutes=1), SPREAD) == both

    signs = both.renewed(begun + SPREAD + timedelta(minutes=1), SPREAD)
    assert signs.current == both.successor
    assert signs.successor is None
    assert names(signs) == names(both)[::-1]
    assert signs.renewed(START + 3649 * DAY, SPREAD) == signs
    assert names(signs.renewed(START + 3651 * DAY, SPREAD)) == names(signs)[:1]


def test_an_authority_that_has_ended_is_replaced_at_once(first):
    late = START + 4000 * DAY
    after = first.renewed(late, SPREAD)
    assert after.current != first.current
    assert pki.ends_at(after.current) > late


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_secret_keeps_every_step(first, steps):
    held = first
    for step in range(steps):
        held = held.renewed(START + 3286 * DAY + step * 2 * SPREAD, SPREAD)
    assert pki.from_secret(pki.to_secret(held)) == held


def test_a_servers_certificate_is_due_after_two_thirds_of_its_time(first):
    server = pki.make_server(first.current, ["localhost"], START)
    life = pki.ends_at(server) - START
    assert not pki.is_due(server, START + 0.66 * life)
    assert pki.is_due(server, START + 0.67 * life)


def test_a_servers_certificate_does_not_outlive_its_authority(first):
    late = START + 3640 * DAY
    server = pki.make_server(first.current, ["localhost"], late)
    assert pki.ends_at(server) == pki.ends_at(first.current)
