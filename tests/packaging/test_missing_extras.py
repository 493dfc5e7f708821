"""Without an optional package the rest works, and what needs it names the line that installs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weightsync import serve
from weightsync.errors import install_hint

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("imports.py")
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]

# What each part needs, by the names under which packages are imported.
NEEDS = {
    "weightsync:SafetensorsSource": (),
    "weightsync.ray": ("ray",),
    "weightsync.server": ("fastapi",),
    "weightsync.testing": (),
    "weightsync.sender": (),
    "weightsync.profiling": (),
    "weightsync.queues.tensor_queue": (),
    "weightsync.queues.message_queue": (),
    "weightsync.queues.sockets": ("zmq",),
    "weightsync.integrations.huggingface": ("peft",),
    "weightsync.integrations.trl": ("transformers",),
    "weightsync.integrations.vllm.plugin": ("vllm",),
    "weightsync.integrations.vllm.actors": (),
    "weightsync.serve.hugging_face": ("transformers",),
    "weightsync.serve.status_page": ("jinja2",),
    "weightsync.serve:APIServerProcessManager": ("psutil",),
    "weightsync.serve:ConstantList": (),
    "weightsync.serve:RayEngines": ("ray",),
    "weightsync.serve:wait_for_completion_or_failure": ("psutil",),
    "weightsync.cli.app": ("typer",),
}
# vLLM is not installed where this runs, so its plugin cannot be imported anyway.
ALL = " ".join(part for part in NEEDS if part != "weightsync.integrations.vllm.plugin")
INDIFFERENT = "matplotlib uvicorn"
"""Packages that none of these parts imports; the verbs that need them say so, see tests/cli."""
_LINE = re.compile(re.escape(install_hint("EXTRAS")).replace("EXTRAS", r"([\w,-]+)"))
OPTIONAL = {
    "PIL",
    "anyio",
    "cuda",
    "fastapi",
    "jinja2",
    "matplotlib",
    "peft",
    "prometheus_client",
    "psutil",
    "ray",
    "requests",
    "rich",
    "safetensors",
    "sglang",
    "starlette",
    "transformers",
    "trl",
    "typer",
    "uvicorn",
    "vllm",
    "zmq",
}

Answer = list[str] | None


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], Answer]:
    """What importing each part raised without each package; every pair is a process."""
    lacking = [(package, part) for part, needed in NEEDS.items() for package in needed]
    cases = [*lacking, (INDIFFERENT, ALL)]
    return dict(zip(cases, json.loads(run(str(SCRIPT), json.dumps(cases))), strict=True))


@pytest.mark.parametrize("part", [part for part, needed in NEEDS.items() if needed])
def test_a_missing_package_is_named_with_its_extra(
    part: str, answers: dict[tuple[str, str], Answer]
) -> None:
    for package in NEEDS[part]:
        answer = answers[package, part]
        assert answer is not None, f"{part} was imported without {package}"
        kind, text = answer
        assert kind == "MissingExtraError", text
        assert package.partition(".")[0] in text.lower().replace("pyzmq", "zmq")
        line = _LINE.search(text)
        assert line, text
        assert set(line[1].split(",")) <= EXTRAS.keys()


def test_what_one_extra_lacks_stops_no_other(answers: dict[tuple[str, str], Answer]) -> None:
    assert answers[INDIFFERENT, ALL] is None


OURS_AT_ONCE = {"errors", "report", "runtime", "runtime.provided", "specs"}
LATER = ("http", "weightsync.integrations")


def loaded_by(code: str, *, before: str = "") -> set[str]:
    """Return the modules that `code` loads in a process that has run `before`."""
    said = run(
        "-c",
        f"{before}\nimport sys, json; known = set(sys.modules)\n{code}\n"
        "print(json.dumps(sorted(set(sys.modules) - known)))",
    )
    return set(json.loads(said))


def test_the_import_loads_names_and_not_what_is_behind_them() -> None:
    loaded = loaded_by("import weightsync")
    ours = {name.partition(".")[2] for name in loaded if name.startswith("weightsync.")}
    assert ours == OURS_AT_ONCE
    foreign = {name.partition(".")[0] for name in loaded} - {"weightsync"}
    assert foreign <= sys.stdlib_module_names, foreign - sys.stdlib_module_names


def test_the_import_of_the_server_loads_no_package() -> None:
    foreign = {name.partition(".")[0] for name in loaded_by("import weightsync.serve")}
    assert foreign - {"weightsync"} <= sys.stdlib_module_names


def test_the_names_of_the_server_are_there_and_load_no_torch() -> None:
    names = [name for name in serve.__all__ if name != "RayEngines"]
    assert names
    loaded = loaded_by(f"from weightsync.serve import {', '.join(names)}")
    assert "torch" not in loaded
    assert set(serve.__all__) <= set(dir(serve))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = serve.nothing


def test_a_sender_and_a_receiver_load_the_core_alone_and_no_http() -> None:
    loaded = loaded_by(
        "import weightsync; weightsync.connect, weightsync.send_weights, weightsync.WeightReceiver",
        before="import torch",
    )
    tops = {name.partition(".")[0] for name in loaded}
    assert {"weightsync", "msgspec"} <= tops
    assert tops.isdisjoint(OPTIONAL)
    assert [name for name in sorted(loaded) if name.startswith(LATER)] == []
