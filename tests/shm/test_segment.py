"""Segments between real processes: round trips, suspicion, full memory, and their end."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import operator
import os
import random
import re
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.shm.processes import (
    UNSHARE,
    output,
    private_directory,
    python,
    run,
)
from weightsync.errors import ConfigError, HandleError, SegmentError
from weightsync.shm import segment as segment_module
from weightsync.shm.segment import (
    PATTERN,
    Segment,
    find_leftovers,
    live_segments,
    remove_leftovers,
)

pytestmark = pytest.mark.usefixtures("frozen")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def shm() -> Iterator[Path]:
    with private_directory() as path:
        yield path


def descriptors() -> int:
    gc.collect()  # an earlier failure's traceback may hold a mapping, and that a descriptor
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped(directory: Path) -> bool:
    return str(directory) in Path("/proc/self/maps").read_text()


class TestRoundTrip:
    def test_reader_in_another_process_sees_the_bytes(self, shm: Path) -> None:
        with Segment.create(10_000, directory=shm) as segment:
            segment.tensor(9_000, 3).copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
            script = """
with Segment.open(args[0], nbytes=10_000, directory=directory) as segment:
    assert not segment.owner and not segment.writable and segment.owner_alive()
    print(segment.tensor(8_999, 5).tolist())
"""
            assert output(python(script, shm, segment.name)).strip() == "[0, 1, 2, 3, 0]"
            assert (shm / segment.name).exists()

    def test_writer_in_another_process_writes_into_ours(self, shm: Path) -> None:
        with Segment.create(100, directory=shm) as segment:
            script = """
with Segment.open(args[0], nbytes=100, writable=True, directory=directory) as segment:
    segment.buffer[99] = 7
"""
            output(python(script, shm, segment.name))
            assert segment.tensor()[99] == 7
            assert int(segment.tensor().sum()) == 7

    def test_read_only_is_enforced_by_the_kernel(self, shm: Path) -> None:
        with Segment.create(100, directory=shm) as segment:
            with Segment.open(segment.name, nbytes=100, directory=shm) as reader:
                assert reader.buffer.readonly
                with pytest.raises(TypeError):
                    reader.buffer[0] = 1
            script = "Segment.open(args[0], nbytes=100, directory=directory).tensor().fill_(1)"
            assert run(python(script, shm, segment.name)).returncode == -signal.SIGSEGV
            assert int(segment.tensor().sum()) == 0

    def test_file_is_exact_private_and_named_by_the_pattern(self, shm: Path) -> None:
        with Segment.create(4097, directory=shm, prefault=False) as segment:
            info = (shm / segment.name).stat()
            assert PATTERN.fullmatch(segment.name)
            assert (info.st_size, stat.S_IMODE(info.st_mode)) == (4097, 0o600)
            assert info.st_blocks * 512 >= 4097
            assert (segment.nbytes, len(segment.buffer)) == (4097, 4097)

    def test_address_is_that_of_the_mapping(self, shm: Path) -> None:
        with Segment.create(64, directory=shm) as segment:
            segment.buffer[5:8] = b"abc"
            assert ctypes.string_at(segment.address + 5, 3) == b"abc"
            assert segment.tensor(5).data_ptr() == segment.address + 5
            with Segment.open(segment.name, nbytes=64, directory=shm) as reader:
                assert reader.address != segment.address
                assert ctypes.string_at(reader.address + 5, 3) == b"abc"

    def test_live_segments_lists_created_and_opened(self, shm: Path) -> None:
        gc.collect()  # what an earlier test left ends here, and not in between
        before = live_segments()
        with Segment.create(64, directory=shm) as segment:
            reader = Segment.open(segment.name, nbytes=64, directory=shm)
            assert live_segments() == [*before, segment, reader]
            reader.close()
            assert live_segments() == [*before, segment]


class TestTensor:
    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(-1, 1), (0, 101), (100, 1), (101, None), (5, -1), (50, 51)]
    )
    def test_ranges_outside_are_refused(self, shm: Path, offset: int, nbytes: int | None) -> None:
        refused = pytest.raises(SegmentError, match=r"segment weightsync-\w+, which has 100")
        with Segment.create(100, directory=shm) as segment, refused:
            segment.tensor(offset, nbytes)

    def test_ranges_to_the_edge_and_empty_ones_are_given(self, shm: Path) -> None:
        with Segment.create(100, directory=shm) as segment:
            shapes = [segment.tensor(*place).shape for place in [(), (99,), (40, 60), (100,)]]
            assert shapes == [(100,), (1,), (60,), (0,)]

    def test_views_have_storages_of_their_own(self, shm: Path) -> None:
        with Segment.create(100, directory=shm) as segment:
            storage = segment.tensor(40, 20).untyped_storage()
            assert (storage.nbytes(), storage.data_ptr()) == (20, segment.address + 40)

    def test_view_outlives_close_and_the_last_one_unmaps(self, shm: Path) -> None:
        segment = Segment.create(8192, directory=shm)
        views = [segment.tensor(0, 4).fill_(3), segment.tensor(4096)]
        segment.close()
        assert int(views[0].sum()) == 12
        assert mapped(shm)
        views.clear()
        assert not mapped(shm)

    def test_closed_segment_gives_no_views(self, shm: Path) -> None:
        segment = Segment.create(64, directory=shm)
        segment.close()
        for use in (segment.tensor, lambda: segment.buffer):
            with pytest.raises(SegmentError, match="closed in this process"):
                use()


class TestPrivate:
    """A private mapping, into which the code of users may write."""

    PAGES = 64

    def test_what_was_written_is_restored_whoever_wrote_and_whenever(self) -> None:
        """Also between calls with nothing to restore, which read no page table."""
        page, generator = mmap.PAGESIZE, random.Random(5)
        with Segment.create(self.PAGES * page) as segment, closing(segment.private()) as private:
            shown, seen = segment.tensor(), private.tensor()
            with ThreadPoolExecutor(1) as other:
                for round_ in range(300):
                    shown.random_(0, 256)
                    start = generator.randrange(self.PAGES) * page
                    nbytes = generator.randrange(1, segment.nbytes - start + 1)
                    for number in generator.sample(range(self.PAGES), generator.randrange(3)):
                        write = partial(operator.setitem, seen.numpy(), number * page + 7, 1)
                        other.submit(write).result() if round_ % 2 else write()
                    private.restore_written(private.address + start, nbytes)
                    inside = slice(start, start + nbytes)
                    assert torch.equal(seen[inside], shown[inside]), f"round {round_}"

    def test_a_look_that_fails_is_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: int) -> None:
            raise MemoryError

        with Segment.create(mmap.PAGESIZE) as segment, closing(segment.private()) as private:
            private.restore_written(private.address, mmap.PAGESIZE)
            seen = private.tensor().numpy()
            for _ in range(50):  # most of them without a page fault between the two looks
                seen[7] = 1
                with monkeypatch.context() as patch:
                    patch.setattr(segment_module, "_written_pages", fails)
                    with pytest.raises(MemoryError):
                        private.restore_written(private.address, mmap.PAGESIZE)
                private.restore_written(private.address, mmap.PAGESIZE)
                assert not seen[7]

    def test_pages_are_looked_at_where_no_page_faults_are_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a sandbox whose kernel says that there were none."""
        segment_module._counts_page_faults.cache_clear()
        with monkeypatch.context() as patch, Segment.create(mmap.PAGESIZE) as segment:
            patch.setattr(segment_module, "_page_faults", lambda: 0)
            with closing(segment.private()) as private:
                for value in range(1, 5):
                    private.tensor()[7] = value
                    private.restore_written(private.address, mmap.PAGESIZE)
                    assert not private.tensor().any()
        segment_module._counts_page_faults.cache_clear()
        assert segment_module._counts_page_faults()

    def test_pages_are_not_looked_at_again_without_a_page_fault(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks, look = Counter[str](), segment_module._written_pages

        def counted(address: int, nbytes: int) -> list[int] | None:
            looks["all"] += 1
            return look(address, nbytes)

        monkeypatch.setattr(segment_module, "_written_pages", counted)
        with Segment.create(mmap.PAGESIZE) as segment, closing(segment.private()) as private:
            for _ in range(1000):
                private.restore_written(private.address, mmap.PAGESIZE)
        assert 1 <= looks["all"] < 500  # the test's own memory may have faults


class TestSuspicion:
    @pytest.mark.parametrize(
        "name",
        [
            "",
            "weightsync-",
            "weightsync-" + "0" * 31,
            "weightsync-" + "0" * 32 + "\n",
            "weightsync-" + "A" * 32,
            "../weightsync-" + "0" * 32,
            "/dev/shm/weightsync-" + "0" * 32,
            "weightsync-" + "0" * 15 + "/" + "0" * 16,
        ],
    )
    def test_names_not_ours_are_refused(self, shm: Path, name: str) -> None:
        before = descriptors()
        with pytest.raises(HandleError, match="is not the name of a segment"):
            Segment.open(name, nbytes=64, directory=shm)
        assert descriptors() == before

    @pytest.mark.parametrize("nbytes", [0, -1, sys.maxsize + 1])
    def test_sizes_that_cannot_be_are_refused(self, shm: Path, nbytes: int) -> None:
        with pytest.raises(ConfigError, match="give a positive size"):
            Segment.create(nbytes, directory=shm)
        with pytest.raises(ConfigError, match="give a positive size"):
            Segment.open("weightsync-" + "0" * 32, nbytes=nbytes, directory=shm)
        assert list(shm.iterdir()) == []

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (Path.exists, os.strerror(errno.ENOENT)),
            (lambda path: path.write_bytes(bytes(65)), "has 65 bytes where the handle says 64"),
            (lambda path: path.write_bytes(bytes(63)), "has 63 bytes where the handle says 64"),
            (lambda path: path.write_bytes(b""), "has 0 bytes where the handle says 64"),
            (lambda path: path.symlink_to("/etc/passwd"), os.strerror(errno.ELOOP)),
            (lambda path: path.mkdir(), "is not a regular file but d"),
            (os.mkfifo, "is not a regular file but p"),
        ],
        ids=["absent", "longer", "truncated", "emptied", "symlink", "directory", "fifo"],
    )
    @pytest.mark.parametrize("writable", [False, True])
    def test_what_is_not_the_segment_is_not_opened(
        self, shm: Path, make: Callable[[Path], object], message: str, writable: bool
    ) -> None:
        path = shm / ("weightsync-" + "0" * 32)
        make(path)
        if writable and path.is_dir():
            message = os.strerror(errno.EISDIR)
        before = descriptors()
        with pytest.raises(SegmentError, match=re.escape(message)):
            Segment.open(path.name, nbytes=64, writable=writable, directory=shm)
        assert descriptors() == before

    @needs_root
    def test_file_of_another_user_is_neither_opened_nor_a_leftover(self, shm: Path) -> None:
        path = shm / ("weightsync-" + "0" * 32)
        path.write_bytes(bytes(64))
        os.chown(path, 12345, 12345)
        with pytest.raises(SegmentError, match="belongs to uid 12345, and this process runs as 0"):
            Segment.open(path.name, nbytes=64, directory=shm)
        assert remove_leftovers(shm) == []
        assert path.exists()

    def test_missing_directory_is_a_segment_error(self, tmp_path: Path) -> None:
        for use in (lambda path: Segment.create(64, directory=path), find_leftovers):
            with pytest.raises(SegmentError, match=os.strerror(errno.ENOENT)):
                use(tmp_path / "absent")


class TestSpace:
    def test_full_memory_is_an_error_that_names_the_size(self, tmp_path: Path) -> None:
        script = """
half = Segment.create(1 << 19, directory=directory)
half.tensor().fill_(1)
try:
    Segment.create((1 << 19) + 1, directory=directory)
except SegmentError as error:
    print(error)
other = Segment.create(1 << 19, directory=directory)
other.tensor().fill_(1)
assert sorted(os.listdir(directory)) == sorted([half.name, other.name])
"""
        mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
        if run([*UNSHARE, "-m", "sh", "-c", mount, "sh", "true"]).returncode != 0:
            pytest.skip("mounting in a private mount namespace is not permitted here")
        said = output([*UNSHARE, "-m", "sh", "-c", mount, "sh", *python(script, tmp_path)])
        wanted = f"524289 bytes is wanted and {tmp_path} has 524288 bytes free"
        assert wanted in said
        assert "--shm-size" in said

    def test_size_that_cannot_be_reserved_leaves_nothing(self, shm: Path) -> None:
        before = descriptors()
        with pytest.raises(SegmentError):
            Segment.create(sys.maxsize, directory=shm)
        assert list(shm.iterdir()) == []
        assert descriptors() == before

    def test_cycles_leave_descriptors_and_directory_as_they_were(self, shm: Path) -> None:
        before = descriptors()
        for _ in range(200):
            with (
                Segment.create(5000, directory=shm) as segment,
                Segment.open(segment.name, nbytes=5000, directory=shm) as reader,
            ):
                assert int(reader.tensor().sum()) == 0
                assert reader.owner_alive()
        assert descriptors() == before
        assert list(shm.iterdir()) == []


class TestEnd:
    def test_unlink_and_close_are_idempotent(self, shm: Path) -> None:
        segment = Segment.create(64, directory=shm)
        reader = Segment.open(segment.name, nbytes=64, directory=shm)
        for end in (segment.unlink, segment.unlink, segment.close, segment.close, segment.unlink):
            end()
            assert not (shm / segment.name).exists()
        assert not reader.owner_alive()
        reader.close()
        reader.close()

    def test_readers_do_not_unlink(self, shm: Path) -> None:
        with Segment.create(64, directory=shm) as segment:
            reader = Segment.open(segment.name, nbytes=64, writable=True, directory=shm)
            with reader, pytest.raises(ConfigError, match="only its owner unlinks it"):
                reader.unlink()
            assert (shm / segment.name).exists()

    def test_owner_that_unlinked_is_still_alive(self, shm: Path) -> None:
        segment = Segment.create(64, directory=shm)
        with Segment.open(segment.name, nbytes=64, directory=shm) as reader:
            segment.unlink()
            assert segment.owner_alive()
            assert reader.owner_alive()
            segment.close()
            assert not segment.owner_alive()
            assert not reader.owner_alive()
