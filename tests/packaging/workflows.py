"""The workflows of .github, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def jobs_of(name: str) -> dict[str, Any]:
    """Return the jobs of a workflow by their names."""
    loaded = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    jobs: dict[str, Any] = loaded["jobs"]
    return jobs


def steps_of(name: str) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in jobs_of(name).values() for step in job.get("steps", [])]
