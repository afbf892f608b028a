"""Check which transfer libraries may write KV into an arena on a GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from windrow.errors import UserError
from windrow.rundir import ENV_RUN_DIR, RunDir
from windrow_sidecar.engines.sglang import transfers
from windrow_sidecar.engines.sglang.plugin import Plugin


def installed(**versions: str):
    """Return a look-up of versions: underscores of the names for hyphens."""
    by_name = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in by_name:
            raise PackageNotFoundError(name)
        return by_name[name]

    return version


@pytest.mark.parametrize("found", ["0.3.11", "0.3.12", "0.3.12.post1"])
@pytest.mark.parametrize("name", ["mooncake_transfer_engine", "mooncake_transfer_engine_cuda13"])
def test_a_mooncake_that_registers_one_handle_is_refused(name, found):
    with pytest.raises(UserError, match=r"cannot register memory of several CUDA handles") as said:
        transfers.check_library("mooncake", {}, installed(**{name: found}))
    assert said.value.field == "--disaggregation-transfer-backend"
    assert found in str(said.value)


@pytest.mark.parametrize("versions", [{"mooncake_transfer_engine": "0.3.13"}, {}])
def test_a_later_mooncake_or_one_built_from_source_is_left_to_the_probe(versions):
    assert transfers.check_library("mooncake", {}, installed(**versions)) == {}


def test_nixl_gets_the_settings_with_which_ucx_registers_all_handles():
    assert transfers.check_library("nixl", {}) == {
        "UCX_CUDA_COPY_REG_WHOLE_ALLOC": "off",
        "UCX_TLS": "^cuda_ipc",
    }
    own = {"UCX_CUDA_COPY_REG_WHOLE_ALLOC": "n", "UCX_TLS": "rc,cuda_copy"}
    assert transfers.check_library("nixl", own) == {}, "what the user wrote stays"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UCX_CUDA_COPY_REG_WHOLE_ALLOC", "on"),
        ("UCX_CUDA_COPY_REG_WHOLE_ALLOC", "auto"),
        ("UCX_TLS", "all"),
        ("UCX_TLS", "rc, cuda"),
        ("UCX_TLS", "rc,cuda_ipc,cuda_copy"),
        ("UCX_TLS", "^tcp"),
        ("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC"),
    ],
)
def test_settings_by_which_a_transfer_may_stop_at_the_first_handle_are_refused(name, value):
    with pytest.raises(UserError) as said:
        transfers.check_library("nixl", {name: value})
    assert said.value.field == name
    assert value in str(said.value)


@pytest.mark.parametrize("value", ["^cuda_ipc", "^cuda", "rc,ud,cuda_copy", "tcp"])
def test_transports_without_cuda_ipc_are_fine(value):
    assert "UCX_TLS" not in transfers.check_library("nixl", {"UCX_TLS": value})


def test_a_library_that_nobody_has_looked_at_is_refused_by_name():
    with pytest.raises(UserError, match="mori"):
        transfers.check_library("mori", {})


def answering(answer: str, code: int = 0) -> transfers.RangeProbe:
    """Return a probe whose process prints that, and a line of a library before it."""
    program = f"import sys; print('a library'); print({answer!r}); sys.exit({code})"
    return transfers.RangeProbe([sys.executable, "-c", program], os.environ)


def test_the_probes_answer_decides():
    answering(json.dumps({"refused": ""})).check()
    with pytest.raises(UserError, match="Invalid argument"):
        answering(json.dumps({"refused": "Invalid argument [22]"})).check()
    with pytest.raises(UserError, match="exit code 3"):
        answering("", 3).check()
    with pytest.raises(UserError, match="exit code"):
        answering("[1, 2]").check()


def test_a_probe_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(transfers, "_ANSWERS_WITHIN_S", 0.1)
    probe = transfers.RangeProbe(
        [sys.executable, "-c", "import signal; signal.pause()"], os.environ
    )
    probe._until_s = time.monotonic()
    with pytest.raises(UserError, match="no answer"):
        probe.check()
    assert probe._process.returncode is not None


def test_the_probe_is_no_server_of_the_pod():
    show = f"import os, json; print(json.dumps({{'refused': os.environ.get({ENV_RUN_DIR!r}, '')}}))"
    environment = {**os.environ, ENV_RUN_DIR: "/run/windrow"}
    transfers.RangeProbe([sys.executable, "-c", show], environment).check()


@pytest.mark.parametrize(
    ("mode", "device", "backend", "asked"),
    [
        ("decode", "cuda", "mooncake", True),
        ("decode", "cuda", "nixl", True),
        ("decode", "cuda", "fake", False),
        ("decode", "cpu", "mooncake", False),
        ("null", "cuda", "mooncake", False),
    ],
)
def test_only_a_decode_instance_on_a_gpu_is_asked(mode, device, backend, asked):
    args = SimpleNamespace(
        disaggregation_mode=mode, device=device, disaggregation_transfer_backend=backend
    )
    assert transfers.receives_by_transfer(args) is asked


def test_where_the_range_is_refused_the_pool_keeps_sglangs_memory(monkeypatch, tmp_path):
    class MHATokenToKVPool:
        """A pool of SGLang's."""

        dtype = None

    pools = SimpleNamespace(
        MHATokenToKVPool=MHATokenToKVPool, MLATokenToKVPool=None, DSATokenToKVPool=None
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.memory_pool", pools)
    (tmp_path / "run").mkdir()
    plugin = Plugin(RunDir(tmp_path / "run"), {})
    plugin.range_probe = answering(json.dumps({"refused": "Invalid argument [22]"}))
    made = []
    plugin.create_buffers(made.append, MHATokenToKVPool())
    assert len(made) == 1, "SGLang's own buffers"
    assert plugin.arena is None
    assert "Invalid argument [22]" in plugin.off
    assert "Invalid argument" in plugin.run_dir.refusal().read_text(encoding="utf-8")
