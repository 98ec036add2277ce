"""What mkdocs does beside its own: links to files beside docs/ lead to the repository, where the site knows it.

On GitHub, and from a site in the checkout, they work as they are. A site that is published elsewhere is built with
REPOSITORY_URL, such as https://github.com/OWNER/REPOSITORY.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r'(?<= href=")\.\./[^"]+(?=")')


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its links out of docs/ as links into the repository."""
    repository = config.extra["repository"].rstrip("/")

    def outside(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), found[0]))
        return f"{repository}/blob/main/{path.removeprefix('../')}" if path.startswith("../") else found[0]

    return _LINK.sub(outside, html) if repository else html
