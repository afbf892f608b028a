"""Text of a conversation, and the parts of it that the assistant says."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.rows import DatasetRow, Fields, bad_row
from windrow_sidecar.finetune.data.encoding import Rendered
from windrow_sidecar.finetune.data.rendered_turns import (
    behind_header,
    difference,
    end_of_content,
    outside,
    shared,
    tokens_of,
    words,
)
from windrow_sidecar.finetune.data.rendering import bounded, rendering, sized, without_comments
from windrow_sidecar.finetune.data.row_fields import (
    fields_of,
    nothing_of,
    reference,
    said_in,
    without,
)
from windrow_sidecar.finetune.data.tally import Tally

# By which a template says itself what the assistant says.
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What a template may read that is not the job's: the time, and random numbers.
_CLOCK = "strftime_now"
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")


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
        # Answers that a later turn makes the template write otherwise.
        self.rewritten = Tally()
        # Answers that the template writes otherwise than it asks for them.
        self.unasked = Tally()
        # The same of answers that the template marks: they are learnt.
        self.unlike_asked = Tally()
        # Turns of others and parts of answers that the template leaves out.
        self.unwritten = Tally()
        self.shortened = Tally()
        # Answers without a header that the template writes and does not ask by, and those whose
        # end is that of their turn, since the template writes something else behind the last one.
        self.headed, self.ended = Tally(), Tally()
        self.unprompted = Tally()  # answers that begin a conversation
        self.unread: Counter[str] = Counter()  # rows with a field of which the text has nothing
        self.dates: set[str] = set()  # what templates made of the time
        # Whether an earlier version made other tokens of a row, and in which way.
        self.unlike_before = ""
        self._counts: dict[str, bool] = {}  # by field
        self._goes_on: bool | None = None  # whether a turn is the same once another one follows
        self._tokens = tokens_of(tokenizer)

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
            self._check_written(row, row.turns, text)
            self._check_last(row)
            return Rendered(text, ((0, len(text)),), special=False)
        roles = [turn["role"] for turn in row.turns]
        turns = row.turns[: len(roles) - roles[::-1].index("assistant")]
        template = self._template(row)
        if _MARK.search(without_comments(template)):
            return self._marked(row, turns, template)
        return self._told_apart(row, turns)

    def _behind_prompt(self, row: DatasetRow) -> Rendered:
        """Learn all that follows the prompt of a row, as TRL does of a preferred answer."""
        prompt = self._text(row, row.turns[: row.prompt_turns], prompt=True)
        answer = row.turns[row.prompt_turns]
        whole = self._text(row, row.turns)
        self._check_written(row, row.turns, whole)
        if not whole.startswith(prompt):
            raise bad_row(
                row.where,
                "the model's chat template writes an answer otherwise than it asks for it"
                f"{difference(prompt, whole, said_in(answer, self._counts), self._tokens)}",
                "Set what the template needs for it in the row's `chat_template_kwargs`, or render "
                "prompt and answers yourself and write them as text.",
            )
        said = end_of_content(whole, len(prompt), row.turns[-1]["content"])
        end = self._end_of_last(row, row.turns, whole, len(whole) if said is None else said)
        begin = len(prompt)
        if row.turns[row.prompt_turns - 1]["role"] != "user":
            begin = self._behind_header(row, answer, whole, begin)
        return Rendered(whole, ((begin, end),), special=False)

    def _note_unread(self, row: DatasetRow) -> None:
        """Count fields that change nothing in the text: the template knows no such field."""
        for name in fields_of(row):
            if name not in self._counts:
                self._counts[name] = self._is_written(row, name)
            if not self._counts[name]:
                self.unread[name] += 1

    def _is_written(self, row: DatasetRow, name: str) -> bool:
        """Return whether the template names a row's field, or writes another text without it."""
        other = without(row, name)
        return name in self._template(row) or (
            self._text(row, row.turns) != self._text(other, other.turns)
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

        with bounded(row), rendering(row, template), self._of_the_job(row):
            (text,), (marks,) = render_jinja_template(
                conversations=[list(turns)],
                tools=row.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **row.template_settings},
            )
        self._check_written(row, turns, text)
        learnt = [(begin, end) for begin, end in marks if begin < end]
        learnt = self._behind_prompts(row, turns, sized(text, row), learnt)
        return Rendered(text, tuple(learnt), special=False, touched=True)

    def _behind_prompts(
        self, row: DatasetRow, turns: tuple[Fields, ...], text: str, marks: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return marked parts without what the model is asked by: some marks hold the header.

        Answers that the model is asked for otherwise are counted.
        """
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant" or i == 0:
                continue
            try:
                prompt = self._text(row, turns[:i], prompt=True)
                if not text.startswith(prompt):
                    answered = self._text(row, turns[: i + 1])
                    if not answered.startswith(prompt):
                        self.unlike_asked.add(row.where)
            except UserError:  # the template refuses a part of these turns
                continue
            begun = outside(text, shared(text, prompt), self._tokens)
            if any(begin < begun < end for begin, end in marks):
                self.headed.add(row.where)
                self.unlike_before = self.unlike_before or "headers in marks are not learnt"
            marks = [(begun if begin < begun < end else begin, end) for begin, end in marks]
        return marks

    def _told_apart(self, row: DatasetRow, turns: tuple[Fields, ...]) -> Rendered:
        """Learn each answer in the form in which the model would be asked for it."""
        whole = self._text(row, turns)
        self._check_written(row, turns, whole, answers=False)
        learnt: list[tuple[int, int]] = []
        why = ""
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            if i == 0:  # nothing is there to render a prompt of
                if len(turns) == 1:
                    raise bad_row(
                        row.where,
                        "its only answer begins the conversation, so nothing asks for it",
                        "Write the turn that it answers before it, or drop the row.",
                    )
                self.unprompted.add(row.where)
                continue
            prompt = self._text(row, turns[:i], prompt=True)
            answered = whole if i + 1 == len(turns) else self._text(row, turns[: i + 1])
            if not answered.startswith(prompt):
                said_there = said_in(turn, self._counts)
                why = why or difference(prompt, answered, said_there, self._tokens)
                self.unasked.add(row.where)
                continue
            begin = len(prompt)
            said = end_of_content(answered, begin, turn["content"])
            if said is None:
                raise nothing_of(row, i)
            if turns[i - 1]["role"] != "user":
                begin = self._behind_header(row, turn, answered, begin)
            self._note_shortened(row, turn, answered[begin:])
            end, last = len(answered), i + 1 == len(turns)
            if not last and self._leaves_out(row, turns[: i + 2], answered):
                last = whole.startswith(answered)
            if last:
                end = self._end_of_last(row, turns[: i + 1], answered, said)
            elif whole.startswith(answered):
                if turns[i + 1]["role"] == "assistant":
                    end = self._end_of_last(row, turns[: i + 1], answered, said)
                end += self._stop_at(whole, end, said)
            else:
                end = self._end_of_turn(answered, whole, said) or 0
                if not end:
                    self.rewritten.add(row.where)
                    continue
                self.ended.add(row.where)
                self.unlike_before = self.unlike_before or "answers of earlier turns are learnt"
            learnt.append((begin, end))
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

    def _behind_header(self, row: DatasetRow, turn: Fields, answered: str, begin: int) -> int:
        """Return where an answer to another one than a user begins, without a header of its turn.

        Some templates ask by a header behind a user's turn alone.
        """
        content = turn["content"]
        if not words(answered[begin : answered.find(content.strip(), begin)]):
            return begin
        found = begin
        with suppress(UserError):  # the template wants other turns before an answer
            first = reference(row.turns, turn)
            asked = self._text(row, first[:-1], prompt=True)
            shown = (asked, self._text(row, first), first[-1]["content"])
            found = behind_header(shown, answered, begin, content, self._tokens)
        if found > begin:
            self.headed.add(row.where)
            self.unlike_before = self.unlike_before or "headers between answers are not learnt"
        return found

    def _check_written(
        self, row: DatasetRow, turns: tuple[Fields, ...], text: str, *, answers: bool = True
    ) -> None:
        """Count turns of which a template writes nothing; a part of an answer is counted, too.

        Args:
            row: the row.
            turns: its turns, or the first of them.
            text: what the template makes of them.
            answers: whether to look at those of the assistant.

        Raises:
            UserError: it writes nothing of an answer.
        """
        for i, turn in enumerate(turns):
            answer = turn["role"] == "assistant"
            if (answer and not answers) or not turn["content"].strip():
                continue
            if end_of_content(text, 0, turn["content"]) is None:
                if answer:
                    raise nothing_of(row, i)
                self.unwritten.add(row.where)
            elif answer:
                self._note_shortened(row, turn, text)

    def _check_last(self, row: DatasetRow) -> None:
        """Refuse a row of whose last answer nothing is written, though its words are elsewhere."""
        at = max(i for i, turn in enumerate(row.turns) if turn["role"] == "assistant")
        written = True
        with suppress(UserError):  # the template wants more turns than these
            written = not at or self._text(row, row.turns[:at]) != self._text(
                row, row.turns[: at + 1]
            )
        if not written:
            raise nothing_of(row, at)

    def _leaves_out(self, row: DatasetRow, turns: tuple[Fields, ...], before: str) -> bool:
        """Return whether a template writes nothing of the last turn, another one than a user's.

        `before` is the text without that turn. A question may follow the answer in it.
        """
        if turns[-1]["role"] == "user" or self._text(row, turns) != before:
            return False
        self.unwritten.add(row.where)
        return True

    def _note_shortened(self, row: DatasetRow, turn: Fields, written: str) -> None:
        """Count an answer that lacks words: templates leave out what was thought."""
        for said in said_in(turn, self._counts):
            if said.strip() not in written and words(said) - words(written) - {"think"}:
                self.shortened.add(row.where)
                return

    def _end_of_turn(self, answered: str, other: str, said: int) -> int | None:
        """Return where a turn ends that two texts hold, and behind which each goes on its own way.

        A template may write something behind the last turn alone: an end of the text, or the
        question for the next answer. None: the turn is another one in the two.

        Args:
            answered: the text whose last turn it is.
            other: that has turns behind it.
            said: where the content of the turn ends in `answered`.
        """
        end = shared(answered, other)
        while (whole := outside(answered, outside(other, end, self._tokens), self._tokens)) != end:
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

    def _end_of_last(
        self, row: DatasetRow, turns: tuple[Fields, ...], whole: str, said: int
    ) -> int:
        """Return where the last answer ends: before a question that nobody has asked for."""
        if self._goes_on:
            return len(whole)
        longer = whole
        others = [each for each in turns if each["role"] == "user"]
        if turns[-2]["role"] != "assistant":
            others.insert(0, turns[-2])
        for turn in others:
            with suppress(UserError):  # the template wants another turn there
                longer = self._text(row, (*turns, turn))
            if longer != whole:  # else it writes nothing of such a turn
                break
        else:
            return len(whole)
        if longer.startswith(whole):
            # So it is with all rows of this template, or with none.
            self._goes_on = self._goes_on is None
            return len(whole)
        self._goes_on = False
        end = self._end_of_turn(whole, longer, said)
        if end is None:
            return len(whole)
        ended = any(stop in whole[said:end] for stop in self._stops)
        if not ended and any(stop in whole[end:] for stop in self._stops):
            return len(whole)
        if end < len(whole):
            self.unlike_before = self.unlike_before or "what follows the last answer is not learnt"
        return end

    def _text(self, row: DatasetRow, turns: tuple[Fields, ...], *, prompt: bool = False) -> str:
        with bounded(row), rendering(row, self._template(row)), self._of_the_job(row):
            text = self._tokenizer.apply_chat_template(
                list(turns),
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **row.template_settings,
            )
        return sized(str(text), row)

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
