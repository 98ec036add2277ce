"""requests, imported without the library that guesses character sets: 3 MB that an agent of 40 carries for nobody.

Every body here is bytes, JSON or UTF-8. requests itself looks for such a library when it is imported, and does without
one where there is none (it warns of that; ``Response.text`` then takes UTF-8 for what says nothing else). So it is
hidden for that one moment. Imported first by the command line alone: whoever uses `bridge` as a library keeps what is
installed.
"""

from __future__ import annotations

import sys
import warnings

_GUESSERS = ("chardet", "charset_normalizer")


def import_requests() -> None:
    """Import requests in the lean way, unless somebody has imported it already."""
    if "requests" in sys.modules:
        return
    hidden = [name for name in _GUESSERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # null there means: not to be found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import requests  # noqa: F401, PLC0415
    finally:
        for name in hidden:
            del sys.modules[name]


import_requests()
