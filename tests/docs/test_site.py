"""The program that looks for dead links in the site, and the hook that leads links out of docs/ to the repository."""

from __future__ import annotations

import importlib.util

import doc_pages
import pytest

ROOT = doc_pages.ROOT
REPOSITORY = "https://git.example.net/a/b"


def _module(path):
    if not path.exists():
        pytest.skip("an unpacked sdist has no .ci")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def faults(tmp_path):
    """Return a function that looks through a site of two pages, the first with *html* in it."""
    program = _module(ROOT / ".ci" / "site.py")
    site = tmp_path / "checkout" / "site"
    (site / "howto").mkdir(parents=True)
    (site / "howto" / "slack.html").write_text('<h2 id="limits">Limits</h2>')

    def look(html):
        (site / "index.html").write_text(html)
        return list(program.faults(site, REPOSITORY))

    return look


@pytest.mark.parametrize(
    "link",
    [
        "howto/slack.html",
        "howto/slack.html#limits",
        "/howto/slack.html",
        "#top",
        "../README.md",
        f"{REPOSITORY}/blob/main/deploy/systemd/install.sh#L1",
        "https://learn.microsoft.com/cli/azure/",
        "http://127.0.0.1:9464/readyz",
    ],
)
def test_link_that_leads_somewhere_is_no_fault(faults, link):
    assert faults(f'<h1 id="top"><a href="{link}">x</a></h1>') == []


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("howto/slak.html", "there is no such file"),
        ("howto/slack.html#limit", "slack.html has no such anchor"),
        ("#bottom", "index.html has no such anchor"),
        ("../deploy/no-such-file", "there is no such file"),
        (f"{REPOSITORY}/blob/main/deploy/no-such-file", "there is no such file in the repository"),
        ("http://example.net", "it is not encrypted"),
        ("https://exam ple.net", "its host is none; a character in it must be written with %"),
        ("https://docs", "its host is none"),
        ("https://user@example.net", "it holds a login"),
        ("ftp://example.net", "only http and https lead to a page"),
    ],
)
def test_dead_link_is_found(faults, link, fault):
    assert faults(f'<img src="{link}">') == [f"index.html: {link}: {fault}"]
