"""Bearer tokens from files and the environment. No message here contains a token."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weightsync.errors import ConfigError

TOKEN_VARIABLE = "WEIGHTSYNC_TOKEN"  # noqa: S105 - the name of a variable, not a secret
TOKEN_FILE_VARIABLE = "WEIGHTSYNC_TOKEN_FILE"  # noqa: S105 - same
MAX_TOKEN_LENGTH = 4096

_TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO


def check_token_text(token: str) -> str:
    """Return `token`. Raises ConfigError where it is empty, no text, or no header can carry it."""
    check_token_type(token)
    sendable = token.isascii() and token.isprintable() and " " not in token
    if not sendable or not 0 < len(token) <= MAX_TOKEN_LENGTH:
        raise ConfigError(
            f"a token has 1 to {MAX_TOKEN_LENGTH} printable ASCII characters and no spaces; "
            "leave it out to have one made"
        )
    return token


def check_token_type(token: object) -> None:
    """Raise ConfigError unless `token` is a text or None."""
    if token is not None and not isinstance(token, str):
        raise ConfigError(f"token is a text (str) or None, not {type(token).__name__}")


def token_from_environment() -> str | None:
    """Return the token in WEIGHTSYNC_TOKEN, or in the file WEIGHTSYNC_TOKEN_FILE, or None.

    Raises ConfigError where both are set, and as `read_token_file` does.
    """
    text = os.environ.get(TOKEN_VARIABLE) or None
    path = os.environ.get(TOKEN_FILE_VARIABLE) or None
    if text is not None and path is not None:
        raise ConfigError(f"{TOKEN_VARIABLE} and {TOKEN_FILE_VARIABLE} are both set; set one")
    return text if path is None else read_token_file(path)


def read_token_file(path: str | os.PathLike[str]) -> str:
    """Return the token in the file `path`, without the line break at its end.

    Follows links, because Kubernetes mounts secrets behind them. Raises ConfigError for a file
    that users outside its group may read, that users other than its owner may write, or that
    contains no token.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            _check_private(os.fstat(fd), path)
            raw = os.read(fd, MAX_TOKEN_LENGTH + 3)
        finally:
            os.close(fd)
    except OSError as exc:
        raise ConfigError(f"the token file {path} cannot be read: {exc.strerror}") from exc
    text = raw.decode("latin-1").removesuffix("\n").removesuffix("\r")
    try:
        return check_token_text(text)
    except ConfigError as exc:
        raise ConfigError(f"the token file {path} holds no token: {exc}") from exc


def _check_private(info: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"the token file {Path(path)} is {stat.filemode(info.st_mode)}, no file")
    if info.st_mode & _TOO_OPEN:
        raise ConfigError(
            f"the token file {Path(path)} has mode {stat.filemode(info.st_mode)}, so others may "
            "read or change it; chmod 600 it (defaultMode: 0400 of a Kubernetes secret)"
        )
