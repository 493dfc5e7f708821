"""The workflows run what there is, by pinned actions; forms and addresses are complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.packaging.workflows import ROOT, WORKFLOWS, jobs_of, steps_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = sorted(WORKFLOWS.glob("*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_version(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    foreign = [line for line in used if not line.startswith("./")]
    assert [
        ln for ln in foreign if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", ln)
    ] == []
    assert len(used) == path.read_text(encoding="utf-8").count("uses:")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_workflows_run_targets_that_there_are(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in jobs_of(path.stem).values()]
    targets = [name for matrix in matrices for name in matrix.get("target", [])]
    for step in steps_of(path.stem):
        if found := re.match(r"make ([\w-]+)", step.get("run", "")):
            targets.append(found[1])
        if step.get("run", "").startswith(".ci/"):
            assert (ROOT / step["run"]).is_file()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_ci_and_the_week_run_all_that_the_project_promises() -> None:
    week = jobs_of("weekly")["long"]
    assert week["strategy"]["matrix"]["target"] == [
        "test-vllm",
        "test-verl",
        "test-megatron",
        "test-openrlhf",
        "test-skyrl",
        "test-sglang",
        "soak",
    ]
    runs = {name: [step.get("run") for step in job["steps"]] for name, job in jobs_of("ci").items()}
    assert ".ci/run" in runs["check"]
    assert "make test" in runs["test"]
    assert "make dist-check" in runs["dist"]


def test_a_release_is_tried_before_it_is_published_and_only_where_the_owner_allows_it() -> None:
    jobs = jobs_of("release")
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["archives"]["needs"] == "ci"
    (check,) = [s for s in jobs["archives"]["steps"] if s.get("run") == "make dist-check"]
    assert check["env"] == {"RELEASE_TAG": "${{ github.ref_name }}"}
    publish = jobs["publish"]
    assert publish["needs"] == "archives"
    assert publish["environment"] == "release"
    assert publish["if"] == "vars.RELEASE_INDEX != ''"
    assert "http" not in (WORKFLOWS / "release.yml").read_text(encoding="utf-8")


def test_the_address_of_the_project_is_set_at_all_places_or_at_none() -> None:
    config = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/config.yml").read_text("utf-8"))
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    set_at = {"urls" in PROJECT, "repo_url" in site, "contact_links" in config}
    assert len(set_at) == 1, set_at


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_asks_what_it_needs(name: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text("utf-8"))
    assert form["name"]
    assert form["description"]
    asked = [field for field in form["body"] if field["type"] == "textarea"]
    assert len({field["id"] for field in asked}) == len(asked) > 2
    assert any(field.get("validations", {}).get("required") for field in asked)
    if name == "bug":
        assert any("weightsync doctor" in field["attributes"]["label"] for field in asked)
