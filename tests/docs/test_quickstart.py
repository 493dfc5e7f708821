"""docs/quickstart.md from top to bottom: its commands, in order, print what it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import Result

import weightsync as ws
from tests.children import Program
from tests.cli.running import ROOT, weightsync
from tests.cli.test_doctor import CHECKS
from weightsync.cli.app import VERBS

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
SHOWN_URL = "http://127.0.0.1:8000"
SHOWN_TOKEN = "xdMiLvK6pFU8xvWlx735k6hSiYsxH82YvIzRaWeHU7s"
WAIT_S = 90
_WIDTH = re.compile("([ ━─])\\1+")
_VOLATILE = re.compile(r"HOST-[0-9a-f]+|\d[\d.,]*")
_LISTENING = re.compile(r"listening on (\S+)\n")


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of the page, and what the page says that it prints."""

    line: str
    output: str


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def commands() -> list[Shown]:
    pattern = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
    return [Shown(*found) for block in blocks("console") for found in pattern.findall(block)]


def shape(text: str) -> list[str]:
    """Return lines without what differs from run to run: numbers, and waits that there were not.

    A column of a table is as wide as its numbers.
    """
    lines = (_VOLATILE.sub("N", line) for line in text.splitlines())
    return [_WIDTH.sub(r"\1", line.replace(", wait N ms", "")) for line in lines]


@dataclass(slots=True)
class Quickstart:
    """The server that the page starts, the directory it works in, and how its commands run."""

    folder: Path
    server: subprocess.Popen[str]
    url: str
    token: str
    said: str

    def run(self, line: str, *, token: str | None = None) -> Result:
        """Run a command of the page in this process, against the server of this test."""
        first, *words = line.replace(SHOWN_URL, self.url).split()
        assert first == "weightsync"
        return weightsync(*words, token=self.token if token is None else token)


def environment(token: str = "") -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "WEIGHTSYNC_TOKEN"}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return kept | ({"WEIGHTSYNC_TOKEN": token} if token else {})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    """The server of the page, on a port of its own, and the checkpoint of its program."""
    folder = tmp_path_factory.mktemp("quickstart")
    (serve,) = [shown for shown in commands() if " serve " in shown.line]
    words = [*serve.line.split()[1:], "--port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-m", "weightsync", *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )
    try:
        assert server.stdout is not None
        said = server.stdout.readline() + server.stdout.readline()
        listening = _LISTENING.search(said)
        assert listening, said
        make_checkpoint(folder)
        yield Quickstart(folder, server, listening[1], said.split()[-1], said)
    finally:
        server.kill()
        server.wait(WAIT_S)
        if server.stdout is not None:
            server.stdout.close()


def make_checkpoint(folder: Path) -> None:
    program = next(block for block in blocks("python") if "save_pretrained" in block)
    with Program(f"import os\nos.chdir({str(folder)!r})\n{program}", env=environment()) as process:
        assert process.wait(WAIT_S) == 0


def test_serve_says_where_it_listens_and_its_token(page: Quickstart) -> None:
    (serve,) = [shown for shown in commands() if " serve " in shown.line]
    assert page.said.replace(page.url, SHOWN_URL).replace(page.token, SHOWN_TOKEN) == serve.output
    assert f"export WEIGHTSYNC_TOKEN={SHOWN_TOKEN}\n" in PAGE


def test_doctor_looks_at_what_is_shown() -> None:
    # Run for real in tests/cli; what it says differs from machine to machine.
    (doctor,) = [shown for shown in commands() if shown.line == "weightsync doctor"]
    lines = doctor.output.splitlines()
    assert {line.split()[1] for line in lines[:-1]} == CHECKS
    assert lines[-1].startswith("paths that work here: ")


def test_the_commands_print_what_is_shown_in_order(
    page: Quickstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(page.folder)
    live = [shown for shown in commands() if shown.line.split()[1] not in ("serve", "doctor")][:4]
    assert [shown.line.split()[1] for shown in live] == ["verify", "push", "verify", "status"]
    codes = []
    for shown in live:
        done = page.run(shown.line)
        assert shape(done.stdout.replace(page.url, SHOWN_URL)) == shape(shown.output), done.stderr
        assert done.stderr == ""
        codes.append(done.exit_code)
    assert codes == [1, 0, 0, 0]
    assert page.run(live[1].line, token="another").exit_code == 4


def test_the_answer_says_which_version_made_it(page: Quickstart) -> None:
    (curl,) = [block for block in blocks("bash") if "curl" in block]
    body = re.search(r"-d '(.*)'", curl)
    assert body
    request = urllib.request.Request(
        f"{page.url}/v1/completions",
        data=body[1].encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        answer = json.load(response)
    (choice,) = answer["choices"]
    count = answer["usage"]["completion_tokens"]  # tokens are drawn, and one may be the end
    assert count == 4 or choice["finish_reason"] == "stop"
    assert choice["weight_versions"] == [{"version": 1, "start": 0, "stop": count}]


def test_the_trainer_prints_what_is_shown(
    page: Quickstart, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", page.token)
    program = next(block for block in blocks("python") if "ws.connect" in block)
    names: dict[str, object] = {}
    exec(program.replace(SHOWN_URL, page.url), names)
    (shown,) = blocks("text")
    assert shape(capsys.readouterr().out) == shape(shown)
    assert isinstance(names["report"], ws.SyncReport)


def test_ctrl_c_ends_the_server_and_errors_are_one_line(
    page: Quickstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(page.folder)
    page.server.send_signal(signal.SIGINT)
    assert page.server.wait(WAIT_S) == 0
    failing = commands()[-2:]
    done = [page.run(shown.line) for shown in failing]
    for result, shown in zip(done, failing, strict=True):
        assert result.stdout == ""
        assert result.stderr.replace(page.url, SHOWN_URL) == shown.output
    assert [result.exit_code for result in done] == [3, 2]


def test_the_checkpoints_can_be_served_and_certified(page: Quickstart) -> None:
    """After the page's server has ended, as the page says."""
    given = {**environment("secret"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (serve,) = [block for block in blocks("bash") if "serve --model checkpoint" in block]
    (certify,) = [block for block in blocks("bash") if "certify" in block]
    (table,) = [block for block in blocks("console") if "certified" in block]
    server = subprocess.Popen(
        ["sh", "-c", f"exec env {serve.strip()} --port 0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=page.folder,
        env=given,
    )
    try:
        assert server.stdout is not None
        listening = _LISTENING.search(server.stdout.readline())
        assert listening
        done = subprocess.run(
            ["sh", "-c", certify.replace(SHOWN_URL, listening[1])],
            check=False,
            cwd=page.folder,
            env={**given, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        assert shape(done.stdout) == shape(table)
    finally:
        server.terminate()
        server.wait(WAIT_S)
        if server.stdout is not None:
            server.stdout.close()


def test_the_command_tells_its_version() -> None:
    assert weightsync("--version").stdout == f"{ws.__version__}\n"


def test_the_page_names_verbs_that_there_are() -> None:
    named = {shown.line.split()[1] for shown in commands()}
    assert named == {"doctor", "serve", "push", "verify", "status"} <= set(VERBS)
