"""Every example of docs/testing.md, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import models
from tests.e2e.processes import Host
from weightsync.testing import ACTS

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
FOUND = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL
)
EXAMPLES: dict[str, str] = dict(FOUND)


def test_every_section_has_one_example() -> None:
    assert list(EXAMPLES) == re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert PAGE.count("```python") == len(EXAMPLES)


def test_the_table_names_every_act() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == ACTS


@pytest.mark.parametrize("title", [t for t in EXAMPLES if "transport" not in t])
@pytest.mark.usefixtures("shm_clean")
def test_the_examples_in_one_process(title: str) -> None:
    imports = "from weightsync.testing import InProcessFleet, TinyModel\n"
    exec(imports + EXAMPLES[title], {"ws": ws})


def test_the_example_around_a_transport(host: Host) -> None:
    receiver = host.receiver("http", model="pages")
    names: dict[str, Any] = {"ws": ws, "model": models.make("pages", 1), "url": receiver.url}
    exec(EXAMPLES["Around a transport of yours"], names)
    assert receiver.reading() == 1
