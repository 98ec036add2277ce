"""Imports `requests` without its character set detection, to save 3 MB of memory.

The agent does not need the detection, because every body that it reads is JSON or UTF-8. requests imports a detection
library if one is installed. This module hides the detection libraries while requests is imported. The configuration
loader calls this module before it loads a sink that might use requests. The approval service calls this module before
it starts the portal poller. A program that imports `bridge` as a library is not affected.
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
