"""Check with which settings a client of S3 asks a store, by whose store it is."""

from __future__ import annotations

import pytest

from windrow_operator.secrets import KEYS
from windrow_sidecar.finetune.data.places import failed
from windrow_sidecar.finetune.data.remote import Credentials, answers_later, storage_options

pytest.importorskip("botocore")

PLAIN = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """An environment in which nothing of AWS is set."""
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "config"


def asked_by(endpoint=None) -> dict:
    """Return what a client with a Secret is opened with."""
    values = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    if endpoint:
        values["AWS_ENDPOINT_URL"] = endpoint
    return storage_options("s3://b/k", Credentials("team", values)).get("config_kwargs", {})


def test_amazons_own_store_is_asked_as_its_client_does(monkeypatch):
    assert asked_by() == {}
    assert asked_by("https://s3.eu-west-1.amazonaws.com") == {}
    assert storage_options("s3://b/k", Credentials()) == {}


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://storage.googleapis.com",
        "https://ns.compat.objectstorage.eu-frankfurt-1.oraclecloud.com",
        "http://minio.team:9000",
    ],
)
def test_another_store_gets_plain_bodies(endpoint):
    assert asked_by(endpoint) == PLAIN


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://oss-eu-central-1.aliyuncs.com",
        "https://cos-internal.ap-nanjing.tencentcos.cn",
        "https://tos-s3-cn-beijing.ivolces.com",
    ],
)
def test_a_store_that_knows_buckets_by_their_hosts_is_asked_so(endpoint):
    assert asked_by(endpoint) == {**PLAIN, "s3": {"addressing_style": "virtual"}}


@pytest.mark.parametrize(("said", "style"), [("true", "virtual"), ("false", "path")])
def test_a_secret_says_whether_a_store_wants_the_bucket_in_its_host(said, style):
    values = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    values |= {"AWS_ENDPOINT_URL": "https://s3.own", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": said}
    found = storage_options("s3://b/k", Credentials("team", values))["config_kwargs"]
    assert found == {**PLAIN, "s3": {"addressing_style": style}}
    assert set(values) <= set(KEYS)


def test_the_workers_own_settings_say_which_store_it_is(monkeypatch, nobody):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://cos.ap-tokyo.myqcloud.com")
    found = storage_options("s3://b/k", Credentials())["config_kwargs"]
    assert found["s3"] == {"addressing_style": "virtual"}
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    nobody.write_text(
        "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = https://x\n"
    )
    assert storage_options("s3://b/k", Credentials()) == {"config_kwargs": PLAIN}
    of_http = {"client_kwargs": {"trust_env": True}}  # which is about proxies
    assert storage_options("https://host/k", Credentials()) == of_http


def test_what_is_set_already_counts(monkeypatch, nobody):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    nobody.write_text("[default]\nresponse_checksum_validation = when_supported\n")
    assert asked_by("https://x") == {}


def test_an_unknown_profile_is_left_to_the_client(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert asked_by("https://x") == PLAIN


@pytest.mark.parametrize(
    ("status", "later"), [(501, False), (505, False), (500, True), (503, True)]
)
def test_a_store_that_says_that_it_cannot_is_not_asked_again(status, later):
    error = OSError("no")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
    assert answers_later(error) is later


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [
        ("PermanentRedirect", 301, "region"),
        ("301", 301, "region"),  # of a HEAD, which has no body
        ("AuthorizationHeaderMalformed", 400, "region"),
        ("ExpiredToken", 400, "AWS_SESSION_TOKEN"),
        ("400", 400, "AWS_SESSION_TOKEN"),
        ("InvalidAccessKeyId", 403, "of this store"),
        ("RequestTimeTooSkewed", 403, "clock"),
        ("SecondLevelDomainForbidden", 403, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST: true"),
        ("PathStyleDomainForbidden", 403, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST: true"),
        ("AccessDenied", 403, "list, read"),
        ("InvalidObjectState", 403, "archive"),
        ("NoSuchBucket", 404, "s3://bucket/key"),
    ],
)
def test_what_a_store_refuses_says_what_to_do_about_it(code, status, remedy):
    exceptions = pytest.importorskip("botocore.exceptions")
    answer = {
        "Error": {"Code": code, "Message": "refused"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error = OSError("refused")  # as s3fs raises it
    error.__cause__ = exceptions.ClientError(answer, "HeadObject")
    found = failed("s3://bucket/rows.jsonl", error)
    assert found.reason == "DatasetUnreadable"
    assert remedy in found.remedy
