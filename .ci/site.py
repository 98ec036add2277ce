#!/usr/bin/env python3
"""Finds dead links in the documentation site, and malformed links to other sites.

    .ci/site.py SITE [--repository URL]

Links within the site must point to an existing page and anchor. Links to the repository at URL, or to files outside
docs/, must point to an existing file in this tree. The program does not use the network, so for links to other sites it
checks only the syntax of the URL.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")
_CHARACTERS = re.compile(r"[!#-;=?-Z_a-z~\[\]]+")  # RFC 3986, including % for percent-encoding
_LINKS = {"href", "src"}


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect a tag's links and anchors. Ignore preconnect hints, which are not links."""
        values = dict(attrs)
        self.anchors |= {values[name] or "" for name in ("id", "name") if values.get(name)}
        if tag != "link" or values.get("rel") != "preconnect":
            self.links += [value for name, value in attrs if name in _LINKS and value is not None]


def faults(site: Path, repository: str) -> Iterator[str]:
    """Yield an error message for each dead link in *site*."""
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            fault = _fault(link, path, pages, site, repository)
            if fault:
                yield f"{path.relative_to(site)}: {link}: {fault}"


def _fault(link: str, path: Path, pages: dict[Path, Page], site: Path, repository: str) -> str:
    if repository and link.startswith(f"{repository}/blob/main/"):
        file = unquote(urlsplit(link.removeprefix(f"{repository}/blob/main/")).path)
        return "" if (ROOT / file).exists() else "the repository does not contain this file"
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return _fault_of_another_site(link)
    start = site if parts.path.startswith("/") else path.parent
    target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if target in pages:
        is_there = not parts.fragment or unquote(parts.fragment) in pages[target].anchors
        return "" if is_there else f"{target.name} does not contain this anchor"
    if site not in target.parents:  # a file outside docs/
        target = ROOT / target.relative_to(site.parent) if site.parent in target.parents else ROOT / ".nowhere"
    return "" if target.exists() else "the file does not exist"


def _fault_of_another_site(link: str) -> str:
    parts = urlsplit(link)
    is_here = parts.hostname in {"127.0.0.1", "localhost"}
    wrong = {
        "the scheme is not http or https": parts.scheme not in {"http", "https"},
        "the scheme is http and not https": parts.scheme == "http" and not is_here,
        "the host name is invalid": not is_here and not _HOST.fullmatch(parts.hostname or ""),
        "the URL contains credentials": "@" in parts.netloc,
        "a character must be percent-encoded": not _CHARACTERS.fullmatch(link),
    }
    return "; ".join(sentence for sentence, is_wrong in wrong.items() if is_wrong)


def main() -> int:
    """Print the faults, and return whether there are any."""
    parser = argparse.ArgumentParser(description="Find dead links in the documentation site.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--repository", default="", help="The URL of the repository, such as https://github.com/a/b")
    arguments = parser.parse_args()
    found = list(faults(arguments.site, arguments.repository.rstrip("/")))
    for fault in found:
        sys.stderr.write(f"{fault}\n")
    pages = len(list(arguments.site.rglob("*.html")))
    sys.stdout.write(f"{pages} pages, {len(found)} dead links\n")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
