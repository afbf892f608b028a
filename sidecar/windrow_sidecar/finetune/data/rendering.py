"""Bound a chat template while it renders a row, and name who can correct its faults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.rows import MOST_ROW_BYTES, DatasetRow, bad_row
from windrow_sidecar.finetune.data import row_limit

# Of one row; templates of real models take milliseconds for the longest.
_RENDER_CPU_S = 10.0
_TOOLS = re.compile(r"\btools\b")
# As Python writes an object that has no text of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,16}>")
_SHOWN = 40  # characters before it


@contextmanager
def bounded(row: DatasetRow) -> Iterator[None]:
    """Hold while a template renders a row: one that loops without end is ended.

    Raises:
        UserError: it was.
    """
    with row_limit.bounded(row, "the chat template", _RENDER_CPU_S):
        yield


def without_comments(template: str) -> str:
    """Return a template without `{# ... #}`, in time that grows with its length alone."""
    kept, at = [], 0
    while (begin := template.find("{#", at)) >= 0 and (end := template.find("#}", begin + 2)) >= 0:
        kept.append(template[at:begin])
        at = end + 2
    return "".join((*kept, template[at:]))


def sized(text: str, row: DatasetRow) -> str:
    """Return what a template has made of a row, which no model takes beyond a length.

    Raises:
        UserError: it is longer, or holds what is another in each process.
    """
    if found := _ADDRESS.search(text):
        given = (row.turns, row.tools, row.template_settings)
        if found[0] not in json.dumps(given, default=str, ensure_ascii=False):
            raise bad_row(
                row.where,
                f"the model's chat template writes an object of the program with its address "
                f"({text[max(0, found.start() - _SHOWN) : found.end()]!r}), which is another in "
                "each run",
                "Correct the template: call what it names, or put `| list` behind it.",
            )
    if len(text) > MOST_ROW_BYTES:
        raise bad_row(
            row.where,
            f"the chat template makes more than {MOST_ROW_BYTES >> 20} MiB of it",
            "Use a template that writes the row and no more.",
        )
    return text


@contextmanager
def rendering(row: DatasetRow, template: str) -> Iterator[None]:
    """Hold while a template renders a row; it is a program, and the row what it may fail over.

    Raises:
        UserError: it failed; `field` is the row's place, or the model's where no row could do.
    """
    from jinja2.exceptions import (
        SecurityError,
        TemplateError,
        TemplateSyntaxError,
        UndefinedError,
    )

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
    except SecurityError as error:
        raise bad_row(
            row.where,
            f"the model's chat template refuses the turns: {str(error).rstrip('.')}",
            "Correct chat_template.jinja in the model's folder: templates run where no value can "
            "be changed, here as in servers.",
        ) from error
    except (
        *(TemplateError, TypeError, ValueError, LookupError),
        *(ArithmeticError, AttributeError, RecursionError),
    ) as error:
        raise bad_row(
            row.where,
            f"the model's chat template refuses the turns: {error}",
            "Give each row its `tools`: the template reads them in every row."
            if not row.tools and "NoneType" in str(error) and _TOOLS.search(template)
            else "Write the turns, and their order, as the template wants them.",
        ) from error
