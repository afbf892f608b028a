"""Text of a conversation, and the parts of it that the assistant says."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.rows import MOST_ROW_BYTES, DatasetRow, Fields, bad_row
from windrow_sidecar.finetune.data.cpu_limit import ComputesTooLong, cpu_limit
from windrow_sidecar.finetune.data.encoding import Rendered

# By which a template says itself what the assistant says.
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# What a template may read that is not the job's: the time, and random numbers.
_CLOCK = "strftime_now"
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")
# Of one row; templates of real models take milliseconds for the longest.
_RENDER_CPU_S = 10.0
# Characters of a text that an error shows.
_SHOWN = 60


class Conversations:
    """Renders chat rows with the template of a tokenizer.

    Args:
        tokenizer: the model's.
        learn_all: prompts count as well.
        now: the time that templates read (default: that of the call).
        stops: texts of tokens at which generation ends.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        *,
        learn_all: bool,
        now: datetime | None = None,
        stops: tuple[str, ...] = (),
    ) -> None:
        self._tokenizer, self._learn_all = tokenizer, learn_all
        self._now, self._stops = now or datetime.now().astimezone(), stops
        # Answers that a later turn makes the template write otherwise, and the first such row.
        self.rewritten, self.first_rewritten = 0, ""
        # Answers that the template writes otherwise than it asks for them, and the first such row.
        self.unasked, self.first_unasked = 0, ""
        self.unread: Counter[str] = Counter()  # rows with a field of which the text has nothing
        self.dates: set[str] = set()  # what templates made of the time
        # Whether an earlier version made other tokens of a row, and in which way.
        self.unlike_before = ""
        self._counts: dict[str, bool] = {}  # by field
        self._goes_on: bool | None = None  # whether a turn is the same once another one follows
        self._tokens = sorted(_tokens_of(tokenizer), key=len, reverse=True)

    def rendered(self, row: DatasetRow) -> Rendered:
        """Return a row's text: all turns as the template writes them in one conversation.

        What a template draws by chance follows from the row alone.

        Where only answers are learnt, turns after the last one are left out: nothing is learnt
        of them, and some templates write an answer otherwise once the user has spoken again.

        Raises:
            UserError: the tokenizer has no chat template (`field` is then one of the spec), the
                template refuses the turns, or no answer can be separated from its prompt.
        """
        if not self._tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template, so chat rows cannot be rendered",
                field="spec.dataset.format",
                remedy="Use a model with a template, or rows of another format.",
                reason=Reason.DATASET_INVALID,
            )
        self._template(row)
        self._note_unread(row)
        if row.prompt_turns:
            return self._behind_prompt(row)
        if self._learn_all:
            text = self._text(row, row.turns)
            return Rendered(text, ((0, len(text)),), special=False)
        roles = [turn["role"] for turn in row.turns]
        turns = row.turns[: len(roles) - roles[::-1].index("assistant")]
        template = self._template(row)
        if _MARK.search(_COMMENT.sub("", template)):
            return self._marked(row, turns, template)
        return self._told_apart(row, turns)

    def _behind_prompt(self, row: DatasetRow) -> Rendered:
        """Learn all that follows the prompt of a row, as TRL does of a preferred answer."""
        prompt = self._text(row, row.turns[: row.prompt_turns], prompt=True)
        whole = self._text(row, row.turns)
        if not whole.startswith(prompt):
            raise bad_row(
                row.where,
                "the model's chat template writes an answer otherwise than it asks for it"
                f"{_difference(prompt, whole)}",
                "Set what the template needs for it in the row's `chat_template_kwargs`, or render "
                "prompt and answers yourself and write them as text.",
            )
        return Rendered(whole, ((len(prompt), len(whole)),), special=False)

    def _note_unread(self, row: DatasetRow) -> None:
        """Count fields that change nothing in the text: the template knows no such field."""
        for name in _fields_of(row):
            if name not in self._counts:
                self._counts[name] = self._is_written(row, name)
            if not self._counts[name]:
                self.unread[name] += 1

    def _is_written(self, row: DatasetRow, name: str) -> bool:
        """Return whether the template names a row's field, or writes another text without it."""
        without = _without(row, name)
        return name in self._template(row) or (
            self._text(row, row.turns) != self._text(without, without.turns)
        )

    def _template(self, row: DatasetRow) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, row.tools))
        except ValueError as error:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise UserError(
                f"the model has chat templates named {names}, and none of them is `default`",
                field="spec.model.name",
                remedy="Name one of them `default` (chat_template.jinja in the model's folder).",
                reason=Reason.MODEL_UNSUPPORTED,
            ) from error

    def _marked(self, row: DatasetRow, turns: tuple[Fields, ...], template: str) -> Rendered:
        """Return what a template with `{% generation %}` marks, as the tokenizer's own mask does.

        `apply_chat_template(return_assistant_tokens_mask=True)` ends its mask at the first answer
        that begins with a blank which the tokenizer's offsets leave out; so the marks are read.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with _bounded(row), _rendering(row), self._of_the_job(row):
            (text,), (marks,) = render_jinja_template(
                conversations=[list(turns)],
                tools=row.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **row.template_settings},
            )
        learnt = tuple((begin, end) for begin, end in marks if begin < end)
        return Rendered(_sized(text, row), learnt, special=False, touched=True)

    def _told_apart(self, row: DatasetRow, turns: tuple[Fields, ...]) -> Rendered:
        """Learn each answer in the form in which the model would be asked for it."""
        whole = self._text(row, turns)
        learnt: list[tuple[int, int]] = []
        why = ""
        for i, turn in enumerate(turns):
            # Without a turn before it there is no prompt to render.
            if turn["role"] != "assistant" or i == 0:
                continue
            prompt = self._text(row, turns[:i], prompt=True)
            answered = whole if i + 1 == len(turns) else self._text(row, turns[: i + 1])
            if not answered.startswith(prompt):
                why = why or _difference(prompt, answered)
                self.unasked += 1
                self.first_unasked = self.first_unasked or row.where
                continue
            said = _end_of_content(answered, len(prompt), turn["content"])
            if said is None:
                raise bad_row(
                    row.where,
                    f"the model's chat template writes nothing of messages[{i}], which the "
                    "assistant says",
                    "Use a template that takes `content` as text, or render the rows yourself and "
                    "set spec.dataset.format to completion.",
                )
            end = len(answered)
            if i + 1 == len(turns):
                end = self._end_of_last(row, turns, answered, said)
            elif whole.startswith(answered):
                end += self._stop_at(whole, end, said)
            else:
                end = self._end_of_turn(answered, whole, said) or 0
                if not end:
                    self.rewritten += 1
                    self.first_rewritten = self.first_rewritten or row.where
                    continue
                self.unlike_before = self.unlike_before or "answers of earlier turns are learnt"
            learnt.append((len(prompt), end))
        if not learnt:
            raise bad_row(
                row.where,
                "the model's chat template writes no answer of this conversation as it asks for "
                f"it, so the answers cannot be found{why}",
                "Set what the template needs for it in the row's `chat_template_kwargs` (such as "
                "enable_thinking), set spec.training.loss to all, or render the rows yourself and "
                "set spec.dataset.format to completion.",
            )
        return Rendered(whole, tuple(learnt), special=False)

    def _end_of_turn(self, answered: str, other: str, said: int) -> int | None:
        """Return where a turn ends that two texts hold, and behind which each goes on its own way.

        A template may write something behind the last turn alone: an end of the text, or the
        question for the next answer. None: the turn is another one in the two.

        Args:
            answered: the text whose last turn it is.
            other: that has turns behind it.
            said: where the content of the turn ends in `answered`.
        """
        end = _shared(answered, other)
        while (whole := self._outside(answered, self._outside(other, end))) != end:
            end = whole
        if end < said:
            return None
        behind = answered[said:end]
        # Behind the turn's own end both may go on with the same token: that which begins a turn.
        stops = (behind.rfind(stop) + len(stop) for stop in self._stops if stop in behind)
        stopped = max(stops, default=0)
        if not stopped:
            found = next((t for t in self._tokens if behind.lstrip().startswith(t)), "")
            stopped = behind.index(found) + len(found) if found else len(behind)
        rest = behind[stopped:]
        return said + stopped + len(rest) - len(rest.lstrip())

    def _stop_at(self, whole: str, end: int, said: int) -> int:
        """Return the length of a stop that a template writes behind a turn once another follows.

        0: none is there, or the turn has its own.
        """
        if any(stop in whole[said:end] for stop in self._stops):
            return 0
        length = max((len(s) for s in self._stops if whole.startswith(s, end)), default=0)
        if length:
            self.unlike_before = self.unlike_before or "ends of earlier turns are learnt"
        return length

    def _outside(self, text: str, at: int) -> int:
        """Return the place in a text, or the begin of the token or word that it would cut."""
        for token in self._tokens:
            begin = text.find(token, max(0, at - len(token) + 1), at + len(token) - 1)
            if 0 <= begin < at:
                return begin
        while 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum():
            at -= 1
        return at

    def _end_of_last(
        self, row: DatasetRow, turns: tuple[Fields, ...], whole: str, said: int
    ) -> int:
        """Return where the last answer ends: before a question that nobody has asked for."""
        if self._goes_on:
            return len(whole)
        try:
            longer = self._text(row, (*turns, turns[-2]))
        except UserError:
            return len(whole)  # the template wants another turn there
        if longer.startswith(whole):
            # So it is with all rows of this template, or with none.
            self._goes_on = self._goes_on is None
            return len(whole)
        self._goes_on = False
        end = self._end_of_turn(whole, longer, said)
        if end is None or any(stop in whole[end:] for stop in self._stops):
            return len(whole)
        if end < len(whole):
            self.unlike_before = self.unlike_before or "what follows the last answer is not learnt"
        return end

    def _text(self, row: DatasetRow, turns: tuple[Fields, ...], *, prompt: bool = False) -> str:
        with _bounded(row), _rendering(row), self._of_the_job(row):
            text = self._tokenizer.apply_chat_template(
                list(turns),
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **row.template_settings,
            )
        return _sized(str(text), row)

    @contextmanager
    def _of_the_job(self, row: DatasetRow) -> Iterator[None]:
        """Hold while a template renders a row: time and chance are the job's and the row's."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = str(self._tokenizer.get_chat_template(None, row.tools))
        draws, before = _CHANCE.search(template), random.getstate()
        known = _compile_jinja_template(template).globals if _CLOCK in template else {}
        clock = known.get(_CLOCK)
        if draws:
            self.unlike_before = self.unlike_before or "the template draws random numbers"
            random.seed(json.dumps([row.turns, row.tools], default=str))
        known[_CLOCK] = self._strftime_now
        try:
            yield
        finally:
            known[_CLOCK] = clock
            if draws:
                random.setstate(before)

    def _strftime_now(self, form: str) -> str:
        """Return the time at which the job began; templates ask for it by this name."""
        made = self._now.strftime(form)
        self.dates.add(made)
        self.unlike_before = "the template reads the clock"
        return made


def _tokens_of(tokenizer: Any) -> set[str]:  # noqa: ANN401
    """Return the texts that a tokenizer takes for one token wherever they stand."""
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    return {token for token in added | set(tokenizer.all_special_tokens) if len(token) > 1}


def _end_of_content(text: str, begin: int, content: str) -> int | None:
    """Return where a turn's content ends in a text; None: nothing of it is there.

    A template may leave blanks out, or what was thought: then its last word tells.
    """
    whole = content.strip()
    if (at := text.find(whole, begin)) >= 0:
        return at + len(whole)
    words = re.findall(r"\w+", whole)
    if not words:
        return len(text)
    at = text.rfind(words[-1], begin)
    return at + len(words[-1]) if at >= 0 else None


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        at = (low + high + 1) // 2
        low, high = (at, high) if one.startswith(other[:at]) else (low, at - 1)
    return low


def _difference(asked: str, written: str) -> str:
    """Show what a template asks by and does not write."""
    differs = asked[_shared(asked, written) :]
    shown = differs if len(differs) <= _SHOWN else f"{differs[:_SHOWN]}..."
    return f" (it asks by {shown!r}, and writes something else there)"


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
def _bounded(row: DatasetRow) -> Iterator[None]:
    """Hold while a template renders a row: one that loops without end is ended.

    Raises:
        UserError: it was.
    """
    try:
        with cpu_limit(_RENDER_CPU_S):
            yield
    except ComputesTooLong:
        raise bad_row(
            row.where,
            f"the chat template computes for more than {_RENDER_CPU_S:g} s",
            "Use a template whose loops end.",
        ) from None


def _sized(text: str, row: DatasetRow) -> str:
    """Return what a template has made of a row, which no model takes beyond a length."""
    if len(text) > MOST_ROW_BYTES:
        raise bad_row(
            row.where,
            f"the chat template makes more than {MOST_ROW_BYTES >> 20} MiB of it",
            "Use a template that writes the row and no more.",
        )
    return text


@contextmanager
def _rendering(row: DatasetRow) -> Iterator[None]:
    """Hold while a template renders a row; it is a program, and the row what it may fail over.

    Raises:
        UserError: it failed; `field` is the row's place, or the model's where no row could do.
    """
    from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

    try:
        yield
    except TemplateSyntaxError as error:
        raise UserError(
            f"the model's chat template cannot be compiled: {error.message} (line {error.lineno})",
            field="spec.model.name",
            remedy="Correct chat_template.jinja, or `chat_template` of tokenizer_config.json, in "
            "the model's folder; or use rows of another format.",
            reason=Reason.MODEL_UNSUPPORTED,
        ) from error
    except UndefinedError as error:
        raise bad_row(
            row.where,
            f"the model's chat template refuses the turns: {error}",
            "Write what it asks for into the row's turns or `chat_template_kwargs`, or correct the "
            "template.",
        ) from error
    except (
        *(TemplateError, TypeError, ValueError, LookupError),
        *(ArithmeticError, AttributeError, RecursionError),
    ) as error:
        raise bad_row(
            row.where,
            f"the model's chat template refuses the turns: {error}",
            "Write the turns, and their order, as the template wants them.",
        ) from error
