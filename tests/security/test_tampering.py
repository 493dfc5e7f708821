"""Segments that someone else deletes or cuts: an error, or the end of the process that reads on.

Only the same user can do it. A mapped file that was cut answers with SIGBUS, and files that have a
name cannot be sealed against it; SECURITY.md says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.shm.processes import private_directory, python, run
from weightsync.errors import SegmentError
from weightsync.shm.segment import DIRECTORY, Segment

READS_ON = """
segment = Segment.open(args[0], nbytes=1 << 20, directory=directory)
view = segment.tensor()
assert int(view[-1]) == 7
os.truncate(directory / args[0], 4096)
print(int(view[0]), flush=True)
print(int(view[-1]), flush=True)
"""


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("packed", [True, False])
def test_deleted_names_do_not_end_an_update_and_newcomers_are_told(packed: bool) -> None:
    source, held = nn.Linear(64, 64), nn.Linear(64, 64)
    receiver, late = ws.WeightReceiver(held), ws.WeightReceiver(nn.Linear(64, 64))
    with ws.connect(source, to=receiver.handle, packed=packed, backend="ipc") as sender:
        sender.send_weights()
        for entry in sender.shared_memory_usage():
            (DIRECTORY / entry.name).unlink()
        with torch.no_grad():
            source.weight.fill_(3.0)
        report = sender.send_weights()
        assert report.verified == "held"
        assert torch.equal(held.weight, source.weight)
        with pytest.raises(ws.WeightSyncError, match="No such file or directory"):
            sender.add(late.handle)
        assert late.shared_memory_usage() == []
        assert late.version == 2  # from the other receiver, though it did not become a member
        assert len(sender.targets) == 1
        assert sender.send_weights().version == 3
    assert (receiver.version, receiver.may_generate) == (3, True)
    receiver.close()
    late.close()


def test_a_segment_that_was_cut_is_not_opened() -> None:
    with private_directory() as shm, Segment.create(1 << 20, directory=shm) as segment:
        os.truncate(shm / segment.name, 4096)
        with pytest.raises(SegmentError, match="has 4096 bytes where the handle says 1048576"):
            Segment.open(segment.name, nbytes=1 << 20, directory=shm)


def test_one_that_is_cut_while_it_is_open_ends_its_reader_and_nobody_else() -> None:
    with private_directory() as shm, Segment.create(1 << 20, directory=shm) as segment:
        segment.tensor().fill_(7)
        done = run(python(READS_ON, shm, segment.name))
        assert done.returncode == -signal.SIGBUS
        assert done.stdout.split() == ["7"]
        assert int(segment.tensor(0, 1)) == 7


def test_the_kernel_seals_no_file_that_has_a_name() -> None:
    with private_directory() as shm, Segment.create(4096, directory=shm) as segment:
        fd = os.open(shm / segment.name, os.O_RDWR)
        try:
            with pytest.raises(PermissionError) as refused:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        finally:
            os.close(fd)
        assert refused.value.errno == errno.EPERM
