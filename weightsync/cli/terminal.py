"""The output of verbs on a terminal: styled lines, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import Progress


def text_console() -> Console:
    """Return a console for stdout that prints text unchanged, apart from styles."""
    return Console(soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress_bar(task: str, total: int, *, as_json: bool) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr, where that is a terminal; yield a call that advances it by one."""
    console = Console(stderr=True)
    hidden = as_json or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        yield partial(bar.advance, bar.add_task(task, total=total))
