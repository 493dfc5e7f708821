"""The names of adapters, and the paths of their receivers below a server's URL."""

from __future__ import annotations

import re

from weightsync.errors import ConfigError

PATHS = "adapters/"
"""The path of all adapters' receivers below a server's URL."""

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
"""A regular expression of adapters' names: ASCII, as they are in URLs and in names of models."""
_NAME = re.compile(NAME)


def check_name(name: object) -> str:
    """Return the name of an adapter. Raises ConfigError for one that is no part of a URL's path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            "an adapter's name is 1 to 128 letters (A to Z, a to z), digits, '_', '-' and '.', and "
            f"begins with a letter or a digit; this is {name!r:.60}"
        )
    return name


def adapter_path(name: str) -> str:
    """Return the path of an adapter's receiver below its server's URL."""
    return PATHS + check_name(name)


def adapter_of(path: str) -> str:
    """Return the adapter at a path below a URL. Raises ConfigError where it is another path."""
    if not path.startswith(PATHS):
        raise ConfigError(f"{path!r} is no adapter's path: adapters are at {PATHS}NAME")
    return check_name(path.removeprefix(PATHS))
