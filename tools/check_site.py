"""Fail where a built site would fetch anything from elsewhere, or leads to a file it lacks.

python tools/check_site.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself; a link that one has to follow may lead elsewhere.
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
_LINKED_KINDS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest"}


class _Page(HTMLParser):
    """Collects what a page fetches, and where it leads."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses of one tag."""
        found = {name: value or "" for name, value in attrs}
        if tag in _FETCHED and found.get(_FETCHED[tag]):
            self.fetched.append(found[_FETCHED[tag]])
        elif tag == "link" and set(found.get("rel", "").split()) & _LINKED_KINDS:
            self.fetched.append(found.get("href", ""))
        elif tag == "a" and found.get("href"):
            self.links.append(found["href"])


def problems(site: Path) -> list[str]:
    """Return a sentence for each thing that is wrong with a site."""
    found = []
    for path in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        where = path.relative_to(site)
        found += [
            f"{where} fetches {address}" for address in page.fetched if urlsplit(address).netloc
        ]
        for address in (*page.fetched, *page.links):
            parts = urlsplit(address)
            # The page for what is not found has absolute addresses, as it may stand anywhere.
            if parts.scheme or parts.netloc or not parts.path or where.name == "404.html":
                continue
            target = path.parent / unquote(parts.path)
            if not (target / "index.html" if target.is_dir() else target).exists():
                found.append(f"{where} leads to {address}, which is not there")
    return found


def main() -> int:
    """Check the site that the command line names."""
    found = problems(Path(sys.argv[1]))
    for sentence in found:
        print(sentence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
