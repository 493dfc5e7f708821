"""The diagrams of the pages are those that docs/diagrams.py draws, and every page's file exists."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from tests.docs.pages import ROOT

_spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
assert _spec is not None
assert _spec.loader is not None
diagrams: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(diagrams)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", sorted(diagrams.DIAGRAMS))
def test_a_file_is_what_the_program_draws(name: str, scheme: str) -> None:
    drawn = diagrams.drawing(name, scheme)
    path = ROOT / "docs" / "images" / f"{name}-{scheme}.svg"
    assert path.read_text(encoding="utf-8") == drawn, "run python docs/diagrams.py"
    root = ET.fromstring(drawn)  # our own text
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        right = float(box.attrib["x"]) + float(box.attrib["width"])
        bottom = float(box.attrib["y"]) + float(box.attrib["height"])
        assert right <= width, name
        assert bottom <= height, name


def test_every_diagram_is_on_a_page_in_both_schemes() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    shown = set(re.findall(r'(?:srcset|src)="images/([\w-]+\.svg)"', "".join(pages)))
    made = {f"{name}-{scheme}.svg" for name in diagrams.DIAGRAMS for scheme in diagrams.COLOURS}
    assert made <= shown
    assert all((ROOT / "docs" / "images" / name).is_file() for name in shown)
