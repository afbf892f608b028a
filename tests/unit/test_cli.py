"""Every command explains itself, and says by its exit code who must act."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
import yaml

import windrow_cli as cli
from windrow.errors import Transient, UserError
from windrow.views import JobView, SlotView
from windrow_cli import doctor, jobs, top
from windrow_cli.clusters import DemoOptions
from windrow_cli.output import plain, spread, table
from windrow_cli.simulate import SimulateOptions
from windrow_lab.demo.run import DemoSettings
from windrow_sidecar.finetune.engine.orders import ORDERS
from windrow_simulator.scenario import SimulationSettings


def commands():
    """Return every command that the program has, groups opened: {words: command}."""
    found = {}

    def walk(group, words):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, f"{words}{name} ")
            else:
                found[f"{words}{name}"] = command

    walk(typer.main.get_command(cli.app), "")
    return found


JOB = {
    "apiVersion": "windrow.dev/v1alpha1",
    "kind": "FinetuneJob",
    "metadata": {"name": "tone"},
    "spec": {
        "model": {"name": "m"},
        "dataset": {"source": "rows.jsonl"},
        "training": {"maxSteps": 3},
        "output": {"destination": "out"},
    },
}


@pytest.fixture
def nowhere(tmp_path):
    """A kubeconfig of a server that does not listen."""
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    return path


@pytest.mark.parametrize("command", commands())
def test_each_command_has_help_with_an_example_and_answers_in_json(command, capsys):
    assert cli.run([*command.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: windrow {command}" in shown or f"-- windrow {command}" in shown
    # It becomes the server that it is given, whose output is its own.
    assert ("--json" in shown) == (command != "run")


@pytest.mark.parametrize(
    ("closes", "says"),
    [
        (">&-", ""),
        (">&- 2>&-", ""),
        (">/dev/full", "windrow: standard output cannot be written: No space left on device\n"),
        ("| true", ""),
    ],
)
def test_output_that_goes_nowhere_is_no_error_and_a_full_disk_is_told_once(closes, says):
    program = "from windrow_cli.output import print_line as p; p('a' * 70000); p('b'); p('c')"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closes}; exit ${{PIPESTATUS[0]}}', sys.executable, program],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, says)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_no_time_at_all_or_an_endless_one_is_nothing_to_measure(seconds, tmp_path, capsys):
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(JOB))
    assert cli.run(["finetune", str(manifest), f"--seconds={seconds}"]) == cli.EXIT_USAGE
    assert "--seconds" in capsys.readouterr().err


def test_an_unknown_option_and_an_unknown_command_end_with_two(capsys):
    assert cli.run(["get", "--nonsense"]) == cli.EXIT_USAGE
    assert cli.run(["harvest"]) == cli.EXIT_USAGE
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("demo --json --engine vllm", 2, "vllm"),
        ("get --nonsense --json", 2, "nonsense"),  # an option that there is none of
        ("harvest --json", 2, "harvest"),  # a command that there is none of
        ("--json", 2, "--json"),
        ("explain --json", 2, "name"),  # an argument is missing
        ("describe --json", 2, "name"),
        ("finetune --json", 2, "MANIFEST"),
        ("memory --json", 2, "--json"),
        ("finetune job.yaml --json --units few", 2, "--units"),  # a bad value
        ("report --since --json", 2, "--since"),
        ("get --kubeconfig no/file --json", 2, "--kubeconfig"),
        ("submit no/file --kubeconfig {nowhere} --json", 2, "no/file"),
        ("plan no/file --json", 2, "no/file"),
        ("memory dump 0 --json", 2, "0"),
        ("get --kubeconfig {nowhere} --json", 3, "does not answer at 127.0.0.1:1 (Connection re"),
    ],
)
def test_a_command_that_is_asked_for_json_answers_an_error_in_json(
    line, code, says, nowhere, capsys
):
    assert cli.run(line.format(nowhere=nowhere).split()) == code
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert said["exit_code"] == code
    assert says in said["error"]
    assert says in err  # for people, as ever


def test_json_on_standard_output_is_for_commands_that_print_it(capsys):
    assert cli.run(["run", "--nonsense", "--", "server", "--json"]) == 2
    assert cli.run(["get", "--nonsense"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "Job"}, "kind"),
        ({"metadata": {}}, "metadata.name"),
        ({"spec": {**JOB["spec"], "training": {"maxSteps": 0}}}, "spec.training.maxSteps"),
        ({"spec": {**JOB["spec"], "trainning": {}}}, "spec.trainning"),
    ],
)
def test_a_bad_manifest_is_refused_before_anything_is_sent(
    change, field, tmp_path, nowhere, capsys
):
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(JOB | change))
    assert cli.run(["submit", str(manifest), "--kubeconfig", str(nowhere)]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"windrow: {field}: ")


def test_an_order_that_there_is_none_of_is_refused_with_those_that_there_are(capsys):
    assert cli.run(["plan", "job.yaml", "--order=zig"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("windrow: --order: 'zig' is not an order. Write ")
    assert said.rstrip(".\n").partition(" Write ")[2].split(", ") == list(ORDERS)


def test_a_missing_manifest_and_a_missing_kubeconfig_end_with_two(tmp_path, nowhere, capsys):
    none = str(tmp_path / "none")
    assert cli.run(["submit", none, "--kubeconfig", str(nowhere)]) == cli.EXIT_USAGE
    assert cli.run(["get", "--kubeconfig", none]) == cli.EXIT_USAGE
    assert "windrow up" in capsys.readouterr().err


def test_an_api_server_that_does_not_answer_ends_with_three(monkeypatch, capsys):
    def silent(*_):
        raise Transient("the API server does not answer")

    monkeypatch.setattr(jobs, "client", silent)
    assert cli.run(["get"]) == cli.EXIT_TRANSIENT
    assert "does not answer" in capsys.readouterr().err


def test_demo_refuses_bad_input_before_anything_starts(tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.run(["demo", "--seconds", "0", "--out", str(out)]) == cli.EXIT_USAGE
    assert cli.run(["demo", "--trace", "none.csv", "--out", str(out)]) == cli.EXIT_USAGE
    assert cli.run(["demo", "--pods", "0", "--out", str(out)]) == cli.EXIT_USAGE
    assert cli.run(["demo", "--engine", "vllm", "--out", str(out)]) == cli.EXIT_USAGE
    assert cli.run(["up", "--engine", "vllm"]) == cli.EXIT_USAGE
    (out / "old").mkdir(parents=True)
    assert cli.run(["demo", "--out", str(out)]) == cli.EXIT_USAGE
    told = capsys.readouterr().err
    for field in ("--seconds", "none.csv", "--pods", "--out"):
        assert f"windrow: {field}" in told


def test_rows_fit_their_heads_and_json_is_plain():
    job = JobView.of(JOB | {"metadata": {"name": "tone", "namespace": "a", "uid": "u"}})
    slot = SlotView.of({"metadata": {"name": "s", "namespace": "a"}, "spec": {"podName": "p"}})
    assert len(jobs.row_of(job)) == len(jobs.HEAD)
    assert len(top.row_of(slot)) == len(top.HEAD)
    assert json.loads(json.dumps(plain([job, slot])))[1]["chunks"]["kv"] == 0
    assert table(("A", "LONG"), [("xyz", "1")]) == "A     LONG\nxyz   1"


def test_a_job_that_failed_for_its_rows_has_field_and_remedy_in_its_json():
    wrong = {"field": "rows.jsonl:17", "remedy": "Write chat rows."}
    named = {"metadata": {"name": "tone", "namespace": "a", "uid": "u"}}
    shown = plain(JobView.of(JOB | named | {"status": {"userError": wrong}}))
    assert {"field": shown["field"], "remedy": shown["remedy"]} == wrong
    assert plain(JobView.of(JOB | named))["field"] == ""


def test_doctor_finds_what_the_demo_needs(monkeypatch, capsys, nowhere):
    monkeypatch.setattr(doctor, "client", lambda _: _raise())
    assert cli.run(["doctor", "--json"]) == 0
    found = {entry["what"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["native module"]["ok"]
    assert found["torch"]["ok"]
    assert not found["cluster"]["ok"]


def _raise():
    raise Transient("no cluster")


def test_kubectl_finds_the_same_program_as_a_plugin(capsys):
    assert cli.run(["top", "--help"], name="kubectl windrow") == 0
    assert "Usage: kubectl windrow top" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shell", "asked", "answer"),
    [
        ("bash", {"COMP_WORDS": "windrow rep", "COMP_CWORD": "1"}, "report"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "windrow rep"}, '"report"'),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "windrow rep", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "report\t",
        ),
    ],
)
def test_shells_get_a_script_and_complete_commands(shell, asked, answer, monkeypatch, capsys):
    monkeypatch.setenv("_WINDROW_COMPLETE", f"source_{shell}")
    assert cli.run([]) == 0
    assert f"_WINDROW_COMPLETE=complete_{shell}" in capsys.readouterr().out
    monkeypatch.setenv("_WINDROW_COMPLETE", f"complete_{shell}")
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert cli.run([]) == 0
    assert answer in capsys.readouterr().out


def test_bash_itself_completes_by_that_script():
    typed = """
    eval "$(_WINDROW_COMPLETE=source_bash windrow)"
    COMP_WORDS=(windrow rep) COMP_CWORD=1
    _windrow_completion windrow
    echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", typed], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["report"], done.stderr


def test_options_of_the_simulator_are_its_settings():
    asked = SimulateOptions().settings()
    settings = asdict(SimulationSettings())
    assert settings.pop("ranks") == 1  # more are compared by --groups
    assert {name: tuple(v) if isinstance(v, list) else v for name, v in asked.items()} == settings


def test_jobs_of_the_simulator_are_read_as_they_are_written():
    asked = SimulateOptions(job_tokens="2e6-8e7", priorities="0:90,1000:10", lengths="60:65")
    settings = asked.settings()
    assert settings["job_tokens"] == [2e6, 8e7]
    assert settings["priorities"] == [(0, 90.0), (1000, 10.0)]
    assert settings["lengths"] == [60.0, 65.0]
    # The dash of an exponent is none between two numbers.
    assert SimulateOptions(job_tokens="5e-1-2e0").settings()["job_tokens"] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"job_tokens": "many"}, "--job-tokens"),
        ({"job_tokens": "1-2-3"}, "--job-tokens"),
        ({"job_tokens": "inf"}, "--job-tokens"),
        ({"priorities": "0:90,high"}, "--priorities"),
        ({"lengths": "60x65"}, "--lengths"),
    ],
)
def test_jobs_that_cannot_be_read_are_refused_with_what_to_write(options, said):
    with pytest.raises(UserError, match=said) as error:
        SimulateOptions(**options).settings()
    assert "Write" in str(error.value)


def test_options_of_the_demo_are_settings_of_it_and_mean_the_same_by_default():
    settings = DemoSettings(out=Path())
    assert vars(DemoOptions()) == {name: getattr(settings, name) for name in vars(DemoOptions())}


def test_a_command_gets_the_record_that_its_options_fill():
    @dataclass(frozen=True)
    class Options:
        rank: Annotated[int, typer.Option(help="Of the adapter.")] = 8
        name: Annotated[str, typer.Option("--called", help="Of the job.")] = ""

    got = []

    @spread
    def command(options: Options, dry: Annotated[bool, typer.Option("--dry")] = False) -> None:
        got.append((options, dry))

    app = typer.Typer()
    app.command()(command)
    app(["--rank", "4", "--called", "a", "--dry"], standalone_mode=False)
    app([], standalone_mode=False)
    assert got == [(Options(4, "a"), True), (Options(), False)]


def test_without_any_kubeconfig_it_is_said_how_to_get_one(tmp_path):
    # In a process of its own: the library looks for kubectl's own when it is imported.
    hidden = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment |= {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "import windrow_cli as cli; cli.main()", "get"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == cli.EXIT_USAGE
    assert done.stderr == (
        "windrow: there is no cluster to talk to: none is up, and kubectl has no configuration. "
        "Start one with `windrow up`, or set KUBECONFIG.\n"
    )
