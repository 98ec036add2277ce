"""The screenshots of the documentation match the current pages."""

import pytest
from browser_kit import chromium
from screenshots import IMAGES, SHOTS, shown


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("name", SHOTS)
def test_screenshot_in_the_documentation_is_current(browser, name):
    _, description = shown(browser, name)
    text = (IMAGES / f"{name}.txt").read_text(encoding="utf-8")
    assert description == text, "run: python docs/screenshots.py"
