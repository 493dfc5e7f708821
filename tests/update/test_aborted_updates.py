"""Which updates may not begin any more, and for how long that is remembered."""

from __future__ import annotations

import time

import pytest

from weightsync.errors import UpdateConflictError
from weightsync.update.history import AbortedUpdates

KEEP_S = 60.0
SHORT_S = 0.02


def test_what_ended_may_not_begin() -> None:
    overtaken = AbortedUpdates(KEEP_S)
    overtaken.note("u")
    for _ in range(2):
        with pytest.raises(UpdateConflictError, match="under another update_id") as caught:
            overtaken.check("u")
    assert (caught.value.state, caught.value.update_id) == ("ABORTED", "u")


def test_others_may_begin() -> None:
    overtaken = AbortedUpdates(KEEP_S)
    overtaken.note("u")
    overtaken.check("v")


def test_it_is_forgotten_in_time() -> None:
    overtaken = AbortedUpdates(SHORT_S)
    overtaken.note("u")
    time.sleep(2 * SHORT_S)
    overtaken.check("u")


def test_the_oldest_make_room_and_a_note_renews() -> None:
    overtaken = AbortedUpdates(KEEP_S)
    overtaken.note("renewed")
    overtaken.note("oldest")
    for number in range(254):
        overtaken.note(f"u{number}")
    overtaken.note("renewed")
    overtaken.note("newest")
    overtaken.check("oldest")
    for kept in ("renewed", "u0", "newest"):
        with pytest.raises(UpdateConflictError):
            overtaken.check(kept)
