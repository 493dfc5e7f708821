"""Which updates may not begin any more, and for how long that is remembered."""

from __future__ import annotations

import time

import pytest

from weightsync.errors import UpdateConflictError
from weightsync.update.history import UpdateTable

KEEP_S = 60.0
SHORT_S = 0.02


def test_what_ended_may_not_begin() -> None:
    table = UpdateTable(KEEP_S)
    table.aborted("u")
    for _ in range(2):
        with pytest.raises(UpdateConflictError, match="under another update_id") as caught:
            table.check_not_aborted("u")
    assert (caught.value.state, caught.value.update_id) == ("ABORTED", "u")


def test_others_may_begin() -> None:
    table = UpdateTable(KEEP_S)
    table.aborted("u")
    table.check_not_aborted("v")


def test_it_is_forgotten_in_time() -> None:
    table = UpdateTable(SHORT_S)
    table.aborted("u")
    time.sleep(2 * SHORT_S)
    table.check_not_aborted("u")


def test_the_oldest_make_room_and_a_note_renews() -> None:
    table = UpdateTable(KEEP_S)
    table.aborted("renewed")
    table.aborted("oldest")
    for number in range(254):
        table.aborted(f"u{number}")
    table.aborted("renewed")
    table.aborted("newest")
    table.check_not_aborted("oldest")
    for kept in ("renewed", "u0", "newest"):
        with pytest.raises(UpdateConflictError):
            table.check_not_aborted(kept)
