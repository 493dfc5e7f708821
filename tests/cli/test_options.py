"""Sizes on the command line."""

from __future__ import annotations

import pytest

from weightsync.arguments import SIZE_HELP, parse_size
from weightsync.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("512MiB", 512 * 1024**2),
        ("512M", 512 * 1024**2),
        ("512MB", 512 * 1000**2),
        ("0.5G", 512 * 1024**2),
        ("1.5KB", 1500),
        ("64k", 64 * 1024),
        ("2gib", 2 * 1024**3),
        ("1T", 1024**4),
        ("0.1K", 102),
        ("1e9", 10**9),
        ("1.5E+3", 1500),
        ("123456789012345678.999999999999999999", 123_456_789_012_345_678),
    ],
)
def test_a_size_is_in_powers_of_1024_unless_it_ends_in_a_plain_b(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M",
        "some",
        "1.M",
        ".5G",
        "-1",
        "+1",
        "1e-9",
        "e9",
        "1e3M",
        "1 M",
        "1MM",
        "1Mi",
        "1B",
        "\u0663",
    ],
)
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_size(text)
    assert str(raised.value) == f"{text!r} is not a size; write {SIZE_HELP}"
    assert "512MiB or 512M (M = 1024 x 1024), 512MB (MB = 1000 x 1000), 0.5G" in SIZE_HELP


def test_more_bytes_than_can_be_addressed_are_refused() -> None:
    assert parse_size("7.99G") < parse_size("8000000T")
    with pytest.raises(ConfigError, match=r"^'8388608T' is 9223372036854775808 bytes; a size is "):
        parse_size("8388608T")


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"^'9{40}' is not a size"):
        parse_size("9" * 400)
