"""A program that sets no logging up sees nothing of weightsync's; one that does sees it."""

from __future__ import annotations

import subprocess
import sys

WARNS = """
import logging
import weightsync as ws
from weightsync.receiver import WeightReceiver
log = logging.getLogger(WeightReceiver.__module__)
log.warning("what nobody asked for")
logging.basicConfig()
log.warning("what the library says")
"""


def test_a_warning_is_shown_to_who_asked() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WARNS], capture_output=True, text=True, timeout=240, check=True
    )
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == ["WARNING:weightsync.receiver:what the library says"]
