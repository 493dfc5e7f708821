"""CONTRIBUTING.md: its table names tests that exist, for every folder of the package."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TABLE = PAGE.partition("## To change X, run Y")[2].partition("\n## ")[0]
PATHS = sorted(set(re.findall(r"tests/[\w/]+(?:\.py)?", TABLE)))


@pytest.mark.parametrize("path", PATHS)
def test_its_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_it_has_every_folder() -> None:
    folders = {init.parent.name for init in (ROOT / "weightsync").glob("*/__init__.py")}
    named = set(re.findall(r"`(\w+)/(?:\w+/)?`", TABLE)) - {"examples"}  # beside the package
    assert len(PATHS) > 20
    assert folders == named
