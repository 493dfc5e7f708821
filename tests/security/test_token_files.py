"""A token that comes from a file, on both sides; who else may read it; what an error says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightsync.cli.serve import serve
from weightsync.errors import ConfigError
from weightsync.server.auth import resolve_token
from weightsync.transports.http import HttpTransport
from weightsync.transports.tokens import (
    MAX_TOKEN_LENGTH,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    read_token_file,
)

SECRET = "kept-in-a-file"


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "token"
    made.write_text(f"{SECRET}\n")
    made.chmod(0o600)
    return made


def sent_by(transport: HttpTransport) -> str | None:
    transport.close()
    return transport._headers.get("Authorization")


def test_both_sides_take_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_token(token_file=path).text == SECRET
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    assert resolve_token().text == SECRET
    assert not resolve_token().made
    assert sent_by(HttpTransport("http://127.0.0.1:1")) == f"Bearer {SECRET}"
    assert sent_by(HttpTransport("http://127.0.0.1:1", "")) is None
    assert resolve_token("given").text == "given"


def test_where_two_are_given_neither_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        resolve_token("given", token_file=path)
    with pytest.raises(ConfigError, match="--no-auth excludes"):
        serve("tiny", no_auth=True, token_file=path)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(ConfigError, match="both set"):
        resolve_token()


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_its_owner_and_a_group_may_read_it(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert read_token_file(path) == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o660, 0o620, 0o601, 0o777])
def test_a_file_open_to_others_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read or change it; chmod 600") as refused:
        read_token_file(path)
    assert SECRET not in str(refused.value)


def test_a_link_to_it_will_do_but_its_targets_mode_counts(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_token_file(link) == SECRET
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        read_token_file(link)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_one_line_break_at_the_end_is_no_part_of_it(path: Path, end: str) -> None:
    path.write_bytes(f"{SECRET}{end}".encode())
    assert read_token_file(path) == SECRET


def test_the_longest_token_fits_and_no_longer_one(path: Path) -> None:
    path.write_text("x" * MAX_TOKEN_LENGTH + "\n")
    assert len(read_token_file(path)) == MAX_TOKEN_LENGTH
    path.write_text("x" * (MAX_TOKEN_LENGTH + 1))
    with pytest.raises(ConfigError, match="holds no token"):
        read_token_file(path)


@pytest.mark.parametrize("text", ["", "\n", f"{SECRET}\n\n", f"{SECRET}\nmore", f"{SECRET} ", "ü"])
def test_what_is_no_token_is_refused_and_not_repeated(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no token") as refused:
        read_token_file(path)
    assert SECRET not in str(refused.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, wanted in [("absent", "cannot be read"), ("fifo", "no file"), (".", "no file")]:
        with pytest.raises(ConfigError, match=wanted):
            read_token_file(tmp_path / name)
