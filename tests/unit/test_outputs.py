"""Check where a job may write, with real directories and links."""

from pathlib import Path

import pytest

from windrow.crd import parse_job_spec
from windrow.errors import UserError
from windrow.outputs import check_alone, check_within, is_below, make_trees, path_of
from windrow_sidecar.finetune.job.assembly import JobSpec


@pytest.mark.parametrize(
    ("destination", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a/%62", "/a/b"),
        ("/a//b/./c/", "/a/b/c"),
        ("//a/b", "/a/b"),
        ("///a/b", "/a/b"),
        ("a/b/", "a/b"),
        ("/a/%62", "/a/%62"),
    ],
)
def test_one_directory_has_one_path(destination, path):
    assert path_of(destination) == path


@pytest.mark.parametrize(
    ("destination", "below"),
    [
        ("/data/tone", True),
        ("file:///data/tone", True),
        ("/data", True),
        ("/data2/tone", False),
        ("/", False),
        ("out/tone", True),  # the worker knows below what
    ],
)
def test_a_destination_is_in_a_tree_by_its_whole_names(destination, below):
    assert is_below(["/mnt", "/data"], destination) is below


@pytest.fixture
def volume(tmp_path):
    """A volume with a directory of another job, and its mount, which is itself a link."""
    (tmp_path / "disk" / "other").mkdir(parents=True)
    (tmp_path / "mount").symlink_to(tmp_path / "disk")
    return tmp_path / "mount"


def test_a_directory_of_a_volume_is_taken_as_it_really_is(volume, tmp_path):
    assert check_within(volume / "tone", [volume]) == tmp_path / "disk" / "tone"
    assert check_within(volume / "deep" / "tone", [tmp_path / "no", volume]).name == "tone"


@pytest.mark.parametrize("link_to", ["other", "/etc", "../elsewhere"])
def test_a_link_below_a_volume_is_refused_wherever_it_leads(volume, link_to):
    (volume / "tone").symlink_to(link_to)
    for place in (volume / "tone", volume / "tone" / "deeper"):
        with pytest.raises(UserError, match="leads by a link to"):
            check_within(place, [volume])


@pytest.mark.parametrize("link", [".windrow", ".windrow/u", ".windrow/u/checkpoints"])
def test_a_link_where_a_jobs_own_folder_comes_is_refused(volume, tmp_path, link):
    spec = {
        "model": {"name": "/m"},
        "dataset": {"source": "/rows.jsonl"},
        "training": {"maxSteps": 1},
        "output": {"destination": str(volume / "tone")},
    }
    job = JobSpec("team", "tone", "u", 1, parse_job_spec(spec), outputs=(volume,))
    assert job.destination == tmp_path / "disk" / "tone"
    (volume / "tone" / link).parent.mkdir(parents=True)
    (volume / "tone" / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads by a link to"):
        _ = job.destination


def test_outside_of_the_volumes_is_refused_with_what_there_is(volume, tmp_path):
    with pytest.raises(UserError) as refused:
        check_within(tmp_path / "disk2" / "tone", [volume])
    assert str(volume) in refused.value.problem
    assert (refused.value.field, refused.value.reason) == (
        "spec.output.destination",
        "OutputNotWritable",
    )
    with pytest.raises(UserError, match="which is nothing"):
        check_within(volume / "tone", [])


def test_climbing_out_of_a_volume_is_refused(volume):
    with pytest.raises(UserError, match="is not in what this slot may write"):
        check_within(volume / ".." / "elsewhere", [volume])


def test_a_volume_that_is_not_mounted_is_said_to_be_missing(tmp_path):
    with pytest.raises(UserError, match="not mounted in this pod"):
        check_within(tmp_path / "data" / "tone", [tmp_path / "data"])


def test_a_relative_destination_stands_in_the_working_directory(volume, monkeypatch):
    monkeypatch.chdir(volume)
    place = volume.resolve()

    assert check_within(Path("tone"), [place]) == place / "tone"
    assert check_alone("tone") == Path("tone")


def test_alone_a_link_may_not_lead_a_relative_path_out_of_the_working_directory(
    tmp_path, monkeypatch
):

    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("out").symlink_to(tmp_path / "there")
    with pytest.raises(UserError, match="out of the working directory"):
        check_alone("out/tone")
    Path("plain").mkdir()
    Path("plain/.windrow").symlink_to(tmp_path / "there")
    with pytest.raises(UserError, match=r"\.windrow leads by a link .* out of the working"):
        check_alone("plain")
    # Named in full it is meant.
    assert check_alone(str(tmp_path / "here" / "out" / "tone")).name == "tone"


def test_alone_the_root_of_the_file_system_is_refused_also_by_a_link(tmp_path):
    (tmp_path / "root").symlink_to("/")
    with pytest.raises(UserError, match="the root of the file system"):
        check_alone(str(tmp_path / "root"))


def test_a_bucket_has_one_name_and_is_below_no_volume_that_it_needs():
    assert path_of("s3://team//out/./tone/") == "s3://team/out/tone"
    assert is_below((), "s3://team/out")


def test_what_a_job_alone_leaves_here_of_a_bucket_has_a_place_by_the_buckets_name(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    place = Path("/var/cache/me/windrow/buckets/team/out/tone")
    assert check_alone("s3://team//out/./tone/") == place
    assert check_alone("s3://team/out/tone") == place


def test_the_folder_of_a_namespace_is_made_on_its_volume_and_through_no_link(tmp_path):
    volume, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    volume.mkdir()
    elsewhere.mkdir()
    make_trees([f"{volume}/teams/bank", f"{tmp_path}/other/bank"], [str(volume)])
    assert (volume / "teams" / "bank").is_dir()
    assert not (tmp_path / "other").exists()
    (volume / "linked").symlink_to(elsewhere)
    make_trees([f"{volume}/linked/bank", f"{volume}/teams/bank"], [str(volume), "/not/there"])
    assert list(elsewhere.iterdir()) == []
