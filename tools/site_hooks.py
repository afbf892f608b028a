"""Changes to a page beyond its Markdown: long names in tables break where words end."""

from __future__ import annotations

import re
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_OPTION = re.compile(r"<code>(?=--[a-z-]+</code>)")
_NAME = re.compile(r"(?<=<code>)[\w.]+(?=</code>)")
_WORD_ENDS = re.compile(r"(?<=[_.])(?=[a-z])|(?<=[a-z])(?=[A-Z])")


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs' page, config and files
    """Let names like windrow_slot_info and EngineNotServing break between words; options never."""
    return _TABLE.sub(lambda table: _with_breaks(table[0]), html)


def _with_breaks(table: str) -> str:
    table = _OPTION.sub('<code style="white-space: nowrap">', table)
    return _NAME.sub(lambda name: _WORD_ENDS.sub("<wbr>", name[0]), table)
