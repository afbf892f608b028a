"""Split a line into words as a shell does, in a time that grows with the line's length alone.

`shlex` reads character by character and adds each to a text, which takes minutes for a line of a
megabyte: a pod's creator chooses the line, and the operator reads it between two other pods.
"""

from __future__ import annotations

import re
from typing import Final

SEPARATORS: Final = ";&|"
_QUOTED: Final = r"""'[^']*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+\""""
_PLAIN: Final = rf"""(?:[^ \t\r\n'"\\]++|\\.|{_QUOTED})++"""
_LINE: Final = rf"""(?:[^ \t\r\n'"\\{SEPARATORS}]++|\\.|{_QUOTED})++"""
_WORDS: Final = re.compile(rf"[ \t\r\n]++|({_PLAIN})", re.DOTALL)
_WORDS_AND_SEPARATORS: Final = re.compile(rf"[ \t\r\n]++|([{SEPARATORS}]++|{_LINE})", re.DOTALL)
_MARKS: Final = re.compile(rf"\\(?P<one>.)|{_QUOTED}", re.DOTALL)
_WITHIN_DOUBLE: Final = re.compile(r'\\(["\\])')


def shell_words(line: str, *, separates: bool = False) -> list[str]:
    """Return the words of a line, without their quotes, as `shlex` does.

    Args:
        line: as it is written; a `#` is a character like others.
        separates: whether runs of `;`, `&` and `|` outside of quotes are words of their own.

    Raises:
        ValueError: a quote has no end, or the last character is a backslash.
    """
    pattern = _WORDS_AND_SEPARATORS if separates else _WORDS
    found, place = [], 0
    while place < len(line):
        part = pattern.match(line, place)
        if part is None:
            raise ValueError("a quote has no end")
        if part[1] is not None:
            found.append(_MARKS.sub(_unquoted, part[1]))
        place = part.end()
    return found


def _unquoted(mark: re.Match[str]) -> str:
    if mark["one"] is not None:
        return mark["one"]
    within = mark[0][1:-1]
    return within if mark[0][0] == "'" else _WITHIN_DOUBLE.sub(r"\1", within)
