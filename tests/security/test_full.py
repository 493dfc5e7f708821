"""A full /dev/shm and a full memory: an error at init that names the size, no signal later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.security.full import MODEL_NBYTES
from tests.shm.processes import environment, output, run
from weightsync.errors import TransferError
from weightsync.weights.copying import arena

MODULE = [sys.executable, "-m", "tests.security.full"]
CPU = torch.device("cpu")


def small_shm(megabytes: int) -> list[str]:
    """A command that runs what follows with so little in /dev/shm, in mounts of its own."""
    mount = f'mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if os.geteuid() != 0 or run([*command, "true"]).returncode != 0:
        pytest.skip("mounting in a private mount namespace is not permitted here")
    return command


def test_a_full_dev_shm_is_an_error_at_init_and_the_ring_fits_all_the_same() -> None:
    said = output([*small_shm(16), *MODULE, "too_little_shared_memory"]).splitlines()
    assert said[0].startswith("SegmentError: ")
    assert f"a segment of {MODEL_NBYTES} bytes is wanted" in said[0]
    assert "--shm-size" in said[0]
    assert said[1] == "held"


def test_a_ring_that_does_not_fit_is_an_error_at_init() -> None:
    script = """
import weightsync as ws
from torch import nn
receiver = ws.WeightReceiver(nn.Linear(8, 8))
try:
    ws.connect(nn.Linear(8, 8), to=receiver.handle, packed=True, bucket_nbytes=2 << 20)
except ws.SegmentError as exc:
    print(exc)
assert receiver.shared_memory_usage() == [] and receiver.status().may_generate
receiver.close()
"""
    said = output([*small_shm(4), sys.executable, "-c", script])
    assert f"a segment of {8 << 20} bytes is wanted and /dev/shm has " in said


def test_staged_weights_without_memory_are_an_error_at_init() -> None:
    done = subprocess.run(
        [*MODULE, "too_little_memory"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TransferError: ")
    assert f"this update takes {MODEL_NBYTES} bytes" in done.stdout
    assert 'apply="in_place"' in done.stdout


def test_more_than_there_is_is_refused_before_it_is_touched() -> None:
    huge = arena.available(CPU) * 100
    with pytest.raises(TransferError, match=f"takes {huge} bytes of memory on cpu"):
        arena.allocate(huge, CPU)
    assert not arena.fits(huge, CPU)
    assert arena.allocate(5, CPU).tolist() == [0] * 5


def test_what_the_kernel_would_promise_and_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "available", lambda _: 4096)
    monkeypatch.setattr(arena, "_kilobytes", lambda _: 0)
    with pytest.raises(TransferError, match=r"takes 4097 bytes .* 4096 bytes are free"):
        arena.allocate(4097, CPU)
    assert arena.allocate(4096, CPU).numel() == 4096


def test_the_limits_of_control_groups_count(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("12:cpuset:/other\n0::/pod/container\n")
    inner = tmp_path / "root" / "pod" / "container"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (inner.parent, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 200\nactive_file 50\n")
    assert arena._group_rooms(tmp_path / "root", own) == [500]
    (inner / "memory.max").write_text("600\n")
    assert arena._group_rooms(tmp_path / "root", own) == [100, 500]
    assert arena._group_rooms(tmp_path / "absent", own) == []
    assert arena._group_rooms(tmp_path / "root", tmp_path / "absent") == []
