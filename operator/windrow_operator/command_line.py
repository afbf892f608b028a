"""Read a container's command line as its kubelet and its shell make it: pure functions.

The kubelet expands `$(NAME)` by the container's variables, and a shell `$NAME`, `${NAME}` and
`${NAME:-default}`. What comes from a Secret, a ConfigMap or the image is not in the pod's spec, so
a word that needs it stays open.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Body = Mapping[str, Any]

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_SEPARATORS = ";&|"
_KUBELET = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_SHELL = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?::?[-=](?P<default>[^{}]*))?\}"
    r"|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))"
)
_OPEN = re.compile(r"\$[({A-Za-z_]|`")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
# ARGS=(--port 1) and "${ARGS[@]}" of bash.
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=\((.*)", re.DOTALL)
_ALL_OF = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}")
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")


def variables_of(container: Body) -> dict[str, str]:
    """Return the variables of a container whose values its spec holds, expanded."""
    known: dict[str, str] = {}
    for entry in container.get("env") or ():
        if entry.get("valueFrom"):
            known.pop(entry["name"], None)
        else:
            known[entry["name"]] = expanded(str(entry.get("value") or ""), known)
    return known


def expanded(text: str, known: Mapping[str, str]) -> str:
    """Return `text` with each `$(NAME)` that is known; `$$` is a dollar sign."""
    return _KUBELET.sub(
        lambda found: known.get(found[1], found[0]) if found[1] else "$",
        text,
    )


def is_open(text: str) -> bool:
    """Return whether `text` needs a variable or a command whose value is not known."""
    return _OPEN.search(text) is not None


def commands_of(container: Body) -> list[list[str]]:
    """Return the commands that a container runs, each as its words; of a shell line all of them."""
    known = variables_of(container)
    words = [
        expanded(str(word), known)
        for word in (*(container.get("command") or ()), *(container.get("args") or ()))
    ]
    script = _script_at(words)
    commands: list[list[str]] = [[]]
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if place == script or (_reads_like_a_line(word) and not before.startswith("--")):
            commands += _of_shell(word, known)
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _script_at(words: Sequence[str]) -> int:
    """Return the place of the script that a shell gets by -c; -1: there is none."""
    for place, word in enumerate(words):
        if word.rpartition("/")[2] not in _SHELLS:
            continue
        for after in range(place + 1, len(words) - 1):
            option = words[after]
            if not option.startswith("-"):
                break
            if not option.startswith("--") and "c" in option:
                return after + 1
    return -1


def _reads_like_a_line(word: str) -> bool:
    """Return whether a word is a command line: images run such by a shell of their own."""
    return any(space in word for space in (" -", "\n")) and word.lstrip()[:1] not in ("{", "[")


def _of_shell(script: str, known: Mapping[str, str]) -> list[list[str]]:
    text = _COMMENT.sub(r"\1", script.replace("\\\n", " ")).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:  # a quote without its end: only the shell knows
        tokens = text.split()
    own, commands = dict(known), [list[str]()]
    arrays: dict[str, list[str]] = {}
    filled: list[str] | None = None  # the array of which the next word is an element
    for token in tokens:
        if token and not token.strip(_SEPARATORS):
            commands.append([])
            continue
        begun = _ARRAY.fullmatch(token) if filled is None else None
        if begun:
            filled = arrays[begun[1]] = arrays.get(begun[1], []) if begun[2] else []
            token = begun[3]
        if filled is not None:
            words = _by_shell(token.removesuffix(")"), own)
            filled += [words] if words else []
            filled = None if token.endswith(")") else filled
        elif named := _ALL_OF.fullmatch(token):
            commands[-1] += arrays.get(named[1], [token])
        else:
            word = _by_shell(token, own)
            if (given := _ASSIGNMENT.fullmatch(word)) and not word.startswith("-"):
                own[given[1]] = given[2]
            commands[-1] += _split(token, word)
    return commands


def _split(token: str, word: str) -> list[str]:
    """Return the words that a shell makes of a token: of a variable with options, each of them.

    Quotes around it are not known here; a value that holds options had none.
    """
    if not _SHELL.fullmatch(token) or not word.lstrip().startswith("-"):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()


def _by_shell(token: str, known: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        default = found["default"]
        return known.get(found["braced"] or found["bare"], found[0] if default is None else default)

    return _SHELL.sub(value, token)


def option_of(container: Body, *names: str) -> str:
    """Return the value of an option of the container's command line, or nothing.

    Of several the last counts, as for argparse. A value that is open counts as nothing.
    """
    value = option_as_written(container, *names)
    return "" if is_open(value) else value


def option_as_written(container: Body, *names: str) -> str:
    """Return the value of an option, open or not, or nothing."""
    return (options_of(container, *names) or [""])[-1]


def options_of(container: Body, *names: str) -> list[str]:
    """Return all values of an option, in their order."""
    return options_in(commands_of(container), *names)


def options_in(commands: Iterable[Sequence[str]], *names: str) -> list[str]:
    """Return all values of an option in some commands, in their order."""
    found = []
    for command in commands:
        for word, following in pairwise([*command, ""]):
            name, equals, value = word.partition("=")
            if name in names:
                found.append(value if equals else following)
    return found
