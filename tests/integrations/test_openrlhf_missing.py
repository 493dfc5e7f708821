"""`python -m weightsync.integrations.openrlhf` without OpenRLHF, and without a module to run."""

from __future__ import annotations

import subprocess
import sys

import pytest

USAGE = "usage: python -m weightsync.integrations.openrlhf openrlhf.cli.train_ppo_ray ARGUMENTS"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync.integrations.openrlhf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("--help",), 0), (("--speed",), 2)])
def test_the_command_says_how_it_is_called(arguments: tuple[str, ...], status: int) -> None:
    done = run(*arguments)
    assert done.returncode == status
    assert done.stderr.startswith(USAGE)


def test_a_missing_openrlhf_is_one_line_that_names_the_version() -> None:
    done = run("openrlhf.cli.train_ppo_ray", "--train.seed", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("MissingExtraError: this needs OpenRLHF 0.11 with its vLLM (")
    assert done.stderr.count("\n") == 1
