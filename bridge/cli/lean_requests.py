"""The import of requests without the library that guesses character sets: 3 MB that an agent of 40 does not need.

Every body here is bytes, JSON or UTF-8. requests looks for such a library when it is imported, and does without one
where there is none (it warns of that, and ``Response.text`` then takes UTF-8). So the library is hidden for that
moment. Only the command line does this, before anything else imports requests; a program that imports `bridge` as a
library keeps requests as it is installed.
"""

from __future__ import annotations

import sys
import warnings

_GUESSERS = ("chardet", "charset_normalizer")


def import_requests() -> None:
    """Import requests without its guesser, unless it was imported already."""
    if "requests" in sys.modules:
        return
    hidden = [name for name in _GUESSERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None there means: cannot be imported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import requests  # noqa: F401, PLC0415
    finally:
        for name in hidden:
            del sys.modules[name]


import_requests()
