"""Checks of the arguments of public calls: one line for each that does not fit."""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from numbers import Real
from typing import Any, get_args

import torch

from weightsync.errors import ConfigError
from weightsync.specs import DTYPE_ALIASES
from weightsync.tensors import TORCH_DTYPES

SIZE_HELP = "512MiB or 512M (M = 1024 x 1024), 512MB (MB = 1000 x 1000), 0.5G, or a number of bytes"
_SIZE = re.compile(
    r"(\d{1,18}(?:\.\d{1,18})?(?:e\+?\d{1,2}(?![KMGT]))?)(?:([KMGT])(iB|B)?)?",
    re.ASCII | re.IGNORECASE,
)
MAX_TIMEOUT_S = 1e6
"""Eleven days; waits of the operating system overflow a little above."""
Dtype = torch.dtype | str
"""A dtype of torch, or its name: "bfloat16", "torch.bfloat16", "bf16"."""


def parse_size(text: str) -> int:
    """Return the bytes of a size; a part of a byte is cut off.

    `512MiB` and `512M` count in powers of 1024, `512MB` in powers of 1000, as GNU coreutils do.
    Upper and lower case are the same. Raises ConfigError for other forms, and for a size that no
    address can reach.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text[:40]!r} is not a size; write {SIZE_HELP}")
    number, prefix, unit = found.groups(default="")
    base = 1000 if unit.upper() == "B" else 1024
    nbytes = int(Fraction(number) * base ** " KMGT".index(prefix.upper() or " "))
    if nbytes > sys.maxsize:
        raise ConfigError(f"{text!r} is {nbytes} bytes; a size is at most {sys.maxsize}")
    return nbytes


def as_nbytes(name: str, value: object) -> int | None:
    """Return a size as a number of bytes: of an integer, or of a text like "8MB"."""
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return as_count(name, value)


def as_count(name: str, value: object) -> int | None:
    """Return a positive integer, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is a positive integer, not {_shown(value)}")
    return value


def as_seconds(name: str, value: object, *, or_zero: bool = False) -> float:
    """Return a positive number of seconds that a process can wait; also 0 with `or_zero`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    seconds = float(value) if is_number else -1.0  # type: ignore[arg-type]  # a number
    if not 0 <= seconds <= MAX_TIMEOUT_S or (seconds == 0 and not or_zero):
        least = "at least 0 and" if or_zero else "above 0 and"
        raise ConfigError(
            f"{name} is a number of seconds, {least} at most {MAX_TIMEOUT_S:.0f}, not "
            f"{_shown(value)}"
        )
    return seconds


def as_choice(name: str, value: object, choices: Any) -> None:
    """Raise ConfigError unless `value` is one of a Literal's `choices`."""
    known = get_args(choices)
    if value not in known:
        listed = f"{', '.join(known[:-1])} or {known[-1]}"
        raise ConfigError(f"{name} must be {listed}, not {_shown(value)}")


def as_share(name: str, value: object) -> float:
    """Return a number from 0 to 1."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    share = float(value) if is_number else -1.0  # type: ignore[arg-type]  # a number
    if not 0 <= share <= 1:
        raise ConfigError(f"{name} is a share, from 0 to 1, not {_shown(value)}")
    return share


def as_flag(name: str, value: object, *, optional: bool = False) -> bool | None:
    """Return True or False, or None where it is `optional`."""
    if value is None and optional:
        return None
    if not isinstance(value, bool):
        choices = "True, False or None" if optional else "True or False"
        raise ConfigError(f"{name} is {choices}, not {_shown(value)}")
    return value


def as_dtype(name: str, value: object) -> torch.dtype | None:
    """Return a dtype that floating-point weights can be cast to; also of its name, "bfloat16"."""
    if value is None:
        return None
    dtype = value
    if isinstance(value, str):
        given = value.removeprefix("torch.").lower()
        dtype = TORCH_DTYPES.get(DTYPE_ALIASES.get(given, given))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"{name} is a floating-point dtype, as torch.bfloat16 or 'bfloat16', not "
            f"{_shown(value)}"
        )
    return dtype


def as_label(value: object) -> str | None:
    """Return the label of an update: a text of at most 256 characters, or None."""
    if value is not None and not (isinstance(value, str) and len(value) <= 256):
        raise ConfigError(f"label is a text of at most 256 characters, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
