"""The command `weightsync`: a file per verb, each with extras of its own."""

from __future__ import annotations

import sys

from weightsync.cli.answers import exit_code, one_line
from weightsync.errors import WeightSyncError


def main() -> None:
    """Run the command line; errors of ours are one line on stderr and an exit code."""
    try:
        # Here, so that a missing typer is an error of ours, too.
        from weightsync.cli.app import make_app  # noqa: PLC0415

        make_app(sys.argv[1:])(prog_name="weightsync")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except WeightSyncError as exc:
        print(f"weightsync: {one_line(exc)}", file=sys.stderr)
        raise SystemExit(exit_code(exc)) from None
