"""Texts that say how to install weightsync give the one command of errors.py, which works today."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from weightsync.errors import INSTALL_PLACE, install_hint

_spec = importlib.util.spec_from_file_location(
    "install_commands", ROOT / "docs" / "install_commands.py"
)
assert _spec
assert _spec.loader
commands: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(commands)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS: list[Path] = list(commands.texts())
PACKAGE = [
    path
    for path in (ROOT / "weightsync").rglob("*")
    if path.is_file() and path.parent.name != "__pycache__"
]
INSTALLER = r"\b(?:pip3?|pipx|uv|conda|poetry|requirements\.txt)\b[^`;\n]{0,60}?"
BY_NAME = re.compile(rf"\bweightsync\[|{INSTALLER}(?<![\w./-])weightsync(?![\w./:-])")
"""A command that takes weightsync from an index, by whatever tool; extras come with any text."""
BY_PATH = re.compile(r"pip3? install [^`\n]*?(?<=['\" ])\.(?=['\"\[`\s])")
ADDRESS = re.compile(r"pip install [^\n`]*(?:git\+|https?:)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def others(text: str) -> list[str]:
    """Return what installs weightsync and is not the command of errors.py."""
    wrong = [] if commands.rewritten(text) == text else ["docs/install_commands.py changes it"]
    rest = commands.COMMAND.sub("", text)
    return wrong + [m[0] for kind in (BY_NAME, BY_PATH, ADDRESS) for m in kind.finditer(rest)]


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_a_text_gives_the_command_that_works(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert others(text) == []
    for found in commands.COMMAND.finditer(text):
        extras = set((found["extras"] or "").split(",")) - {""}
        assert extras <= set(PROJECT["optional-dependencies"])


def test_the_package_writes_no_command_but_the_constant() -> None:
    literal = re.compile(r"pip install ['\"]*(?:\.|weightsync)|weightsync\[[\w,-]+\]")
    found = {
        name_of(path): lines
        for path in PACKAGE
        if (lines := literal.findall(path.read_text(encoding="utf-8")))
    }
    assert found == {"weightsync/errors.py": ["pip install '."]}


def test_the_image_installs_the_clone_that_it_copies() -> None:
    image = (ROOT / "examples" / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert "\nCOPY weightsync weightsync\n" in image
    assert re.findall(r'pip install [^\n]*"(\S+)\[', image) == ["."]
    assert not BY_NAME.search(image)


@pytest.mark.parametrize(
    "wrong",
    [
        "pip install weightsync",
        "`pip install 'weightsync[server]'`",
        "pip install --upgrade weightsync\n",
        "uv pip install 'weightsync[server]'",
        "uv add weightsync",
        "pip install -e '.[server]'",
        "pip install '.[server]'",
        "`pip install '.[server]'` brings it",
        'pip install ".[server]" in a clone of weightsync',
        "pip install .",
        "pip install git+https://host/weightsync",
        "the extra (weightsync[ray])",
    ],
)
def test_any_other_command_is_found(wrong: str) -> None:
    assert others(f"Install:\n{wrong}\n")


@pytest.mark.parametrize(
    "right",
    [
        "`pip install '.[server]'` in a\nclone of weightsync",
        "pip install '.[server]'  # in a clone of weightsync",
        "pip install .  # in a clone of weightsync",
        f"a: {install_hint('server')}",
        "install weightsync beside vLLM",
        "pip install torch==2.13.0",
        "uv and weightsync/errors.py",
    ],
)
def test_what_works_is_not(right: str) -> None:
    assert others(f"Install:\n{right}\n") == []


def test_a_release_changes_one_place_and_the_texts_follow() -> None:
    """As with the name alone after a release; texts keep all else, and come back the same."""
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        released = commands.rewritten(text, "pip install 'weightsync[{extras}]'", "")
        assert not re.search(r"in\s+a\s+clone\s+of\s+weightsync|pip install '?\.", released)
        assert " ".join(commands.rewritten(released).split()) == " ".join(text.split())


def test_the_readme_says_whether_there_is_a_release() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ("not released yet" in page) == bool(INSTALL_PLACE)
