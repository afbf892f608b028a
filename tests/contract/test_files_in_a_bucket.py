"""Files of the API's callers in a bucket: whole or not at all."""

import pytest

from windrow_operator.openai_api.stores import BucketStore, StoreSilent


@pytest.fixture
def store(bucket, monkeypatch):
    place, secret = bucket
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    return BucketStore(f"{place}/files")


LARGE = b"0123456789abcdef" * (1 << 20)  # two parts of an upload


@pytest.mark.parametrize("content", [b"rows\n", LARGE], ids=["one part", "two parts"])
def test_a_file_is_there_once_it_is_committed(store, content):
    with store.write("blue/file-1/rows.jsonl") as writer:
        for at in range(0, len(content), 1 << 20):
            writer.write(content[at : at + (1 << 20)])
        assert store.names("blue/file-1") == []
        writer.commit()
    assert store.names("blue") == ["file-1"]
    assert store.names("blue/file-1") == ["rows.jsonl"]
    assert store.read("blue/file-1/rows.jsonl", 4) == content[:4]
    assert b"".join(store.pieces("blue/file-1/rows.jsonl")) == content
    store.remove("blue/file-1/rows.jsonl")
    store.remove("blue/file-1/rows.jsonl")
    assert store.read("blue/file-1/rows.jsonl", 4) is None
    assert store.names("blue/file-1") == []


@pytest.mark.parametrize("content", [b"rows\n", LARGE], ids=["one part", "two parts"])
def test_an_upload_that_breaks_off_leaves_no_part(store, bucket, content):
    def broken_off():
        with store.write("blue/file-1/rows.jsonl") as writer:
            writer.write(content)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        broken_off()
    assert store.names("blue/file-1") == []
    name = bucket[0].removeprefix("s3://").partition("/")[0]
    left = store._system.call_s3("list_multipart_uploads", Bucket=name)
    assert not left.get("Uploads")


def test_a_store_that_does_not_answer_says_so(bucket, monkeypatch):
    for name, value in {**bucket[1], "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreSilent, match="s3://"):
        BucketStore("s3://team/x").read("a", 1)
