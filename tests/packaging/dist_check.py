"""Builds the source archive and the wheel, and tries the wheel as a user would: `make dist-check`.

The wheel is built from the archive, so the archive is complete. It is installed in an environment
of its own, outside of this tree, first without extras and then with those of the command line.
Needs the packages build and twine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
LIMIT_S = 1800


def run(*words: str | Path, cwd: Path, expect: int = 0) -> str:
    """Run a command without our PYTHONPATH, and return what it printed."""
    print("$", *words, flush=True)
    unset = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in unset},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode != expect:
        raise SystemExit(f"exit code {done.returncode}, not {expect}: {' '.join(map(str, words))}")
    return done.stdout


def project_version(tag: str = "") -> str:
    """Return the version of pyproject.toml. Exits if a tag is given and is not `v` before it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = str(project["version"])
    if tag and tag != f"v{version}":
        raise SystemExit(f"the tag {tag} is not v{version}, the version of pyproject.toml")
    return version


def build(out: Path, version: str) -> Path:
    """Build both archives into `out`, in the place of former ones, and return the wheel."""
    for former in out.glob("weightsync-*"):
        former.unlink()
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=ROOT)
    wheel = out / f"weightsync-{version}-py3-none-any.whl"
    wanted = {wheel.name, f"weightsync-{version}.tar.gz"}
    if (made := {path.name for path in out.iterdir()}) != wanted:
        raise SystemExit(f"{out} has {sorted(made)}, not {sorted(wanted)}")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir()), cwd=out)
    return wheel


def try_wheel(wheel: Path, version: str, torch: str, home: Path) -> None:
    """Install `wheel` below `home`, and use it from there."""
    run(sys.executable, "-m", "venv", home / "env", cwd=home)
    python, command = home / "env/bin/python", home / "env/bin/weightsync"
    shutil.copy(SMOKE, home)

    # torch first and in each command, so that no requirement brings another build of it.
    run(python, "-m", "pip", "install", "--quiet", torch, cwd=home)
    run(python, "-m", "pip", "install", "--quiet", torch, wheel, cwd=home)
    seen = json.loads(run(python, home / SMOKE.name, cwd=home).splitlines()[-1])
    if not Path(seen["file"]).is_relative_to(home / "env"):
        raise SystemExit(f"imported {seen['file']}, which is not the installed one")
    wanted = {"version": version, "metadata": version, "held": 2, "verified": "held"}
    if {name: seen[name] for name in wanted} != wanted:
        raise SystemExit(f"the update gave {seen}, not {wanted}")
    if "pip install" not in run(command, "--version", cwd=home, expect=1):
        raise SystemExit("the command without its extra does not say how to install it")

    run(python, "-m", "pip", "install", "--quiet", torch, f"{wheel}[server,cli]", cwd=home)
    run(python, "-m", "pip", "check", cwd=home)
    if (printed := run(command, "--version", cwd=home).strip()) != version:
        raise SystemExit(f"weightsync --version printed {printed}, not {version}")
    run(command, "doctor", cwd=home)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--torch", default="torch", help="what pip installs as torch")
    parser.add_argument("--tag", default=os.environ.get("RELEASE_TAG", ""))
    given = parser.parse_args(arguments)
    version = project_version(given.tag)
    wheel = build(given.out.resolve(), version)
    with tempfile.TemporaryDirectory(prefix="weightsync-dist-") as home:
        try_wheel(wheel, version, given.torch, Path(home).resolve())
    print(f"{wheel.name} and its source archive are good: {wheel.parent}")


if __name__ == "__main__":
    main()
