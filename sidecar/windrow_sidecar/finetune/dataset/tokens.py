"""What a row is to the model: its tokens, and which of them are learnt."""

from __future__ import annotations

from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.dataset.records import bad_row
from windrow_sidecar.finetune.dataset.rows import Row, Segment
from windrow_sidecar.finetune.training.data import IGNORED, Example


class RowTokenizer:
    """Turns rows into tokens.

    The loss counts what the assistant says (chat), the completion (instruction, completion) or
    everything (text).

    Args:
        tokenizer: the model's. It needs no padding token: padding has no label, and behind a causal
            mask no token sees what stands to its right.
        max_length: rows are cut to so many tokens.
        learn_all: prompts count as well.
    """

    def __init__(self, tokenizer: Any, *, max_length: int, learn_all: bool = False) -> None:  # noqa: ANN401
        self._tokenizer, self._max_length, self._learn_all = tokenizer, max_length, learn_all

    def example(self, row: Row) -> Example:
        """Return the row's tokens.

        Raises:
            UserError: the tokenizer has no chat template (`field` is then one of the spec), or
                nothing to learn from is left (`field` is the row's place).
        """
        ids: list[int] = []
        labels: list[int] = []
        end = None if row.messages else self._tokenizer.eos_token_id
        if not row.messages and self._tokenizer.bos_token_id is not None:
            ids.append(self._tokenizer.bos_token_id)
            labels.append(IGNORED)
        for segment in self._chat(row) if row.messages else row.segments:
            tokens = self._tokenizer.encode(segment.text, add_special_tokens=False)
            ids += tokens
            learn = segment.learn or self._learn_all
            labels += tokens if learn else [IGNORED] * len(tokens)
        if end is not None:
            ids.append(end)
            labels.append(end)
        made = Example(tuple(ids[: self._max_length]), tuple(labels[: self._max_length]), row.where)
        if made.targets == 0:
            raise _nothing_left(row.where, len(ids), self._max_length)
        return made

    def _chat(self, row: Row) -> tuple[Segment, ...]:
        """Cut the rendered conversation where the assistant begins and ends to speak."""
        if not self._tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template, so chat rows cannot be rendered",
                field="spec.dataset.format",
                remedy="Use a model with a template, or rows of another format.",
                reason=Reason.DATASET_INVALID,
            )
        turns = [{"role": m.role, "content": m.content} for m in row.messages]
        segments: list[Segment] = []
        done = ""
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            prompt = self._render(turns[:i], row, prompt=True)
            answered = self._render(turns[: i + 1], row, prompt=False)
            if not (prompt.startswith(done) and answered.startswith(prompt)):
                raise bad_row(
                    row.where,
                    "the model's chat template renders earlier turns anew with each answer, so "
                    "the answers cannot be told apart",
                    "Give each row one turn of the assistant, the last.",
                )
            segments.append(Segment(prompt[len(done) :], learn=False))
            segments.append(Segment(answered[len(prompt) :], learn=True))
            done = answered
        return tuple(segments)

    def _render(self, turns: list[dict[str, str]], row: Row, *, prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=prompt
                )
            )
        except TemplateError as error:
            raise bad_row(
                row.where,
                f"the model's chat template refuses the turns: {error}",
                "Order the turns as the template wants them.",
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
