"""What docs/command-line.md shows is what the commands do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.cli.running import ROOT, TOKEN, weightsync
from tests.cli.test_bad_input import CASES
from tests.cli.test_doctor import CHECKS
from weightsync.cli.app import EXTRAS, VERBS
from weightsync.cli.doctor import make_checks
from weightsync.cli.output import FAILED, OK, REFUSED, UNREACHABLE, USAGE

PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
SHOWN_URL = "http://127.0.0.1:8000"
_NUMBER = re.compile(r"\d[\d.,]*")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def shape(text: str) -> list[str]:
    """Return lines without what differs from run to run, and from server to server."""
    keyless = re.sub(r"HOST-[0-9a-f]+", "HOST", text)
    lines = keyless.splitlines()
    shapes = [_NUMBER.sub("N", line) for line in lines if not line.endswith("committed")]
    return [line.replace(", wait N ms", "") for line in shapes]  # where there was no wait


def rows(title: str) -> list[list[str]]:
    """Return the cells of the first table under a heading."""
    section = PAGE.partition(title)[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:]]


def test_the_commands_print_what_is_shown(
    url: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, *_ = blocks("console")
    (tmp_path / "checkpoint").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^\$ weightsync (.*)\n((?:(?!\$).*\n)*)", session, re.MULTILINE)
    assert len(shown) == 3
    for line, output in shown:
        result = weightsync(*shlex.split(line.replace(SHOWN_URL, url)))
        assert result.exit_code == 0, result.output
        assert shape(result.stdout.replace(url, SHOWN_URL)) == shape(output)


def test_the_program_works(url: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = blocks("python")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    names: dict[str, Any] = {"ws": ws, "torch": torch}
    exec(program.replace(SHOWN_URL, url).replace('"checkpoint"', repr(str(checkpoint))), names)
    assert names["report"].verified == "held"


def test_the_tables_name_all_verbs_codes_and_checks() -> None:
    assert {row[0].strip("`") for row in rows("# The command line")} == set(VERBS)
    codes = [code for row in rows("## Exit codes") for code in row[0].split(", ")]
    assert codes == [*map(str, (OK, FAILED, USAGE, UNREACHABLE, REFUSED)), "130", "143"]
    *_, session = blocks("console")
    lines = [line.split() for line in session.splitlines()[1:-1] if not line.startswith(" ")]
    assert {line[1] for line in lines} == CHECKS
    named = {name.strip("`") for row in rows("## Doctor") for name in row[0].split(", ")}
    assert named == CHECKS | {"driver", "backend"}
    checks = make_checks(clean=False, host="127.0.0.1", ports=[])
    assert {check.name for check in checks} - {"limits"} <= named


def test_the_extras_are_those_that_an_error_names() -> None:
    for verb, _, brought in rows("# The command line"):
        name = verb.strip("`")
        assert EXTRAS[name].split(",") == re.findall(r"`([a-z-]+)`", brought)


def test_every_verb_says_which_code_it_ends_with() -> None:
    told = {cells[0].strip("`"): cells[1:] for cells in rows("Which of them a verb ends with")}
    assert set(told) == set(VERBS)
    for line, code in CASES:
        if (verb := line.split()[0]) in VERBS:
            assert told[verb][code], f"weightsync {line} ends with {code}"
