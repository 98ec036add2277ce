"""A MkDocs hook that changes links to files outside docs/ into links to the repository.

To enable the hook, build the site with the environment variable REPOSITORY_URL, such as
https://github.com/OWNER/REPOSITORY. Without this variable, the links stay relative.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r'(?<= href=")\.\./[^"]+(?=")')


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with repository links to files outside docs/."""
    repository = config.extra["repository"].rstrip("/")

    def outside(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), found[0]))
        return f"{repository}/blob/main/{path.removeprefix('../')}" if path.startswith("../") else found[0]

    return _LINK.sub(outside, html) if repository else html
