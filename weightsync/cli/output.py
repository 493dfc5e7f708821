"""Output that verbs share: error lines, exit codes, JSON."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from weightsync.errors import (
    AuthError,
    ConfigError,
    ManifestMismatchError,
    TransportError,
    VerificationError,
    WeightSyncError,
)

OK, FAILED, USAGE, UNREACHABLE, REFUSED = 0, 1, 2, 3, 4
"""Exit codes: done; failed or different; wrong arguments; no connection; the token is refused."""

_OPTIONS = {
    "timeout_s=": "--timeout",
    "verify_tls=": "--ca-file",
    "as token=": "in --token-file",
    "(token= of the sender,": "(--token-file,",
    "send_weights(rewind=True)": "--rewind",
    "dtype=,": "--dtype,",
}
"""Options of the command line by the arguments that messages of the library name."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a verb that ends with `error`."""
    if isinstance(error, AuthError):
        return REFUSED
    if isinstance(error, TransportError):
        return UNREACHABLE
    return USAGE if isinstance(error, ConfigError) else FAILED


def one_line(error: BaseException | str) -> str:
    """Return an error's message on one line, with options in place of arguments."""
    text = " ".join(str(error).split())
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text


def describe(error: BaseException) -> dict[str, object]:
    """Return an error as plain data, with all names that it carries."""
    described: dict[str, object] = {"type": type(error).__name__, "message": one_line(error)}
    if isinstance(error, ManifestMismatchError):
        names = ("missing", "unexpected", "mismatched")
        described |= {name: list(getattr(error, name)) for name in names}
    if isinstance(error, VerificationError):
        described["names"] = list(error.names)
    return described


def print_error(
    error: BaseException, *, as_json: bool, text: str | None = None, code: int | None = None
) -> None:
    """Print one line on stderr, and with `as_json` one object on stdout.

    `text` replaces the error's message, and `code` the error's exit code.
    """
    text = one_line(error) if text is None else text
    print(f"weightsync: {text}", file=sys.stderr)
    if as_json:
        code = exit_code(error) if code is None else code
        print_json({"error": describe(error) | {"message": text}, "exit_code": code})


def print_json(answer: object) -> None:
    """Print the one object of a `--json` run."""
    print(json.dumps(answer, indent=2, allow_nan=False))


@contextmanager
def ending(*, as_json: bool) -> Iterator[None]:
    """Around a verb: an expected error is printed, and becomes SystemExit with its exit code.

    SIGTERM unwinds the block as Ctrl-C does, so that shared memory is released.
    """
    previous = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    except BrokenPipeError:  # of our own stdout; `main` ends the process
        raise
    except (WeightSyncError, OSError) as exc:  # OSError: a full disk, a file without permission
        print_error(exc, as_json=as_json)
        raise SystemExit(exit_code(exc)) from exc
    finally:
        signal.signal(signal.SIGTERM, previous)


def raise_exit(signum: int, _frame: object) -> NoReturn:
    """Raise SystemExit: a signal handler whose exception runs `finally` clauses, once."""
    signal.signal(signum, signal.SIG_IGN)  # a second signal must not interrupt them
    raise SystemExit(128 + signum)
