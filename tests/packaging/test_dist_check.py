"""`make dist-check`, without the parts that build and install: those take minutes, and an index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weightsync
from tests.packaging import dist_check


def test_the_smoke_test_holds_an_update(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, dist_check.SMOKE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(dist_check.ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    seen = json.loads(printed)
    assert (seen["held"], seen["verified"]) == (2, "held")
    assert seen["version"] == weightsync.__version__


def test_a_tag_is_the_version() -> None:
    version = dist_check.project_version()
    assert dist_check.project_version(f"v{version}") == version == weightsync.__version__
    for tag in (version, f"v{version}1", "v0"):
        with pytest.raises(SystemExit, match="is not v"):
            dist_check.project_version(tag)


def test_a_command_that_ends_otherwise_ends_the_check(tmp_path: Path) -> None:
    fails = (sys.executable, "-c", "raise SystemExit(3)")
    dist_check.run(*fails, cwd=tmp_path, expect=3)
    with pytest.raises(SystemExit, match="exit code 3, not 0"):
        dist_check.run(*fails, cwd=tmp_path)
