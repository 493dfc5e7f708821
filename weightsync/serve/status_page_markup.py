"""HTML out of plain values: every text is escaped where it enters, so that no caller has to."""

from __future__ import annotations

import html
from collections.abc import Iterable

Attribute = str | int | float | bool | None

_VOID = frozenset({"meta", "link", "br"})
_UNPRINTABLE = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)],
    "\N{REPLACEMENT CHARACTER}",
) | {ord("\n"): " ", ord("\t"): " "}


class Markup(str):
    """Text that is HTML already. What is cut or formatted out of it is plain text again."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return text as HTML, control characters made visible; Markup as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(shown(text)))


def shown(text: str) -> str:
    """Return text on one line, with a mark for each character that has no shape."""
    return text.translate(_UNPRINTABLE)


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """Return an element. `class_` is class, `aria_label` aria-label; no None, no False."""
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{joined(children)}</{name}>")


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Return the parts one after another, each escaped unless it is Markup."""
    return Markup(escaped(between).join(map(escaped, parts)))


def isolated(text: str) -> Markup:
    """Return somebody else's text: whatever direction it is written in ends with it."""
    return tag("bdi", text)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'
