"""`python -m weightsync`: the command line."""

from __future__ import annotations

from weightsync.cli import main

if __name__ == "__main__":
    main()
