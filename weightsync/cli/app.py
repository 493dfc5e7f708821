"""The verbs: their names, the extras that each needs, and how a verb is loaded.

A verb's module is imported only to run that verb, so a package that it lacks stops no other verb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

from weightsync import __version__
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    MissingExtraError,
    install_hint,
)

try:
    import typer
except ImportError as exc:
    raise MissingExtraError(f"the command line needs typer ({exc}); {install_hint('cli')}") from exc

# Some versions of typer contain click's classes and others import click.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
"""The error of a wrong command line: a click ClickException, with `format_message()`."""

VERBS = {
    "serve": "Serve a model over HTTP, while a trainer replaces its weights.",
    "bench": "Measure how fast weights move between two processes.",
    "push": "Load a safetensors checkpoint into servers that are running.",
    "pull": "Write the weights that a server uses as a safetensors checkpoint.",
    "status": "Show what servers hold, and how the last update went.",
    "verify": "Compare the weights that a server holds with a safetensors checkpoint.",
    "certify": "Push a checkpoint, and compare the server with one that loaded it itself.",
    "doctor": "Say which paths work on this machine, and why others do not.",
    "plot": "Draw the updates of a run from their reports.",
    "plan": "Show what receivers would read from which ranks, without a gather.",
}

EXTRAS = {
    "serve": "server,hf,cli",
    "push": "safetensors,cli",
    "pull": "hf,cli",
    "status": "cli",
    "verify": "safetensors,cli",
    "certify": "safetensors,cli",
    "doctor": "cli",
    "bench": "server,cli",
    "plot": "plot,cli",
    "plan": "safetensors,cli",
}


_REFUSED = {
    "int_parsing": "{input!r} is no integer",
    "float_parsing": "{input!r} is no number",
    "greater_than_equal": "{input} is not at least {ge:.10g}",
    "less_than_equal": "{input} is not at most {le:.10g}",
}
"""Messages by the types of pydantic's errors: newer versions of typer read values with pydantic."""


def problem(error: Exception) -> str:
    """Return what is wrong with a command line, in its own words: the text of a UsageProblem."""
    cause: Any = error.__cause__
    refused: dict[str, Any] = cause.errors()[0] if hasattr(cause, "errors") else {"type": ""}
    words = _REFUSED.get(refused["type"])
    text: str = error.format_message()  # type: ignore[attr-defined]  # a click ClickException
    if words is not None:
        known = {"input": refused["input"], **refused.get("ctx", {})}
        text = text.replace(str(error), words.format(**known))
    return text.replace("Value error, ", "").rstrip(".")


def make_command(arguments: Sequence[str]) -> Callable[..., Any]:
    """Return what runs the command line for `arguments`, whose help names no value of flags."""
    command: Any = typer.main.get_command(make_app(arguments))
    for each in (command, *command.commands.values()):
        context = typer.Context(each)
        for parameter in each.get_params(context):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""  # newer versions show <bool>, although a flag has no value
    run: Callable[..., Any] = command
    return run


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the command line for `arguments`: the verb they name, or all where they name none."""
    app = typer.Typer(
        name="weightsync",
        help="Moves a model's weights from training to inference.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_options)  # or typer drops the name of a single verb
    words = arguments[1:] if arguments[:1] == ["--"] else arguments
    if words and words[0] == "demo":
        raise ConfigError("the demo is in weightsync's repository alone: make demo, in a clone")
    named = words[0] if words and words[0] in VERBS else None
    for verb, text in VERBS.items():
        # Only the named verb shows its options, so the others need not be imported.
        app.command(name=verb, help=text)(_load(verb) if verb == named else _not_loaded)
    return app


def _load(verb: str) -> Callable[..., Any]:
    try:
        module = import_module(f"weightsync.cli.{verb}")
    except ModuleNotFoundError as exc:
        raise missing_package(verb, exc.name) from exc
    run: Callable[..., Any] = getattr(module, verb)
    return run


def _not_loaded() -> None:
    raise AssertionError("a verb that is not named is not run")


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def require(verb: str, *packages: str) -> None:
    """Raise BackendUnavailableError where a package is missing that processes of a verb import.

    Called before such a process starts, because there a missing package would be a traceback.
    """
    for package in packages:
        if find_spec(package) is None:
            raise missing_package(verb, package)


def missing_package(verb: str, module: str | None) -> BackendUnavailableError:
    """Return the error of a verb that needs `module`, which is not installed."""
    package = (module or "a package").partition(".")[0]
    return MissingExtraError(f"weightsync {verb} needs {package}; {install_hint(EXTRAS[verb])}")
