"""What mkdocs does to a page beyond its Markdown: long names in tables break where words end."""

from __future__ import annotations

import re
from typing import Any

_NAME = re.compile(r"(?<=<td><code>)[a-z]+(?:_[a-z0-9]+)+(?=</code>)")


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs' page, config and files
    """Let names like windrow_slot_info break after an underscore, and nowhere else."""
    return _NAME.sub(lambda found: found[0].replace("_", "_<wbr>"), html)
