"""Read a file with one object in it: JSON as JSON, all else as YAML 1.2.

PyYAML follows YAML 1.1, which takes `5e-05` for a text and `1:30` for ninety; kubectl does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from windrow.errors import UserError

_FLOAT = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_REPLACED = ("int", "float", "timestamp")


def read_document(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        UserError: it cannot be read, is none or several, or names a key twice; with `remedy`.
    """
    try:
        found = parse_document(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot be read: {_why(error)}", field=str(path), remedy=remedy) from error
    if not isinstance(found, dict):
        raise UserError("is not one YAML object", field=str(path), remedy=remedy)
    return found


def _why(error: Exception) -> str:
    """Say in one line what is wrong, and where."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    said = error.strerror if isinstance(error, OSError) else ""
    return said or " ".join(str(error).split())


def parse_document(text: str) -> Any:  # noqa: ANN401 - whatever is written
    """Return what a text says.

    Raises:
        ValueError, yaml.YAMLError: it is neither JSON nor YAML, or names a key twice.
    """
    if text.lstrip().startswith("{"):
        try:
            return whole_numbers(json.loads(text, object_pairs_hook=_once_each))
        except json.JSONDecodeError:
            pass  # YAML may begin like that as well
    # Renderers write `---` before and behind each object.
    found = [each for each in yaml.load_all(text, Loader=_Loader) if each is not None]
    if len(found) > 1:
        raise ValueError(f"it holds {len(found)} documents")
    return whole_numbers(found[0]) if found else None


def whole_numbers(value: Any) -> Any:  # noqa: ANN401 - whatever was written
    """Return it with integers for 100.0 and 1e3, as kubectl sends them.

    The API server's rules take no float for an integer.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: whole_numbers(each) for key, each in value.items()}
    return [whole_numbers(each) for each in value] if isinstance(value, list) else value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is written twice")
    return found


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401
        """Refuse a duplicate key, of which PyYAML would take the last."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        written = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in written:
                problem = f"{key.value!r} is written twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            written.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in _REPLACED]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
