"""A cache of executables is whole and proved, or it is not there."""

import os
import re
from pathlib import Path

import pytest

from windrow.errors import UserError
from windrow_lab.machine.build import modules
from windrow_lab.machine.resources import resource_directory
from windrow_lab.machine.toolchain import build_environment, find_go
from windrow_lab.machine.tools import (
    ENV_ASSETS,
    ETCD_VERSION,
    KUBERNETES_VERSION,
    KUEUE,
    MANIFEST,
    NAMES,
    NODE,
    OBJECT_STORE,
    cache_directory,
    cached_tools,
    find_tools,
    is_whole,
    write_manifest,
)


def put_tools(directory: Path, names=NAMES) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text(f"#!/bin/sh\n# {name}\n")
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture
def environment(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path / "nothing")}


@pytest.fixture
def cache(environment):
    directory = put_tools(cache_directory(environment))
    write_manifest(directory, NAMES, "1.26")
    return directory


def test_a_sealed_build_is_found(cache, environment):
    assert cached_tools(environment) == cache
    assert find_tools(environment=environment).kube_apiserver == cache / "kube-apiserver"


def test_a_build_without_its_manifest_is_no_build(cache, environment):
    (cache / MANIFEST).unlink()
    assert cached_tools(environment) is None
    assert find_tools(environment=environment) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": []}', '{"files": [{"name": "etcd"}]}'])
def test_a_torn_manifest_is_no_build(cache, text):
    (cache / MANIFEST).write_text(text)
    assert not is_whole(cache)


def test_a_missing_executable_is_noticed(cache):
    (cache / "etcd").unlink()
    assert not is_whole(cache)


def test_a_truncated_executable_is_noticed(cache):
    os.truncate(cache / "kube-apiserver", 5)
    assert not is_whole(cache)


def test_changed_content_of_the_same_size_is_noticed(cache):
    path = cache / "kube-apiserver"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(1, 1))
    assert not is_whole(cache)


def test_a_copied_cache_whose_times_changed_is_still_whole(cache):
    os.utime(cache / "kube-apiserver", ns=(1, 1))
    assert is_whole(cache)


def test_an_explicit_directory_comes_before_path_assets_and_cache(tmp_path, cache, environment):
    explicit, path, assets = (put_tools(tmp_path / name) for name in ("e", "p", "a"))
    environment |= {"PATH": str(path), ENV_ASSETS: str(assets)}
    found = [find_tools(explicit, environment).etcd.parent]
    found.append(find_tools(None, environment).etcd.parent)
    environment["PATH"] = ""
    found.append(find_tools(None, environment).etcd.parent)
    del environment[ENV_ASSETS]
    found.append(find_tools(None, environment).etcd.parent)
    assert found == [explicit, path, assets, cache]


def test_a_place_that_lacks_one_executable_is_passed_over(tmp_path, cache, environment):
    environment["PATH"] = str(put_tools(tmp_path / "p", ["etcd"]))
    environment[ENV_ASSETS] = str(put_tools(tmp_path / "a", ["etcd", "kube-apiserver"]))
    assert find_tools(None, environment).etcd.parent == cache


def test_an_explicit_directory_that_lacks_one_is_an_error_that_names_it(tmp_path, environment):
    with pytest.raises(UserError, match="no executable kube-controller-manager"):
        find_tools(put_tools(tmp_path / "e", NAMES[:2]), environment)


def test_the_go_modules_hold_the_versions_that_the_cache_is_named_after():
    folder = resource_directory("controlplane")
    kubernetes = (folder / "kubernetes" / "go.mod").read_text()
    etcd = (folder / "etcd" / "go.mod").read_text()
    assert f"require k8s.io/kubernetes {KUBERNETES_VERSION}\n" in kubernetes
    assert f"require go.etcd.io/etcd/server/v3 {ETCD_VERSION}\n" in etcd
    replaced = set(re.findall(r"=> k8s\.io/\S+ (\S+)", kubernetes))
    assert replaced == {KUBERNETES_VERSION.replace("v1.", "v0.")}


def test_the_nodes_modules_hold_the_versions_that_its_cache_is_named_after():
    folder = resource_directory("node")
    named = cache_directory({"HOME": "/h"}, NODE).name
    for module, required in (
        ("kubernetes", "k8s.io/kubernetes"),
        ("containerd", "github.com/containerd/containerd/v2"),
        ("coredns", "github.com/coredns/coredns"),
        ("helm", "helm.sh/helm/v4"),
    ):
        version = re.search(
            rf"require {re.escape(required)} (\S+)", (folder / module / "go.mod").read_text()
        ).group(1)
        assert version in named.split("-")
        assert module == "kubernetes" or f"{module}-{version}" in named
    assert {module.folder for module in modules(NODE)} == {
        path.parent.name for path in folder.glob("*/go.mod")
    }


def test_the_executables_are_stamped_with_their_version():
    flags = next(module.linker_flags for module in modules() if module.folder == "kubernetes")
    for package in ("k8s.io/component-base", "k8s.io/client-go/pkg"):
        assert f"-X {package}/version.gitVersion={KUBERNETES_VERSION}" in flags


def test_the_users_go_settings_do_not_reach_the_build():
    theirs = {
        "GOFLAGS": "-mod=vendor",
        "GOOS": "plan9",
        "GOWORK": "/x",
        "GOPROXY": "https://mirror",
    }
    ours = build_environment(theirs)
    assert "-mod=vendor" not in ours["GOFLAGS"]
    assert "GOOS" not in ours
    assert ours["GOWORK"] == "off"
    assert ours["GOPROXY"] == "https://mirror"


@pytest.mark.parametrize(
    ("version", "usable"), [("1.25.4", False), ("1.26.0", True), ("2.0", True)]
)
def test_a_toolchain_is_taken_only_when_it_is_new_enough(tmp_path, version, usable):
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\necho go version go{version} linux/amd64\n")
    go.chmod(0o755)
    assert (find_go({"PATH": str(tmp_path)}) is not None) is usable


def test_the_object_stores_module_holds_the_version_that_its_cache_is_named_after():
    module = (resource_directory("objectstore") / "versitygw" / "go.mod").read_text()
    named = cache_directory({"HOME": "/h"}, OBJECT_STORE).name
    assert f"require github.com/versity/versitygw {named}\n" in module


def test_kueues_module_holds_the_version_that_its_cache_is_named_after():
    module = (resource_directory("kueue") / "kueue" / "go.mod").read_text()
    named = cache_directory({"HOME": "/h"}, KUEUE).name
    assert f"require sigs.k8s.io/kueue {named}\n" in module
