"""`python -m weightsync.integrations.openrlhf MODULE …`: runs a module after `install()`."""

from __future__ import annotations

import runpy
import sys

from weightsync.errors import WeightSyncError
from weightsync.integrations.openrlhf import install

_USAGE = (
    "usage: python -m weightsync.integrations.openrlhf openrlhf.cli.train_ppo_ray ARGUMENTS\n"
    "runs a module of OpenRLHF, or a file NAME.py, whose weights go to vLLM by weightsync\n"
)


def main() -> None:
    """Install weightsync in OpenRLHF, and run what the command line names as the main program."""
    del sys.argv[0]
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.stderr.write(_USAGE)
        sys.exit(0 if sys.argv[:1] in (["-h"], ["--help"]) else 2)
    try:
        install()
    except WeightSyncError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
