"""verl's manager and workers with our engine, in a network and a process tree of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray import sandbox
from tests.verl import conformance

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
def test_verls_manager_moves_weights_by_our_engine() -> None:
    options = ("-v", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", "timeout=300")
    said = sandbox.run("-m", "pytest", *options, HERE / "managed.py", timeout_s=860)
    print(*(line for line in said.splitlines() if "PASSED" in line or " passed" in line), sep="\n")
    assert "10 passed" in said, said[-5000:]


@pytest.mark.timeout(300)
def test_verls_own_test_passes_with_our_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.verl.cpu_platform")
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")  # the engine that verl registers for CUDA
    said = sandbox.run("-m", "tests.verl.own_tests", timeout_s=280)
    assert "three updates are equal" in said, said[-5000:]
    print("three updates are equal")


@pytest.mark.timeout(200)
def test_the_example_runs_as_it_stands() -> None:
    said = sandbox.run(sandbox.ROOT / "examples" / "verl_engine.py", timeout_s=180)
    assert said.count("the rollout's answer is the trainer's: True") == 6, said[-5000:]
    assert "version 3 in " in said


@pytest.mark.timeout(600)
def test_our_engine_keeps_verls_contract() -> None:
    said = conformance.run("-k", "Ours")
    print(said[said.index("= conformance: ") :].partition("\n")[2])
