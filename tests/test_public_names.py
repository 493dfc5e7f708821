"""`import weightsync` offers exactly what it names, and loads no optional package."""

from __future__ import annotations
import __future__

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import weightsync

OPTIONAL = (
    "accelerate",
    "cuda",
    "fastapi",
    "gguf",
    "matplotlib",
    "prometheus_client",
    "ray",
    "rich",
    "safetensors",
    "sglang",
    "transformers",
    "trl",
    "typer",
    "uvicorn",
    "vllm",
    "zmq",
)
# Typing's own names and `annotations` are bound by imports that every module makes.
UNNAMED = {"TYPE_CHECKING", "Any"}

IMPORT_AND_LIST = """
import json, sys
import torch, msgspec, xxhash  # what these bring by themselves is not ours to judge
before = set(sys.modules)
import weightsync
weightsync.connect, weightsync.send_weights, weightsync.WeightReceiver
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def bound() -> set[str]:
    return {
        name
        for name, value in vars(weightsync).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType | __future__._Feature)
        and name not in UNNAMED
    }


def test_all_names_what_is_bound() -> None:
    assert bound() - set(weightsync.__all__) == set()


def test_types_are_told_what_a_name_is_at_run_time() -> None:
    """What is imported for type checkers alone is what __getattr__ finds, and nothing else is."""
    (block,) = [
        node
        for node in ast.parse(Path(weightsync.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {
        alias.name: (node.module or "").removeprefix("weightsync.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {n: m for n, m in weightsync._MODULE_OF.items() if n not in weightsync._SUBMODULES}
    assert told == lazy


def test_every_name_of_all_resolves() -> None:
    assert [name for name in weightsync.__all__ if not hasattr(weightsync, name)] == []


CORE_ONLY = """
import inspect, sys
for name in ("fastapi", "prometheus_client", "ray", "safetensors"):
    sys.modules[name] = None  # as if it were not installed
import weightsync as ws
from weightsync.errors import install_hint
assert not hasattr(ws, "server") and not hasattr(ws, "ray") and hasattr(ws, "testing")
assert "connect" in dict(inspect.getmembers(ws))
from weightsync import *
try:
    ws.server
except AttributeError as exc:
    assert install_hint("server") in str(exc), exc
try:
    from weightsync import server
except ImportError as exc:
    assert isinstance(exc, ws.MissingExtraError)
    assert install_hint("server") in str(exc), exc
try:
    ws.SafetensorsSource(sys.argv[1])
except ws.MissingExtraError as exc:
    assert install_hint("safetensors") in str(exc), exc
else:
    raise AssertionError
print("done")
"""


def test_a_core_install_can_be_inspected_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    done = subprocess.run(
        [sys.executable, "-c", CORE_ONLY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


def test_all_names_nothing_twice() -> None:
    assert len(weightsync.__all__) == len(set(weightsync.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(weightsync, "no_such_name")


def test_the_import_loads_no_optional_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "weightsync" in loaded
    assert [name for name in loaded if name.split(".")[0] in OPTIONAL] == []
