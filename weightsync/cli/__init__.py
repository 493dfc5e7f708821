"""The command `weightsync`: a file per verb, each with extras of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from weightsync.cli.answers import FAILED, OK, USAGE, exit_code, one_line, say_error
from weightsync.errors import WeightSyncError

_HELP = "weightsync --help lists the verbs, weightsync VERB --help its options"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors of ours are one line on stderr and an exit code."""
    logging.basicConfig()  # a program of its own: its warnings belong on stderr
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Here, so that a missing typer is an error of ours, too.
        from weightsync.cli.app import UsageProblem, make_app  # noqa: PLC0415

        try:
            code = make_app(words)(words, prog_name="weightsync", standalone_mode=False)
        except UsageProblem as exc:
            # A type of click's own, wherever typer keeps it; empty where the help was shown.
            said = one_line(exc.format_message())  # type: ignore[attr-defined]  # see UsageProblem
            if said:
                say_error(exc, f"{said}; {_HELP}", USAGE, words)
            raise SystemExit(USAGE) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except WeightSyncError as exc:
        say_error(exc, one_line(exc), exit_code(exc), words)
        raise SystemExit(exit_code(exc)) from None
    except BrokenPipeError:
        # Who read our output has gone; or Python would say so at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(FAILED) from None
    raise SystemExit(code if isinstance(code, int) else OK)
