"""Check what of URLs nobody may see is in no message and no log."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from windrow.errors import UserError
from windrow.redaction import RedactingFormatter, redacted
from windrow_sidecar.finetune.job.failures import failure

SIGNED = {
    "S3": "https://b.s3.amazonaws.com/rows.jsonl?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential="
    "AKIAsecret%2F20240101%2Fs3&X-Amz-Expires=60&X-Amz-Signature=secret&X-Amz-Security-Token=secret",
    "S3, of version 2": "http://b.s3.amazonaws.com/rows.jsonl?AWSAccessKeyId=secret&Signature=secret"
    "%3D&Expires=1",
    "GCS": "https://storage.googleapis.com/b/rows.jsonl?X-Goog-Credential=secret%40p&X-Goog-Signature="
    "secret",
    "Azure": "https://a.blob.core.windows.net/c/rows.jsonl?sv=2022-11-02&sr=b&sig=secret%2Bsecret%3D",
    "a password": "https://me:secret@example.com/rows.jsonl",
    "a fragment": "https://example.com/rows.jsonl#token=secret",
}


@pytest.mark.parametrize("of", SIGNED)
def test_a_signature_and_a_password_are_hidden_and_the_place_stays(of):
    url = SIGNED[of]
    shown = redacted(f"{url!r} cannot be read (see {url})")
    assert "secret" not in shown
    assert "rows.jsonl" in shown
    assert shown.startswith("'http")
    assert shown.endswith(")")
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text", ["3 < 4 and a=b", "s3://bucket/folder/rows.jsonl is not there", "/data/a?b=c.jsonl"]
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


def test_the_event_of_an_error_and_the_log_of_its_causes_show_no_signature():
    url = SIGNED["S3"]
    event, _ = failure(OSError(f"403, message='Forbidden', url='{url}'"), "")
    assert "secret" not in event.detail
    event, _ = failure(UserError(f"{url} is not there", field=f"{url}:1"), "")
    assert "secret" not in event.detail
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logger = logging.getLogger("test-redaction")
    logger.addHandler(handler)
    try:
        Path(url).read_text()
    except FileNotFoundError:
        logger.exception("cannot read %s", url)
    finally:
        logger.removeHandler(handler)
    assert "rows.jsonl" in out.getvalue()
    assert "secret" not in out.getvalue()
