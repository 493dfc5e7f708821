"""Checkpoints in safetensors files: found, described, tied, cast, and refused where bad."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightsync as ws
from weightsync.specs import Manifest
from weightsync.weights.sources.safetensors_source import SafetensorsSource

Tensors = dict[str, torch.Tensor]
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def some(*names: str, dtype: torch.dtype = torch.float32) -> Tensors:
    return {name: torch.randn(5, 3, dtype=dtype) for name in names}


def write(
    path: Path, *shards: Tensors, config: dict[str, object] | None = None, index: bool = True
) -> Path:
    """Write a checkpoint of one file, or of several with their index."""
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors")
        return path
    table: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i:05}.safetensors"
        save_file(shard, path / file)
        table |= dict.fromkeys(shard, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": table})
        (path / "model.safetensors.index.json").write_text(text)
    return path


def test_one_file_is_read_as_its_header_says(tmp_path: Path) -> None:
    stored = {
        "half": torch.randn(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([[True], [False]]),
        "full": torch.randn(2, 2),
        "nothing": torch.empty(0, 4),
    }
    source = SafetensorsSource(write(tmp_path, stored) / "model.safetensors")
    assert {s.name: (s.dtype, s.shape) for s in source.manifest.specs} == {
        "half": ("bfloat16", (3,)),
        "scalar": ("int64", ()),
        "flags": ("bool", (2, 1)),
        "full": ("float32", (2, 2)),
        "nothing": ("float32", (0, 4)),
    }
    read = list(source.tensors())
    assert [name for name, _ in read] == [spec.name for spec in source.manifest.specs]
    assert all(torch.equal(tensor, stored[name]) for name, tensor in read)
    assert source.stable_tensors() is None


def test_shards_are_read_file_by_file(tmp_path: Path) -> None:
    first, second = some("a", "c"), some("b", "d")
    source = SafetensorsSource(write(tmp_path, first, second))
    read = dict(source.tensors())
    assert list(read) == [spec.name for spec in source.manifest.specs]
    assert set(list(read)[:2]) == set(first)
    assert all(torch.equal(read[name], tensor) for name, tensor in (first | second).items())


def test_a_directory_with_one_file_of_another_name_is_that_file(tmp_path: Path) -> None:
    save_file(some("x"), tmp_path / "adapter.safetensors")
    assert [spec.name for spec in SafetensorsSource(tmp_path).manifest.specs] == ["x"]


def test_it_casts_and_renames_as_announced(tmp_path: Path) -> None:
    stored = some("w") | {"n": torch.tensor([3])}
    source = SafetensorsSource(
        write(tmp_path, stored), dtype=torch.bfloat16, rename=lambda name: f"model.{name}"
    )
    assert {s.name: s.dtype for s in source.manifest.specs} == {
        "model.w": "bfloat16",
        "model.n": "int64",
    }
    assert {name for name, _ in source.tensors()} == {"model.w", "model.n"}


@pytest.mark.parametrize(
    ("config", "aliases"),
    [
        ({"tie_word_embeddings": True}, {HEAD: EMBEDDINGS}),
        ({"text_config": {"tie_word_embeddings": True}}, {HEAD: EMBEDDINGS}),
        ({"tie_word_embeddings": False}, {}),
        ({}, {}),
        (None, {}),
    ],
)
def test_a_head_that_config_ties_is_an_alias(
    tmp_path: Path, config: dict[str, object] | None, aliases: dict[str, str]
) -> None:
    source = SafetensorsSource(write(tmp_path, some(EMBEDDINGS, "model.norm"), config=config))
    assert source.manifest.aliases == aliases


def test_a_head_of_the_same_bytes_is_an_alias_and_of_others_is_not(tmp_path: Path) -> None:
    table = some(EMBEDDINGS)
    same = write(tmp_path / "same", table, {HEAD: table[EMBEDDINGS].clone()})
    source = SafetensorsSource(same)
    assert source.manifest.aliases == {HEAD: EMBEDDINGS}
    assert [name for name, _ in source.tensors()] == [EMBEDDINGS]
    other = write(tmp_path / "other", table, some(HEAD), config={"tie_word_embeddings": True})
    assert SafetensorsSource(other).manifest.aliases == {}


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 3), "norm": nn.LayerNorm(3)})
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tied:
            embeddings = self.model["embed_tokens"]
            assert isinstance(embeddings, nn.Embedding)
            self.lm_head.weight = embeddings.weight


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("shm_clean")
def test_a_head_that_is_not_in_the_file_arrives(tmp_path: Path, tied: bool) -> None:
    held = Tied(tied=True)
    stored = {name: t.detach().clone() for name, t in held.state_dict().items() if name != HEAD}
    source = SafetensorsSource(write(tmp_path, stored, config={"tie_word_embeddings": True}))
    model = Tied(tied=tied)
    receiver = ws.WeightReceiver(model)
    try:
        with ws.connect(source, to=receiver.handle) as sender:
            report = sender.send_weights()
    finally:
        receiver.close()
    assert (report.tensors, report.packed, report.verified) == (len(stored), True, "held")
    assert torch.equal(model.lm_head.weight, stored[EMBEDDINGS])
    assert all(torch.equal(model.state_dict()[name], t) for name, t in stored.items())


@pytest.mark.usefixtures("shm_clean")
def test_files_that_were_replaced_are_sent_and_of_another_model_refused(tmp_path: Path) -> None:
    path = write(tmp_path, some("weight"))
    model = nn.Linear(3, 5, bias=False)
    receiver = ws.WeightReceiver(model)
    try:
        with ws.connect(ws.SafetensorsSource(path), to=receiver.handle) as sender:
            sender.send_weights()
            newer = some("weight")
            (path / "model.safetensors").unlink()
            write(path, newer)
            sender.send_weights()
            assert torch.equal(model.weight, newer["weight"])
            (path / "model.safetensors").unlink()
            write(path, some("other"))
            with pytest.raises(ws.ManifestMismatchError, match=r"no longer.*other, weight"):
                sender.send_weights()
    finally:
        receiver.close()


def test_what_is_no_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ws.ConfigError, match=r"nowhere does not exist; give a directory"):
        SafetensorsSource(tmp_path / "nowhere")
    with pytest.raises(ws.ConfigError, match="holds no safetensors file; give"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ws.ConfigError, match=r"but pytorch_model.bin, which may be pickles"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ws.ConfigError, match=r"pytorch_model.bin is not a .safetensors file"):
        SafetensorsSource(tmp_path / "pytorch_model.bin")
    write(tmp_path, some("a"), some("b"), index=False)
    with pytest.raises(ws.ConfigError, match=r"2 .safetensors files and no model.safetensors.ind"):
        SafetensorsSource(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, some("a"), some("b"))
    index, file = path / "model.safetensors.index.json", path / "model-00001.safetensors"
    text = index.read_text()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ws.ConfigError, match="cannot be read as a safetensors file"):
        SafetensorsSource(path)
    save_file(some("c"), file)
    with pytest.raises(ws.ConfigError, match=r"index alone: b; in the files alone: c"):
        SafetensorsSource(path)
    file.unlink()
    with pytest.raises(ws.ConfigError, match="part of the checkpoint and is not there"):
        SafetensorsSource(path)
    index.write_text(text.replace(file.name, "../elsewhere"))
    with pytest.raises(ws.ConfigError, match=r"outside its directory: \.\./elsewhere"):
        SafetensorsSource(path)
    index.write_text("[]")
    with pytest.raises(ws.ConfigError, match="holds a list, not an object"):
        SafetensorsSource(path)


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """A checkpoint of 256 MB is described without memory, and read a tensor at a time."""
    path = write(tmp_path, {f"t{i}": torch.ones(16 << 18) for i in range(16)})
    script = (
        "import resource, sys, torch\n"
        "from weightsync.weights.sources.safetensors_source import SafetensorsSource\n"
        "anonymous = lambda: int(next(line.split()[1] for line in open('/proc/self/status')"
        " if line.startswith('RssAnon')))\n"
        "before = anonymous()\n"
        f"source = SafetensorsSource({str(path)!r})\n"
        "total = sum(float(tensor[0]) for _, tensor in source.tensors())\n"
        "print(int(total), anonymous() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    total, grown_kb = map(int, done.stdout.split())
    assert total == 16
    assert grown_kb < 64 << 10  # all of it would be 256 << 10


class Meddled(ws.WrappingSource):
    """Runs `change` once, when four tensors of the other source were read."""

    change: Callable[[], object] | None = None

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(pairs):
            if i == 3 and self.change is not None:
                change, self.change = self.change, None
                change()
            yield pair


def named(value: float) -> Tensors:
    return {f"t{i}": torch.full((1 << 14,), value) for i in range(8)}


def taken(into: Tensors) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    """A hook that keeps copies of what it is given."""

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        into.update((name, tensor.clone()) for name, tensor in pairs)

    return load


def rewritten(file: Path) -> None:
    """Write other weights of the same size into a file that is open, from its end on."""
    other = file.with_name("other")
    save_file(named(7.0), other)
    new = other.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(len(new) // 2)
        opened.write(new[len(new) // 2 :])


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def cut_to_nothing(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("change", [rewritten, cut, cut_to_nothing])
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("hook", [False, True])
def test_files_that_change_while_they_are_sent_are_named_and_not_committed(
    tmp_path: Path, change: Callable[[Path], None], files: int, *, hook: bool
) -> None:
    tensors, model, given = named(1.0), nn.Module(), Tensors()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))
    parts = [tensors] if files == 1 else [{"t0": tensors.pop("t0")}, tensors]
    path = write(tmp_path / "checkpoint", *parts)
    file = max(path.glob("*.safetensors"))
    receiver = ws.WeightReceiver(taken(given) if hook else model, apply="staged")
    source = Meddled(ws.SafetensorsSource(path))
    with ws.connect(source, to=receiver) as sender:
        sender.send_weights()
        before = file.read_bytes()
        source.change = lambda: change(file)
        with pytest.raises(ws.VerificationError) as caught:
            sender.send_weights()
        assert str(file) in str(caught.value)
        assert caught.value.names == (file.name,)
        assert (receiver.version, receiver.status().state) == (1, "READY")
        held = given if hook else model.state_dict()
        assert all(bool((tensor == 1).all()) for tensor in held.values())
        file.write_bytes(before)
        assert sender.send_weights().version == 2


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("which", [0, 1])
def test_files_that_are_replaced_while_they_are_sent_are_sent_as_they_were(
    tmp_path: Path, which: int
) -> None:
    given = Tensors()
    path = write(tmp_path / "old", *({name: t} for name, t in named(1.0).items()))
    newer = write(tmp_path / "new", *({name: t} for name, t in named(2.0).items()))
    source = Meddled(ws.SafetensorsSource(path))

    def replace() -> None:
        for file in sorted(newer.glob("*.safetensors"))[which::2]:
            file.rename(path / file.name)

    with ws.connect(source, to=ws.WeightReceiver(taken(given), apply="staged")) as sender:
        source.change = replace
        sender.send_weights()
        assert all(bool((tensor == 1).all()) for tensor in given.values())
        sender.send_weights()
        new = {f"t{i}" for i in range(8)[which::2]}
        assert {n for n, t in given.items() if bool((t == 2).all())} == new


def test_a_tensor_that_somebody_keeps_is_not_overwritten(tmp_path: Path) -> None:
    stored = {f"t{i}": torch.randn(i + 1) for i in range(6)}
    kept = dict(SafetensorsSource(write(tmp_path, stored)).tensors())
    assert all(torch.equal(kept[name], tensor) for name, tensor in stored.items())


def test_the_public_name_is_the_class() -> None:
    assert ws.SafetensorsSource is SafetensorsSource
    assert isinstance(Manifest(()), ws.Manifest)
