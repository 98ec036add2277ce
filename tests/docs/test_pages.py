"""The structure of the documentation: a short front page, and a navigation with every page."""

import re

import doc_pages
import pytest

DOCS = doc_pages.ROOT / "docs"
README = doc_pages.page("README.md")


def test_front_page_is_short():
    assert len(README.splitlines()) <= 150


def test_changelog_of_the_first_release_is_short():
    assert len(doc_pages.page("CHANGELOG.md").splitlines()) <= 40


def test_site_navigation_contains_every_page():
    text = (DOCS / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    named = set(re.findall(r"[\w/-]+\.md", text))
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_index_links_to_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8") + (DOCS / "howto" / "README.md").read_text(
        encoding="utf-8"
    )
    missing = [path.name for path in DOCS.rglob("*.md") if path.name not in index and path.name != "README.md"]
    assert missing == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_page_begins_with_its_only_title(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^# .+$", text, re.MULTILINE) == [text.splitlines()[0]]
