"""Tokens of a text, and which of them belong to the part that is learnt.

A text is given to the tokenizer whole, once: pieces that are encoded apart are other tokens. A
SentencePiece vocabulary puts a blank before each piece, and no merge reaches over their border.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windrow_sidecar.finetune.data.split import IGNORED

# What byte-level tokenizers write for a blank in the names of their tokens.
_BLANK = "Ġ"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The whole text of a row. `learnt`: from which character to before which, in order.

    `special`: the tokenizer puts its own tokens (BOS) around it, as around any text; a template has
    written them itself.
    `touched`: a token over the first border of a part is learnt as well. Else it belongs to the
    part before: a client that sends that text and gets a token has already sent its first half.
    """

    text: str
    learnt: tuple[tuple[int, int], ...]
    special: bool
    touched: bool = False


def encode(tokenizer: Any, rendered: Rendered) -> tuple[list[int], list[int]]:  # noqa: ANN401
    """Return (ids, labels) of a text, as `tokenizer(text)` makes them; labels are -100 elsewhere.

    The first token has no label: nothing predicts it.
    """
    text = rendered.text
    made = tokenizer(text, add_special_tokens=rendered.special, verbose=False)
    ids: list[int] = list(made["input_ids"])
    labels = [IGNORED] * len(ids)
    spans: Iterator[tuple[int, int]]
    if rendered.learnt == ((0, len(text)),):
        spans = iter([(0, len(ids))])
    elif made.encodings:
        spans = _by_offsets(tokenizer, ids, made.encodings[0], rendered)
    else:
        spans = _by_counting(tokenizer, ids, rendered)
    for first, end in spans:
        labels[first:end] = ids[first:end]
    if labels:
        labels[0] = IGNORED
    return ids, labels


def _by_offsets(
    tokenizer: Any,  # noqa: ANN401
    ids: list[int],
    encoding: Any,  # noqa: ANN401
    rendered: Rendered,
) -> Iterator[tuple[int, int]]:
    """Yield the tokens of each learnt part; what the tokenizer puts after a text belongs to it."""
    offsets: list[tuple[int, int]] = encoding.offsets
    low, high = _of_text(encoding) if rendered.special else (0, len(offsets))

    def begin_of(at: int) -> int:
        # Some tokenizers leave the blanks of a token out of its offsets, not out of its name.
        name: str = tokenizer.convert_ids_to_tokens(ids[at])
        begin, before = offsets[at][0], offsets[at - 1][1] if at else 0
        return max(min(before, begin), begin - (len(name) - len(name.lstrip(_BLANK))))

    def first_from(character: int) -> int:
        at = bisect_left(offsets, character, low, high, key=lambda span: span[0])
        while at < high and begin_of(at) < character:
            at += 1
        return at

    for begin, end in rendered.learnt:
        if rendered.touched:
            first = bisect_right(offsets, begin, low, high, key=lambda span: span[1])
        else:
            first = first_from(begin)
        yield first, len(offsets) if end == len(rendered.text) else first_from(end)


def _of_text(encoding: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return where the text's own tokens begin and end, between those put around it."""
    parts: list[int | None] = encoding.sequence_ids
    low = next((at for at, part in enumerate(parts) if part is not None), 0)
    high = next((at for at in range(len(parts), low, -1) if parts[at - 1] is not None), low)
    return low, high


def _by_counting(
    tokenizer: Any,  # noqa: ANN401
    ids: list[int],
    rendered: Rendered,
) -> Iterator[tuple[int, int]]:
    """Yield the same of a tokenizer without offsets: the text before is counted in tokens."""

    def plain(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    text = rendered.text
    whole = plain(text)
    put_before = next(
        (n for n in range(len(ids) - len(whole) + 1) if ids[n : n + len(whole)] == whole), 0
    )
    for begin, end in rendered.learnt:
        first = put_before + len(plain(text[:begin]))
        yield first, len(ids) if end == len(text) else put_before + len(plain(text[:end]))
