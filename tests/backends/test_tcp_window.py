"""The window of chunks that a process serves: for whom it waits, and what readers get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from weightsync.backends.tcp.connection import FrameKind
from weightsync.backends.tcp.window import ChunkWindow, Cursor, Offer

HOLD_S = 0.4
LONG_S = 3600.0
FIRST, SECOND, THIRD = 10, 20, 30
"""Places of hosts."""


class Ends(Exception):
    """Ends a wait."""


def window(
    followers: list[int], *, slots: int = 2, chunks: int = 4, hold_s: float = LONG_S
) -> ChunkWindow:
    made = ChunkWindow(slots, hold_s)
    made.begin(1, chunks, [followers])
    return made


def offer(to: ChunkWindow, *chunks: int) -> None:
    for chunk in chunks:
        to.offer(chunk, memoryview(bytes([chunk])), [chunk])


def attach(to: ChunkWindow, place: int, first: int = 0, *, epoch: int = 1) -> Cursor:
    cursor = to.attach(place, epoch, first, is_next=False)
    assert cursor is not None
    return cursor


def take(frm: ChunkWindow, cursor: Cursor) -> bytes:
    found = frm.next(cursor)
    assert found is not None
    assert found.kind is FrameKind.CHUNK
    frm.sent(cursor)
    assert isinstance(found.data, memoryview)
    return bytes(found.data)


def kind_of(found: Offer | None) -> FrameKind | None:
    return None if found is None else found.kind


def waits(call: Callable[[Callable[[], None]], None]) -> bool:
    """Whether a wait of the window waits, for one look at least."""

    def check() -> None:
        raise Ends

    try:
        call(check)
    except Ends:
        return True
    return False


def has_room(of: ChunkWindow, chunk: int) -> bool:
    return not waits(lambda check: of.make_room(chunk, check))


def is_complete(of: ChunkWindow) -> bool:
    return not waits(of.complete)


def test_the_nearest_follower_is_waited_for() -> None:
    one = window([FIRST, SECOND])
    offer(one, 0, 1)
    assert has_room(one, 1)
    assert not has_room(one, 2)
    reader = attach(one, FIRST)
    assert not has_room(one, 2)
    assert take(one, reader) == b"\0"
    assert has_room(one, 2)
    assert not has_room(one, 3)


def test_it_is_not_waited_for_for_ever() -> None:
    one = window([FIRST], hold_s=HOLD_S)
    offer(one, 0, 1)
    began = time.monotonic()
    one.make_room(2, lambda: None)
    assert time.monotonic() - began >= HOLD_S
    late = attach(one, FIRST)
    assert kind_of(one.next(late)) is FrameKind.GONE


def test_its_successor_is_waited_for_when_it_is_lost() -> None:
    one = window([FIRST, SECOND, THIRD])
    offer(one, 0, 1)
    first = attach(one, FIRST)
    take(one, first)
    take(one, first)
    one.detach(first)
    assert not has_room(one, 2)
    second = attach(one, SECOND)
    assert [take(one, second), take(one, second)] == [b"\0", b"\1"]
    assert has_room(one, 2)


def test_successors_that_are_lost_as_well_are_not_waited_for() -> None:
    one = window([FIRST, SECOND, THIRD])
    offer(one, 0, 1)
    first = attach(one, FIRST)
    one.lose(SECOND, 1)
    one.detach(first)
    assert not has_room(one, 2), "the third may come"
    one.lose(THIRD, 1)
    assert has_room(one, 2)


def test_a_host_that_reads_is_not_lost_by_hearsay() -> None:
    one = window([FIRST, SECOND])
    offer(one, 0, 1)
    first = attach(one, FIRST)
    one.lose(FIRST, 1)
    take(one, first)
    one.detach(first)
    assert not has_room(one, 2), "the second takes its place"


def test_a_host_may_be_lost_before_its_update_begins_here() -> None:
    one = window([FIRST])
    one.lose(FIRST, 2)
    offer(one, 0, 1)
    assert not has_room(one, 2), "it takes part in this update"
    one.begin(2, 4, [[FIRST]])
    offer(one, 0, 1)
    assert has_room(one, 2)
    one.begin(3, 4, [[FIRST]])
    offer(one, 0, 1)
    assert not has_room(one, 2), "it has joined again"


def test_a_successor_that_is_too_late_for_its_chunk_is_not_waited_for() -> None:
    """It reads from another source, and serves those after it."""
    one = window([FIRST, SECOND, THIRD])
    offer(one, 0, 1)
    first = attach(one, FIRST)
    take(one, first)
    one.make_room(2, lambda: None)
    offer(one, 2)
    late = attach(one, SECOND)
    assert kind_of(one.next(late)) is FrameKind.GONE
    one.detach(late)
    take(one, first)
    one.detach(first)
    assert has_room(one, 3)


def test_one_that_has_connected_again_is_not_lost() -> None:
    """Its former connection is found to be dead when the new one reads already."""
    one = window([FIRST, SECOND])
    offer(one, 0, 1)
    former = attach(one, FIRST)
    again = attach(one, FIRST)
    take(one, again)
    assert not has_room(one, 2), "of the former one nobody knows yet"
    one.detach(former)
    assert has_room(one, 2)
    offer(one, 2)
    take(one, again)
    assert has_room(one, 3)
    offer(one, 3)
    take(one, again)
    take(one, again)
    one.detach(again)
    assert is_complete(one), "it serves those that follow it"


def test_one_that_comes_instead_of_a_nearer_one_is_enough() -> None:
    one = window([FIRST, SECOND])
    offer(one, 0, 1)
    reader = attach(one, SECOND)
    take(one, reader)
    assert has_room(one, 2)


def test_all_that_read_are_waited_for() -> None:
    one = window([FIRST, SECOND])
    offer(one, 0, 1)
    fast, slow = attach(one, FIRST), attach(one, SECOND)
    take(one, fast)
    assert not has_room(one, 2)
    take(one, slow)
    assert has_room(one, 2)
    take(one, fast)
    one.detach(slow)
    assert has_room(one, 3)


def test_it_is_complete_when_those_that_read_have_all() -> None:
    one = window([FIRST], chunks=2)
    offer(one, 0, 1)
    assert not is_complete(one)
    reader = attach(one, FIRST)
    take(one, reader)
    assert not is_complete(one)
    take(one, reader)
    assert is_complete(one)
    one.detach(reader)
    assert is_complete(one)


def test_the_nearest_of_each_chain_is_waited_for() -> None:
    """Hosts on two networks, which do not reach each other: both read here."""
    one = window([])
    one.begin(2, 4, [[FIRST, SECOND], [THIRD]])
    offer(one, 0, 1)
    first = one.attach(FIRST, 1, 0, is_next=True)
    assert first is not None
    take(one, first)
    assert not has_room(one, 2), "the other chain has not come"
    assert one.attach(SECOND, 1, 0, is_next=True) is None
    third = one.attach(THIRD, 1, 0, is_next=True)
    assert third is not None
    take(one, third)
    assert has_room(one, 2)
    one.detach(first)
    assert not has_room(one, 3), "the next one of the chain may take its place"
    second = attach(one, SECOND, 1, epoch=2)
    for cursor in (second, third):
        take(one, cursor)
    assert has_room(one, 3)
    one.detach(third)
    assert has_room(one, 3), "its chain has no other"


def test_a_lost_host_of_one_chain_is_missed_in_that_one_alone() -> None:
    one = window([])
    one.lose(FIRST, 2)
    one.begin(2, 4, [[FIRST, SECOND], [THIRD]])
    offer(one, 0, 1)
    third = one.attach(THIRD, 1, 0, is_next=True)
    assert third is not None
    take(one, third)
    assert not has_room(one, 2)
    one.lose(SECOND, 2)
    assert has_room(one, 2)


@pytest.mark.parametrize(("followers", "chunks"), [([], 3), ([FIRST], 0)])
def test_without_followers_or_chunks_nobody_is_waited_for(
    followers: list[int], chunks: int
) -> None:
    one = window(followers, chunks=chunks)
    offer(one, *range(chunks))
    assert is_complete(one)


def test_a_cursor_of_an_older_update_gets_nothing_of_a_newer_one() -> None:
    one = window([FIRST])
    offer(one, 0)
    old = attach(one, FIRST)
    one.begin(3, 4, [[SECOND]])
    offer(one, 0, 1)
    assert kind_of(one.next(old)) is FrameKind.GONE
    late = attach(one, FIRST, epoch=1)
    assert kind_of(one.next(late)) is FrameKind.GONE
    one.detach(old)
    one.detach(late)
    assert not has_room(one, 2), "the older ones are no followers of this update"


def test_a_host_gets_the_next_update_in_which_it_takes_part() -> None:
    one = window([FIRST])
    assert one.attach(FIRST, 1, 0, is_next=True) is None
    one.begin(2, 1, [[SECOND]])
    assert one.attach(FIRST, 1, 0, is_next=True) is None
    one.begin(3, 1, [[FIRST]])
    cursor = one.attach(FIRST, 1, 0, is_next=True)
    assert cursor is not None
    assert cursor.epoch == 3


def test_a_host_that_reads_elsewhere_now_does_not_take_the_place_of_a_nearer_one() -> None:
    """Its connection from the last update stays open until the message of this one arrives."""
    one = window([SECOND])
    one.begin(2, 4, [[FIRST, SECOND, THIRD]])
    assert one.attach(SECOND, 1, 0, is_next=True) is None
    offer(one, 0, 1)
    first = one.attach(FIRST, 1, 0, is_next=True)
    assert first is not None
    take(one, first)
    assert has_room(one, 2)


def test_an_update_that_has_not_begun_is_waited_for() -> None:
    one = window([FIRST])
    assert one.attach(FIRST, 2, 0, is_next=False) is None
    one.begin(2, 1, [[FIRST]])
    assert attach(one, FIRST, epoch=2).epoch == 2


def test_a_chunk_that_left_is_read_again_where_there_is_a_source() -> None:
    one = ChunkWindow(2, LONG_S)
    one.begin(1, 4, [[]], lambda chunk: memoryview(bytes([100 + chunk])))
    for chunk in range(4):
        one.make_room(chunk, lambda: None)
        offer(one, chunk)
    late = attach(one, FIRST)
    assert [take(one, late) for _ in range(4)] == [b"d", b"e", b"\2", b"\3"]
    one.release()
    again = attach(one, FIRST)
    assert kind_of(one.next(again)) is FrameKind.GONE
    assert one._again is None
    assert not one._data


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ChunkWindow.fail, FrameKind.FAILED),
        (ChunkWindow.abort, FrameKind.ABORTED),
        (ChunkWindow.close, FrameKind.FAILED),
    ],
)
def test_readers_are_told_how_an_update_ended(
    end: Callable[[ChunkWindow], None], kind: FrameKind
) -> None:
    one = window([FIRST])
    offer(one, 0)
    reader = attach(one, FIRST)
    end(one)
    one.abort()
    assert kind_of(one.next(reader)) is kind
    assert kind_of(one.next(attach(one, SECOND))) is kind


def test_a_window_that_is_closed_waits_for_no_follower() -> None:
    one = window([FIRST])
    offer(one, 0, 1)
    threading.Timer(0.1, one.close).start()
    one.make_room(2, lambda: None)


def test_a_reader_that_is_slower_than_the_hold_keeps_its_chunk() -> None:
    """No chunk is overwritten while it is sent."""
    one = window([FIRST], hold_s=0.0)
    offer(one, 0, 1)
    reader = attach(one, FIRST)
    held = one.next(reader)
    assert held is not None
    assert not has_room(one, 2)
    assert isinstance(held.data, memoryview)
    assert bytes(held.data) == b"\0"


@pytest.mark.parametrize("ends", ["begins another update", "releases its memory"])
def test_memory_is_not_used_again_while_it_is_sent(ends: str) -> None:
    held = window([0], chunks=2)
    held.offer(0, memoryview(b"chunk"), [])
    stopped, ended = threading.Event(), threading.Event()
    cursor = held.attach(0, 1, 0, is_next=False, stop=stopped.set)
    assert cursor is not None
    assert held.next(cursor) is not None

    def end() -> None:
        if ends == "begins another update":
            held.begin(2, 1, [[]])
        else:
            held.release()
        ended.set()

    threading.Thread(target=end, daemon=True).start()
    assert stopped.wait(5), "the send is told to stop"
    assert not ended.wait(0.3), "and waited for"
    held.detach(cursor)
    assert ended.wait(5)


def test_a_host_gets_no_bytes_of_chunks_that_it_does_not_want() -> None:
    """It gets their fingerprints; nothing is read again for it."""

    def again(chunk: int) -> memoryview:
        raise AssertionError(f"chunk {chunk} is read again")

    made = ChunkWindow(4, LONG_S)
    made.begin(1, 2, [[FIRST], [SECOND]], again, {FIRST: {1}, SECOND: {0}})
    offer(made, 0, 1)
    got = {}
    for place in (FIRST, SECOND):
        cursor = attach(made, place)
        for chunk in (0, 1):
            given = made.next(cursor)
            assert given is not None
            assert (given.kind, given.fingerprints) == (FrameKind.CHUNK, [chunk])
            got[place, chunk] = bytes(given.data)  # type: ignore[arg-type]  # no Pieces here
            made.sent(cursor)
    assert got == {(FIRST, 0): b"\0", (FIRST, 1): b"", (SECOND, 0): b"", (SECOND, 1): b"\1"}
