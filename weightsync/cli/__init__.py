"""The command `weightsync`: one module per verb, and each verb may need extras of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from weightsync.cli.output import FAILED, OK, USAGE, exit_code, one_line, print_error
from weightsync.errors import WeightSyncError

_HELP = "weightsync --help lists the verbs, weightsync VERB --help its options"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an expected error is one line on stderr and an exit code."""
    logging.basicConfig()  # the warnings of a program go to stderr
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words == ["version"]:
        words = ["--version"]
    as_json = "--json" in words
    try:
        # Imported here, so that a missing typer is reported as any other error.
        from weightsync.cli.app import UsageProblem, make_command, problem  # noqa: PLC0415

        try:
            code = make_command(words)(words, prog_name="weightsync", standalone_mode=False)
        except UsageProblem as exc:
            text = f"{one_line(problem(exc))}; {_HELP}"
            print_error(exc, as_json=as_json, text=text, code=USAGE)
            raise SystemExit(USAGE) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except WeightSyncError as exc:
        print_error(exc, as_json=as_json)
        raise SystemExit(exit_code(exc)) from None
    except BrokenPipeError:
        # The reader of stdout has ended. Without this, Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(FAILED) from None
    raise SystemExit(code if isinstance(code, int) else OK)
