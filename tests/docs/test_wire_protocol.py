"""docs/wire-protocol.md has every route, every message and every field, as the code has them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import weightsync as ws
from weightsync.backends import ring
from weightsync.backends.tcp import payload as tcp_payload
from weightsync.integrations.vllm import handles
from weightsync.server import weight_router
from weightsync.testing import TinyModel
from weightsync.wire import messages, offers, problem
from weightsync.wire.messages import CALLS, REPLIES
from weightsync.wire.offers import Message, ReplyMessage

PAGE = (Path(__file__).parents[2] / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
ALIASES = {
    str(offers.KeyedHandle): "handles by device key",
    str(messages.UpdateInfo): "an update_info",
    str(Any): "plain data",
}


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every struct that can be in a message, but for their bases."""
    found = {
        name: kind
        for module in (messages, offers, ring, tcp_payload, handles)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Message) and kind not in (Message, ReplyMessage, messages.ForeignUpdate)
    }
    return {**found, "Problem": problem.Problem}


def shown(kind: Any) -> str:
    """Write a field's type as the page does."""
    if str(kind) in ALIASES:
        return ALIASES[str(kind)]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return shown(args[0])
    if origin in (Union, UnionType):
        parts = [shown(arg) for arg in args if arg not in (NoneType, msgspec.UnsetType)]
        return " or ".join(parts)
    if origin is Literal:
        return " or ".join(f"`{str(arg).lower() if arg in (True, False) else arg}`" for arg in args)
    if origin in (list, tuple):
        return f"list of {shown(args[0])}"
    if origin is dict:
        return f"map of {shown(args[0])} to {shown(args[1])}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind.__name__
    return str(kind.__name__)


def rows_of(kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Return (field, type) as the page must have them: needed fields are bold."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return [
        (f"**`{f.name}`**" if f.required else f"`{f.name}`", shown(hints[f.name])) for f in fields
    ]


def section(name: str) -> str:
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/wire-protocol.md has no section {name}"
    return found[1]


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", structs())
def test_a_message_has_the_fields_that_the_page_says(name: str) -> None:
    kind = structs()[name]
    told = table(section(name))
    assert [tuple(row[:2]) for row in told] == rows_of(kind)
    assert all(row[2] for row in told), "each field has its meaning"
    config = kind.__struct_config__
    if config.tag:
        assert f'`"{config.tag_field}": "{config.tag}"`' in section(name)


def test_the_page_names_no_message_that_there_is_not() -> None:
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == set(structs())


def test_the_table_has_every_route() -> None:
    receiver = ws.WeightReceiver(TinyModel())
    routes: Any = weight_router(receiver, token="x").routes
    wanted = {f"{method} {route.path}" for route in routes for method in route.methods}
    told = {row[0].strip("`").partition("?")[0]: row for row in table(PAGE)}
    assert {key for key in told if key.startswith(("GET ", "POST "))} == wanted
    for call in CALLS:
        row = told.get(f"POST /{call}") or told[f"GET /{call}"]
        asks = CALLS[call].__name__ if call != "weight_info" else "none"
        assert row[1].strip("`") == asks
        assert row[2].strip("`") == REPLIES[call].__name__
