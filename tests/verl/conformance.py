"""Runs the contracts of engines.py in a network of their own, and prints their table.

`python -m tests.verl.conformance`, with further options of pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ray import sandbox

ENGINES = Path(__file__).with_name("engines.py")
OPTIONS = (
    *("-p", "weightsync.testing.conformance", "-p", "no:cacheprovider", "--disable-warnings"),
    *("-q", "--tb=short", "--show-capture=no", "-o", "filterwarnings=default"),
)


def run(*options: str) -> str:
    """Return what pytest printed; fails where it does."""
    return sandbox.run("-m", "pytest", ENGINES, *OPTIONS, *options, timeout_s=1200)


if __name__ == "__main__":
    print(run("-rx", *sys.argv[1:]))
