"""Extension of griffe: items of a docstring that describe an argument become a table of them.

An item is ``- `name`: text``, where `name` is a parameter of the function, or of the class.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"^- `(\w+)`: ((?:.*\n?)(?:  .*\n?)*)", re.MULTILINE)


class ArgumentTables(griffe.Extension):
    """Moves such items to a section of arguments, which mkdocstrings shows as a table."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for each function when all of it is known."""
        _move(func)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called for each class when all of it is known."""
        _move(cls)


def _move(described: griffe.Function | griffe.Class) -> None:
    docstring = described.docstring
    if docstring is None:
        return
    known = {parameter.name for parameter in described.parameters}
    found = [m for m in _ITEM.finditer(docstring.value) if m[1] in known]
    if not found:
        return
    rows = [f"    {m[1]}: {' '.join(m[2].split())}" for m in found]
    text = docstring.value
    for match in reversed(found):
        text = text[: match.start()] + text[match.end() :]
    docstring.value = "\n".join([text.rstrip(), "", "Args:", *rows, ""])
