"""Check what README and `--help` promise of commands and specs is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml

import windrow_cli as cli
from windrow.crd import parse_job_spec
from windrow.errors import UserError

README = (Path(__file__).parents[2] / "README.md").read_text()


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json_for_machines(name):
    command = COMMANDS[name]
    said = f"{command.help}\n{command.epilog}"
    assert f"Example: windrow {name}" in said
    # `run` becomes the server that it is given: what is printed is the server's.
    has_json = any("--json" in parameter.opts for parameter in command.params)
    assert has_json == (name != "run")


def test_commands_of_the_readme_exist():
    called = re.findall(r"(?:\.venv/bin/|[;`] ?)windrow ((?:memory )?[a-z][a-z-]*)", README)
    assert len(set(called)) >= 8
    assert set(called) <= {*COMMANDS, *(name.split()[0] for name in COMMANDS)}


def spec_of_the_readme():
    (block,) = re.findall(r"```yaml\n(apiVersion.*?)```", README, re.DOTALL)
    return yaml.safe_load(block)["spec"]


def test_the_job_of_the_readme_is_valid():
    assert parse_job_spec(spec_of_the_readme()).training.batch_size == 16


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"output": {"destination": "gs://team/adapters"}}, "spec.output.destination"),
        ({"workers": {"max": 2}}, "spec.workers.max"),
    ],
)
def test_what_the_readme_says_is_not_there_is_refused_by_field(part, field):
    with pytest.raises(UserError) as refused:
        parse_job_spec(spec_of_the_readme() | part)
    assert refused.value.field == field
