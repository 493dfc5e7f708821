"""Files that hold what was given, as safetensors reads them; directories of dead owners."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.children import CONTEXT
from weightsync.errors import ConfigError, TransferError
from weightsync.integrations.sglang import files
from weightsync.integrations.sglang.files import (
    INDEX,
    Snapshot,
    WeightDirectory,
    lay_out,
    read_manifest,
)
from weightsync.shm.owner_lock import OwnerLock
from weightsync.tensors import as_bytes, spec_of

TENSORS = {
    "odd": torch.randn(33, 7).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "whole": torch.arange(5),
    "small": torch.randn(9).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
    "double": torch.randn(3, dtype=torch.float64),
}


def put(shelf: WeightDirectory, member: object, *, shard_nbytes: int) -> Snapshot:
    batch = shelf.join("update", member)
    specs = [spec_of(name, tensor) for name, tensor in TENSORS.items()]
    writing = batch.add(lay_out(specs, shard_nbytes=shard_nbytes))
    for name, tensor in TENSORS.items():
        writing.write(name, as_bytes(tensor))
    writing.done()
    return batch


def read(directory: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            held |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return held


@pytest.mark.parametrize("shard_nbytes", [1, 100, 1 << 20])
def test_what_was_written_is_read(tmp_path: Path, shard_nbytes: int) -> None:
    shelf, member = WeightDirectory(tmp_path), object()
    batch = put(shelf, member, shard_nbytes=shard_nbytes)
    directory = batch.publish()
    assert batch.publish() == directory
    held = read(directory)
    assert held.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert held[name].dtype == tensor.dtype
        assert held[name].shape == tensor.shape
        assert torch.equal(as_bytes(held[name]), as_bytes(tensor))
    index = json.loads((directory / INDEX).read_bytes())["weight_map"]
    assert set(index.values()) == {file.name for file in directory.glob("*.safetensors")}
    manifest = read_manifest(directory)
    assert manifest is not None
    assert set(manifest.specs) == {spec_of(name, tensor) for name, tensor in TENSORS.items()}
    shelf.leave(batch, member)
    assert not directory.exists()


def test_permissions_are_those_of_the_named_directory(tmp_path: Path) -> None:
    for mode, wanted in ((0o700, 0o600), (0o755, 0o644), (0o777, 0o644)):
        base = tmp_path / oct(mode)
        base.mkdir()
        base.chmod(mode)
        shelf, member = WeightDirectory(base), object()
        directory = put(shelf, member, shard_nbytes=1 << 20).publish()
        (file,) = directory.glob("*.safetensors")
        assert file.stat().st_mode & 0o777 == wanted
        assert directory.stat().st_mode & 0o777 == mode & 0o755
        assert directory.parent.stat().st_mode & 0o777 == mode & 0o755
        shelf.close()
        assert list(base.iterdir()) == []


def test_files_that_are_not_complete_are_not_read(tmp_path: Path) -> None:
    shelf, writer, reader = WeightDirectory(tmp_path), object(), object()
    batch = shelf.join("update", writer)
    assert shelf.join("update", reader) is batch
    batch.add(lay_out([spec_of("a", torch.ones(3))], shard_nbytes=100))
    shelf.leave(batch, writer)
    with pytest.raises(TransferError, match="not complete"):
        batch.publish()
    with pytest.raises(TransferError, match="still lie in"):
        shelf.join("the next", writer)
    shelf.leave(batch, reader)
    assert shelf.join("the next", writer) is not batch
    shelf.close()


def test_a_directory_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    shelf, member = WeightDirectory(tmp_path), object()
    layout = lay_out([spec_of("a", torch.ones(3))], shard_nbytes=100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    batch = shelf.join("update", member)
    with pytest.raises(TransferError, match=r"cannot be put into.*No space left"):
        batch.add(layout)
    shelf.leave(batch, member)
    shelf.close()
    assert list(tmp_path.iterdir()) == []


def own_and_die(base: str, ready: Any) -> None:
    shelf = WeightDirectory(Path(base))
    batch = put(shelf, shelf, shard_nbytes=1 << 20)
    ready.send(str(batch.publish()))
    os._exit(9)


def test_what_a_dead_owner_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=own_and_die, args=(str(tmp_path), there))
    process.start()
    try:
        assert here.poll(60)
        left = Path(here.recv())
        process.join(20)
        assert left.is_dir()
    finally:
        process.kill()
        process.join(20)
    held = tmp_path / "weightsync-sglang-held"
    held.mkdir()
    lock = OwnerLock(held)
    lock.link(held / "owner.lock")
    foreign = tmp_path / "weightsync-sglang-foreign"
    foreign.mkdir()
    files.remove_stale_homes(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([held, foreign])
    lock.release()
    files.remove_stale_homes(tmp_path)
    assert list(tmp_path.iterdir()) == [foreign]


def test_foreign_directories_say_nothing(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert read_manifest(tmp_path) is None
    (tmp_path / INDEX).write_text('{"weight_map": ["x"]}')
    assert read_manifest(tmp_path) is None


def test_dtypes_that_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match=r"b: of a dtype.*cast with dtype="):
        lay_out([spec_of("b", torch.ones(2).to(torch.float8_e5m2fnuz))], shard_nbytes=100)
