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

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("imports.py")
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]

# What each part needs, by the names under which packages are imported.
NEEDS = {
    "weightsync:SafetensorsSource": ("safetensors",),
    "weightsync:ray": ("ray",),
    "weightsync:server": ("fastapi",),
    "weightsync:testing": (),
    "weightsync.trainer": (),
    "weightsync.profiling": (),
    "weightsync.samehost.tensor_queue": (),
    "weightsync.samehost.message_queue": (),
    "weightsync.samehost.message_sockets": ("zmq",),
    "weightsync.integrations.huggingface": ("peft",),
    "weightsync.integrations.trl": ("transformers",),
    "weightsync.integrations.vllm": ("vllm",),
    "weightsync.integrations.vllm_actors": (),
    "weightsync.rollout.hugging_face": ("transformers",),
    "weightsync.cli.app": ("typer",),
}
# vLLM is not installed where this runs, so its plugin cannot be imported anyway.
ALL = " ".join(part for part in NEEDS if part != "weightsync.integrations.vllm")
INDIFFERENT = ("matplotlib", "uvicorn")
"""Packages that none of these parts imports; the verbs that need them say so, see tests/cli."""
_LINE = re.compile(r"pip install 'weightsync\[([\w,-]+)\]'")
OPTIONAL = {
    "PIL",
    "anyio",
    "cuda",
    "fastapi",
    "jinja2",
    "matplotlib",
    "peft",
    "prometheus_client",
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
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], Answer]:
    """What importing each part raised without each package; every pair is a process."""
    lacking = [(package, part) for part, needed in NEEDS.items() for package in needed]
    cases = [*lacking, *((package, ALL) for package in INDIFFERENT)]
    return dict(zip(cases, json.loads(run(str(SCRIPT), json.dumps(cases))), strict=True))


@pytest.mark.parametrize("part", [part for part, needed in NEEDS.items() if needed])
def test_a_missing_package_is_named_with_its_extra(
    part: str, answers: dict[tuple[str, str], Answer]
) -> None:
    for package in NEEDS[part]:
        answer = answers[package, part]
        assert answer is not None, f"{part} was imported without {package}"
        kind, text = answer
        assert kind == "BackendUnavailableError", text
        assert package.partition(".")[0] in text.lower().replace("pyzmq", "zmq")
        line = _LINE.search(text)
        assert line, text
        assert set(line[1].split(",")) <= EXTRAS.keys()


def test_what_one_extra_lacks_stops_no_other(answers: dict[tuple[str, str], Answer]) -> None:
    assert {package: answers[package, ALL] for package in INDIFFERENT} == dict.fromkeys(INDIFFERENT)


def test_the_import_loads_torch_and_the_core_alone() -> None:
    said = run(
        "-c",
        "import torch, sys, json; known = set(sys.modules); import weightsync\n"
        "print(json.dumps(sorted({n.split('.')[0] for n in set(sys.modules) - known})))",
    )
    loaded = set(json.loads(said))
    assert {"weightsync", "msgspec"} <= loaded
    assert loaded.isdisjoint(OPTIONAL)
