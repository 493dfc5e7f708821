"""`python -m weightsync.cli.child PARENT COMMAND …`: a command that ends when its parent does."""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have this process get SIGTERM, which unwinds it, when `parent` ends, however that happens.

    To be exact, when the thread of `parent` does that started this one.
    """
    signal.signal(signal.SIGTERM, _raise_exit)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) is refused here")
    # The parent may have gone before the call; then nobody would send the signal.
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one has ended")


def _raise_exit(signum: int, _frame: object) -> None:
    # An exception, so that `with` blocks and `finally` clauses let go of shared memory.
    raise SystemExit(128 + signum)


def main() -> None:
    """Run the module named on the command line, with the arguments after it."""
    parent, module, *arguments = sys.argv[1:]
    end_with(int(parent))
    logging.basicConfig()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
