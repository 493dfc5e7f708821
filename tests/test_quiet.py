"""A program that sets no logging up sees nothing of weightsync's; one that does sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARNS = """
import logging
import weightsync as ws
from weightsync.receiver import WeightReceiver
{set_up}
logging.getLogger(WeightReceiver.__module__).warning("what the library says")
"""


@pytest.mark.parametrize(("set_up", "shown"), [("", False), ("logging.basicConfig()", True)])
def test_a_warning_is_shown_to_who_asked(set_up: str, shown: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WARNS.format(set_up=set_up)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == (
        ["WARNING:weightsync.receiver:what the library says"] if shown else []
    )
