"""A list that callers can read and cannot change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weightsync.serve import ConstantList


@pytest.fixture
def items() -> list[int]:
    return [3, 1, 2, 1]


def test_it_reads_like_a_list(items: list[int]) -> None:
    view = ConstantList(items)
    assert (view[0], view[-1], view[1:3], len(view)) == (3, 1, [1, 2], 4)
    assert list(view) == items
    assert list(reversed(view)) == [1, 2, 1, 3]
    assert 2 in view
    assert 9 not in view
    assert (view.index(1), view.index(1, 2), view.count(1)) == (1, 3, 2)
    more = [5]
    assert view + more == [3, 1, 2, 1, 5]
    assert repr(view) == "ConstantList([3, 1, 2, 1])"
    with pytest.raises(IndexError):
        view[4]
    with pytest.raises(ValueError, match="9"):
        view.index(9)


def test_it_follows_its_owner(items: list[int]) -> None:
    view = ConstantList(items)
    items.append(7)
    assert view[-1] == 7
    assert len(view) == 5


def test_it_equals_lists_of_the_same_items(items: list[int]) -> None:
    view = ConstantList(items)
    assert view == [3, 1, 2, 1]
    assert view == ConstantList([3, 1, 2, 1])
    assert view != [3]
    assert view != ConstantList([3])
    with pytest.raises(TypeError, match="unhashable"):
        hash(view)


def test_what_it_hands_out_is_the_callers(items: list[int]) -> None:
    view = ConstantList(items)
    nothing: list[int] = []
    for own in (view.copy(), view[:], view + nothing):
        own.append(9)
    assert items == [3, 1, 2, 1]


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda view: view.append(1),
    "extend": lambda view: view.extend([1]),
    "insert": lambda view: view.insert(0, 1),
    "pop": lambda view: view.pop(),
    "remove": lambda view: view.remove(1),
    "clear": lambda view: view.clear(),
    "sort": lambda view: view.sort(key=None),
    "reverse": lambda view: view.reverse(),
    "set": lambda view: view.__setitem__(0, 1),
    "set slice": lambda view: view.__setitem__(slice(0, 1), [1]),
    "delete": lambda view: view.__delitem__(0),
    "iadd": lambda view: view.__iadd__([1]),
    "imul": lambda view: view.__imul__(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_every_change_is_refused(items: list[int], change: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"this list is read-only; change a copy\(\) of it"):
        change(ConstantList(items))
    assert items == [3, 1, 2, 1]


def test_it_takes_no_attributes(items: list[int]) -> None:
    with pytest.raises(AttributeError):
        ConstantList(items).extra = 1  # type: ignore[attr-defined]  # the point of the test
