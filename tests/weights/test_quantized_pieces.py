"""Weights that are quantized straight into buckets, in pieces: the bits of `quantize`, or none."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.weights.test_packer import Buckets
from tests.weights.test_quantized import Held
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines.memory import why_no_kernels
from weightsync.weights.sources import quantized
from weightsync.weights.sources.quantized import SCHEMES, quantize

pytestmark = pytest.mark.usefixtures("shm_clean")


@pytest.fixture(params=["compiled", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setitem(vars(quantized), "why_no_kernels", lambda: "numba is not installed")
    else:
        assert not why_no_kernels()


def as_uint8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(-1)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("fault", ["none", "nan", "inf", "zero"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pieces_have_the_bits_of_the_whole(scheme: str, fault: str) -> None:
    """Wherever a row or a block is cut; what torch has to round may begin in a later piece."""
    draw = random.Random(0)
    for rows, columns in ((1, 32), (3, 992), (7, 4128), (130, 160), (300, 544), (256, 128)):
        weight = torch.randn(rows, columns).bfloat16()
        if fault == "zero":
            weight[rows // 2] = 0
        elif fault != "none":
            weight[rows * 2 // 3, columns // 2] = float(fault)
        values, scales = quantize(weight, SCHEMES[scheme])
        for most in (64, 640, 8192, 1 << 20):
            written, at = quantized._Written(weight, SCHEMES[scheme]), 0
            made = torch.full((weight.numel(),), 0xAB, dtype=torch.uint8)
            while at < made.numel():
                end = at + 64 * draw.randint(1, most // 64)
                written.write(made[at:end])
                at = end
            assert torch.equal(made, as_uint8(values))
            assert torch.equal(as_uint8(written.scales), as_uint8(scales))


class Mixed(nn.Module):
    """Weights larger and smaller than a bucket, one without rows, and others between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(37)
        self.up = nn.Linear(160, 130)
        self.none = nn.Linear(64, 1, bias=False)
        self.none.weight = nn.Parameter(torch.empty(0, 64))
        self.table = nn.Embedding(13, 24)
        self.down = nn.Linear(96, 7, bias=False)
        self.lm_head = nn.Linear(32, 5, bias=False)
        self.bfloat16().requires_grad_(False)

    def step(self) -> None:
        for parameter in self.parameters():
            parameter.normal_()


@pytest.mark.parametrize("bucket", [64, 1024, 8192, 1 << 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_buckets_and_fingerprints_are_those_of_tensors_that_are_copied(
    scheme: Any, bucket: int
) -> None:
    model = Mixed()
    source = ws.QuantizedSource(model, scheme)
    layout = StreamLayout(source.manifest, bucket_nbytes=bucket, unit_nbytes=min(bucket, 4096))
    buckets = Buckets(layout, bucket)
    for _ in range(2):
        model.step()
        copied = buckets.packer.pack(source.tensors(), buckets.acquire, verify=True)
        wanted, table = buckets.collect(copied)
        for verify in (True, False):
            writers = source.writers()
            assert writers is not None
            written = buckets.packer.pack_written(writers, buckets.acquire, verify=verify)
            assert buckets.collect(written) == (wanted, table if verify else [])


class Counted(ws.QuantizedSource):
    """Counts how often it was asked to write, and whether it did."""

    asked: tuple[bool, ...] = ()

    def writers(self) -> Any:
        writers = super().writers()
        self.asked = (*self.asked, writers is not None)
        return writers


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_can_be_resized_after_they_were_quantized(scheme: str) -> None:
    """Trainers offload by it."""
    weight = torch.randn(128, 128).bfloat16()
    quantize(weight, SCHEMES[scheme])
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0


def test_which_updates_are_written_straight_into_buckets() -> None:
    """Not those whose tensors are looked at, and none of a subclass that makes other tensors."""

    class Renamed(Counted):
        def convert(self, pairs: Any) -> Any:
            yield from super().convert(pairs)

    model = Mixed()
    cases: list[tuple[type[Counted], dict[str, Any], tuple[bool, ...]]] = [
        (Counted, {}, (True,)),
        (Counted, {"check_finite": "warn"}, ()),
        (Renamed, {}, (False,)),
    ]
    for kind, terms, asked in cases:
        source = kind(model, "fp8_channel")
        served = Held(source)
        receiver = ws.WeightReceiver(served)
        with closing(receiver), ws.connect(source, to=receiver.handle, **terms) as sender:
            assert sender.send_weights().verified == "held"
        served.assert_is(source)
        assert source.asked == asked


@pytest.mark.parametrize("bucket", [4096, 1 << 20])
@pytest.mark.parametrize("fails_at", ["up.weight", "down.weight", "lm_head.weight"])
def test_a_failed_update_leaves_the_weights_and_the_next_one_is_whole(
    fails_at: str, bucket: int
) -> None:
    """A bucket that is half written when the source raises is not read by a receiver."""
    model = Mixed()
    fails = False

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if fails and name == fails_at:
                raise RuntimeError("the source fails")
            yield name, tensor

    source = Counted(tensors, "fp8_channel")
    served = Held(source)
    receiver = ws.WeightReceiver(served)
    with (
        closing(receiver),
        ws.connect(source, to=receiver.handle, bucket_nbytes=bucket, packed=True) as sender,
    ):
        for _ in range(3):
            model.step()
            report = sender.send_weights()
            assert report.verified == "held"
            served.assert_is(source)
            kept = {name: tensor.clone() for name, tensor in served.state_dict().items()}
            fails = True
            model.step()
            with pytest.raises(RuntimeError, match="the source fails"):
                sender.send_weights()
            fails = False
            assert receiver.version == report.version
            for name, tensor in served.state_dict().items():
                assert torch.equal(as_uint8(tensor), as_uint8(kept[name]))
    assert all(source.asked)


@pytest.mark.parametrize("piece", [1, 2, 5])
def test_a_cancelled_update_leaves_the_weights_and_the_next_one_is_whole(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while a weight lies in its buckets in part; the source is not read afterwards."""
    model, served_model = Mixed(), Mixed()
    source = Counted(model, "fp8_channel")
    served = Held(ws.QuantizedSource(served_model, "fp8_channel"))
    receiver = ws.WeightReceiver(served)
    written, reached, go = 0, threading.Event(), threading.Event()
    genuine = quantized._Written.write

    def write(self: Any, target: torch.Tensor) -> None:
        nonlocal written
        written += 1
        if written == piece and not go.is_set():
            reached.set()
            assert go.wait(60)
        genuine(self, target)

    async def cancel(sender: ws.WeightSender) -> None:
        sending = asyncio.create_task(sender.asend_weights())
        assert await asyncio.to_thread(reached.wait, 60)
        sending.cancel()
        asyncio.get_running_loop().call_later(0.1, go.set)
        with pytest.raises(asyncio.CancelledError):
            await sending

    with (
        closing(receiver),
        ws.connect(source, to=receiver.handle, bucket_nbytes=4096, packed=True) as sender,
    ):
        sender.send_weights()
        kept = {name: tensor.clone() for name, tensor in served.state_dict().items()}
        model.step()
        monkeypatch.setattr(quantized._Written, "write", write)
        asyncio.run(cancel(sender))
        read, version = written, receiver.version
        assert (read, version) == (piece, 1)
        for name, tensor in served.state_dict().items():
            assert torch.equal(as_uint8(tensor), as_uint8(kept[name]))
        model.step()
        assert sender.send_weights().verified == "held"
        served.assert_is(source)
        assert written > read
