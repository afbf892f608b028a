"""Fail where a built site would fetch anything from elsewhere, or leads to a file it lacks.

python tools/check_site.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches unasked; a link that one has to follow may lead elsewhere.
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
_LINKED_KINDS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest"}


class _Page(HTMLParser):
    """Collects what a page fetches, and where it leads."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses of one tag."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag in _FETCHED and found.get(_FETCHED[tag]):
            self.fetched.append(found[_FETCHED[tag]])
        elif tag == "link" and set(found.get("rel", "").split()) & _LINKED_KINDS:
            self.fetched.append(found.get("href", ""))
        elif tag == "a" and found.get("href"):
            self.links.append(found["href"])


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems(site: Path) -> list[str]:
    """Return a sentence for each thing that is wrong with a site."""
    found = []
    pages = {path.resolve(): _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        found += [
            f"{where} fetches {address}" for address in page.fetched if urlsplit(address).netloc
        ]
        # The page for what is not found has absolute addresses, as it may stand anywhere.
        for address in () if where.name == "404.html" else (*page.fetched, *page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{where} leads to {address}, which is not there")
            elif target in pages and not _has(pages[target], unquote(parts.fragment)):
                found.append(f"{where} leads to {address}, a place that the page does not have")
    return found


def _has(page: _Page, anchor: str) -> bool:
    # Those that begin so are the theme's own, made by its script.
    return not anchor or anchor in page.anchors or anchor.startswith("__")


def main() -> int:
    """Check the site that the command line names."""
    found = problems(Path(sys.argv[1]))
    for sentence in found:
        print(sentence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
