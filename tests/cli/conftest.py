"""One server for all tests of the command line, each of which first pushes its own weights."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import serving_tiny, tiny_tensors, write_checkpoint
from tests.segments import opened_since
from weightsync.shm.segment import live_segments


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The URL of a server process with the tiny model."""
    with serving_tiny() as address:
        yield address


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that fits the server."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_tensors(5))


@pytest.fixture(scope="session")
def down() -> Iterator[str]:
    """The URL of a port that is bound, without a listening socket."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def segments_closed() -> Iterator[None]:
    """Fail the test if a verb that it ran in this process left a segment open."""
    before = live_segments()
    yield
    assert not opened_since(before)
