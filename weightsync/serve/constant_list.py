"""A read-only view of a list, for token ids of a request that still runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar, overload

T = TypeVar("T")


class ConstantList(Sequence[T]):
    """A read-only view of a list, which shows the changes that the list's owner makes.

    Slices and sums are new lists. Every attempt to change the view raises TypeError.
    """

    __slots__ = ("_items",)
    __hash__ = None  # type: ignore[assignment]  # its value can change

    def __init__(self, items: list[T]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def index(self, item: Any, start: int = 0, stop: int | None = None) -> int:
        return self._items.index(item, start, len(self) if stop is None else stop)

    def copy(self) -> list[T]:
        """Return a new list, which may be changed."""
        return list(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, ConstantList) else other)

    def __add__(self, other: Sequence[T]) -> list[T]:
        return [*self._items, *other]

    def __repr__(self) -> str:
        return f"ConstantList({self._items!r})"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("this list is read-only; change a copy() of it")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
