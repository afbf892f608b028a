"""Commands and environments become what they mean on this machine."""

import sys
from pathlib import Path

import pytest

from windrow_lab.node.expansion import (
    ConfigError,
    command_line,
    container_environment,
    expand,
    field_value,
    parse_cpus,
    quantity,
    relocate,
)

MOUNTS = {"/run/windrow": Path("/t/p/1/run"), "/run": Path("/t/p/1/all"), "/models/": Path("/m")}
POD = {
    "metadata": {
        "name": "decode-0",
        "namespace": "serving",
        "uid": "u-1",
        "labels": {"app": "chat", "a.b/c": "d"},
    },
    "spec": {"nodeName": "laptop"},
}


def nothing(_kind, _name):
    return None


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)-$(B)", "1-2"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
    ],
)
def test_references_are_expanded_as_kubernetes_does(text, expanded):
    assert expand(text, {"A": "1", "B": "2"}) == expanded


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("/run/windrow", "/t/p/1/run"),
        ("--dir=/run/windrow/agent.sock", "--dir=/t/p/1/run/agent.sock"),
        ("unix:///run/windrow/agent.sock", "unix:///t/p/1/run/agent.sock"),
        ("/run/other:/run/windrow", "/t/p/1/all/other:/t/p/1/run"),
        ("/run/windrow2 /run-time /run.d", "/t/p/1/all/windrow2 /run-time /run.d"),
        ("/var/run/windrow", "/var/run/windrow"),
        ("open('/models/tiny')", "open('/m/tiny')"),
        ("relative/run", "relative/run"),
    ],
)
def test_mount_paths_become_real_directories_where_a_path_begins(text, moved):
    assert relocate(text, MOUNTS) == moved


def test_nothing_moves_without_mounts():
    assert relocate("/run/windrow", {}) == "/run/windrow"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "decode-0"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['app']", "chat"),
        ("metadata.labels['a.b/c']", "d"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "laptop"),
        ("status.podIP", "127.0.0.1"),
        ("metadata.labels", 'a.b/c="d"\napp="chat"'),
    ],
)
def test_the_downward_api_answers(path, value):
    assert field_value(POD, path) == value


def test_an_unknown_field_path_is_refused():
    with pytest.raises(ConfigError, match=r"spec\.hostname"):
        field_value(POD, "spec.hostname")


def test_variables_are_resolved_in_order_and_later_ones_see_earlier_ones():
    container = {
        "name": "c",
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "settings"}}],
        "env": [
            {"name": "A", "value": "$(B)"},
            {"name": "B", "value": "$(P_color) in /run/windrow"},
            {"name": "C", "value": "$(B)"},
        ],
    }
    found = container_environment(POD, container, lambda *_: {"color": "green"}, MOUNTS)
    assert found == {
        "P_color": "green",
        "A": "$(B)",
        "B": "green in /t/p/1/run",
        "C": "green in /t/p/1/run",
    }


def test_a_missing_key_is_an_error_unless_it_is_optional():
    reference = {"name": "keys", "key": "word"}
    entry = {"name": "WORD", "valueFrom": {"secretKeyRef": reference}}
    container = {"name": "c", "env": [entry]}
    with pytest.raises(ConfigError, match="'keys' not found"):
        container_environment(POD, container, nothing, {})
    with pytest.raises(ConfigError, match="no key 'word'"):
        container_environment(POD, container, lambda *_: {"other": "x"}, {})
    reference["optional"] = True
    assert container_environment(POD, container, nothing, {}) == {}


def test_resource_fields_are_rounded_up_to_the_divisor():
    container = {
        "name": "c",
        "resources": {"limits": {"cpu": "1500m", "memory": "3Gi"}},
        "env": [
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {
                "name": "MEMORY",
                "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
            },
        ],
    }
    assert container_environment(POD, container, nothing, {}) == {"CPU": "2", "MEMORY": "3072"}


def test_python_is_the_nodes_own_and_other_programs_are_as_written():
    assert command_line({"name": "c", "command": ["python", "-V"]}, {}, {})[0] == sys.executable
    assert command_line({"name": "c", "command": ["sh"], "args": ["$(A)"]}, {"A": "1"}, {}) == [
        "sh",
        "1",
    ]


def test_a_container_without_a_command_is_refused():
    with pytest.raises(ConfigError, match="has no command"):
        command_line({"name": "c", "args": ["serve"]}, {}, {})


def test_cpu_lists_are_read_as_the_kernel_writes_them():
    assert parse_cpus("0,2-4") == (0, 2, 3, 4)
    for wrong in ("", "a", "1-", "-1", "0;1"):
        with pytest.raises(ConfigError):
            parse_cpus(wrong)


def test_quantities_have_units():
    assert [quantity(text) for text in ("2", "100m", "1Ki", "1.5M")] == [2, 0.1, 1024, 1.5e6]
    with pytest.raises(ConfigError):
        quantity("two")
