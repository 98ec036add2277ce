"""The portal's tests need its libraries: without the extra, and so on Python 3.10, they are skipped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

_IS_INSTALLED = all(
    find_spec(name) is not None for name in ("sqlalchemy", "alembic", "asn1crypto", "starlette", "uvicorn")
)


class _Skipped(pytest.Module):
    """A file of tests that is not even imported."""

    def collect(self) -> NoReturn:
        raise pytest.skip.Exception("the extra [portal] is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Return the file as one that is skipped, where the libraries are missing."""
    return None if _IS_INSTALLED else _Skipped.from_parent(parent, path=module_path)
