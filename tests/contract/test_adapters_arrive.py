"""Finished adapters are copied to where servers load them from: whole, checked, bounded."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save
from support.filehub import served

from windrow.adapter_files import CONFIG_FILE, WEIGHTS_FILE, digest_of_folder
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow.rundir import RunDir
from windrow_sidecar.agent.adapter_store import AdapterStore
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.finetune.arrival.__main__ import fetch
from windrow_sidecar.finetune.arrival.cache import AdapterCache
from windrow_sidecar.finetune.arrival.sources import AdapterSource
from windrow_sidecar.finetune.data import network_guard
from windrow_sidecar.finetune.data.remote import NO_CREDENTIALS, Credentials, storage_options
from windrow_sidecar.finetune.data.source_access import SourceAccess


def adapter(folder: Path, value: float = 1.0, *, rank: int = 4) -> str:
    """Write an adapter; returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    weights = {"q.lora_A.weight": torch.full((rank, 8), value)}
    (folder / WEIGHTS_FILE).write_bytes(save(weights))
    return digest_of_folder(folder)


def source_of(folder: Path) -> AdapterSource:
    return AdapterSource(str(folder), NO_CREDENTIALS, SourceAccess((folder,)))


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_a_copy_is_whole_and_under_its_digest(tmp_path, cache):
    digest = adapter(tmp_path / "a")
    for _ in range(2):  # the same order twice is one
        AdapterCache(cache, 10**6).store(source_of(tmp_path / "a"), digest, ())
        assert names(cache) == {digest}
        assert names(cache / digest) == {CONFIG_FILE, WEIGHTS_FILE}
        assert digest_of_folder(cache / digest) == digest


def test_a_damaged_copy_is_made_again(tmp_path, cache):
    digest = adapter(tmp_path / "a")
    AdapterCache(cache, 10**6).store(source_of(tmp_path / "a"), digest, ())
    (cache / digest / WEIGHTS_FILE).write_bytes(b"half")
    AdapterCache(cache, 10**6).store(source_of(tmp_path / "a"), digest, ())
    assert digest_of_folder(cache / digest) == digest


def broken(folder: Path, how: str) -> str:
    """Make an adapter wrong; returns the digest that is asked for."""
    digest = adapter(folder)
    if how == "changed":
        adapter(folder, value=2.0)
    elif how == "no LoRA adapter":
        (folder / CONFIG_FILE).write_text('{"peft_type": "IA3"}')
    elif how == "pickled":
        (folder / WEIGHTS_FILE).write_bytes(b"\x80\x02}q\x00." * 40)
    elif how == "cut":
        whole = (folder / WEIGHTS_FILE).read_bytes()
        (folder / WEIGHTS_FILE).write_bytes(whole[:-4])
    elif how == "a link":
        (folder / WEIGHTS_FILE).unlink()
        (folder / WEIGHTS_FILE).symlink_to("/etc/hostname")
    elif how == "missing":
        (folder / WEIGHTS_FILE).unlink()
    return digest if how in ("changed", "a link", "missing") else digest_of_folder(folder)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("changed", "are not those that the job wrote"),
        ("no LoRA adapter", "is not of a LoRA adapter"),
        ("pickled", "is not a safetensors file"),
        ("cut", "is not a safetensors file"),
        ("a link", "leads by a link out of"),
        ("missing", "cannot be read"),
    ],
)
def test_what_is_not_the_jobs_adapter_leaves_nothing(tmp_path, cache, how, said):
    digest = broken(tmp_path / "a", how)
    with pytest.raises(UserError, match=said):
        AdapterCache(cache, 10**6).store(source_of(tmp_path / "a"), digest, ())
    assert names(cache) == set()


def test_the_hub_is_not_asked_for_an_adapter_with_the_pods_own_token(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of-decode")
    access = SourceAccess((tmp_path,), pod_credentials=False)
    mine = Credentials("mine", {"HF_TOKEN": "of-job"})
    for credentials, token in ((NO_CREDENTIALS, False), (mine, "of-job")):
        assert AdapterSource("hf://bank/private", credentials, access)._system.token == token
    assert AdapterSource("hf://bank/own", NO_CREDENTIALS, SourceAccess())._system.token is None


class Swapping:
    """An adapter's files; somebody swaps a folder of the cache as they are opened."""

    def __init__(self, files: AdapterSource, swap) -> None:
        self._files, self._swap, self.place = files, swap, files.place

    def open(self, name: str):
        self._swap(name)
        return self._files.open(name)


@pytest.mark.parametrize("at", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_an_adapter_is_copied_through_no_link_that_is_put_into_the_cache(tmp_path, cache, at, what):
    """Have the draft, which all who write to the volume see, lead to another's adapter."""
    digest = adapter(tmp_path / "a")
    theirs = adapter(tmp_path / "theirs", 7.0)

    def swap(name):
        (draft,) = cache.glob(".draft-*")
        if name == at and what == "folder" and not draft.is_symlink():
            draft.rename(tmp_path / "moved")
            draft.symlink_to(tmp_path / "theirs")
        elif name == at and what == "file":
            (draft / name).symlink_to(tmp_path / "theirs" / name)

    with pytest.raises((UserError, OSError)):
        AdapterCache(cache, 10**6).store(Swapping(source_of(tmp_path / "a"), swap), digest, ())
    assert digest_of_folder(tmp_path / "theirs") == theirs
    assert digest not in names(cache)


@pytest.mark.parametrize("what", ["link", "pipe", "terabytes"])
def test_what_was_put_in_the_place_of_a_copy_holds_nobody_up(tmp_path, cache, what):
    digest = adapter(tmp_path / "a")
    if what == "link":
        (cache / digest).symlink_to(tmp_path / "a")
    else:
        adapter(cache / digest)
        (cache / digest / WEIGHTS_FILE).unlink()
    if what == "pipe":
        os.mkfifo(cache / digest / WEIGHTS_FILE)
    elif what == "terabytes":
        with (cache / digest / WEIGHTS_FILE).open("wb") as file:
            file.truncate(1 << 42)
    AdapterCache(cache, 10**6).store(source_of(tmp_path / "a"), digest, ())
    assert not (cache / digest).is_symlink()
    assert digest_of_folder(cache / digest) == digest
    assert names(cache) == {digest}
    assert names(tmp_path / "a") == {CONFIG_FILE, WEIGHTS_FILE}


def test_a_digest_is_no_path(tmp_path, cache):
    adapter(tmp_path / "a")
    with pytest.raises(UserError, match="is not a digest"):
        AdapterCache(cache, 10**6).store(source_of(tmp_path / "a"), "../../a", ())


def test_versions_that_nobody_uses_make_room(tmp_path, cache):
    digests = [adapter(tmp_path / str(n), float(n)) for n in range(4)]
    one = sum(file.stat().st_size for file in (tmp_path / "0").iterdir())
    kept = AdapterCache(cache, 2 * one)
    for n in (0, 1):
        kept.store(source_of(tmp_path / str(n)), digests[n], ())
        os.utime(cache / digests[n], (n + 1, n + 1))
    kept.store(source_of(tmp_path / "2"), digests[2], {digests[0]})  # the older one is in use
    assert names(cache) == {digests[0], digests[2]}
    with pytest.raises(UserError, match=r"more than the 0 bytes.*adapterCache\.size"):
        kept.store(source_of(tmp_path / "3"), digests[3], {digests[0], digests[2]})
    assert names(cache) == {digests[0], digests[2]}


class Breaking:
    """A source that breaks off in the middle of its weights."""

    place = "s3://team/a"

    def __init__(self, folder: Path) -> None:
        self._inner = source_of(folder)

    def open(self, name):
        return self._inner.open(name if name == CONFIG_FILE else "nothing")


def test_a_copy_that_breaks_off_leaves_nothing_and_what_was_there_stays(tmp_path, cache):
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", 2.0)
    kept = AdapterCache(cache, 10**6)
    kept.store(source_of(tmp_path / "a"), first, ())
    with pytest.raises(UserError, match="cannot be read"):
        kept.store(Breaking(tmp_path / "b"), second, ())
    assert names(cache) == {first}


def order_of(source, digest, volume, **changes):
    cache = f"{volume}/team/.windrow-adapters/team"
    return {
        "source": source,
        "forget": False,
        "digest": digest,
        "cache": cache,
        "cacheBytes": 10**6,
        "keep": [],
        "trees": [f"{volume}/team"],
        "mounts": [str(volume)],
        "secret": {},
        "access": {
            "readableTrees": [],
            "never": [],
            "listsSources": False,
            "sources": [],
            "privateSources": False,
            "podCredentials": False,
        },
    } | changes


@pytest.fixture
def guarded():
    """Let the guard of this process forget the adapter's job."""
    yield
    network_guard.forget("adapter")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("source", ["/elsewhere", "file:///etc", "http://169.254.169.254/a"])
def test_no_adapter_is_read_outside_of_what_the_job_may_read(tmp_path, source):
    (tmp_path / "volume").mkdir()
    with pytest.raises(UserError):
        fetch(order_of(source, "0" * 64, tmp_path / "volume"))


@pytest.mark.usefixtures("guarded")
def test_a_bucket_is_not_read_with_the_pods_own_credentials(tmp_path):
    with pytest.raises(UserError, match="credentials of the pod"):
        fetch(order_of("s3://team/a", "0" * 64, tmp_path))


def stored(volume: Path, *orders: dict) -> list[pb.AdapterStored]:
    """Have an agent carry out orders, one after the other; returns its answers."""
    volume.mkdir()
    told: list[pb.AdapterStored] = []
    store = AdapterStore(AgentSettings(RunDir(volume.parent / "run")), told.append)
    tree = f"{volume}/team"
    fixed = {
        "job_uid": "u",
        "cache": f"{tree}/.windrow-adapters/team",
        "cache_bytes": 10**6,
        "outputs": pb.Outputs(trees=[tree], mounts=[str(volume)]),
        "access": pb.Access(private_sources=True),
    }

    async def run():
        for order in orders:
            await store.store(pb.StoreAdapter(**fixed, **order))

    asyncio.run(run())
    assert {path.name for path in volume.rglob(".draft-*")} == set()
    return told


def test_an_adapter_arrives_from_a_repository_of_the_hub(tmp_path, monkeypatch):
    digest = adapter(tmp_path / "models" / "team" / "tone")
    with served(tmp_path) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        (told,) = stored(tmp_path / "volume", {"source": "hf://team/tone", "digest": digest})
        assert told.error == ""
        assert names(tmp_path / "volume/team/.windrow-adapters/team") == {digest}
    # What its job leaves behind goes with it, whether or not the Hub answers.
    order = order_of("", digest, tmp_path / "volume", forget=True)
    fetch(order)
    assert names(Path(order["cache"])) == set()


@pytest.mark.extended
def test_an_adapter_arrives_from_a_bucket_and_another_in_its_place_does_not(tmp_path, bucket):
    url, secret = bucket
    digest = adapter(tmp_path / "a")
    system = fsspec.filesystem("s3", **storage_options(url, Credentials("s3", secret)))
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        system.put_file(str(tmp_path / "a" / name), f"{url}/{name}")
    of_bucket = {"source": url, "secret": secret}
    volume = tmp_path / "volume"
    told = stored(volume, of_bucket | {"digest": digest}, of_bucket | {"digest": "0" * 64})
    assert [(each.digest, bool(each.error)) for each in told] == [(digest, False), ("0" * 64, True)]
    assert "are not those that the job wrote" in told[1].error
    assert secret["AWS_SECRET_ACCESS_KEY"] not in told[1].error
    copies = volume / "team/.windrow-adapters/team"
    assert names(copies) == {digest}
    assert load_file(copies / digest / WEIGHTS_FILE)["q.lora_A.weight"].shape == (4, 8)
