"""The wheel: for every Python and machine, with all that is imported and nothing that is not."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import weightsync

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def build(kind: str, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that `pip install .` would install."""
    built = build("wheel", tmp_path_factory.mktemp("dist"))
    # No ABI and no platform: nothing is compiled, neither here nor where it is installed.
    assert built.name == f"weightsync-{weightsync.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def requirements(wheel: zipfile.ZipFile, extra: str) -> set[str]:
    """Return the names of the packages that an extra adds; "" is the core."""
    found = set()
    for line in metadata(wheel).get_all("Requires-Dist", []):
        needed, _, marker = line.partition(";")
        wanted = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if (wanted[1] if wanted else "") == extra:
            found.add(re.split(r"[\s<>=!~\[]", needed.strip(), maxsplit=1)[0].lower())
    return found


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = ROOT / "weightsync"
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in [*package.rglob("*.py"), *package.rglob("templates/*")]
    }
    assert files >= sources | {"weightsync/py.typed"}
    assert any(name.endswith(".html") for name in sources)
    assert {name.partition("/")[0] for name in files} == {"weightsync"}
    assert [name for name in files if "__pycache__" in name or name.endswith(".so")] == []


def test_it_brings_the_command_and_the_plugin(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    lines = wheel.read(name).decode().splitlines()
    assert "weightsync = weightsync.cli:main" in lines
    assert "weightsync = weightsync.integrations.vllm.plugin:register" in lines


def test_the_core_needs_four_packages_and_each_extra_its_own(wheel: zipfile.ZipFile) -> None:
    assert requirements(wheel, "") == {"torch", "numpy", "msgspec", "xxhash"}
    extras = set(metadata(wheel).get_all("Provides-Extra", []))
    assert extras == set(PROJECT["optional-dependencies"])
    for extra in extras - {"demo", "demo-tools", "dev"}:
        assert "weightsync" not in requirements(wheel, extra), f"{extra} brings another extra"
        assert "torch" not in requirements(wheel, extra), f"{extra} could bring another torch"


def test_the_version_is_the_same_everywhere(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel)["Version"] == PROJECT["version"] == weightsync.__version__
    assert metadata(wheel)["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"


def test_the_source_archive_has_all_that_its_makefile_needs(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "mkdocs.yml", "pyproject.toml", "README.md", "LICENSE", "docs/hooks.py"}
    assert needed <= names
    assert {"tests/conftest.py", "benchmarks/compare.py", "examples/trainer.py"} <= names
    assert {"examples/demo/__main__.py", "examples/demo/trainer.py"} <= names
