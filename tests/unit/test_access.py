"""Hosts that a job may reach, by the list of its policy and by the address that a name has."""

from __future__ import annotations

import pytest

from windrow.access import NetworkAccess, address_of, parse_source
from windrow.crd import parse_policy_spec
from windrow.errors import UserError

POLICY = {"selector": {}, "objective": {"tpot": "40ms"}}
PUBLIC, PRIVATE, METADATA = "93.184.215.14", "10.1.2.3", "169.254.169.254"


@pytest.mark.parametrize(
    "text",
    [
        *("huggingface.co", "*.example.com:443", "10.0.0.0/8", "10.0.0.1:9000", "[::1]:80"),
        *("fd00::/8", "*", "minio.team.svc:9000"),
    ],
)
def test_a_policy_lists_names_addresses_and_networks(text: str) -> None:
    parse_source(text)
    assert parse_policy_spec({**POLICY, "access": {"sources": [text]}}).access.sources == [text]


@pytest.mark.parametrize(
    "text", ["a b", "https://a.example", "10.0.0.0/8/8", "a/8", "-a", "", "a:0", "300.1.1.1", "a.*"]
)
def test_what_is_not_a_host_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"access\.sources"):
        parse_policy_spec({**POLICY, "access": {"sources": [text]}})


def test_without_a_list_public_hosts_are_open_and_private_ones_to_the_own_namespace() -> None:
    others, own = NetworkAccess(), NetworkAccess(private=True)
    for access in (others, own):
        assert access.host_refusal("rows.example.com", 443) == ""
        assert access.address_refusal("rows.example.com", 443, PUBLIC) == ""
        assert "link-local" in access.address_refusal("rows.example.com", 80, METADATA)
    assert "private address" in others.address_refusal("rows.example.com", 80, PRIVATE)
    assert "spec.access.sources" in others.host_refusal(PRIVATE, 80)
    assert own.address_refusal("minio.team.svc", 9000, PRIVATE) == ""
    assert own.host_refusal("127.0.0.1", 9000) == ""


@pytest.mark.parametrize(
    "address",
    [
        *(METADATA, "::ffff:169.254.169.254", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1"),
        *("fd00:ec2::254", "100.100.100.200", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::"),
        *("168.63.129.16", "192.0.0.192", "::ffff:168.63.129.16"),  # Azure, Oracle
        *("::169.254.169.254", "::ffff:0:a9fe:a9fe", "64:ff9b:1::a9fe:a9fe"),
    ],
)
def test_where_a_nodes_credentials_are_served_is_closed_whoever_asks(address: str) -> None:
    for access in (NetworkAccess(private=True), NetworkAccess(("*", "rows.example.com"))):
        assert access.address_refusal("rows.example.com", 80, address)
        assert access.host_refusal(address, 80)


@pytest.mark.parametrize(
    "address",
    [
        *(PRIVATE, "127.0.0.1", "::1", "fd12::1", "100.64.0.1", "::ffff:10.1.2.3", "fec0::1"),
        *("::10.1.2.3", "::ffff:0:a01:203", "64:ff9b:1::a01:203", "::127.0.0.1"),
    ],
)
def test_a_wildcard_for_all_hosts_opens_no_private_address(address: str) -> None:
    access = NetworkAccess(("*",))
    assert access.host_refusal("rows.example.com", 80) == ""
    assert access.address_refusal("rows.example.com", 80, address)
    assert access.address_refusal("rows.example.com", 80, PUBLIC) == ""


def test_a_list_closes_every_other_host_and_opens_what_it_names() -> None:
    access = NetworkAccess(("Minio.team.svc:9000", "*.example.com", "10.1.0.0/16"), private=True)
    assert access.host_refusal("MINIO.team.svc.", 9000) == ""
    assert access.address_refusal("minio.team.svc", 9000, "10.9.9.9") == ""
    assert "which lists Minio.team.svc:9000" in access.host_refusal("minio.team.svc", 80)
    assert access.host_refusal("a.b.example.com", 443) == ""
    for other in ("example.com", "badexample.com", "elsewhere.org"):
        assert access.host_refusal(other, 443)
    assert access.host_refusal("10.1.2.3", 80) == ""
    assert access.host_refusal("10.2.2.3", 80)
    assert access.host_refusal(PUBLIC, 80)


def test_a_name_that_is_listed_opens_no_link_local_address_but_a_network_does() -> None:
    assert NetworkAccess(("a.example.com",)).address_refusal("a.example.com", 80, METADATA)
    listed = NetworkAccess(("a.example.com", "169.254.169.254/32"))
    assert listed.address_refusal("a.example.com", 80, METADATA) == ""


def test_a_volume_has_a_folder_for_each_namespace_where_others_are_admitted() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "c"}}
    volumes = [
        {"name": "out", "mountPath": "/out", **claim},
        {"name": "models", "mountPath": "/models", "readOnly": True, **claim},
        {"name": "teams", "mountPath": "/teams", "folder": "of/{namespace}", **claim},
        {"name": "all", "mountPath": "/all", "folder": "", **claim},
    ]
    parsed = parse_policy_spec({**POLICY, "sidecar": {"volumes": volumes}}).sidecar.volumes
    assert [v.tree_of("bank", shared=False) for v in parsed] == [
        *("/out", "/models", "/teams/of/bank", "/all")
    ]
    assert [v.tree_of("bank", shared=True) for v in parsed] == [
        *("/out/bank", "/models", "/teams/of/bank", "/all")
    ]


@pytest.mark.parametrize("folder", ["/a", "a/", "..", "a/../b", "./a", "{job}", "a//b", "a b"])
def test_a_folder_leads_nowhere_else(folder: str) -> None:
    volume = {"name": "v", "mountPath": "/v", "folder": folder, "hostPath": {"path": "/srv"}}
    with pytest.raises(UserError, match="folder"):
        parse_policy_spec({**POLICY, "sidecar": {"volumes": [volume]}})


def test_an_empty_selector_admits_the_own_namespace_alone() -> None:
    access = parse_policy_spec(POLICY).access
    assert not access.admits_others("prod")
    assert access.admits("prod", "prod", {})
    assert not access.admits("prod", "bank", {"a": "b"})
    selector = {"matchLabels": {"tier": "gold"}}
    access = parse_policy_spec({**POLICY, "access": {"namespaceSelector": selector}}).access
    assert access.admits_others("prod")
    assert access.admits("prod", "bank", {"tier": "gold"})
    assert not access.admits("prod", "x", {})
    for own in (
        {"matchLabels": {"kubernetes.io/metadata.name": "prod"}},
        {
            "matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["prod"]}
            ]
        },
    ):
        access = parse_policy_spec({**POLICY, "access": {"namespaceSelector": own}}).access
        assert not access.admits_others("prod")
        assert access.admits_others("elsewhere")


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "0X7F000001"])
def test_an_address_in_another_notation_is_the_address(host: str) -> None:
    assert str(address_of(host)) == "127.0.0.1"
    assert "private" in NetworkAccess().host_refusal(host, 80)


@pytest.mark.parametrize("host", ["4294967296", "1.2.3.4.5", "0xg", "hub", "1e9.example"])
def test_a_number_that_is_no_address_is_a_name(host: str) -> None:
    assert address_of(host) is None
