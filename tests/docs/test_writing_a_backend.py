"""The page docs/writing-a-backend.md works as written: its backend, its example and its test class.

tests/backends/test_contract.py runs the contract on the backend.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import weightsync as ws
from tests.docs.pages import Block, blocks
from weightsync.backends import registry
from weightsync.backends.base import Endpoint, TransferOptions
from weightsync.backends.registry import get_backend
from weightsync.testing import TinyModel
from weightsync.weights.copying.fingerprint import table_digest
from weightsync.weights.copying.layout import StreamLayout

BLOCKS = blocks("docs/writing-a-backend.md")
CODE = [block for block in BLOCKS if block.language == "python"]
BACKEND, USE, TEST, RING = CODE[:4], CODE[4], CODE[5], CODE[6]
LINES = 150

Names = dict[str, Any]


def run(block: Block, names: Names) -> None:
    """Run one block; a traceback names the page and the line in it."""
    text = "\n" * block.line + block.text
    exec(compile(text, block.page, "exec", dont_inherit=True), names)


def model(seed: int) -> TinyModel:
    torch.manual_seed(seed)
    made = TinyModel()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOOL_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def names(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """The page's names, after the blocks of the backend have run."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_endpoints", {})
    made: Names = {"model": model(1), "server_model": model(2)}
    for block in BACKEND:
        run(block, made)
    yield made
    if "receiver" in made:
        made["receiver"].close()


def code_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_backend_is_small() -> None:
    written = [line for block in BACKEND for line in code_lines(block.text)]
    imports = [line for line in written if line.startswith(("import ", "from "))]
    assert len(written) - len(imports) <= LINES


def test_every_method_is_of_the_contract_or_used() -> None:
    """No field and no method that the backend does not need."""
    text = "\n".join(block.text for block in BACKEND)
    known = dir(ws.Backend) + dir(ws.TrainerWeightTransferEngine) + dir(ws.WeightTransferEngine)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.name in known or text.count(f"{node.name}(") > 1, node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert text.count(f"self.{node.attr}") > 1, node.attr


def test_the_page_sends_weights(
    names: Names, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ws.register_backend(Spool)" in USE.text
    assert 'ws.connect(model, to=receiver.handle, backend="spool")' in USE.text
    run(USE, names)
    assert capsys.readouterr().out.split() == ["spool", "arrived", "1"]
    assert [path.name for path in directory.iterdir()] == ["id"]


def test_the_choices_that_the_page_names(names: Names) -> None:
    ws.register_backend(names["Spool"])
    receiver = names["receiver"] = ws.WeightReceiver(names["server_model"])
    for choice, path in (
        (names["Spool"](), "spool"),
        (["spool", "ipc"], "spool"),
        (["ipc", "spool"], "shared_memory"),
        ("auto", "shared_memory"),
    ):
        with ws.connect(names["model"], to=receiver.handle, backend=choice) as sender:
            assert sender.send_weights().path == path


def test_the_entry_point_of_the_page() -> None:
    (block,) = [block for block in BLOCKS if block.language == "toml"]
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert groups == {registry.GROUP: {"spool": "my_package.spool:Spool"}}


def test_the_test_class_of_the_page(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spool_as_module.py").write_text(
        "\n".join(block.text for block in [*BACKEND, TEST]), encoding="utf-8"
    )
    module = importlib.import_module("spool_as_module")
    assert issubclass(module.TestSpool, ws.testing.BackendContract)
    assert module.TestSpool.backend is module.Spool
    ws.register_backend(module.Spool)
    module.TestSpool().test_updates_follow_each_other("hook", "staged")
    module.TestSpool().test_a_flipped_bit_is_found("module", monkeypatch)
    del sys.modules["spool_as_module"]


def test_another_directory_is_a_reason(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = names["Spool"]()
    cpu = torch.device("cpu")

    def endpoint(directory: Path) -> Endpoint:
        directory.mkdir(exist_ok=True)
        monkeypatch.setenv("SPOOL_DIRECTORY", str(directory))
        return Endpoint(keys=[], facts=spool.endpoint(cpu))

    here, there = endpoint(tmp_path / "one"), endpoint(tmp_path / "other")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    assert not spool.reach(here, endpoint(link)).why_not, "one directory under two names"
    assert "another directory" in spool.reach(here, there).why_not


def test_without_a_directory_it_is_unavailable(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, "/no/such/directory"):
        if value is None:
            monkeypatch.delenv("SPOOL_DIRECTORY")
        else:
            monkeypatch.setenv("SPOOL_DIRECTORY", value)
        with pytest.raises(ws.BackendUnavailableError, match="SPOOL_DIRECTORY"):
            names["Spool"]().endpoint(torch.device("cpu"))


@pytest.mark.parametrize("name", ["../sender-a", "sender-a/../..", "/etc", "id", "", "sender-"])
def test_a_path_from_another_process_is_refused(names: Names, name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"directory": name}, names["SpoolInit"])


def test_what_a_killed_trainer_left_is_removed(names: Names, directory: Path) -> None:
    living, killed = names["SpoolSender"](), names["SpoolSender"]()
    killed._alive.close()  # as the kernel does
    assert len(list(directory.glob("sender-*"))) == 2
    names["SpoolSender"]().close()
    assert list(directory.glob("sender-*")) == [living._directory]
    living.close()
    killed.close()
    assert [path.name for path in directory.iterdir()] == []


def test_a_forked_child_keeps_no_lock(names: Names, directory: Path) -> None:
    """A data loader that outlives its trainer does not keep the trainer alive."""
    sender = names["SpoolSender"]()
    alive = sender._directory / "alive"
    (reading, writing), (forked, forks) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where threads run
        child = os.fork()
    if child == 0:
        os.write(forks, b"x")
        os.read(reading, 1)
        os._exit(0)
    try:
        os.read(forked, 1)
        assert names["is_locked"](alive), "the parent's lock stays when the child lets go of it"
        sender._alive.close()  # the trainer dies
        assert not names["is_locked"](alive)
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        for end in (reading, writing, forked, forks):
            os.close(end)
        sender.close()


def test_a_sending_half_on_the_ring(names: Names) -> None:
    """The page's engine gets every byte of a model, and each fingerprint."""
    run(RING, names)
    sent, table = bytearray(), list[int]()

    def send(_: Any, data: torch.Tensor, fingerprints: list[int]) -> None:
        sent.extend(data.numpy().tobytes())
        table.extend(fingerprints)

    def stop(engine: Any) -> None:
        engine._relay.stop()

    rest = {"send": send, "end": stop, "close": stop, "table_digest": None}
    kind: Any = type("Sender", (names["RingSender"],), rest)

    source = ws.ModuleSource(names["model"])
    options = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=2, timeout_s=20)
    ring = get_backend("ipc").trainer_engine(source, "shared_memory", options, {})
    with closing(ring), closing(kind({"ipc": ring})) as sender:
        (index,) = sender.base_readers([0])
        assert sender.base_readers([]) == []
        ring.begin([index], verify=True, source=source)
        sender.begin([0], verify=True, source=source)
        ring.transfer(lambda: None)
        sender.transfer(lambda: None)
        assert ring.table_digest == table_digest(table)
        sender.end()
        ring.end()
    layout = StreamLayout(source.manifest)
    assert len(sent) == layout.nbytes
    for (_, tensor), offset in zip(source.tensors(), layout.offsets, strict=True):
        assert sent[offset : offset + tensor.nbytes] == tensor.detach().numpy().tobytes()
