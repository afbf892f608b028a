"""Load a tokenizer with the chat template that servers take from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

# Files by which transformers makes a processor, whose template SGLang and vLLM ask for first.
_OF_PROCESSOR: Final = ("processor_config.json", "preprocessor_config.json")
_TEMPLATE, _OLDER = "chat_template.jinja", "chat_template.json"


def read_tokenizer(directory: str | Path) -> Any:  # noqa: ANN401
    """Return the tokenizer of a folder.

    A folder of a model with a processor (pictures, sound) may have the template in
    `chat_template.json`, which transformers gives to the processor alone. Servers use it before the
    tokenizer's; where the tokenizer has none, it is the only one.

    Raises:
        OSError, ValueError, ImportError: it cannot be loaded; whatever else libraries raise.
    """
    from transformers import AutoTokenizer

    folder = Path(directory)
    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    older = folder / _OLDER
    if (folder / _TEMPLATE).exists() or not older.is_file():
        return tokenizer
    if not tokenizer.chat_template or any((folder / name).exists() for name in _OF_PROCESSOR):
        tokenizer.chat_template = _read(older)
    return tokenizer


def _read(path: Path) -> str | dict[str, str]:
    """Return the template of a file, or those that it has by their names.

    Raises:
        ValueError: the file has none.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    template = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(template, str) and template:
        return template
    try:
        named = {str(each["name"]): str(each["template"]) for each in template or ()}
    except (TypeError, KeyError):
        named = {}
    if not named:
        raise ValueError(f"{path.name} has no `chat_template`, a text or a list of named ones")
    return named
