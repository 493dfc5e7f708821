"""The option of a dtype: names as torch has them, and their short forms."""

from __future__ import annotations

from typing import Any, Literal, get_args

import typer

from weightsync.specs import DTYPE_ALIASES

Dtype = Literal["float32", "bfloat16", "float16"]
"""Dtypes to which floating-point tensors can be cast."""


def dtype_option(text: str) -> Any:
    """Return the option; `text` is its help."""
    return typer.Option(
        parser=_parse, metavar=f"<{'|'.join(get_args(Dtype))}>", help=text, show_default=False
    )


def _parse(text: str) -> str:
    name = DTYPE_ALIASES.get(text.lower(), text)
    if name not in get_args(Dtype):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(get_args(Dtype))}")
    return name
