"""What `weightsync doctor` says of each pair of GPUs; the driver is a stand-in (two_gpus.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.gpu.two_gpus import GPUS, REFUSED, Node, install
from weightsync.backends.base import TrialPart
from weightsync.backends.ipc import trial
from weightsync.backends.ipc.backend import IpcBackend
from weightsync.cli import doctor
from weightsync.cli.doctor import Level

SEEN = [GPUS[2], GPUS[0]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    made = Node(receiver="", seen=SEEN)
    install(made, monkeypatch.setattr)
    monkeypatch.setattr(trial, "NBYTES", 1 << 20)
    monkeypatch.setattr(trial, "_DRIVER", tmp_path)
    monkeypatch.setattr(trial.hidden_gpus, "__defaults__", (tmp_path,))
    return made


@pytest.fixture
def offers(node: Node) -> Iterator[Any]:
    with ExitStack() as stack:
        made = []
        for node.trainer in SEEN:
            cpu = torch.device("cpu")
            made.append(trial.offer_gpu(node.trainer, cpu, len(SEEN) - 1, stack))
        yield msgspec.to_builtins(made)


def findings(offers: Any) -> list[doctor.Finding]:
    parts = IpcBackend().read_trial("cuda_ipc", offers)
    assert not isinstance(parts, str)
    assert parts[0].seen == "another process opened memory on 2 GPUs and read its bytes"
    return [doctor.judge_part("cuda_ipc", part) for part in parts[1:]]


def test_each_pair_is_read_and_timed(node: Node, offers: Any) -> None:
    first, second = findings(offers)
    for finding, pair in ((first, "GPU 0 read by GPU 1"), (second, "GPU 1 read by GPU 0")):
        assert finding.level is Level.OK
        assert finding.works is None
        assert finding.seen.startswith(f"{pair}: 1 MiB at ")
        assert finding.seen.endswith(" GB/s")
    assert node.crossed == 2 * (1 + trial._REPEATS) * trial.NBYTES


def test_a_pair_without_peer_access(node: Node, offers: Any) -> None:
    node.apart = [frozenset(SEEN)]
    for finding in findings(offers):
        assert finding.level is Level.WARNING
        assert "no peer access between " in finding.seen
        assert "nvidia-smi topo -p2p r" in finding.remedy


def test_a_driver_that_refuses_or_sends_other_bytes(node: Node, offers: Any) -> None:
    read = node.read

    def lose(source: torch.Tensor) -> None:
        read(source)
        source[0] ^= 1

    node.read = lose  # type: ignore[method-assign]
    node.fails = node.copies + 1
    first, second = findings(offers)
    assert "other bytes arrive than were sent" in first.seen
    assert REFUSED in second.seen
    assert (first.level, second.level) == (Level.WARNING, Level.WARNING)


def test_gpus_that_are_hidden(
    node: Node, offers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, uuid in enumerate([GPUS[0], GPUS[1], GPUS[2], "GPU-????????"]):
        (tmp_path / f"0000:0{i}:00.0").mkdir()
        text = f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\n"
        (tmp_path / f"0000:0{i}:00.0" / "information").write_text(text)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "2,0")
    *_, last = findings(offers)
    assert last.level is Level.WARNING
    assert "1 GPUs of this machine are not seen here (CUDA_VISIBLE_DEVICES=2,0)" in last.seen


def test_one_gpu_has_no_pair(node: Node) -> None:
    node.trainer, node.seen = SEEN[0], SEEN[:1]
    with ExitStack() as stack:
        offer = trial.offer_gpu(SEEN[0], torch.device("cpu"), 0, stack)
        *_, last = trial.read_gpus([msgspec.to_builtins(offer)])
    assert last == TrialPart(title="between GPUs", seen="one GPU: there is no pair to try")
