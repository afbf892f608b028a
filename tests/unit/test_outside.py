"""All clients of a process take the same way outside."""

from __future__ import annotations

import ssl

import pytest

from windrow_sidecar.finetune.data.outside import agree_on_authorities, spare_of_proxy
from windrow_sidecar.finetune.data.remote import Credentials, storage_options

SETS = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE")


@pytest.mark.parametrize("name", SETS)
def test_a_file_of_authorities_counts_for_all_clients(tmp_path, name):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    given = {name: str(bundle), "HOME": "/"}
    agree_on_authorities(given)
    assert given == {**dict.fromkeys(SETS, str(bundle)), "HOME": "/"}


def test_what_is_set_stays_and_a_directory_or_nothing_changes_nothing(tmp_path):
    one, other = tmp_path / "one.pem", tmp_path / "other.pem"
    one.write_text("")
    other.write_text("")
    given = {"REQUESTS_CA_BUNDLE": str(one), "AWS_CA_BUNDLE": str(other)}
    agree_on_authorities(given)
    assert given == {**dict.fromkeys(SETS, str(one)), "AWS_CA_BUNDLE": str(other)}
    for untouched in ({"REQUESTS_CA_BUNDLE": str(tmp_path)}, {"SSL_CERT_FILE": "/none"}, {}):
        given = dict(untouched)
        agree_on_authorities(given)
        assert given == untouched


def test_a_context_of_ssl_reads_the_variable_when_it_is_made(tmp_path, monkeypatch):
    """Clients of a worker make theirs later, so it counts for them."""
    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    for name in SETS:
        monkeypatch.setenv(name, str(bundle))  # so that it is as it was once the test is over
        if name != "REQUESTS_CA_BUNDLE":
            monkeypatch.delenv(name)
    agree_on_authorities()
    assert ssl.get_default_verify_paths().cafile == str(bundle)


@pytest.mark.parametrize(
    ("url", "before", "after"),
    [
        ("http://10.1.2.3:9000/b", "localhost, 10.0.0.0/8", "localhost,10.0.0.0/8,10.1.2.3"),
        ("http://10.1.2.3:9000/b", "10.0.0.0/8,10.1.2.3", "10.0.0.0/8,10.1.2.3"),
        ("http://11.1.2.3/b", "10.0.0.0/8", "10.0.0.0/8"),
        ("https://[fd00::7]:9000", "fd00::/8", "fd00::/8,fd00::7"),
        ("https://minio.store.svc", "10.0.0.0/8,.svc", "10.0.0.0/8,.svc"),
        ("http://10.1.2.3", "10.1.0.0/99, *", "10.1.0.0/99, *"),
        ("http://127.0.0.1:80", ".svc", ".svc,127.0.0.1"),
        ("", "10.0.0.0/8", "10.0.0.0/8"),
    ],
)
def test_an_address_in_a_range_is_spared_of_the_proxy(url, before, after):
    given = {"NO_PROXY": before, "HTTPS_PROXY": "http://proxy:3128"}
    spare_of_proxy(url, given)
    assert given["NO_PROXY"] == after


def test_without_a_proxy_nothing_is_spared():
    given = {"NO_PROXY": "10.0.0.0/8", "HTTPS_PROXY": ""}
    spare_of_proxy("http://10.1.2.3", given)
    assert given["NO_PROXY"] == "10.0.0.0/8"


def test_the_endpoint_of_a_secret_is_spared(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "10.0.0.0/8")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://proxy.invalid:3128")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    endpoint = {"AWS_ENDPOINT_URL": "http://10.9.9.9:9000"}
    storage_options("s3://bucket/rows", Credentials("store", {**keys, **endpoint}))
    from botocore.utils import get_environ_proxies

    assert get_environ_proxies("http://10.9.9.9:9000") == {}
