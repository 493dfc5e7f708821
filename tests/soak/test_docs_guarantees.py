"""Every test that docs/guarantees.md names is there, and every promise names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)+)`", PAGE)
ROWS = re.findall(r"^\| (?!promise)([^|\n]+) \| ([^|\n]+) \| ([^|\n]+) \|$", PAGE, re.MULTILINE)


def names_in(body: list[ast.stmt], before: str = "") -> set[str]:
    """Return functions, classes with their methods, and variables, as pytest writes them."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(f"{before}::{node.name}")
        if isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{before}::{node.name}")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.add(f"{before}::{node.targets[0].id}")
    return found


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 30
    for file, name in NAMED:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert name in names_in(ast.parse(source).body), f"{file}{name}"


def test_every_promise_names_a_test_and_a_limit() -> None:
    assert len(ROWS) > 20
    for promise, shown, limit in ROWS:
        assert "`tests/" in shown, promise
        assert limit.strip(), promise


def test_every_soak_is_named() -> None:
    named = set(NAMED)
    for path in (ROOT / "tests" / "soak").glob("test_*.py"):
        if path != Path(__file__):
            tests = {name for name in names_in(ast.parse(path.read_text()).body) if "test_" in name}
            file = str(path.relative_to(ROOT))
            assert all((file, name) in named for name in tests), file
