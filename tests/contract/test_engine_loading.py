"""Arena, weights and decoder put together as the server does it, on each driver and decode step."""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from windrow.errors import UserError
from windrow.rundir import ENV_RUN_DIR
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.builtin import profiling
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.loading import load, make_arena
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.threads import Threads
from windrow_sidecar.engines.device import EngineDevice, require_room
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.finetune.model.loading import ExportedWeights, load_base, read_manifest
from windrow_sidecar.testing.models import save_byte_tokenizer, save_random_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> Path:
    """A directory with a config.json and a tokenizer, and no weights."""
    folder = tmp_path_factory.mktemp("shape")
    save_random_llama(folder)
    (folder / "model.safetensors").unlink()
    save_byte_tokenizer(folder)
    return folder


def settings_of(shape: Path, run_dir: Path, *flags: str) -> EngineSettings:
    sizes = ["--arena-bytes=4MiB", "--block-bytes=16KiB", "--max-running-requests=4"]
    return EngineSettings.from_command_line(
        ["--model-path", str(shape), "--random-weights=5", *sizes, *flags],
        {ENV_RUN_DIR: str(run_dir)},
    )


def opened(settings: EngineSettings) -> EngineDevice:
    return open_device(replace(settings, run_dir=None), Threads(1))


@pytest.fixture
def serve(shape) -> Iterator:
    """Loads an engine; closes its arena at the end."""
    arenas: list[Arena] = []

    def start(settings: EngineSettings, device: EngineDevice):
        config = read_config(shape)
        arena = make_arena(settings, config, device)
        arenas.append(arena)
        parts = load(settings, config, device, arena, None, 256, model_fingerprint(shape))
        arena.serve(str(settings.run_dir.arena_socket()))
        return arena, parts

    yield start
    gc.collect()
    for arena in arenas:
        arena.close()


def decoded(parts) -> list[list[int]]:
    """Tokens of three requests whose KV arrived."""
    requests = [profiling.request(i, 20 + 30 * i, 6) for i in range(3)]
    for one in requests:
        parts.scheduler.submit(one)
    running = parts.scheduler.waiting.copy()
    with profiling.muted(parts) as loop:
        while not parts.scheduler.is_empty:
            loop.step()
    return [one.tokens[-6:] for one in running]


@pytest.mark.parametrize("flags", [(), ("--decode-step=static",)], ids=["gathered", "static"])
def test_made_up_weights_are_served_and_are_the_ones_that_the_worker_gets(
    serve, shape, run_dir, flags
):
    settings = settings_of(shape, run_dir, *flags)
    _, parts = serve(settings, opened(settings))
    tokens = decoded(parts)
    assert all(len(of_one) == 6 for of_one in tokens)

    manifest = read_manifest(settings.run_dir.weights_manifest())
    assert manifest["fingerprint"] == model_fingerprint(shape)
    worker = Arena.attach(str(settings.run_dir.arena_socket()))
    exported = ExportedWeights(manifest, from_dlpack(worker.imported("weights")))
    base = load_base(shape, exported)
    assert base.shared
    embedding = base.model.get_input_embeddings().weight
    # Drawn with a deviation of 0.02, of which so many numbers show five standard errors at most.
    error = 5 / math.sqrt(2 * embedding.numel())
    assert float(embedding.float().std()) == pytest.approx(0.02, rel=error)
    del base, exported, embedding
    worker.close()
    del parts


def test_both_decode_steps_agree_on_the_same_seed(serve, shape, run_dir):
    found = []
    for flags in ((), ("--decode-step=static",)):
        settings = settings_of(shape, run_dir / str(len(found)), *flags)
        settings.run_dir.root.mkdir()
        found.append(decoded(serve(settings, opened(settings))[1]))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_runs_over_the_cuda_driver_with_both_sides_in_its_memory(
    cuda_standin, serve, shape, run_dir, dtype
):
    """All but torch's own kernels: arena, weights, export and attach go through CUDA's driver."""
    settings = settings_of(shape, run_dir, "--decode-step=static", f"--dtype={dtype}")
    host = opened(settings)
    device = replace(host, driver="cuda", layout="token-major")
    arena, parts = serve(settings, device)
    assert arena.geometry.layout == "token-major"
    tokens = decoded(parts)
    worker = Arena.attach(str(settings.run_dir.arena_socket()))
    manifest = read_manifest(settings.run_dir.weights_manifest())
    exported = ExportedWeights(manifest, from_dlpack(worker.imported("weights")))
    assert exported.dtype == getattr(torch, dtype)
    assert {name: t.shape for name, t in exported.tensors().items()}
    del exported
    worker.close()
    if dtype == "float32":
        plain = settings_of(shape, run_dir / "plain")
        plain.run_dir.root.mkdir()
        assert decoded(serve(plain, opened(plain))[1]) == tokens
    del parts


def test_a_directory_without_weights_is_refused_unless_they_are_to_be_made_up(
    shape, run_dir, serve
):
    settings = replace(settings_of(shape, run_dir), random_weights=None)
    with pytest.raises(UserError, match=r"no \*.safetensors file") as refused:
        serve(settings, opened(settings))
    assert "--random-weights" in refused.value.remedy


def test_a_gpu_that_is_not_there_is_refused_by_its_flag(shape, run_dir):
    settings = settings_of(shape, run_dir, "--device=cuda:99")
    assert (settings.device, settings.dtype, settings.decode_step) == (
        "cuda:99",
        "bfloat16",
        "static",
    )
    with pytest.raises(UserError) as refused:
        opened(settings)
    assert refused.value.field == "--device"


def test_triton_is_refused_where_it_cannot_run(shape, run_dir, serve, monkeypatch):
    # Imported while the variable is set: that decides its own functions for good.
    importlib.import_module("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    settings = settings_of(shape, run_dir, "--decode-step=static", "--attention-backend=triton")
    with pytest.raises(UserError) as refused:
        serve(settings, opened(settings))
    assert refused.value.field == "--attention-backend"


def test_an_arena_beyond_the_machine_is_refused_with_what_would_do(shape, run_dir):
    with pytest.raises(UserError, match="too large"):
        require_room(opened(settings_of(shape, run_dir)), 1 << 60, 0)
