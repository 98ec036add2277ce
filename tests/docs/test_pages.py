"""The documentation as a whole: a short front page, and a navigation that names every page."""

from __future__ import annotations

import re

import doc_pages
import pytest

DOCS = doc_pages.ROOT / "docs"
README = doc_pages.page("README.md")


def test_front_page_is_short():
    assert len(README.splitlines()) <= 150


def test_front_page_has_no_long_paragraph_and_no_long_cell():
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [each for each in re.split(r"\n\s*\n", prose) if not each.lstrip().startswith(("|", "- ", "<!--"))]
    assert max(len(each.strip().splitlines()) for each in paragraphs) <= 5
    cells = [cell.strip() for line in prose.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert max(map(len, cells)) <= 120


def test_front_page_shows_a_record_and_says_what_every_question_of_a_newcomer_needs():
    for words in ('"transition": "scheduled"', "## Why not something else?", "## Install", "## Configure", "Tested: "):
        assert words in README
    assert "MiB" in README, "what it costs"


def test_navigation_of_the_site_names_every_page():
    text = (DOCS / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    named = set(re.findall(r"[\w/-]+\.md", text))
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_index_leads_to_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8") + (DOCS / "howto" / "README.md").read_text(
        encoding="utf-8"
    )
    missing = [path.name for path in DOCS.rglob("*.md") if path.name not in index and path.name != "README.md"]
    assert missing == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_page_begins_with_its_one_title(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^# .+$", text, re.MULTILINE) == [text.splitlines()[0]]


def test_picture_of_the_demo_asks_no_other_host():
    svg = (DOCS / "start" / "demo.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' )<]+", svg)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "completed" in svg
