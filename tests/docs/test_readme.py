"""README.md: its first program runs, its first sentence is measured, its pictures are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
WAIT_S = 180


def shape(text: str) -> list[str]:
    """Return the part of each line that is the same in every run; the page shows no more."""
    lines = (line.partition(", …")[0] for line in text.splitlines())
    lines = (re.sub(r" in [\d.]+ ms: ", " in … ms: ", line) for line in lines)
    return ["".join(line.partition("held)")[:2]) for line in lines]


def test_the_first_program_prints_what_is_shown() -> None:
    """As a program of its own, as a reader copies it."""
    program = next(block for block in blocks("README.md") if block.language == "python")
    (shown,) = (block for block in blocks("README.md") if block.language == "text")
    done = subprocess.run(
        [sys.executable, "-c", program.text],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert shape(done.stdout) == shape(shown.text)
    assert done.stderr == ""


OPENING = " ".join(PAGE.split("\n\n")[1].split())


def test_the_opening_has_the_figures_of_its_row() -> None:
    figures = re.search(r"([\d.]+) ms between two processes, ([\d.]+) times", OPENING)
    row = re.search(r"performance\.md#(512[\w-]+)", OPENING)
    assert figures
    assert row
    (cells,) = re.findall(rf'^\| <a id="{row[1]}"></a>(.*) \|$', PERFORMANCE, re.MULTILINE)
    _, ratio, _, _, took, *_ = (cell.strip() for cell in cells.split("|"))
    assert figures.groups() == (took, ratio)


def test_the_opening_has_the_figures_of_the_gpu() -> None:
    figures = re.search(r"takes \[([\d.]+) ms on one H200\].*?: ([\d.]+) times as fast", OPENING)
    assert figures
    section = PERFORMANCE.partition("\n## A GPU\n")[2]
    assert "one NVIDIA H200" in section[: section.index("unpacked | arrived")]
    ours, theirs = (
        float(section[section.index(row) :].split("|")[cell])
        for row, cell in (("unpacked | arrived", 4), ("packed protocol of others, re-enacted", 4))
    )
    assert figures.groups() == (f"{ours:.1f}", f"{theirs / ours:.1f}")


def test_each_picture_has_a_light_and_a_dark_file() -> None:
    pictures = re.findall(r"<picture>.*?</picture>", PAGE, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        assert "(prefers-color-scheme: dark)" in picture
        files = re.findall(r'(?:srcset|src)="([^"]+)"', picture)
        for dark, light in zip(files[::2], files[1::2], strict=True):
            assert dark.replace("-dark.", "-light.") == light != dark
        assert all((ROOT / name).is_file() for name in files)
