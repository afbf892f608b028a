"""The folder of a job, on a disk and in a bucket: one contract.

The bucket is a real S3 server's. Checkpoints come back bit for bit or are passed over by name; a
worker of an older epoch writes nothing any more; the adapter is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from windrow.errors import UserError
from windrow.outputs import OWN_FOLDER
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.remote import (
    Credentials,
    open_file_system,
    storage_options,
)
from windrow_sidecar.finetune.job.bucket import (
    BucketFolder,
    BucketSilent,
    OwnBucketFolder,
)
from windrow_sidecar.finetune.job.starting_point import (
    NamedCheckpoint,
    bucket_files,
    local_files,
)
from windrow_sidecar.finetune.training.checkpoint import Completion, Fenced, JobFolder, Position

UID = "a-job"
TENSORS = {"parameter/x": torch.arange(6.0).reshape(2, 3), "sum/y": torch.ones(4)}


class OnDisk:
    """A job's folders below one directory."""

    def __init__(self, root) -> None:
        self.root = root

    def folder(self, epoch=1):
        return JobFolder(self.root, UID, epoch)

    def other(self, named, namespace=""):
        """The folder of another job that names a checkpoint of this one's."""
        files = local_files(ConfinedFiles([self.root]))
        starts_from = NamedCheckpoint(f"{self.root}/{named}", files, namespace)
        return JobFolder(self.root / "else", "other-job", 1, starts_from=starts_from)

    def names(self):
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())

    def read(self, name):
        return (self.root / name).read_bytes()

    def write(self, name, content):
        (self.root / name).write_bytes(content)

    def remove(self, name):
        (self.root / name).unlink()


class InBucket:
    """The same below one folder of a bucket; each worker has a disk of its own."""

    def __init__(self, url, secret, scratch) -> None:
        self.url, self._secret, self._scratch = url, secret, scratch
        self.system = self._open()

    def _open(self):
        return open_file_system(self.url, Credentials("s3", self._secret))

    def folder(self, epoch=1):
        return BucketFolder(self.url, UID, epoch, self._open(), self._scratch / f"node-{epoch}")

    def other(self, named, namespace=""):
        starts_from = NamedCheckpoint(f"{self.url}/{named}", bucket_files(self._open()), namespace)
        at = (f"{self.url}/else", "other-job", 1, self._open(), self._scratch / "other")
        return BucketFolder(*at, starts_from=starts_from)

    def names(self):
        root = self.url.removeprefix("s3://")
        return sorted(path.removeprefix(f"{root}/") for path in self.system.find(self.url))

    def read(self, name):
        return self.system.cat_file(f"{self.url}/{name}")

    def write(self, name, content):
        self.system.pipe_file(f"{self.url}/{name}", content)

    def remove(self, name):
        self.system.rm_file(f"{self.url}/{name}")


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    if request.param == "disk":
        return OnDisk(tmp_path)
    return InBucket(*request.getfixturevalue("bucket"), tmp_path)


@pytest.fixture
def folder(store):
    made = store.folder()
    made.claim()
    return made


def checkpoints(store):
    found = {n.split("/")[3] for n in store.names() if "/checkpoints/" in n}
    return sorted(found)


def test_a_checkpoint_comes_back_as_it_was_to_another_worker(store, folder):
    assert folder.newest() is None
    said = folder.save(Position(3, (1, 2), 0.5, tokens_done=70), TENSORS, keep=2)
    later = store.folder(2)
    later.claim()
    found = later.newest()
    assert (found.path, found.position) == (said, Position(3, (1, 2), 0.5, tokens_done=70))
    assert all(torch.equal(found.tensors[name], TENSORS[name]) for name in TENSORS)
    assert later.passed_over == ()


def test_the_newest_are_kept_and_later_ones_go(store, folder):
    for step in (1, 2, 3, 9):
        folder.save(Position(step), TENSORS, keep=2)
    assert checkpoints(store) == ["step-00000003-00000", "step-00000009-00000"]
    folder.save(Position(4), TENSORS, keep=2)
    assert checkpoints(store) == ["step-00000003-00000", "step-00000004-00000"]


@pytest.mark.parametrize("harm", ["tensors torn", "manifest missing", "of another job"])
def test_a_damaged_checkpoint_is_passed_over_by_name(store, folder, harm):
    folder.save(Position(1), TENSORS, keep=3)
    damaged = folder.save(Position(2), TENSORS, keep=3)
    at = f".windrow/{UID}/checkpoints/step-00000002-00000"
    if harm == "tensors torn":
        store.write(f"{at}/tensors.safetensors", store.read(f"{at}/tensors.safetensors")[:-4])
    elif harm == "manifest missing":
        store.remove(f"{at}/manifest.json")
    else:
        manifest = json.loads(store.read(f"{at}/manifest.json")) | {"job_uid": "other"}
        store.write(f"{at}/manifest.json", json.dumps(manifest).encode())
    assert folder.newest().position == Position(1)
    assert [text.partition(": ")[0] for text in folder.passed_over] == [damaged]


JOB, FIRST = f".windrow/{UID}", f".windrow/{UID}/checkpoints/step-00000001-00000"


@pytest.mark.parametrize(("named", "step"), [(JOB, 2), (FIRST, 1)])
def test_a_job_goes_on_from_the_checkpoint_that_it_names_until_it_has_its_own(
    store, folder, named, step
):
    for done in (1, 2):
        folder.save(Position(done, tokens_done=done), TENSORS, keep=3)
    other = store.other(named)
    other.claim()
    found = other.newest()
    assert (found.position.step, found.is_named) == (step, True)
    assert all(torch.equal(found.tensors[name], TENSORS[name]) for name in TENSORS)
    assert other.begun == folder.begun  # so that a template that writes the date writes the same
    other.save(Position(5), TENSORS, keep=3)
    assert (other.newest().position.step, other.newest().is_named) == (5, False)


def test_a_job_keeps_the_server_whose_requests_its_rows_are_rendered_as(store, folder):
    assert folder.served_by("sglang-0.5.22") == "sglang-0.5.22"
    assert folder.served_by("sglang-0.5.23") == "sglang-0.5.23"  # nothing is learnt yet
    folder.save(Position(1), TENSORS, keep=3)
    assert folder.served_by("vllm") == "sglang-0.5.23"
    other = store.other(JOB)
    other.claim()
    assert other.served_by("vllm") == "sglang-0.5.23"
    assert folder.served_by("vllm", insisted=True) == folder.served_by("transformers") == "vllm"


def test_rows_of_a_job_that_began_before_there_were_forms_stay_as_they_are(store, folder):
    folder.save(Position(1), TENSORS, keep=3)
    assert folder.served_by("sglang-0.5.23") == "transformers"
    other = store.other(JOB)
    other.claim()
    assert other.served_by("sglang-0.5.23") == "transformers"


@pytest.mark.parametrize("named", ["nothing", FIRST])
def test_a_checkpoint_that_is_named_and_not_there_is_refused_before_anything_is_loaded(
    store, folder, named
):
    folder.save(Position(2), TENSORS, keep=3)
    with pytest.raises(UserError, match="holds no checkpoint") as refused:
        store.other(named).claim()
    assert refused.value.field == "spec.checkpoint.resumeFrom"


def test_a_named_checkpoint_that_is_damaged_is_refused_and_an_older_whole_one_is_taken(
    store, folder
):
    for step in (1, 2):
        folder.save(Position(step), TENSORS, keep=3)
    at = f"{JOB}/checkpoints/step-00000002-00000/tensors.safetensors"
    store.write(at, store.read(at)[:-4])
    assert store.other(JOB).newest().position.step == 1
    with pytest.raises(UserError, match="does not have the checksum"):
        store.other(at.rpartition("/")[0]).newest()


def test_a_checkpoint_that_would_fill_the_memory_is_refused_or_passed_over(tmp_path):
    store = OnDisk(tmp_path / "volume")
    folder = JobFolder(store.root, UID, 1)
    folder.claim()
    at = Path(folder.save(Position(1), TENSORS, keep=3))
    with (at / "tensors.safetensors").open("r+b") as file:
        file.truncate(1 << 43)  # it takes no room on the disk
    assert folder.newest() is None
    assert "this machine has memory for" in folder.passed_over[0]
    with pytest.raises(UserError, match="this machine has memory for"):
        store.other(JOB).newest()
    (at / "manifest.json").write_text("[" * 100_000)
    assert folder.newest() is None


def test_a_named_checkpoint_leads_nowhere_else(tmp_path):
    """Links out of the volume, pipes, and what another namespace's job left."""
    secret = tmp_path / "elsewhere"
    secret.mkdir()
    (secret / "manifest.json").write_text("{}")
    store = OnDisk(tmp_path / "volume")
    folder = JobFolder(store.root, UID, 1, namespace="bank")
    folder.claim()
    at = Path(folder.save(Position(1), TENSORS, keep=3))
    (store.root / "link").symlink_to(secret)
    (store.root / "pipe").mkdir()
    os.mkfifo(store.root / "pipe" / "manifest.json")
    with pytest.raises(UserError, match="leads by a link out of"):
        store.other("link").claim()
    with pytest.raises(UserError, match="is not a regular file"):
        store.other("pipe").claim()
    with pytest.raises(UserError, match="is not on a volume that this job may read") as refused:
        store.other("../elsewhere").claim()
    assert refused.value.field == "spec.checkpoint.resumeFrom"
    for named in (JOB, FIRST):
        with pytest.raises(UserError, match="of a job of another namespace"):
            store.other(named, "evil").claim()
        store.other(named, "bank").claim()
    (at / "state.json").unlink()
    (at / "state.json").symlink_to(secret / "manifest.json")
    with pytest.raises(UserError, match="leads by a link out of"):
        store.other(FIRST).newest()


@pytest.mark.parametrize("link", ["the folder of a job", "a checkpoint", "files", "a name"])
def test_what_another_namespace_left_is_refused_by_every_link_on_one_volume(tmp_path, link):
    """Lead by links to what others wrote, on a volume without a folder for each namespace."""
    store = OnDisk(tmp_path / "volume")
    bank = JobFolder(store.root / "bank", UID, 1, namespace="bank")
    bank.claim()
    theirs = Path(bank.save(Position(1), TENSORS, keep=3))
    evil = JobFolder(store.root / "evil", "evil-uid", 1, namespace="evil")
    evil.claim()
    at, named = evil.root, f"evil/{OWN_FOLDER}/evil-uid"
    up = "../" * (len(at.relative_to(store.root).parts) - 1)
    if link == "the folder of a job":
        shutil.rmtree(at)
        at.symlink_to(f"{up}bank/{OWN_FOLDER}/{UID}")
    elif link == "a checkpoint":
        (evil.checkpoints / theirs.name).symlink_to(f"../../{up}{theirs.relative_to(store.root)}")
    elif link == "files":
        (evil.checkpoints / theirs.name).mkdir()
        for file in theirs.iterdir():
            leads = f"../../../{up}{file.relative_to(store.root)}"
            (evil.checkpoints / theirs.name / file.name).symlink_to(leads)
    else:
        named = "copy"
        (store.root / "copy").symlink_to(theirs.relative_to(store.root))
    with pytest.raises(UserError, match=r"of another namespace|leads by a link out of") as refused:
        store.other(named, "evil").newest()
    assert refused.value.field == "spec.checkpoint.resumeFrom"
    if link == "a name":
        store.other(named, "bank").claim()


def test_whose_a_named_checkpoint_is_and_what_it_holds_are_of_one_directory(tmp_path, monkeypatch):
    """Exchange the folder after its owner was looked at."""
    store = OnDisk(tmp_path / "volume")
    for namespace, step in (("bank", 7), ("evil", 1)):
        folder = JobFolder(store.root / namespace, UID, 1, namespace=namespace)
        folder.claim()
        folder.save(Position(step), TENSORS, keep=3)
    look = NamedCheckpoint._refuse_others

    def swap(named, *place):
        look(named, *place)
        (store.root / "evil").rename(store.root / "before")
        (store.root / "evil").symlink_to("bank")

    monkeypatch.setattr(NamedCheckpoint, "_refuse_others", swap)
    found = store.other(f"evil/{OWN_FOLDER}/{UID}", "evil").newest()
    assert found.position == Position(1)


def test_a_worker_of_an_older_epoch_writes_nothing_any_more(store, folder):
    folder.save(Position(1), TENSORS, keep=2)
    store.folder(2).claim()
    before = store.names()
    with pytest.raises(Fenced, match="epoch 2"):
        folder.save(Position(2), TENSORS, keep=2)
    with pytest.raises(Fenced):
        folder.put_adapter(lambda draft: (draft / "adapter_config.json").write_text("{}"), last="")
    with pytest.raises(Fenced):
        folder.forget_checkpoints()
    with pytest.raises(Fenced):
        store.folder(1).claim()
    later = store.folder(2)
    assert [later.newest().position, checkpoints(store)[0]] == [Position(1), "step-00000001-00000"]
    assert not [name for name in store.names() if name not in before and "manifest" in name]


def adapter(weights: bytes):
    def fill(folder):
        (folder / "adapter_model.safetensors").write_bytes(weights)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))

    return fill


def test_an_adapter_takes_the_place_of_an_earlier_one(store, folder):
    for weights in (b"first", b"second"):
        folder.put_adapter(adapter(weights), last="adapter_config.json")
    assert store.read("adapter_model.safetensors") == b"second"
    assert json.loads(store.read("adapter_config.json")) == {"r": 8}
    assert not [name for name in store.names() if "/adapter/" in name]


def test_checkpoints_that_are_forgotten_leave_the_adapter(store, folder):
    folder.save(Position(1), TENSORS, keep=2)
    folder.put_adapter(adapter(b"x"), last="adapter_config.json")
    folder.forget_checkpoints()
    assert checkpoints(store) == []
    assert "adapter_model.safetensors" in store.names()


def test_what_a_job_came_to_is_read_by_the_next_worker_and_noted_by_no_older_one(store, folder):
    assert folder.completion() is None
    later = store.folder(2)
    later.claim()
    with pytest.raises(Fenced):
        folder.complete(Completion(7, 90, "7 of 7 steps"))
    assert later.completion() is None
    done = Completion(7, 90, "7 of 7 steps", loss=0.5, base_eval_loss=2.0, tuned_eval_loss=1.5)
    later.complete(done)
    assert store.folder(3).completion() == done


class Failing:
    """A bucket's file system that fails at one of its writes; `n`: which."""

    def __init__(self, system, n: int) -> None:
        self._system, self.left = system, n

    def put_file(self, *args):
        self.left -= 1
        if self.left == 0:
            raise OSError("connection reset")
        return self._system.put_file(*args)

    def __getattr__(self, name):
        return getattr(self._system, name)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_upload_that_fails_at_any_file_leaves_the_checkpoint_before(bucket, tmp_path, n):
    url, secret = bucket
    credentials = Credentials("s3", secret)
    folder = BucketFolder(url, UID, 1, open_file_system(url, credentials), tmp_path)
    folder.claim()
    folder.save(Position(1), TENSORS, keep=1)
    folder._system = Failing(folder._system, n)
    with pytest.raises(OSError, match="connection reset"):
        folder.save(Position(2), TENSORS, keep=1)
    after = BucketFolder(url, UID, 2, open_file_system(url, credentials), tmp_path)
    after.claim()
    assert after.newest().position == Position(1)
    assert not list(tmp_path.rglob("*.safetensors")), "what was uploaded or not takes no disk"
    after.save(Position(2), TENSORS, keep=1)
    assert after.newest().position == Position(2)


@pytest.mark.parametrize("n", [1, 2])
def test_an_adapter_that_is_uploaded_by_half_is_none(bucket, tmp_path, n):
    url, secret = bucket
    system = open_file_system(url, Credentials("s3", secret))
    folder = BucketFolder(url, UID, 1, Failing(system, n), tmp_path)
    folder.claim()
    with pytest.raises(OSError, match="connection reset"):
        folder.put_adapter(adapter(b"x"), last="adapter_config.json")
    assert not system.exists(f"{url}/adapter_config.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "Correct AWS_ACCESS_KEY_ID"),
        ({"bucket": "s3://nobody/out"}, "Name a bucket that there is"),
    ],
)
def test_a_bucket_that_cannot_be_written_is_the_users_to_mend(bucket, tmp_path, change, says):
    url, secret = change.get("bucket", bucket[0]), bucket[1] | change
    folder = BucketFolder(url, UID, 1, open_file_system(url, Credentials("s3", secret)), tmp_path)
    with pytest.raises(UserError, match=says) as found:
        folder.claim()
    assert found.value.reason == "OutputNotWritable"
    assert "team-secret" not in str(found.value)


def test_a_store_that_does_not_answer_is_no_reason_to_begin_anew(bucket, tmp_path):
    url, secret = bucket[0], bucket[1] | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    folder = BucketFolder(url, UID, 1, open_file_system(url, Credentials("s3", secret)), tmp_path)
    with pytest.raises(BucketSilent):
        folder.newest()


def test_a_secret_that_lacks_a_key_is_named():
    with pytest.raises(UserError, match="'s3' has no AWS_SECRET_ACCESS_KEY"):
        storage_options("s3://b/k", Credentials("s3", {"AWS_ACCESS_KEY_ID": "x"}))
    with pytest.raises(UserError, match="has no HF_TOKEN"):
        storage_options("owner/rows", Credentials("hub", {}))


def test_credentials_are_never_shown():
    assert "hidden" not in repr(Credentials("s3", {"AWS_SECRET_ACCESS_KEY": "hidden"}))


def figures(folder, *steps):
    with (folder.root / "metrics.jsonl").open("a") as out:
        out.writelines(f'{{"step": {step}}}\n' for step in steps)


@pytest.fixture
def alone(bucket, tmp_path):
    """Folders of workers without a cluster, each on a machine of its own."""
    url, secret = bucket

    def folder(machine, **how):
        system = open_file_system(url, Credentials("s3", secret))
        return OwnBucketFolder(url, UID, system, tmp_path / machine, **how)

    return folder


def test_a_worker_alone_goes_on_from_the_bucket_and_the_one_before_writes_no_more(alone):
    first = alone("a")
    first.claim()
    said = first.save(Position(1), TENSORS, keep=2)
    assert said.startswith(f"{first.place}/.windrow/{UID}/checkpoints/step-00000001")
    second = alone("b")
    second.claim()
    assert second.newest().path == said
    with pytest.raises(Fenced, match="epoch 2 of the job has started"):
        first.save(Position(2), TENSORS, keep=2)
    with pytest.raises(Fenced):
        first.put_adapter(adapter(b"old"), last="adapter_config.json")
    again = alone("a")  # the machine of before, with what was left there
    again.claim()
    again.save(Position(3), TENSORS, keep=2)
    assert again.epoch == 3
    fresh = alone("a", fresh=True)
    fresh.claim()
    assert fresh.newest() is None


def test_the_figures_of_all_workers_of_a_job_are_in_its_bucket(bucket, alone, tmp_path):
    url, secret = bucket
    system = open_file_system(url, Credentials("s3", secret))

    def steps():
        lines = system.cat_file(f"{url}/.windrow/{UID}/metrics.jsonl").decode().splitlines()
        return [json.loads(line)["step"] for line in lines]

    first = BucketFolder(url, UID, 1, system, tmp_path / "pod-1")
    first.claim()
    figures(first, 1, 2)
    first.save(Position(2), TENSORS, keep=1)
    assert steps() == [1, 2]
    figures(first, 3)  # lost with its pod: no checkpoint came after it
    second = BucketFolder(url, UID, 2, system, tmp_path / "pod-2")
    second.claim()
    figures(second, 3, 4)
    second.keep_figures()
    assert steps() == [1, 2, 3, 4]
    first.keep_figures()
    assert steps() == [1, 2, 3, 4], "of a worker that was fenced nothing is uploaded"
    own = alone("a")
    own.claim()
    figures(own, 5)
    own._system = Failing(own._system, 4)
    own.save(Position(5), TENSORS, keep=1)  # the last of its uploads is that of the figures
    assert own.newest().position == Position(5), "a checkpoint does not depend on figures"
    assert steps() == [1, 2, 3, 4]
    fresh = alone("a", fresh=True)
    fresh.claim()
    figures(fresh, 1)
    fresh.keep_figures()
    assert steps() == [1]
