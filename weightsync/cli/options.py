"""Options that several verbs share: seconds, tokens, TLS, and the kind of a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsync.arguments import MAX_TIMEOUT_S
from weightsync.errors import ConfigError
from weightsync.transports.http import tls_context
from weightsync.transports.tokens import read_token_file

TokenOption = Annotated[
    str | None, typer.Option(help="of the servers; else WEIGHTSYNC_TOKEN", show_default=False)
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(help="holds the token, mode 0600; else WEIGHTSYNC_TOKEN_FILE", show_default=False),
]
CaFileOption = Annotated[
    Path | None,
    typer.Option(help="certificates to trust, PEM; else REQUESTS_CA_BUNDLE", show_default=False),
]


def seconds(text: str) -> Any:
    """Return the option of a number of seconds that a process can wait; `text` is its help."""
    return typer.Option(min=0.1, max=MAX_TIMEOUT_S, callback=_check_number, help=text)


def _check_number(value: float) -> float:
    if math.isnan(value):  # NaN is neither below the minimum nor above the maximum
        raise typer.BadParameter("nan is not a number of seconds")
    return value


def choose_token(token: str | None, token_file: Path | None) -> str | None:
    """Return the token of the command line, None for that of the environment.

    Raises ConfigError if both are given, and for a file that other users may read.
    """
    if token is not None and token_file is not None:
        raise ConfigError("--token and --token-file are both given; give one of them")
    return token if token_file is None else read_token_file(token_file)


def choose_tls(ca_file: Path | None, urls: Sequence[str]) -> bool | str:
    """Return `verify_tls` of HttpTransport, never False.

    Raises ConfigError for a file that cannot be read, and where no URL is https.
    """
    if ca_file is None:
        return True
    if not any(url.startswith(("https://", "vllm+https://", "sglang+https://")) for url in urls):
        raise ConfigError("--ca-file is for https:// URLs, and none is given")
    tls_context(str(ca_file))
    return str(ca_file)
