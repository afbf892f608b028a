"""What a conversation is as text, and which of it the assistant says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.data.encoding import Rendered
from windrow_sidecar.finetune.data.records import Fields, bad_row
from windrow_sidecar.finetune.data.rows import DatasetRow

# By which a template says itself what the assistant says.
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversations:
    """Renders chat rows with the template of a tokenizer.

    Args:
        tokenizer: the model's.
        learn_all: prompts count as well.
    """

    def __init__(self, tokenizer: Any, *, learn_all: bool) -> None:  # noqa: ANN401
        self._tokenizer, self._learn_all = tokenizer, learn_all
        # Answers that a later turn makes the template write otherwise, and the first such row.
        self.rewritten, self.first_rewritten = 0, ""
        self.unread: Counter[str] = Counter()  # rows with a field of which the text has nothing
        self._counts: dict[str, bool] = {}  # by field

    def rendered(self, row: DatasetRow) -> Rendered:
        """Return a row's text: all turns as the template writes them in one conversation.

        Where only answers are learnt, turns after the last one are left out: nothing is learnt
        of them, and some templates write an answer otherwise once the user has spoken again.

        Raises:
            UserError: the tokenizer has no chat template (`field` is then one of the spec), the
                template refuses the turns, or no answer can be told from its prompt.
        """
        if not self._tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template, so chat rows cannot be rendered",
                field="spec.dataset.format",
                remedy="Use a model with a template, or rows of another format.",
                reason=Reason.DATASET_INVALID,
            )
        self._note_unread(row)
        if self._learn_all:
            text = self._text(row, row.turns)
            return Rendered(text, ((0, len(text)),), special=False)
        roles = [turn["role"] for turn in row.turns]
        turns = row.turns[: len(roles) - roles[::-1].index("assistant")]
        template = self._template(row)
        if _MARK.search(template):
            return self._marked(row, turns, template)
        return self._told_apart(row, turns)

    def _note_unread(self, row: DatasetRow) -> None:
        """Count fields that change nothing in the text: the template knows no such field."""
        for name in _fields_of(row):
            if name not in self._counts:
                self._counts[name] = self._is_written(row, name)
            if not self._counts[name]:
                self.unread[name] += 1

    def _is_written(self, row: DatasetRow, name: str) -> bool:
        """Whether the template names a field of a row, or writes another text without it."""
        without = _without(row, name)
        return name in self._template(row) or (
            self._text(row, row.turns) != self._text(without, without.turns)
        )

    def _template(self, row: DatasetRow) -> str:
        with _rendering(row):
            return str(self._tokenizer.get_chat_template(None, row.tools))

    def _marked(self, row: DatasetRow, turns: tuple[Fields, ...], template: str) -> Rendered:
        """Return what a template with `{% generation %}` marks, as the tokenizer's own mask does.

        `apply_chat_template(return_assistant_tokens_mask=True)` ends its mask at the first answer
        that begins with a blank which the tokenizer's offsets leave out; so the marks are read.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with _rendering(row):
            (text,), (marks,) = render_jinja_template(
                conversations=[list(turns)],
                tools=row.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **row.template_settings},
            )
        learnt = tuple((begin, end) for begin, end in marks if begin < end)
        return Rendered(text, learnt, special=False, touched=True)

    def _told_apart(self, row: DatasetRow, turns: tuple[Fields, ...]) -> Rendered:
        """Learn each answer that stands in the conversation as the model would be asked for it."""
        whole = self._text(row, turns)
        learnt: list[tuple[int, int]] = []
        for i, turn in enumerate(turns):
            # Without a turn before it there is no prompt to render.
            if turn["role"] != "assistant" or i == 0:
                continue
            prompt = self._text(row, turns[:i], prompt=True)
            answered = whole if i + 1 == len(turns) else self._text(row, turns[: i + 1])
            if answered.startswith(prompt) and whole.startswith(answered):
                learnt.append((len(prompt), len(answered)))
        if not learnt:
            raise bad_row(
                row.where,
                "the model's chat template writes no answer of this conversation as it asks for "
                "it, so the answers cannot be told apart",
                "Set spec.training.loss to all, or render the rows yourself and set "
                "spec.dataset.format to completion.",
            )
        rewritten = sum(turn["role"] == "assistant" for turn in turns) - len(learnt)
        if rewritten:
            self.rewritten += rewritten
            self.first_rewritten = self.first_rewritten or row.where
        return Rendered(whole, tuple(learnt), special=False)

    def _text(self, row: DatasetRow, turns: tuple[Fields, ...], *, prompt: bool = False) -> str:
        with _rendering(row):
            text = self._tokenizer.apply_chat_template(
                list(turns),
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **row.template_settings,
            )
        return str(text)


def _fields_of(row: DatasetRow) -> set[str]:
    """Return what a row gives the template besides roles and contents; nothing of what is empty."""
    known = ("role", "content", "weight")
    found = {
        key
        for turn in row.turns
        for key, value in turn.items()
        if key not in known and value not in ("", [], {})
    }
    return found | row.template_settings.keys() | ({"tools"} if row.tools else set())


def _without(row: DatasetRow, name: str) -> DatasetRow:
    def left(fields: Fields) -> Fields:
        return {key: value for key, value in fields.items() if key != name}

    return replace(
        row,
        turns=tuple(left(turn) for turn in row.turns),
        tools=None if name == "tools" else row.tools,
        template_settings=left(row.template_settings),
    )


@contextmanager
def _rendering(row: DatasetRow) -> Iterator[None]:
    """Hold while a template renders a row; it is a program, and the row what it may fail over."""
    from jinja2.exceptions import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise bad_row(
            row.where,
            f"the model's chat template refuses the turns: {error}",
            "Write the turns, and their order, as the template wants them.",
        ) from error
