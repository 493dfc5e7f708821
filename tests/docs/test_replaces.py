"""Each of our names on docs/replaces.md exists."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "replaces.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## The systems taken over") :]
NAMES = sorted(set(re.findall(r"`(weightsync(?:\.\w+)+)`", PAGE)))


def found(name: str) -> Any:
    """Return what a dotted name means: a module, or what is in one."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:index]))
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", NAMES)
def test_our_names_exist(name: str) -> None:
    assert found(name) is not None


def test_there_is_a_table_for_each_system() -> None:
    heads = re.findall(r"^### (.*)$", SECTION, flags=re.MULTILINE)
    assert heads == [
        "`ipc_engine`",
        "`tensor_ipc`",
        "The multimodal path",
        "`v1.utils`",
        "`shm_broadcast`",
    ]
    assert SECTION.count("| their name | ours | what differs |") == len(heads)
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    assert all("`weightsync." in row or "| none |" in row for row in rows)
