"""Read a container's command line as its kubelet and its shell make it: pure functions.

The kubelet expands `$(NAME)` by the container's variables, and a shell `$NAME`, `${NAME}` and
`${NAME:-default}`. What comes from a Secret, a ConfigMap or the image is not in the pod's spec, so
a word that needs it stays open. So does one whose expansion has no room: a few variables that name
each other twice would fill any memory. The creator of a pod chooses all of this, so reading it
takes a time that grows with its length alone.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from windrow_operator.shell_words import SEPARATORS, shell_words

Body = Mapping[str, Any]

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
# Characters of a container's command and arguments, far more than people write.
_MOST_READ: Final = 64 << 10
# Linux starts no program with more arguments and variables than a quarter of a stack of 8 MiB.
_MOST_EXPANDED: Final = 2 << 20
_REMEMBERED: Final = 128
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


class _NoRoom(Exception):
    """An expansion is longer than what a program can be started with."""


class _Room:
    """Room for what the variables of one container become."""

    def __init__(self) -> None:
        self._left = _MOST_EXPANDED

    def take(self, characters: int) -> None:
        """Raise _NoRoom where so many characters do not fit any more."""
        if characters > self._left:
            raise _NoRoom
        self._left -= characters

    def filled(
        self, names: re.Pattern[str], text: str, value: Callable[[re.Match[str]], str]
    ) -> str:
        """Return `text` with the value of each name in it; as it is written where that is long."""
        if "$" not in text:
            return text

        def put(found: re.Match[str]) -> str:
            word = value(found)
            self.take(len(word))
            return word

        try:
            return names.sub(put, text)
        except _NoRoom:
            return text


def variables_of(container: Body) -> dict[str, str]:
    """Return the variables of a container whose values its spec holds, expanded."""
    return _known(_entries_of(container), _Room())


def _entries_of(container: Body) -> tuple[tuple[str, str | None], ...]:
    """Return name and value of each variable; None: its value comes from elsewhere."""
    return tuple(
        (entry["name"], None if entry.get("valueFrom") else str(entry.get("value") or ""))
        for entry in container.get("env") or ()
    )


def _known(entries: Iterable[tuple[str, str | None]], room: _Room) -> dict[str, str]:
    known: dict[str, str] = {}
    for name, value in entries:
        if value is None:
            known.pop(name, None)
        else:
            known[name] = expanded(value, known, room)
    return known


def expanded(text: str, known: Mapping[str, str], room: _Room | None = None) -> str:
    """Return `text` with each `$(NAME)` that is known; `$$` is a dollar sign."""

    def value(found: re.Match[str]) -> str:
        return known.get(found[1], found[0]) if found[1] else "$"

    return (room or _Room()).filled(_KUBELET, text, value)


def is_open(text: str) -> bool:
    """Return whether `text` needs a variable or a command whose value is not known."""
    return _OPEN.search(text) is not None


def commands_of(container: Body) -> list[list[str]]:
    """Return the commands that a container runs, each as its words; of a shell line all of them.

    The lists are shared by all who ask about the same container. What is behind the first 64 KiB
    is not read.
    """
    words = (*(container.get("command") or ()), *(container.get("args") or ()))
    return _commands_of(tuple(_read(map(str, words))), _entries_of(container))


def _read(words: Iterable[str]) -> Iterator[str]:
    left = _MOST_READ
    for word in words:
        if left <= 0:
            return
        yield word[:left]
        left -= len(word) + 1


@lru_cache(maxsize=_REMEMBERED)
def _commands_of(
    written: tuple[str, ...], entries: tuple[tuple[str, str | None], ...]
) -> list[list[str]]:
    room = _Room()
    known = _known(entries, room)
    words = [expanded(word, known, room) for word in written]
    script = _script_at(words)
    commands: list[list[str]] = [[]]
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if place == script or (_reads_like_a_line(word) and not before.startswith("--")):
            commands += _of_shell(word, known, room)
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


def _of_shell(
    script: str, known: MutableMapping[str, str], room: _Room, *, within: bool = False
) -> list[list[str]]:
    """Return the commands of a script; of one that a command of it runs, too, but none within."""
    text = _COMMENT.sub(r"\1", script.replace("\\\n", " ")).replace("\n", " ; ")
    try:
        tokens = shell_words(text, separates=True)
    except ValueError:  # a quote without its end: only the shell knows
        tokens = text.split()
    own: MutableMapping[str, str] = ChainMap({}, known)
    commands = [list[str]()]
    arrays: dict[str, list[str]] = {}
    filled: list[str] | None = None  # the array of which the next word is an element
    for token in tokens:
        if token and not token.strip(SEPARATORS):
            commands.append([])
            continue
        begun = _ARRAY.fullmatch(token) if filled is None and "=(" in token else None
        if begun:
            filled = arrays[begun[1]] = arrays.get(begun[1], []) if begun[2] else []
            token = begun[3]
        if filled is not None:
            words = _by_shell(token.removesuffix(")"), own, room)
            filled += [words] if words else []
            filled = None if token.endswith(")") else filled
        elif "$" in token and (named := _ALL_OF.fullmatch(token)):
            commands[-1] += _all_of(arrays.get(named[1], [token]), room) or [token]
        else:
            word = _by_shell(token, own, room)
            if "=" in word and word[0] != "-" and (given := _ASSIGNMENT.fullmatch(word)):
                own[given[1]] = given[2]
            commands[-1] += _split(token, word)
    inner = [] if within else [each for command in commands if (each := _script_of(command))]
    return commands + [
        command for each in inner for command in _of_shell(each, own, room, within=True)
    ]


def _script_of(command: Sequence[str]) -> str:
    """Return the script that a command has a shell run: eval's words, or that behind -c."""
    if command[:1] == ["eval"]:
        return " ".join(command[1:])
    at = _script_at(command)
    return command[at] if at >= 0 else ""


def _all_of(array: list[str], room: _Room) -> list[str]:
    """Return the elements of an array; none where they have no room."""
    try:
        room.take(len(array))
    except _NoRoom:
        return []
    return array


def _split(token: str, word: str) -> list[str]:
    """Return the words that a shell makes of a token: of a variable with options, each of them.

    Quotes around it are not known here; a value that holds options had none.
    """
    if not _SHELL.fullmatch(token) or not word.lstrip().startswith("-"):
        return [word]
    try:
        return shell_words(word)
    except ValueError:
        return word.split()


def _by_shell(token: str, known: Mapping[str, str], room: _Room) -> str:
    def value(found: re.Match[str]) -> str:
        default = found["default"]
        return known.get(found["braced"] or found["bare"], found[0] if default is None else default)

    return room.filled(_SHELL, token, value)


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
