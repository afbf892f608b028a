"""Find turns, and what is written around them, in a text that a template made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Characters of a text that an error shows.
_SHOWN = 60


def tokens_of(tokenizer: Any) -> list[str]:  # noqa: ANN401
    """Return the texts that a tokenizer takes for one token wherever they stand; longest first."""
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    found = {token for token in added | set(tokenizer.all_special_tokens) if len(token) > 1}
    return sorted(found, key=len, reverse=True)


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(re.findall(r"\w+", text))


def end_of_content(text: str, begin: int, content: str) -> int | None:
    """Return where a turn's content ends in a text; None: nothing of it is there.

    A template may leave blanks out, or what was thought: then its last word tells.
    """
    whole = content.strip()
    if (at := text.find(whole, begin)) >= 0:
        return at + len(whole)
    said = re.findall(r"\w+", whole)
    if not said:
        return len(text)
    at = text.rfind(said[-1], begin)
    return at + len(said[-1]) if at >= 0 else None


def shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        at = (low + high + 1) // 2
        low, high = (at, high) if one.startswith(other[:at]) else (low, at - 1)
    return low


def outside(text: str, at: int, tokens: Sequence[str]) -> int:
    """Return the place in a text, or the begin of the token or word that it would cut."""
    for token in tokens:
        begin = text.find(token, max(0, at - len(token) + 1), at + len(token) - 1)
        if 0 <= begin < at:
            return begin
    while 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum():
        at -= 1
    return at


def difference(asked: str, written: str, said: Sequence[str], tokens: Sequence[str]) -> str:
    """Show what a template asks by and what it writes before an answer, from a token or word on.

    Nothing of `said`, the parts of the answer, is shown.
    """
    at = shared(asked, written)
    begin = min(outside(asked, at, tokens), outside(written, at, tokens))
    found = (written.find(part.strip(), begin) for part in said if part.strip())
    shown = "something else"
    if ends := [end for end in found if end >= 0]:
        there = written[begin : min(ends)]
        shown = repr(_shown(there)) if there else "nothing"
    return f" (it asks by {_shown(asked[begin:])!r}, and writes {shown} there)"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def behind_header(
    first: tuple[str, str, str], text: str, begin: int, content: str, tokens: Sequence[str]
) -> int:
    """Return where an answer begins behind a header that the template has not asked by.

    Some templates ask by no header behind an answer or a tool's turn, and write one before the next
    answer: it is no part of what is said. Where none is written, the answer begins at `begin`.

    Args:
        first: the prompt of an answer to a user, the text that ends with it, and its content.
        text: the text that ends with an answer to another turn.
        begin: where its prompt ends.
        content: what it says.
        tokens: see `tokens_of`.
    """
    asked, answered, said = first
    header = outside(answered, shared(asked, answered), tokens)
    led = answered[header : answered.find(said.strip(), header)]
    at = text.find(content.strip(), begin) - len(led)
    if at <= begin or not text.startswith(led, at):
        return begin
    # What was thought may end with a header's word, and not as the header does.
    last = re.search(r"\w+\W*$", answered[:header])
    return at if last and text[begin:at].endswith(last[0]) else begin
