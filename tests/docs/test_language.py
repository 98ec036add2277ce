"""The checks of docs/language.py, and their findings in this repository."""

import language
import pytest


def test_texts_of_the_repository_have_no_findings():
    assert list(language.findings()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nobody\nreads it.", [(1, "Nobody")]),
        ("One.\nIt has a name of\nits own.", [(2, "of its own")]),
        ("The agent is no service.", [(1, "is no")]),
        ("The sink is no longer configured, and there is no file.", []),
        ("To amend a commit, recommend it.", []),
    ],
)
def test_phrase_is_found_across_line_breaks_and_only_as_whole_words(text, found):
    assert list(language.forbidden(text)) == found


def test_exception_allows_a_phrase_on_its_line(monkeypatch):
    monkeypatch.setitem(language.EXCEPTIONS, "mend the fence", "a quotation")
    assert list(language.forbidden("mend the fence\nmend the gate")) == [(2, "mend")]


def test_sentences_exclude_code_headings_and_tables():
    page = "# A title\n\nFirst one. Second\none.\n\n```sh\nls. Not\n```\n\n| a. B |\n\n- A [link](a.md).\n- Another.\n"
    assert language.sentences(page) == ["First one.", "Second one.", "A [link].", "Another."]


@pytest.mark.parametrize(
    ("words", "findings"),
    [(10, 0), (18, 1), (31, 2)],
)
def test_long_sentences_are_found(words, findings):
    assert len(list(language.long_sentences(["word " * words] * 100))) == findings


def test_image_without_alternative_text_is_found():
    page = "![](a.png)\n![A page](b.png)\n<img src=c>\n<img alt='' src=d>\n<img alt=\"A\nplot\" src=e>\n"
    assert list(language.pictures_without_text(page)) == [1, 3, 4]


def test_docstrings_and_messages_of_a_program_are_checked():
    source = '"""A module."""\nclass A:\n    """A class."""\n\nraise ValueError(f"a message {1}")\nname = "key"\n'
    assert list(language.texts(source)) == [
        (1, "A module.", True),
        (3, "A class.", True),
        (5, "a message ", False),
    ]
