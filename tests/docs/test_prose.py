"""Layout of the pages: each starts with a paragraph, and lines have at most 120 columns."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, pages

COLUMNS = 120
PAGES = ["README.md", *(p for p in pages() if p.startswith("docs/"))]
OPENING = re.compile(r"(`?\w|\[)")


def lines(page: str) -> list[str]:
    """Return the lines of a page, with empty lines for those that cannot be broken.

    These are rows of tables and the errors of a command, each of which is one line.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    whole = ("|", "weightsync: ")
    return ["" if line.lstrip().startswith(whole) else line for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_no_longer_than_120_columns(page: str) -> None:
    assert [line for line in lines(page) if len(line) > COLUMNS] == []


@pytest.mark.parametrize("page", [p for p in PAGES if not p.startswith("docs/api/")])
def test_a_page_starts_with_a_paragraph(page: str) -> None:
    title, gap, first, *_ = lines(page)
    assert title.startswith("# ")
    assert not gap
    assert OPENING.match(first), first
