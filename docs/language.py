"""Checks the language of the documentation, help texts, messages, and docstrings.

Run `python docs/language.py`. The program prints each problem with its file and line number. It exits with 1 if it
finds any of the following problems:

- a phrase that readers had to read twice, unless EXCEPTIONS lists the line with a reason
- a page whose sentences are too long at the median or at the 95th percentile
- a docstring with a first line of over 88 characters
- a picture without alternative text
- a page of over 250 lines, except references
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
#: Regular expressions of phrases that make a native reader stop. Each has a plain replacement, such as "exists".
PHRASES = (
    "nobody",
    "whoever",
    "is there",
    "of its own",
    "as it is",
    "for good",
    "beside",
    "anew",
    "mend",
    "told of",
    "tells of",
    r"(?<!there\s)is no(?! longer)",
    "owed",
)
_PHRASE = re.compile(r"\b(" + "|".join(PHRASES).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
#: Part of a line with one of the phrases -> the reason why the phrase stays.
EXCEPTIONS: dict[str, str] = {}

MOST_MEDIAN_WORDS = 17
MOST_WORDS = 30  # of 95 in 100 sentences
MOST_CHARACTERS = 88  # of the first line of a docstring
MOST_LINES = 250
#: Pages that people search instead of reading them from start to end.
REFERENCES = (
    "docs/reference/",
    "bridge/approval/PROTOCOL.md",
    "docs/operate/runbook.md",  # a section for each alert
)

_SUFFIXES = {".bicep", ".conf", ".html", ".kql", ".ps1", ".service", ".sh", ".tf", ".toml", ".yaml", ".yml"}

_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
_IMAGE_TAG = re.compile(r"<img\b[^>]*>")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"(])")


def pages() -> list[Path]:
    """Return the Markdown pages that people read."""
    folders = ("docs", "deploy", "bridge", "sinks", ".github")
    return [*sorted(ROOT.glob("*.md")), *(path for name in folders for path in sorted((ROOT / name).rglob("*.md")))]


def programs() -> list[Path]:
    """Return the Python files with docstrings, help texts, and messages."""
    folders = ("bridge", "sinks", "docs", "deploy", ".ci")
    return [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]


def other_files() -> list[Path]:
    """Return the templates, alerts, units, and other files with texts or comments."""
    found = [*(ROOT / "bridge" / "portal" / "templates").iterdir(), *(ROOT / "deploy").rglob("*")]
    return sorted(path for path in found if path.suffix in _SUFFIXES and path.is_file())


def forbidden(text: str, *, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each forbidden phrase. Skip the lines in EXCEPTIONS."""
    lines = text.splitlines()
    for found in _PHRASE.finditer(text):
        number = text.count("\n", 0, found.start())
        if not any(part in lines[number] for part in EXCEPTIONS):
            yield first_line + number, " ".join(found[0].split())


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and text of each string in *source*, and whether it is a docstring."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value, id(node) in docstrings


def prose(page: str) -> str:
    """Return *page* without code blocks and comments, with the same line numbers."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    return _COMMENT.sub(blank, _FENCED.sub(blank, page))


def sentences(page: str) -> list[str]:
    """Return the sentences of the paragraphs and lists of *page*, without headings and tables."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", prose(page)):
        text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", block.strip())
        if text and not text.startswith(("#", "|", "<", "!", "---", "[")):
            text = re.sub(r"\]\([^)]*\)", "]", " ".join(text.split()))
            found += _SENTENCE_END.split(text)
    return found


def long_sentences(found: list[str]) -> Iterator[str]:
    """Yield a finding if the sentences are too long at the median or the 95th percentile."""
    counts = [len(sentence.split()) for sentence in found]
    if median(counts) > MOST_MEDIAN_WORDS:
        yield f"the median sentence has {median(counts):g} words, more than {MOST_MEDIAN_WORDS}"
    if (longest := quantiles(counts, n=20)[-1]) > MOST_WORDS:
        yield f"5 of 100 sentences have over {longest:g} words, more than {MOST_WORDS}"


def pictures_without_text(page: str) -> Iterator[int]:
    """Yield the line of each picture without alternative text."""
    text = prose(page)
    for pattern, described in ((_IMAGE, r"!\[[^\]]*\w"), (_IMAGE_TAG, r'alt="[^"]*\w')):
        for found in pattern.finditer(text):
            if not re.search(described, found[0]):
                yield text.count("\n", 0, found.start()) + 1


def _page_findings(path: Path) -> Iterator[str]:
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    yield from (f"{name}:{line}: avoid '{phrase}'" for line, phrase in forbidden(prose(text)))
    yield from (f"{name}:{line}: the picture has no alternative text" for line in pictures_without_text(text))
    count = len(text.splitlines())
    if count > MOST_LINES and not name.startswith(REFERENCES):
        yield f"{name}:{count}: the page has more than {MOST_LINES} lines"


def _program_findings(path: Path) -> Iterator[str]:
    name = str(path.relative_to(ROOT))
    for line, text, is_docstring in texts(path.read_text(encoding="utf-8")):
        yield from (f"{name}:{at}: avoid '{phrase}'" for at, phrase in forbidden(text, first_line=line))
        if is_docstring and len(text.strip().partition("\n")[0]) > MOST_CHARACTERS:
            yield f"{name}:{line}: the first line of the docstring has more than {MOST_CHARACTERS} characters"


def findings() -> Iterator[str]:
    """Yield every finding in the repository."""
    for path in pages():
        yield from _page_findings(path)
    for path in programs():
        if path != Path(__file__):
            yield from _program_findings(path)
    for path in other_files():
        text = path.read_text(encoding="utf-8")
        yield from (f"{path.relative_to(ROOT)}:{line}: avoid '{phrase}'" for line, phrase in forbidden(text))
    docs = sorted((ROOT / "docs").rglob("*.md"))
    yield from long_sentences([each for path in docs for each in sentences(path.read_text(encoding="utf-8"))])


def main() -> int:
    """Print the findings, and return 1 if any exist."""
    found = list(findings())
    for finding in found:
        sys.stderr.write(f"{finding}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
