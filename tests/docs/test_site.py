"""Every page is in the navigation, and the reference has every public name."""

from __future__ import annotations

import importlib
import re
from typing import Any

import yaml

import weightsync as ws
from tests.docs.pages import ROOT

API = {p.stem: p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md")}
MADE_BY_THE_BUILD = {
    "index.md",
    "security.md",
    "contributing.md",
    "changelog.md",
    "code-of-conduct.md",
}


def mkdocs() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def leaves(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    children = node if isinstance(node, list) else node.values()
    return [leaf for child in children for leaf in leaves(child)]


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    written = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}
    programs = {p.stem for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".sh")}
    settings = mkdocs()
    assert settings["not_in_nav"] == "/adr/0*.md\n"
    decisions = {p.relative_to(docs).as_posix() for p in docs.glob("adr/0*.md")}
    named = leaves(settings["nav"])
    assert sorted(named) == sorted(set(named))
    assert not decisions & set(named)
    assert set(named) == written - decisions | MADE_BY_THE_BUILD | {
        f"examples/{p}.md" for p in programs
    }


def test_every_decision_is_in_their_list_under_its_number_and_title() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    index = (ROOT / "docs" / "adr" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[(\d{4})\]\((.+)\) \| (.+) \| \d{4}-\d\d-\d\d \|$", index, re.MULTILINE
    )
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in pages]
    assert rows
    assert [file for _, file, _ in rows] == [page.name for page in pages]
    assert [f"# {number}: {title}" for number, _, title in rows] == titles
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert all(file.startswith(f"{number}-") for number, file, _ in rows)


def test_nothing_is_fetched() -> None:
    settings = mkdocs()
    assert settings["theme"]["font"] is False
    assert settings["strict"] is True
    used = {name if isinstance(name, str) else next(iter(name)) for name in settings["plugins"]}
    assert used == {"search", "mkdocstrings"}


def test_every_public_name_is_in_the_reference() -> None:
    modules = {"ray", "server", "testing"}
    described = {name.rpartition(".")[2] for text in API.values() for name in described_in(text)}
    assert set(re.findall(r"^class (\w+)", source("errors"), re.MULTILINE)) <= described
    missing = set(ws.__all__) - described - modules - {"__version__"}
    assert not missing
    for name in set(ws.__all__) - {"__version__"}:
        assert f"`{name}`" in API["index"] or name in source("errors"), name


def test_what_public_modules_export_is_in_the_reference() -> None:
    for module in ("server", "testing"):
        exported = importlib.import_module(f"weightsync.{module}").__all__
        told = {name.rpartition(".")[2] for name in described_in(API[module])}
        assert set(exported) <= told


def test_what_is_described_exists() -> None:
    """The build says so too; here it is seen without one, and without optional packages."""
    for name in (name for text in API.values() for name in described_in(text)):
        path, last = name.rpartition(".")[::2]
        module = ROOT.joinpath(*path.split("."))
        if (module / f"{last}.py").exists() or hasattr(ws, last):
            continue
        pattern = rf"^(class|(async )?def) {last}\b|^{last}\b.* = "
        assert re.search(pattern, source("/".join(path.split(".")[1:])), re.MULTILINE), name


IMPORT = re.compile(r"^ *from (weightsync[\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)


def test_what_pages_and_examples_import_is_in_the_reference() -> None:
    described = {name for text in API.values() for name in described_in(text)}
    described |= {f"weightsync.{name}" for name in ws.__all__} | {"weightsync.server"}
    tails = {name.rpartition(".")[2] for name in described}
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.*")]
    missing = {
        f"{path.name}: {module}.{name}"
        for path in pages
        for module, names in IMPORT.findall(path.read_text(encoding="utf-8"))
        for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names))
        if module not in described and not {f"{module}.{name}", module} & described
        if name not in tails and f"{module}.{name}.servers" not in described
    }
    assert missing == set()


def test_every_variable_of_the_environment_has_a_row() -> None:
    read = {
        name
        for path in (ROOT / "weightsync").rglob("*.py")
        for name in re.findall(r"\bWEIGHTSYNC_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"`(WEIGHTSYNC_[A-Z_]+)`", page))
    assert rows == read


def described_in(text: str) -> list[str]:
    return re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)


def source(module: str) -> str:
    path = ROOT / "weightsync" / module
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")
