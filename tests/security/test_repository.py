"""No file of the repository looks like it holds a secret."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOKS_SECRET = re.compile(
    "|".join(
        [
            r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/]{32}",
            r"\bAKIA[0-9A-Z]{16}\b",
            r"\bgh[pousr]_[A-Za-z0-9]{36}\b",
            r"\bgithub_pat_\w{60}",
            r"\bhf_[A-Za-z0-9]{30,}\b",
            r"\bsk-[A-Za-z0-9_-]{32,}\b",
            r"\bxox[abpr]-[A-Za-z0-9-]{20,}",
            r"\bAIza[0-9A-Za-z_-]{35}\b",
            r"\bpypi-[A-Za-z0-9_-]{50,}",
            r"\bnpm_[A-Za-z0-9]{36}\b",
            r"\beyJ[A-Za-z0-9_-]{20,}\.eyJ[A-Za-z0-9_-]{20,}\.",
            r"://[^/\s:@{}<>$]+:[A-Za-z0-9_+/=-]{20,}@",
        ]
    )
)


def secrets_in(text: str) -> list[str]:
    return [found.group()[:12] for found in LOOKS_SECRET.finditer(text)]


def tracked_files() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone, or there is no git here")
    listed = subprocess.run(
        [git, "-c", f"safe.directory={ROOT}", "-C", ROOT, "ls-files", "-z"],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_tracked_file_looks_like_it_holds_a_secret() -> None:
    files = [path for path in tracked_files() if path.is_file()]
    assert len(files) > 100
    found = {
        str(path.relative_to(ROOT)): kinds
        for path in files
        if (kinds := secrets_in(path.read_bytes().decode("utf-8", "replace")))
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN PRIVATE" + " KEY-----\n" + "A" * 64,
        "-----BEGIN RSA PRIVATE" + " KEY-----\n" + "b" * 64,
        "token = '" + "ghp_" + "a1" * 18 + "'",
        "HF_TOKEN=" + "hf_" + "x" * 34,
        "OPENAI_API_KEY=" + "sk-" + "Ab1" * 16,
        "https://user:" + "0123456789abcdef01234567" + "@host/repo.git",
        "AKIA" + "ABCDEFGH12345678",
    ],
)
def test_what_a_secret_looks_like(text: str) -> None:
    assert secrets_in(text)


def test_no_file_is_named_like_a_key() -> None:
    suspicious = {".pem", ".key", ".p12", ".pfx", ".env", ".keystore"}
    named = [path.name for path in tracked_files() if {path.suffix, path.name} & suspicious]
    assert named == []
