"""Imports requests without its character set detection, which needs 3 MB of the agent's 40 MB.

All bodies are bytes, JSON, or UTF-8. requests looks for a detection library during its own import, and works without
one: it warns, and ``Response.text`` then assumes UTF-8. This module hides the libraries during that import. The load
of a sink that may use requests calls it, and the start of the portal poller, before anything else imports requests.
"""

from __future__ import annotations

import sys
import warnings

_DETECTION = ("chardet", "charset_normalizer")


def import_requests() -> None:
    """Import requests without a detection library, unless requests is already imported."""
    if "requests" in sys.modules:
        return
    hidden = [name for name in _DETECTION if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: the import fails
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import requests  # noqa: F401, PLC0415
    finally:
        for name in hidden:
            del sys.modules[name]
