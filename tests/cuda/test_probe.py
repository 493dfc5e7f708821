"""The probe decides whether a path works, whatever ids say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.cuda.memory import PROBE_NBYTES, check_probe, probe_digest
from weightsync.errors import HandleError, SegmentError
from weightsync.shm.host_keys import host_key, pick
from weightsync.shm.segment import Segment
from weightsync.wire.offers import KeyedHandle, ProbeInfo, SegmentHandle

CONTENT = bytes(range(PROBE_NBYTES))


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(PROBE_NBYTES) as made:
        made.buffer[:] = CONTENT
        yield made


def probe(segment: Segment, *, key: str = "", nbytes: int = PROBE_NBYTES) -> ProbeInfo:
    handle = SegmentHandle(name=segment.name, nbytes=segment.nbytes)
    return ProbeInfo(
        handle={key or host_key(): handle}, nbytes=nbytes, digest=probe_digest(CONTENT)
    )


def test_known_bytes_pass(segment: Segment) -> None:
    check_probe(probe(segment), [host_key()])


def test_one_other_byte_is_another_host(segment: Segment) -> None:
    segment.buffer[17] ^= 1
    with pytest.raises(HandleError, match="other bytes than the sender wrote"):
        check_probe(probe(segment), [host_key()])


def test_a_handle_for_nobody_here(segment: Segment) -> None:
    with pytest.raises(HandleError, match="offered for HOST-other, this process is HOST-"):
        check_probe(probe(segment, key="HOST-other"), [host_key()])


def test_a_probe_that_is_gone(segment: Segment) -> None:
    info = probe(segment)
    segment.unlink()
    with pytest.raises(SegmentError, match="No such file"):
        check_probe(info, [host_key()])


def test_more_bytes_than_there_are(segment: Segment) -> None:
    with pytest.raises(HandleError, match="bytes 0 to 65 are outside this memory of 64 bytes"):
        check_probe(probe(segment, nbytes=PROBE_NBYTES + 1), [host_key()])


def test_nothing_stays_open(segment: Segment) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(3):
        check_probe(probe(segment), [host_key()])
    assert descriptors() == before


def test_the_first_key_that_fits_is_taken() -> None:
    first, second = (SegmentHandle(name=name, nbytes=1) for name in ("a", "b"))
    handles: KeyedHandle = {"HOST-1": first, "GPU-1": second}
    assert pick(handles, ["GPU-1", "HOST-1"]) is second
    assert pick(handles, ["GPU-2", "HOST-1"]) is first
    with pytest.raises(HandleError, match="offered for no key"):
        pick({}, ["HOST-1"])
