"""docs/errors.md has every error of errors.py, where it stands in the tree, and its status."""

from __future__ import annotations

import inspect
import re

from tests.docs.pages import ROOT, blocks
from weightsync import errors
from weightsync.errors import WeightSyncError
from weightsync.wire.problem import status_of

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
KINDS: dict[str, type[WeightSyncError]] = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, WeightSyncError)
}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


def tree() -> dict[str, str]:
    """Return each error of the page's tree with the one above it."""
    (block,) = [b for b in blocks("docs/errors.md") if b.language == "text"]
    above: list[str] = []
    found = {}
    for line in block.text.splitlines():
        name = re.search(r"\w+", line)
        assert name
        depth = name.start() // 3
        above = [*above[:depth], name[0]]
        found[name[0]] = above[-2] if depth else ""
    return found


def test_the_tree_is_that_of_the_code() -> None:
    wanted = {name: kind.__bases__[0].__name__ for name, kind in KINDS.items()}
    # A second base, ValueError or TimeoutError, is said beside the name.
    wanted |= {"WeightSyncError": ""}
    assert tree() == wanted


def test_every_error_has_a_row() -> None:
    assert [row[0].strip("`") for row in ROWS] == list(tree())
    assert all(row[3] and row[4] for row in ROWS)


def test_rows_say_the_status_and_what_an_error_carries() -> None:
    for name, carries, status, *_ in ROWS:
        error = KINDS[name.strip("`")]("seen")
        assert status_of(error) == int(status), name
        assert set(re.findall(r"`(\w+)`", carries)) == set(vars(error)), name


def test_errors_of_time_are_pythons_own_too() -> None:
    found = {name for name, kind in KINDS.items() if issubclass(kind, TimeoutError)}
    assert found == {name for name in KINDS if name.endswith("Timeout")} != set()
    for name in found:
        assert str(KINDS[name]("seen")) == "seen"
