"""The command `weightsync`: a file per verb, each with extras of its own."""

from __future__ import annotations

import sys

from weightsync.errors import ConfigError, WeightSyncError


def main() -> None:
    """Run the command line; errors of ours are one line on stderr and exit code 2 or 1."""
    try:
        # Here, so that a missing typer is an error of ours, too.
        from weightsync.cli.app import make_app  # noqa: PLC0415

        make_app(sys.argv[1:])(prog_name="weightsync")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except WeightSyncError as exc:
        print(f"weightsync: {' '.join(str(exc).split())}", file=sys.stderr)
        raise SystemExit(2 if isinstance(exc, ConfigError) else 1) from None
