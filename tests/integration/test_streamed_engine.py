"""Serve and finetune in one engine whose memory holds some of the model's layers only."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from safetensors.torch import load_file
from test_in_engine import Engine, manifest
from waiting import wait_until

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.settings import EngineSettings

BUDGET = ("--weights-budget", "9MiB")


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    """Start an engine with a job that ends and an endless one."""
    folder = tmp_path_factory.mktemp("streamed")
    jobs = [manifest(folder, "good"), manifest(folder, "endless", maxSteps=100_000)]
    flags = [word for job in jobs for word in ("--finetune-job", str(job))]
    flags += ["--finetune-objective", "20s", "--finetune-deferral", "60s"]
    started = Engine(folder, "--finetune", "fused", *BUDGET, *flags)
    yield started.wait()
    started.close()


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> str:
    """Return the answer of an engine that holds all layers."""
    resident = Engine(tmp_path_factory.mktemp("resident"))
    try:
        return resident.wait().complete()
    finally:
        resident.close()


@pytest.mark.extended
def test_answers_are_those_of_an_engine_that_holds_all_layers_while_jobs_train(engine, answer):
    assert engine.complete() == answer
    said = engine.until_said("job good SUCCEEDED")
    assert "3 of 6 layers are in memory at a time" in said
    assert load_file(engine.folder / "good" / "adapter_model.safetensors")
    engine.until_said("job endless STARTED")

    def shared() -> bool:
        assert engine.complete() == answer
        return "a decode step has shared its products" in engine.output.read_text()

    wait_until(shared, "a step was carried by a forward", seconds=120)
    assert engine.end() == 0, engine.output.read_text()
    said = engine.output.read_text()
    assert "Traceback" not in said
    assert "job endless STOPPED: Stopped; the engine ends" in said
    turns = re.search(r"(\d+) turns before a step, (\d+) with the step's products shared", said)
    assert int(turns[1]) >= int(turns[2]) > 0


@pytest.mark.parametrize(
    ("flags", "field", "says"),
    [
        (["--device", "cuda", *BUDGET], "--device", "on cores only"),
        (["--random-weights", "1", *BUDGET], "--random-weights", "no file"),
        (["--tp", "2", *BUDGET], "--tp-size", "one rank"),
        (["--profile", "quick", *BUDGET], "--profile", "does not foretell"),
        (["--finetune-policy", "windrow", *BUDGET], "--finetune-policy", "FineInfer's rule"),
        (["--weights-rate", "0", *BUDGET], "--weights-rate", "bring no layer"),
        (["--weights-rate", "1GiB"], "--weights-rate", "nothing to slow down"),
    ],
)
def test_what_streamed_layers_cannot_do_is_refused_before_anything_is_loaded(
    tmp_path, flags, field, says
):
    with pytest.raises(UserError, match=says) as refused:
        EngineSettings.from_command_line(["--model-path", str(tmp_path), *flags], {})
    assert refused.value.field == field
