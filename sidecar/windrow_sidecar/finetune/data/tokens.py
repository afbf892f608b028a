"""Tokens of a row, and which of them are learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow.rows import DatasetRow, bad_row
from windrow.served_chats import PLAIN
from windrow_sidecar.finetune.data.conversation import Conversations
from windrow_sidecar.finetune.data.encoding import Rendered, encode
from windrow_sidecar.finetune.data.request_form import RequestsOf, rows_are
from windrow_sidecar.finetune.data.row_limit import bounded
from windrow_sidecar.finetune.data.split import Example
from windrow_sidecar.finetune.data.tally import Tally

_NAMED = 10  # fields in one sentence
# Of one row: tokenizers in Python do some 10^5 characters a second, those in Rust 10^6.
_ENCODE_CPU_S, _ENCODED_PER_S = 10.0, 20_000


class RowTokenizer:
    """Turns rows into the tokens that `tokenizer(text)` or `apply_chat_template` makes of them.

    The loss counts what the assistant says (chat), the completion (instruction, completion) or
    everything (text); and the end of the text (EOS), which is put after all but chats.

    Args:
        tokenizer: the model's. It needs no padding token: padding has no label, and behind a causal
            mask no token sees those to its right.
        max_length: rows are cut to so many tokens.
        learn_all: prompts count as well.
        now: the time that chat templates read (default: that of the call).
        served_by: the server whose requests chat rows are rendered as.
        engine: the one that serves now; "": it takes no chats, or is not known.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        *,
        max_length: int,
        learn_all: bool = False,
        now: datetime | None = None,
        served_by: str = PLAIN,
        engine: str = "",
    ) -> None:
        self._requests = RequestsOf(served_by, engine)
        self._tokenizer, self._max_length, self._learn_all = tokenizer, max_length, learn_all
        self._stops = stop_tokens(tokenizer)
        self._conversations = Conversations(
            tokenizer,
            learn_all=learn_all,
            now=now,
            stops=tuple(tokenizer.convert_ids_to_tokens(sorted(self._stops))),
        )
        self._endless = Tally()
        self._pruned = 0  # rows of which nulls, or lists of no calls, were left out
        self._as_served = Tally()
        # What the tokenizer puts before a text, and rows that have it already.
        self._begin = _put_before(tokenizer)
        self._begun = 0
        self.characters = 0  # of the texts so far
        self.cut = 0  # rows so far that were longer than that
        self._longest, self._longest_at = 0, ""
        self._blank = Tally()
        self._equal = Tally()

    def examples(self, row: DatasetRow) -> tuple[Example, ...]:
        """Return the row's tokens; of a row of preferences the chosen answer, then the rejected.

        Raises:
            UserError: see `example`.
        """
        if row.rejected is None:
            return (self.example(row),)
        pair = (self.example(row), self.example(row.rejected))
        if pair[0].ids == pair[1].ids:
            self._equal.add(row.where)
        return pair

    def example(self, row: DatasetRow) -> Example:
        """Return the row's tokens.

        Raises:
            UserError: the tokenizer has no chat template (`field` is then one of the spec); the
                row is no text, or nothing to learn from is left (`field` is the row's place).
        """
        rendered = self._chat(row) if row.turns else self._plain(row)
        self._pruned += row.pruned
        if row.as_served:
            self._as_served.add(row.where)
        self.characters += len(rendered.text)
        _check_is_text(rendered.text, row.where)
        seconds = _ENCODE_CPU_S + len(rendered.text) / _ENCODED_PER_S
        with bounded(row, "the tokenizer", seconds):
            ids, labels = _encoded(self._tokenizer, rendered, row.where)
        end = self._tokenizer.eos_token_id
        if not row.turns and end is not None and ids[-1:] != [end]:
            ids.append(end)
            labels.append(end)
        made = Example(tuple(ids[: self._max_length]), tuple(labels[: self._max_length]), row.where)
        if made.targets == 0:
            raise _nothing_left(row.where, len(ids), self._max_length)
        if not row.turns and not row.answer.strip():
            self._blank.add(row.where)
        if len(ids) <= self._max_length and self._stops.isdisjoint(labels):
            self._endless.add(row.where)
        if len(ids) > self._max_length:
            self.cut += 1
            if len(ids) > self._longest:
                self._longest, self._longest_at = len(ids), row.where
        return made

    def _chat(self, row: DatasetRow) -> Rendered:
        served = self._requests.of(row)
        try:
            return self._conversations.rendered(served)
        except UserError as refused:
            bare = self._requests.tried_again(served, refused)
            if bare is None:
                raise
            try:
                rendered = self._conversations.rendered(bare)
            except UserError:
                raise refused from None
            self._requests.note_bare(bare)
            return rendered

    def notes(self) -> Iterator[str]:
        """Yield what is not learnt of the rows so far, in sentences."""
        if self.cut:
            yield (
                f"{rows_are(self.cut)} cut to spec.training.maxSequenceLength, {self._max_length} "
                f"tokens; the longest has {self._longest} ({self._longest_at})"
            )
        if self._blank:
            yield (
                f"{rows_are(self._blank.count)} completed by blanks alone (first "
                f"{self._blank.first}): the model learns to say nothing there"
            )
        if self._equal:
            yield (
                f"{self._equal.count} pairs have the same tokens in both answers (first "
                f"{self._equal.first}), from which nothing is learnt"
            )
        if unread := self._conversations.unread.most_common(_NAMED):
            named = ", ".join(f"{name} ({n})" for name, n in unread)
            yield (
                f"fields of chat rows that the model's chat template does not write: {named}; "
                "nothing follows from them"
            )
        if unwritten := self._conversations.unwritten:
            yield (
                f"{unwritten.count} turns are not in the text: the model's chat "
                f"template writes nothing of them (first in {unwritten.first})"
            )
        if shortened := self._conversations.shortened:
            yield (
                f"{shortened.count} answers are learnt without a part: the model's "
                "chat template leaves it out, as some do with thoughts (first in "
                f"{shortened.first})"
            )
        if unprompted := self._conversations.unprompted:
            yield (
                f"{unprompted.count} answers are not learnt: they begin their conversations, so "
                f"nothing asks for them (first in {unprompted.first})"
            )
        if headed := self._conversations.headed:
            yield (
                f"{headed.count} answers are learnt without a header before them, which the "
                "model's chat template marks with them, or writes where it has not asked by it "
                f"(first in {headed.first})"
            )
        if ended := self._conversations.ended:
            yield (
                f"{ended.count} answers are learnt to the end of their turn: the model's chat "
                "template writes something else behind the last turn than between two (first in "
                f"{ended.first})"
            )
        if self._as_served:
            yield (
                f"tools of {self._as_served.count} rows are given to the chat template as servers "
                f"take them, a function in `function`, parameters as an object (first "
                f"{self._as_served.first})"
            )
        yield from self._requests.notes()
        if unasked := self._conversations.unasked:
            yield (
                f"{unasked.count} answers are not learnt: the model's chat template "
                "asks for them otherwise than it writes them (first in "
                f"{unasked.first})"
            )
        if unlike_asked := self._conversations.unlike_asked:
            yield (
                f"{unlike_asked.count} answers are learnt as the model's chat "
                "template marks them, and servers ask for them otherwise (first in "
                f"{unlike_asked.first})"
            )
        if self._conversations.dates:
            dates = ", ".join(sorted(self._conversations.dates)[:_NAMED])
            yield (
                f"the model's chat template writes the date: all rows have that of the job's "
                f"first run ({dates}), where serving sends that of the day"
            )
        if self._endless:
            yield self._of_endless()
        if rewritten := self._conversations.rewritten:
            yield (
                f"{rewritten.count} answers are not learnt: the model's chat "
                "template writes them otherwise once later turns follow (first in "
                f"{rewritten.first}); give each its own row to learn them"
            )

    @property
    def unlike_before(self) -> str:
        """Difference to the tokens that an earlier version made of these rows; "": none."""
        if self._conversations.unlike_before:
            return self._conversations.unlike_before
        if self._as_served:
            return "tools are written as servers take them"
        if self._begun:
            return "a BOS that a row has already is not put before it again"
        return (
            "nulls of other rows' tools, and lists of no calls, are left out"
            if self._pruned
            else ""
        )

    def _of_endless(self) -> str:
        learnt = f"nothing teaches the model to stop in {self._endless.count} rows"
        if self._tokenizer.eos_token_id is None:
            return f"{learnt}: the model's tokenizer names no EOS (eos_token)"
        names = ", ".join(self._tokenizer.convert_ids_to_tokens(sorted(self._stops)))
        return f"{learnt} (first {self._endless.first}): none of {names} is learnt there"

    def _plain(self, row: DatasetRow) -> Rendered:
        text = row.prompt + row.answer
        begin = 0 if self._learn_all else len(row.prompt)
        special = not self._has_begin(text)
        self._begun += not special
        return Rendered(text, ((begin, len(text)),), special=special)

    def _has_begin(self, text: str) -> bool:
        """Return whether a text, rendered elsewhere, begins with what the tokenizer would put."""
        if not self._begin or not text.startswith(self._begin[0]):
            return False
        _, before = self._begin
        made = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(made[: len(before)]) == before


def _put_before(tokenizer: Any) -> tuple[str, list[int]] | None:  # noqa: ANN401
    """Return the tokens that a tokenizer puts before any text, and their text; None: it has none.

    A server that gets the text of a chat with them puts none before it.
    """
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    whole = list(tokenizer("a", verbose=False)["input_ids"])
    at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    before = whole[:at]
    return ("".join(tokenizer.convert_ids_to_tokens(before)), before) if before else None


def stop_tokens(tokenizer: Any) -> frozenset[int]:  # noqa: ANN401
    """Return the tokens at which servers end a text: the tokenizer's EOS, and the model's list."""
    found: list[Any] = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        with suppress(OSError, ValueError, AttributeError):
            read = json.loads(Path(str(tokenizer.name_or_path), name).read_bytes())
            for part in (read, read.get("text_config") or {}):  # of a composite model's text half
                named = part.get("eos_token_id")
                found += named if isinstance(named, list) else [named]
    known = len(tokenizer)
    return frozenset(token for token in found if isinstance(token, int) and 0 <= token < known)


def _check_is_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise bad_row(
            where,
            f"holds {half}, half of a character that JSON writes as two",
            "Write both halves, or take it out.",
        ) from error


def _nothing_left(where: str, tokens: int, max_length: int) -> UserError:
    if tokens <= max_length:
        return bad_row(
            where,
            f"none of its {tokens} tokens would be learnt",
            "Give it an answer, or drop the row.",
        )
    return bad_row(
        where,
        f"nothing to learn from is left within {max_length} tokens (the row has {tokens})",
        "Raise spec.training.maxSequenceLength, or shorten or drop the row.",
    )


def _encoded(
    tokenizer: Any,  # noqa: ANN401
    rendered: Rendered,
    where: str,
) -> tuple[list[int], list[int]]:
    """Return what `encode` does.

    Raises:
        UserError: the tokenizer's native code has given up.
    """
    try:
        return encode(tokenizer, rendered)
    except BaseException as error:
        # Of pyo3, and no Exception: a pattern that tries too long, for one.
        if type(error).__name__ != "PanicException":
            raise
        raise bad_row(
            where,
            f"the model's tokenizer fails over it: {error}",
            "Correct the model's tokenizer.json, or leave the row out.",
        ) from None
