"""Layout of the pages: each starts with a paragraph, and lines have at most 120 columns."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, pages

COLUMNS = 120
PAGES = ["README.md", *(p for p in pages() if p.startswith("docs/"))]
OPENING = re.compile(r"(`?\w|\[)")


def prose(page: str) -> list[str]:
    """Return the lines of a page outside of code, with empty lines for rows of tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    without_code = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return ["" if line.startswith("|") else line for line in without_code.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_no_longer_than_120_columns(page: str) -> None:
    assert [line for line in prose(page) if len(line) > COLUMNS] == []


@pytest.mark.parametrize("page", [p for p in PAGES if not p.startswith("docs/api/")])
def test_a_page_starts_with_a_paragraph(page: str) -> None:
    title, gap, first, *_ = prose(page)
    assert title.startswith("# ")
    assert not gap
    assert OPENING.match(first), first
