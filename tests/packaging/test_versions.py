"""One set of versions: in pyproject.toml, the workflows, the Makefile, errors and pages."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.packaging.workflows import jobs_of
from weightsync.cli.doctor import OLDEST_TORCH

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CHECK = jobs_of("ci")["check"]
Pair = tuple[str, str]


def text_of(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def in_ci() -> dict[Pair, str]:
    """Return the job of each pair of Python and torch (major and minor version)."""
    (python,) = [
        step["with"]["python-version"]
        for step in CHECK["steps"]
        if step.get("uses", "").startswith("actions/setup-python@")
    ]
    torch = CHECK["env"]["TORCH"].removeprefix("torch==")
    pairs = {(python, minor(torch)): "check"}
    test = jobs_of("ci")["test"]
    assert test["env"]["TORCH"] == "torch==${{ matrix.torch }}"
    for entry in test["strategy"]["matrix"]["include"]:
        assert set(entry) == {"python", "torch"}
        pairs[entry["python"], minor(entry["torch"])] = "test"
    return pairs


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


PYTHONS = sorted({python for python, _ in in_ci()}, key=numbers)
TORCHES = sorted({torch for _, torch in in_ci()}, key=numbers)


def test_the_page_has_the_pairs_of_ci() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (3\.\d+) \| (2\.\d+) \| `(\w+)`", page, re.MULTILINE)
    assert {(python, torch): job for python, torch, job in rows} == in_ci()


def test_every_version_between_the_ends_is_tried() -> None:
    for versions in (PYTHONS, TORCHES):
        lowest, highest = (numbers(version)[1] for version in (versions[0], versions[-1]))
        assert [numbers(version)[1] for version in versions] == [*range(lowest, highest + 1)]


def test_the_project_requires_what_ci_tries() -> None:
    project = SETTINGS["project"]
    assert project["requires-python"] == f">={PYTHONS[0]}"
    prefix = "Programming Language :: Python :: "
    named = [name.removeprefix(prefix) for name in project["classifiers"] if prefix in name]
    assert named == PYTHONS
    assert f"torch>={TORCHES[0]}" in project["dependencies"]
    assert numbers(TORCHES[0]) == OLDEST_TORCH
    assert SETTINGS["tool"]["mypy"]["python_version"] == PYTHONS[0]
    assert SETTINGS["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")


def test_the_makefile_takes_the_torch_of_the_check() -> None:
    (torch,) = re.findall(r"^TORCH \?= torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert CHECK["env"]["TORCH"] == f"torch=={torch}"
    assert minor(torch) == TORCHES[-1]


@pytest.mark.parametrize("page", ["README.md", "docs/versions.md"])
def test_pages_name_the_ends(page: str) -> None:
    said = f"Python {PYTHONS[0]} to {PYTHONS[-1]} and torch {TORCHES[0]} or later"
    assert said in text_of(page)


def test_errors_name_the_ends() -> None:
    source = text_of("weightsync/cuda/handles.py").replace('" "', "")
    named = re.findall(r"torch (\d\.\d+) to (\d\.\d+)", source)
    assert set(named) == {(TORCHES[0], TORCHES[-1])}


def deprecations(source: str) -> list[str]:
    """Return the texts of the DeprecationWarnings that a module raises."""
    return [
        ast.unparse(call.args[0])
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("warnings.warn", "warn")
        and "DeprecationWarning" in ast.unparse(call)
    ]


def names_another(text: str) -> bool:
    return bool(re.search(r"is called \S+ now|; use \S+", text))


def test_a_deprecation_names_the_replacement() -> None:
    found = {
        path.name: [
            text for text in deprecations(path.read_text("utf-8")) if not names_another(text)
        ]
        for path in (ROOT / "weightsync").rglob("*.py")
    }
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_a_deprecation_without_replacement_is_found() -> None:
    (text,) = deprecations("warnings.warn('`a` is deprecated', DeprecationWarning, stacklevel=2)")
    assert not names_another(text)
    (text,) = deprecations("warnings.warn('`a` is called `b` now', DeprecationWarning)")
    assert names_another(text)
