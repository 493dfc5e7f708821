"""docs/hangs.md: its errors are those of the code, its tests exist, its limits are the defaults."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache

import pytest
import yaml

import weightsync as ws
from tests.docs.pages import ROOT
from tests.soak.test_docs_guarantees import names_in
from weightsync.shm.addresses import RESOLVE_S
from weightsync.shm.wait import HEARTBEAT_TIMEOUT_FACTOR

PAGE = (ROOT / "docs" / "hangs.md").read_text(encoding="utf-8")
CHOOSING = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)+)`", PAGE)


SHOWN_BY = dict(
    re.findall(r"^(\d+)\. (.+(?:\n   .+)*)", PAGE.partition("## Shown by")[2], re.MULTILINE)
)


def symptoms() -> Iterator[list[str]]:
    for title in ("The trainer stands still", "The server does not generate"):
        section = PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
        for line in re.findall(r"^\| (\d.*) \|$", section, re.MULTILINE):
            number, *cells = (cell.strip() for cell in line.split(" | "))
            yield [*cells, SHOWN_BY[number]]


@cache
def said_by_the_code() -> str:
    """Return all texts of the package's strings, each part of an f-string after the other."""
    parts = []
    for path in (ROOT / "weightsync").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                values = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                parts.append("".join(map(str, values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert name in names_in(ast.parse(source).body)


def test_each_symptom_has_a_remedy_and_is_shown() -> None:
    rows = list(symptoms())
    assert len(rows) == len(SHOWN_BY) > 20
    for seen, cause, remedy, shown in rows:
        assert all((seen, cause, remedy))
        assert "`tests/" in shown or re.search(r"\]\(\w+\.md#[\w-]+\)", shown), seen


def test_what_is_quoted_is_said_by_the_code() -> None:
    quoted = [
        text
        for seen, cause, remedy, _ in symptoms()
        for text in re.findall(r"`([^`]*)`", f"{seen} {cause} {remedy}")
        if " " in text and not re.search(r"[=/(] |[=/]|^weightsync |^serve |ulimit", text)
    ]
    assert len(quoted) > 8
    lacking = [
        text
        for text in quoted
        if not re.search(re.escape(text).replace("…", ".{1,4}"), said_by_the_code())
    ]
    assert lacking == []


def default(function: object, name: str) -> object:
    assert callable(function)
    return inspect.signature(function).parameters[name].default


def test_the_limits_are_the_defaults() -> None:
    rows = re.findall(r"^\| (.*) \|$", PAGE.partition("## The limits")[2], re.MULTILINE)
    limits = [[cell.strip(" `") for cell in row.split("|")][:3] for row in rows[1:]]
    known = {(limit, where.split("`")[0]): said for limit, where, said in limits}
    for function in (ws.connect, ws.send_weights, ws.fetch):
        said = known["timeout_s", "connect"]
        assert said == f"{default(function, 'timeout_s'):g} s"
    assert known["wait_s", "connect"] == f"{default(ws.connect, 'wait_s'):g} s"
    lease = default(ws.WeightReceiver, "lease_s")
    assert known["lease_s", "WeightReceiver"] == f"{lease:g} s"
    reading = default(ws.WeightReceiver.reading, "timeout_s")
    assert known["timeout_s", "receiver.reading"] == f"{reading:g} s"
    assert known["look-up of a name", ""] == f"{RESOLVE_S:g} s"
    assert (f"{HEARTBEAT_TIMEOUT_FACTOR} times `timeout_s", "") in known
    assert (f"{HEARTBEAT_TIMEOUT_FACTOR + 1} times `timeout_s` and a minute", "") in known


def test_what_choosing_a_setup_names_exists() -> None:
    """docs/choosing.md: arguments, classes and methods; each page of a system is linked there."""
    code = " ".join(re.findall(r"`([^`]+)`", CHOOSING))
    for name in set(re.findall(r"\bws\.(?!ray)(\w+)", code)):
        assert hasattr(ws, name), name
    for name in set(re.findall(r"\bsender\.(\w+)", code)):
        assert hasattr(ws.WeightSender, name), name
    arguments = set(re.findall(r"\bconnect\((\w+)=|^(\w+)=", code, re.MULTILINE))
    known = set(inspect.signature(ws.connect).parameters)
    assert {name for pair in arguments for name in pair if name} <= known
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    (engines,) = (part["Connect your engine"] for part in nav if "Connect your engine" in part)
    pages = [page for entry in engines for page in entry.values()]
    assert [page for page in pages if f"({page}" not in CHOOSING] == []
