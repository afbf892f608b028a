from __future__ import annotations

import argparse
from typing import get_args

import pytest

from windrow.builtin_engine import MODULE, n_bytes, refusal
from windrow.errors import UserError
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.harvest.ablation import Protection
from windrow_sidecar.qos.predictor import PredictorForm


def parse(tmp_path, *argv, **environment):
    return EngineSettings.from_command_line(["--model-path", str(tmp_path), *argv], environment)


def test_the_command_line_of_a_decode_pod_is_understood(tmp_path):
    settings = parse(
        tmp_path,
        *["--host", "0.0.0.0", "--port", "8001", "--disaggregation-mode", "decode"],
        *["--disaggregation-transfer-backend", "fake", "--max-running-requests", "8"],
        *["--arena-bytes", "1GiB", "--block-bytes", "131072", "--tp-size", "1"],
        **{ENV_RUN_DIR: "/run/windrow", ENV_LOG_DIR: "/logs", ENV_POD_NAME: "decode-0"},
    )
    assert (settings.host, settings.port, settings.max_running) == ("0.0.0.0", 8001, 8)
    assert (settings.arena_bytes, settings.block_bytes) == (1 << 30, 1 << 17)
    assert settings.profile == "quick"
    assert settings.source == "decode-0"
    assert str(settings.run_dir.arena_socket()) == "/run/windrow/arena-0.sock"


def test_without_a_run_directory_it_is_an_ordinary_server(tmp_path):
    settings = parse(tmp_path)
    assert settings.run_dir is None
    assert settings.profile == "none"


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--tp-size", "2", "--device", "cuda"], "--device"),
        (["--tp-size", "2", "--decode-step", "static"], "--decode-step"),
        (["--tp-size", "2", "--profile", "roofline"], "--profile"),
        (["--port", "70000"], "--port"),
        (["--watchdog-timeout", "60"], "--watchdog-timeout"),
        (["--weights-budget", "0"], "--weights-budget"),
        (["--finetune-deferral", "30s"], "--finetune-deferral"),
        (["--finetune-objective", "40ms"], "--finetune-objective"),
        (["--finetune-policy", "flexllm"], "--finetune-policy"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_flag(tmp_path, argv, field):
    with pytest.raises(UserError) as refused:
        parse(tmp_path, *argv)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tp", "two"], "'two' is not a whole number"),
        (["--context-length=-5"], "must be at least 0"),
    ],
)
def test_a_number_that_is_none_is_refused_in_words(tmp_path, capsys, argv, said):
    with pytest.raises(SystemExit):
        parse(tmp_path, *argv)
    assert said in capsys.readouterr().err


def test_a_policy_on_the_command_line_is_refused_where_the_sidecar_sends_it(tmp_path):
    with pytest.raises(UserError, match="sends the policy") as refused:
        parse(
            tmp_path,
            *["--finetune", "in-engine", "--finetune-policy", "flexllm"],
            **{ENV_RUN_DIR: "/run/windrow"},
        )
    assert refused.value.field == "--finetune-policy"


@pytest.mark.parametrize("effort", ["roofline", "quick", "full"])
def test_a_profile_that_nobody_reads_is_refused_with_what_to_do(tmp_path, effort):
    with pytest.raises(UserError, match="--profile-only FILE") as refused:
        parse(tmp_path, "--profile", effort)
    assert refused.value.field == "--profile"
    assert parse(tmp_path, "--profile", "none").profile == "none"
    wanted = parse(tmp_path, "--profile", effort, "--profile-only", str(tmp_path / "profile"))
    assert wanted.profile == effort
    assert parse(tmp_path, "--profile", effort, **{ENV_RUN_DIR: "/run/w"}).profile == effort


def test_a_model_directory_that_is_missing_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a directory"):
        parse(tmp_path / "nowhere")


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("128KiB", 131072), ("2 gib", 2 << 30)])
def test_sizes_are_read_with_their_units(text, size):
    assert n_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "12MB", "lots"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        n_bytes(text)


def test_on_a_gpu_sizes_types_and_kernels_are_a_gpus_unless_they_are_named(tmp_path):
    host, gpu = parse(tmp_path), parse(tmp_path, "--device", "cuda")
    assert (host.device, host.dtype, host.decode_step) == ("cpu", "float32", "gathered")
    assert (gpu.device, gpu.dtype, gpu.decode_step) == ("cuda:0", "bfloat16", "static")
    assert (host.attention_backend, gpu.attention_backend) == ("torch", "auto")
    assert (host.block_bytes, gpu.block_bytes) == (128 << 10, 2 << 20)
    named = parse(tmp_path, "--device=cuda:1", "--dtype=float32", "--attention-backend=torch")
    assert (named.device, named.dtype, named.attention_backend) == ("cuda:1", "float32", "torch")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1"])
def test_a_device_that_is_none_is_refused(tmp_path, name, capsys):
    with pytest.raises(SystemExit):
        parse(tmp_path, f"--device={name}")
    assert "write cpu, cuda or cuda:1" in capsys.readouterr().err


def test_the_predictor_has_the_forms_of_the_papers_as_well(tmp_path):
    assert parse(tmp_path).harvest_predictor == "windrow"
    for form in get_args(PredictorForm):
        assert parse(tmp_path, f"--harvest-predictor={form}").harvest_predictor == form
    with pytest.raises(SystemExit):
        parse(tmp_path, "--harvest-predictor=oracle")


def test_every_protection_is_on_unless_it_is_named(tmp_path):
    assert parse(tmp_path).harvest_without == frozenset()
    named = [f"--harvest-without={name}" for name in get_args(Protection)]
    assert parse(tmp_path, *named).harvest_without == set(get_args(Protection))
    with pytest.raises(SystemExit):
        parse(tmp_path, "--harvest-without=everything")


def test_decode_of_a_gpu_is_confined_by_its_graphs_and_elsewhere_that_is_refused(tmp_path):
    green = {"WINDROW_DECODE_PARTITION": "green"}
    assert parse(tmp_path, "--device", "cuda").decode_partition == "none"
    assert parse(tmp_path, "--device", "cuda", **green).decode_partition == "green"
    for argv, field in (
        ([], "--device"),
        (["--device", "cuda", "--decode-step", "gathered"], "--decode-step"),
    ):
        with pytest.raises(UserError, match="Unset WINDROW_DECODE_PARTITION") as refused:
            parse(tmp_path, *argv, **green)
        assert refused.value.field == field
    with pytest.raises(UserError, match="none or green"):
        parse(tmp_path, "--device", "cuda", WINDROW_DECODE_PARTITION="pdmux")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model-path", "/m", "--tp", "2", "--device", "cuda"], "--device: ranks of the"),
        (["--model-path", "/m", "--tp=two"], "'two' is not a whole number"),
        (["--model-path", "/m", "--page-sise", "16"], "unrecognized arguments: --page-sise"),
        (["--port", "8000"], "required: --model-path"),
        (["--model-path", "$(MODEL)", "--tp", "${RANKS}", "--watchdog-timeout=$(LATE)"], ""),
        (["--model-path=$(MODEL)", "--port", "70000"], "--port: 70000 is not a port"),
        (["$ENGINE_ARGS"], ""),
        (["--help"], ""),
    ],
)
def test_a_manifests_arguments_are_judged_by_what_is_known_of_them(given, said):
    words = ["python", "-m", MODULE, *given]
    assert (said in refusal(words)) if said else (refusal(words) == "")


def test_the_arguments_of_another_program_are_not_judged():
    assert refusal(["python", "-m", "sglang.launch_server", "--port", "70000"]) == ""
