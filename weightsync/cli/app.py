"""The verbs, each imported only when it may be run: what one lacks does not stop another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

from weightsync import __version__
from weightsync.cli.answers import lacking
from weightsync.errors import BackendUnavailableError

try:
    import typer
except ImportError as exc:
    raise BackendUnavailableError(
        f"the command line needs typer ({exc}); pip install 'weightsync[cli]'"
    ) from exc

# typer carries click's classes with it in some versions and not in others.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
"""What the command line itself refuses: a click ClickException, with `format_message()`."""

VERBS = {
    "serve": "Serve a model over HTTP, while a trainer replaces its weights.",
    "demo": "Train a model by reinforcement and send its weights to a live server.",
    "bench": "Measure how fast weights move between two processes.",
    "push": "Load a safetensors checkpoint into servers that are running.",
    "status": "Show what servers hold, and how the last update went.",
    "verify": "Compare the weights that a server holds with a safetensors checkpoint.",
    "doctor": "Say which paths work on this machine, and why others do not.",
    "plot": "Draw the updates of a run from their reports.",
}


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the command line for `arguments`: the verb they name, or all where they name none."""
    app = typer.Typer(
        name="weightsync",
        help="Moves a model's weights from training to inference.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_options)  # or a single verb would not be named
    words = arguments[1:] if arguments[:1] == ["--"] else arguments
    named = words[0] if words and words[0] in VERBS else None
    for verb, text in VERBS.items():
        run = _load(verb) if verb == named else _unloaded
        # Only the verb named shows its own options: the others need not even be importable.
        app.command(name=verb, help=text)(run)
    return app


def _load(verb: str) -> Callable[..., Any]:
    try:
        module = import_module(f"weightsync.cli.{verb}")
    except ModuleNotFoundError as exc:
        raise lacking(verb, exc.name) from exc
    run: Callable[..., Any] = getattr(module, verb)
    return run


def _unloaded() -> None:
    raise AssertionError("a verb that is not named is not run")


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
