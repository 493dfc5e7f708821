"""The tensor queue, in one process and between several that end in every way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.queues.tensor_senders import (
    SPAWN,
    WAIT_S,
    answer,
    any_of,
    comes_true,
    pattern,
    producers,
    receive_on_gpu,
    receive_one_and_hold,
)
from tests.shm.processes import output, run
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ProtocolError,
    SegmentError,
    TransferError,
    TransferTimeout,
)
from weightsync.queues import tensor_queue
from weightsync.queues.tensor_packets import (
    PROTOCOL,
    Hello,
    InPacket,
    TensorIpcHandle,
    TensorQueueHandle,
    decode_handle,
    decode_welcome,
    encode,
)
from weightsync.queues.tensor_queue import (
    DEFAULT_TIMEOUT_S,
    PACKET_TENSOR_NBYTES,
    TensorIpcData,
    TensorIpcReceiver,
    TensorIpcSender,
    bound_name,
)
from weightsync.shm.segment import DIRECTORY, Segment, live_segments
from weightsync.shm.spawning import require_spawn
from weightsync.tensors import TORCH_DTYPES
from weightsync.wire.offers import SegmentHandle

BLOCK = 1 << 20
SOON_S = 0.05


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail a test after which this process still has segments, or a file of one it had."""
    seen = own_names()
    yield
    assert comes_true(lambda: own_names() == seen)


@pytest.fixture
def receiver(nothing_left: None) -> Iterator[TensorIpcReceiver]:
    with TensorIpcReceiver() as made:
        yield made


@pytest.fixture
def sender(receiver: TensorIpcReceiver) -> Iterator[TensorIpcSender]:
    with TensorIpcSender(receiver.handle, max_nbytes=64 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def queue() -> Iterator[TensorIpcReceiver]:
    with TensorIpcReceiver() as made:
        yield made


def own_names() -> set[str]:
    """Return what these tests have open in this process, their own segments and those of others."""
    return {segment.name for segment in live_segments()} - _EARLIER


_EARLIER: set[str] = set()
"""What the tests of other files left open in this process."""


@pytest.fixture(autouse=True, scope="module")
def _know_what_others_left(frozen: None) -> None:
    _EARLIER.update(segment.name for segment in live_segments())


def on_disk(names: set[str]) -> set[str]:
    return {name for name in names if (DIRECTORY / name).exists()}


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return any_of(dtype, shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def let_the_grace_pass(receiver: TensorIpcReceiver) -> None:
    """Drop what comes late and has not been taken, as the receiver's thread does in time."""
    receiver._arrivals.drop_late(time.monotonic() + 2 * DEFAULT_TIMEOUT_S)


def later(handle: TensorIpcHandle, by: int) -> TensorIpcHandle:
    """Return a handle of a tensor that its sender has not sent."""
    return msgspec.structs.replace(handle, sequence=handle.sequence + by)


class TestWhatTravels:
    @pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=list(TORCH_DTYPES))
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (300, 500)], ids=str)
    def test_every_dtype_and_shape(
        self,
        receiver: TensorIpcReceiver,
        sender: TensorIpcSender,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> None:
        tensor = of_dtype(dtype, *shape)
        handle = sender.send_tensor(tensor, "r", "t")
        assert (handle.request_id, handle.tensor_id, handle.device) == ("r", "t", "cpu")
        assert (handle.dtype, handle.shape) == (str(dtype).removeprefix("torch."), list(shape))
        assert same(receiver.recv_tensor(handle), tensor)

    @pytest.mark.parametrize("rows", [4, 1000])
    def test_tensors_that_are_not_contiguous(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender, rows: int
    ) -> None:
        wide = torch.arange(rows * 60, dtype=torch.float32).view(rows, 60)
        for tensor in (wide.t(), wide[::2, 1::3], wide[:, :1].expand(rows, 50), wide.flip(0)):
            assert same(receiver.recv_tensor(sender.send_tensor(tensor)), tensor)

    def test_parameters_arrive_as_tensors(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        tensor = receiver.recv_tensor(sender.send_tensor(torch.nn.Parameter(torch.ones(9, 9999))))
        assert not tensor.requires_grad
        assert same(tensor, torch.ones(9, 9999))

    @pytest.mark.parametrize("size", [10, BLOCK])
    def test_what_arrives_may_be_changed(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender, size: int
    ) -> None:
        sent = torch.zeros(size)
        tensor = receiver.recv_tensor(sender.send_tensor(sent))
        tensor += 1
        assert int(tensor.sum()) == size
        assert int(sent.sum()) == 0

    @pytest.mark.parametrize(
        "tensor",
        [torch.eye(3).to_sparse(), torch.empty(3, dtype=torch.bits8), torch.ones(3).to("meta")],
        ids=["sparse", "bits", "meta"],
    )
    def test_tensors_that_cannot_travel_are_refused(
        self, sender: TensorIpcSender, tensor: torch.Tensor
    ) -> None:
        with pytest.raises(ConfigError, match="cannot be sent; dense ones of float64"):
            sender.send_tensor(tensor)

    def test_handles_are_plain_data(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        queue = msgspec.json.decode(msgspec.json.encode(receiver.handle), type=TensorQueueHandle)
        with TensorIpcSender(queue) as other:
            handle = decode_handle(encode(other.send_tensor(torch.ones(3))))
        assert same(receiver.recv_tensor(handle), torch.ones(3))

    def test_names_and_shapes_have_limits(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        with pytest.raises(ConfigError, match="a request_id has at most 1024 characters"):
            sender.send_tensor(torch.ones(1), "r" * 1025)
        with pytest.raises(ConfigError, match="a tensor name must have 1 to 1024 characters"):
            sender.send_tensor(torch.ones(1), "r", "t" * 1025)
        for size in (1, BLOCK):
            with pytest.raises(ConfigError, match="a name of a tensor cannot be sent"):
                sender.send_tensor(torch.ones(size), "\ud800")
        assert sender.pool.blocks_in_use == 0
        with pytest.raises(ConfigError, match="a shape has at most 16 sizes"):
            sender.send_tensor(torch.ones([1] * 17))
        handle = sender.send_tensor(torch.ones([1] * 16), "r" * 1024, "\U0001f600" * 1024)
        assert receiver.recv_tensor(handle).ndim == 16

    def test_several_threads_may_use_both_ends(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        def go(seed: int) -> bool:
            tensor = pattern(seed, 20_000 if seed % 2 else 50)
            return same(receiver.recv_tensor(sender.send_tensor(tensor)), tensor)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(go, range(400)))
        assert receiver.pending == 0
        assert sender.pool.blocks_in_use == 0


class TestHandingOut:
    @pytest.mark.parametrize("nbytes", [64, BLOCK])
    def test_in_any_order(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender, nbytes: int
    ) -> None:
        handles = [sender.send_tensor(pattern(seed, nbytes)) for seed in range(6)]
        for seed in (5, 0, 3, 1, 4, 2):
            assert same(receiver.recv_tensor(handles[seed]), pattern(seed, nbytes))
        assert receiver.pending == 0

    def test_without_a_handle_in_order_of_arrival(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        handles = [sender.send_tensor(torch.tensor(i), f"r{i}") for i in range(3)]
        receiver.recv_tensor(handles[0])
        got = receiver.recv_any()
        assert isinstance(got, TensorIpcData)
        assert (got.request_id, got.tensor_id, int(got.tensor)) == ("r1", "2", 1)
        assert int(receiver.recv_any().tensor) == 2
        with pytest.raises(
            TransferTimeout, match=r"no tensor arrived in 0\.1 s; .* 1 living sender"
        ):
            receiver.recv_any(timeout_s=SOON_S * 2)

    def test_only_once(self, receiver: TensorIpcReceiver, sender: TensorIpcSender) -> None:
        handle = sender.send_tensor(torch.ones(3), "r", "t")
        receiver.recv_tensor(handle)
        with pytest.raises(TransferError, match=r"'t' of request 'r' \(float32\[3\]\) was taken"):
            receiver.recv_tensor(handle)

    def test_one_that_does_not_come_times_out(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        handle = sender.send_tensor(torch.ones(3))
        with pytest.raises(TransferTimeout, match="did not arrive in"):
            receiver.recv_tensor(later(handle, 1), timeout_s=SOON_S)
        assert same(receiver.recv_tensor(handle), torch.ones(3))

    def test_others_are_served_while_one_waits(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        first = sender.send_tensor(pattern(1, 64))
        got: list[torch.Tensor] = []
        waiting = threading.Thread(
            target=lambda: got.append(receiver.recv_tensor(awaited, WAIT_S)), daemon=True
        )
        awaited = msgspec.structs.replace(later(first, 1), tensor_id="2")
        waiting.start()
        assert same(receiver.recv_tensor(first), pattern(1, 64))
        assert receiver.cleanup_request_tensors("other") == 0
        assert not got
        assert sender.send_tensor(pattern(2, 64)) == awaited
        waiting.join(WAIT_S)
        assert same(got[0], pattern(2, 64))

    def test_a_changed_handle_gets_nothing(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        handle = sender.send_tensor(torch.ones(3, 4))
        with pytest.raises(ProtocolError, match=r"\[4, 3\].* its sender sent .*\[3, 4\]"):
            receiver.recv_tensor(msgspec.structs.replace(handle, shape=[4, 3]))
        assert same(receiver.recv_tensor(handle), torch.ones(3, 4))

    def test_a_handle_of_another_queue_fails_at_once(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        with (
            TensorIpcReceiver() as other,
            pytest.raises(TransferError, match="is from a sender that this queue does not know"),
        ):
            other.recv_tensor(sender.send_tensor(torch.ones(1)), WAIT_S)

    def test_a_discarded_one_is_not_handed_out(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        handle = sender.send_tensor(pattern(1, BLOCK))
        sender.discard(handle)
        assert comes_true(lambda: sender.pool.blocks_in_use == 0)
        with pytest.raises(TransferError, match="taken or dropped before"):
            receiver.recv_tensor(handle)

    def test_one_given_up_before_it_came_is_dropped_when_it_comes(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        first = sender.send_tensor(pattern(1, BLOCK))
        receiver.drop(encode(later(first, 2)))
        others = [sender.send_tensor(pattern(seed, BLOCK)) for seed in (2, 3, 4)]
        assert same(receiver.recv_tensor(others[2]), pattern(4, BLOCK))
        assert same(receiver.recv_tensor(others[0]), pattern(2, BLOCK))
        with pytest.raises(TransferError, match="taken or dropped before"):
            receiver.recv_tensor(others[1])
        receiver.drop(encode(first))
        assert receiver.pending == 0
        assert sender.pool.blocks_in_use == 0


class TestCleanup:
    def test_it_drops_and_counts_what_is_here(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        sizes = (64, BLOCK, BLOCK)
        aborted = [sender.send_tensor(pattern(1, nbytes), "aborted") for nbytes in sizes]
        kept = sender.send_tensor(pattern(2, BLOCK), "kept")
        receiver.recv_tensor(aborted[0])
        assert comes_true(lambda: receiver.pending == 3)
        assert receiver.cleanup_request_tensors("aborted") == 2
        assert receiver.cleanup_request_tensors("aborted") == 0
        assert sender.pool.blocks_in_use == 1
        with pytest.raises(TransferError, match="its request was cleaned up"):
            receiver.recv_tensor(aborted[1])
        assert same(receiver.recv_tensor(kept), pattern(2, BLOCK))

    def test_what_comes_later_and_is_not_asked_for_is_dropped_too(self, nothing_left: None) -> None:
        with TensorIpcReceiver(grace_s=0.1) as receiver, TensorIpcSender(receiver.handle) as sender:
            assert receiver.cleanup_request_tensors("aborted") == 0
            late = [sender.send_tensor(pattern(1, size), "aborted") for size in (64, BLOCK)]
            kept = sender.send_tensor(pattern(2, BLOCK), "kept")
            assert same(receiver.recv_tensor(kept), pattern(2, BLOCK))
            assert comes_true(lambda: receiver.pending == 0 and sender.pool.blocks_in_use == 0)
            with pytest.raises(TransferError, match="its request was cleaned up"):
                receiver.recv_tensor(late[1])

    def test_another_attempt_under_the_same_id_works(self, nothing_left: None) -> None:
        with TensorIpcReceiver() as receiver, TensorIpcSender(receiver.handle) as sender:
            for attempt in range(3):
                aborted = sender.send_tensor(pattern(attempt, BLOCK), "r")
                assert comes_true(lambda: receiver.pending == 1)
                assert receiver.cleanup_request_tensors("r") == 1
                with pytest.raises(TransferError, match="its request was cleaned up"):
                    receiver.recv_tensor(aborted)
                sender.send_tensor(pattern(9, BLOCK), "r")  # of the same attempt, and late
                again = [sender.send_tensor(pattern(n, BLOCK), "r") for n in range(2)]
                for n, handle in enumerate(again):
                    assert same(receiver.recv_tensor(handle), pattern(n, BLOCK))
                assert receiver.pending == 1
                let_the_grace_pass(receiver)
                assert receiver.pending == 0
            assert comes_true(lambda: sender.pool.blocks_in_use == 0)

    def test_another_attempt_is_not_hurried(self, nothing_left: None) -> None:
        with TensorIpcReceiver() as receiver, TensorIpcSender(receiver.handle) as sender:
            receiver.cleanup_request_tensors("r")
            first = sender.send_tensor(pattern(1, BLOCK), "r")
            assert same(receiver.recv_tensor(first), pattern(1, BLOCK))
            second = sender.send_tensor(pattern(2, BLOCK), "r")
            assert comes_true(lambda: receiver.pending == 1)
            let_the_grace_pass(receiver)  # of a late one: this one is none
            assert same(receiver.recv_tensor(second), pattern(2, BLOCK))

    def test_whoever_waits_for_it_is_told(
        self,
        receiver: TensorIpcReceiver,
        sender: TensorIpcSender,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        coming = later(sender.send_tensor(torch.ones(1), "aborted"), 1)
        waits, wait = threading.Event(), receiver._arrivals._wait

        def noted(*args: Any) -> None:
            waits.set()  # with the lock, so that the cleanup comes when it waits
            wait(*args)

        monkeypatch.setattr(receiver._arrivals, "_wait", noted)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.recv_tensor, coming, WAIT_S)
            assert waits.wait(WAIT_S)
            receiver.cleanup_request_tensors("aborted")
            with pytest.raises(TransferError, match="its request was cleaned up"):
                waiting.result(WAIT_S)

    def test_that_of_another_request_ends_no_waiting_for_another_attempt(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        coming = later(sender.send_tensor(torch.ones(1), "r", "t"), 1)
        assert comes_true(lambda: receiver.pending == 1)
        assert receiver.cleanup_request_tensors("r") == 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.recv_tensor, coming, WAIT_S)
            time.sleep(SOON_S)
            receiver.cleanup_request_tensors("another")
            time.sleep(SOON_S)
            sender.send_tensor(torch.ones(1), "r", "t")
            assert same(waiting.result(WAIT_S), torch.ones(1))

    def test_what_another_sender_sends_late_does_not_stay_beside_another_attempt(
        self, nothing_left: None
    ) -> None:
        with (
            TensorIpcReceiver() as receiver,
            TensorIpcSender(receiver.handle) as sender,
            TensorIpcSender(receiver.handle) as other,
        ):
            receiver.cleanup_request_tensors("r")
            assert same(receiver.recv_tensor(sender.send_tensor(torch.ones(1), "r")), torch.ones(1))
            other.send_tensor(pattern(1, BLOCK), "r")  # of the attempt that was aborted
            assert comes_true(lambda: receiver.pending == 1)
            let_the_grace_pass(receiver)
            assert receiver.pending == 0
            assert comes_true(lambda: other.pool.blocks_in_use == 0)


class TestMemory:
    def test_a_steady_stream_allocates_nothing(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        def pass_one(number: int) -> None:
            tensor = pattern(number % 5, PACKET_TENSOR_NBYTES + 1)
            assert same(receiver.recv_tensor(sender.send_tensor(tensor, "r")), tensor)

        for number in range(20):
            pass_one(number)
        before = sender.pool.segments_made, sender.pool.nbytes, own_names()
        for number in range(10_000):
            pass_one(number)
        assert (sender.pool.segments_made, sender.pool.nbytes, own_names()) == before

    def test_a_block_goes_back_with_its_last_view(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        tensor = receiver.recv_tensor(sender.send_tensor(pattern(1, BLOCK)))
        view = tensor.view(16, -1)[3, 5:]
        del tensor
        gc.collect()
        for seed in range(20):
            receiver.recv_tensor(sender.send_tensor(pattern(seed + 2, BLOCK)))
        assert same(view, pattern(1, BLOCK).view(16, -1)[3, 5:])
        assert sender.pool.blocks_in_use == 1
        del view
        assert sender.pool.blocks_in_use == 0

    def test_a_copy_that_fails_leaves_its_block_free(
        self,
        receiver: TensorIpcReceiver,
        sender: TensorIpcSender,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*_: object) -> torch.Tensor:
            raise RuntimeError("the GPU is lost")

        with monkeypatch.context() as patch:
            patch.setattr(tensor_queue, "from_bytes", fail)
            with pytest.raises(RuntimeError, match="the GPU is lost"):
                sender.send_tensor(pattern(1, BLOCK))
        assert sender.pool.blocks_in_use == 0
        assert same(receiver.recv_tensor(sender.send_tensor(pattern(2, BLOCK))), pattern(2, BLOCK))

    @pytest.mark.parametrize("max_nbytes", [128 << 10, 1 << 20, 3 << 20])
    def test_a_small_pool_takes_what_fits_it(
        self, receiver: TensorIpcReceiver, max_nbytes: int
    ) -> None:
        with TensorIpcSender(receiver.handle, max_nbytes=max_nbytes) as sender:
            for nbytes in (20 << 10, 100 << 10, max_nbytes // 2):
                tensor = pattern(1, nbytes)
                assert same(receiver.recv_tensor(sender.send_tensor(tensor)), tensor)
                assert sender.pool.nbytes <= max_nbytes
            with pytest.raises(SegmentError, match="does not fit into a pool"):
                sender.send_tensor(pattern(1, max_nbytes + 1))

    @pytest.mark.parametrize("queue", [SPAWN.Queue, dict, lambda: None], ids=["Queue", "dict", "-"])
    def test_a_sender_needs_a_handle(self, queue: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match="give the `handle` of a TensorIpcReceiver"):
            TensorIpcSender(queue())  # type: ignore[arg-type]  # what users of torch's queue give

    def test_a_full_pool_waits_and_then_says_so(self, receiver: TensorIpcReceiver) -> None:
        with TensorIpcSender(receiver.handle, max_nbytes=20 << 20) as sender:
            handles = [sender.send_tensor(pattern(seed, 8 << 20)) for seed in range(2)]
            with pytest.raises(TransferTimeout, match=r"2 tensors are with the receiver"):
                sender.send_tensor(pattern(2, 8 << 20), timeout_s=SOON_S)
            taker = threading.Timer(SOON_S, lambda: receiver.recv_tensor(handles[0]))
            taker.start()
            third = sender.send_tensor(pattern(2, 8 << 20), timeout_s=WAIT_S)
            taker.join(WAIT_S)
            assert same(receiver.recv_tensor(third), pattern(2, 8 << 20))
            assert same(receiver.recv_tensor(handles[1]), pattern(1, 8 << 20))

    def test_a_tensor_that_never_fits_is_refused_at_once(self, receiver: TensorIpcReceiver) -> None:
        with (
            TensorIpcSender(receiver.handle, max_nbytes=8 << 20) as sender,
            pytest.raises(SegmentError, match="does not fit into a pool of 8388608 bytes"),
        ):
            sender.send_tensor(pattern(1, 8 << 20), timeout_s=WAIT_S)

    def test_sizes_that_change_make_room_for_each_other(self, receiver: TensorIpcReceiver) -> None:
        with TensorIpcSender(receiver.handle, max_nbytes=24 << 20) as sender:
            mapped = len(live_segments())
            for turn in range(3):
                for nbytes in (5 << 20, 9 << 20, 17 << 20, 1 << 20):
                    handle = sender.send_tensor(pattern(turn, nbytes))
                    assert same(receiver.recv_tensor(handle), pattern(turn, nbytes))
                    assert sender.pool.nbytes <= 24 << 20
            receiver.recv_tensor(sender.send_tensor(torch.ones(1)))
            # Both ends of what the pool holds now are in this process.
            assert len(live_segments()) - mapped <= 2 * 3

    def test_trim_gives_up_what_nobody_reads(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender
    ) -> None:
        held = receiver.recv_tensor(sender.send_tensor(pattern(1, 9 << 20)))
        receiver.recv_tensor(sender.send_tensor(pattern(2, 3 << 20)))
        assert sender.trim() > 3 << 20
        assert sender.pool.nbytes > 9 << 20
        assert same(held, pattern(1, 9 << 20))
        assert same(
            receiver.recv_tensor(sender.send_tensor(pattern(2, 3 << 20))), pattern(2, 3 << 20)
        )

    def test_a_receiver_takes_no_more_than_it_may(
        self, nothing_left: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_queue, "_GOODBYE_S", 0.5)  # for what nobody reads
        data = torch.zeros(PACKET_TENSOR_NBYTES, dtype=torch.uint8)

        def fill(sender: TensorIpcSender) -> None:
            for _ in range(10_000):
                sender.send_tensor(data, timeout_s=SOON_S)

        with (
            TensorIpcReceiver(max_pending=100) as receiver,
            TensorIpcSender(receiver.handle) as sender,
        ):
            with pytest.raises(TransferTimeout, match="the tensor receiver reads nothing"):
                fill(sender)
            assert receiver.pending < 100 + 64
            for _ in range(120):
                receiver.recv_any()
            sender.send_tensor(data)


class TestEnds:
    def test_what_was_sent_outlives_its_sender(self, receiver: TensorIpcReceiver) -> None:
        with TensorIpcSender(receiver.handle, name="the first") as sender:
            handles = [sender.send_tensor(pattern(1, nbytes)) for nbytes in (64, BLOCK)]
        for handle, nbytes in zip(handles, (64, BLOCK), strict=True):
            assert same(receiver.recv_tensor(handle), pattern(1, nbytes))
        with pytest.raises(TransferError, match="sender the first closed its end"):
            receiver.recv_tensor(later(handles[1], 1), WAIT_S)
        with pytest.raises(ConnectError, match="this tensor sender is closed"):
            sender.send_tensor(torch.ones(1))
        with pytest.raises(ConnectError, match="this tensor sender is closed"):
            sender.send_tensor(pattern(1, BLOCK))

    def test_the_last_tensors_before_an_end_arrive(self, receiver: TensorIpcReceiver) -> None:
        for seed in range(20):
            with TensorIpcSender(receiver.handle) as sender:
                handles = [sender.send_tensor(pattern(seed, nbytes)) for nbytes in (BLOCK, 20_000)]
            for handle, nbytes in zip(handles, (BLOCK, 20_000), strict=True):
                assert same(receiver.recv_tensor(handle), pattern(seed, nbytes))

    def test_an_end_waits_until_the_receiver_has_mapped_all(self, nothing_left: None) -> None:
        with TensorIpcReceiver(max_pending=1) as receiver:
            sender = TensorIpcSender(receiver.handle)
            first = sender.send_tensor(torch.ones(1))
            assert comes_true(lambda: receiver.pending == 1)  # and now it reads no further
            second = sender.send_tensor(pattern(1, BLOCK))
            closing = threading.Thread(target=sender.close)
            closing.start()
            closing.join(SOON_S)
            receiver.recv_tensor(first)
            assert same(receiver.recv_tensor(second), pattern(1, BLOCK))
            closing.join(WAIT_S)

    def test_what_nobody_asks_for_is_dropped_in_the_end(self, nothing_left: None) -> None:
        with TensorIpcReceiver(grace_s=SOON_S) as receiver:
            with TensorIpcSender(receiver.handle) as sender:
                handle = sender.send_tensor(pattern(1, BLOCK))
                assert comes_true(lambda: receiver.pending == 1)
            assert comes_true(lambda: receiver.pending == 0 and not own_names())
            with pytest.raises(TransferError, match="taken or dropped before"):
                receiver.recv_tensor(handle)

    def test_memory_of_an_ended_sender_goes_with_its_last_tensor(self, nothing_left: None) -> None:
        """It does not stay for the `grace_s` of tensors that may still be taken."""
        with TensorIpcReceiver(grace_s=WAIT_S * 10) as receiver:
            with TensorIpcSender(receiver.handle) as sender:
                handle = sender.send_tensor(pattern(1, BLOCK))
            assert own_names()
            receiver.recv_tensor(handle)
            assert comes_true(lambda: not own_names())

    def test_a_closed_queue_is_noticed(self, nothing_left: None) -> None:
        receiver = TensorIpcReceiver()
        sender = TensorIpcSender(receiver.handle)
        held = receiver.recv_tensor(sender.send_tensor(pattern(1, BLOCK)))
        handle = sender.send_tensor(torch.ones(1))
        receiver.close()
        receiver.close()
        for size in (10, BLOCK):
            with pytest.raises(ConnectError, match="the tensor receiver is gone"):
                sender.send_tensor(torch.ones(size))
        with pytest.raises(TransferError, match="this tensor queue is closed"):
            receiver.recv_tensor(handle)
        with pytest.raises(ConnectError, match="the tensor queue cannot be reached"):
            TensorIpcSender(receiver.handle)
        sender.close()
        assert same(held, pattern(1, BLOCK))

    def test_a_sender_waiting_for_room_sees_its_receiver_go(self, nothing_left: None) -> None:
        receiver = TensorIpcReceiver()
        with TensorIpcSender(receiver.handle, max_nbytes=6 << 20) as sender:
            sender.send_tensor(pattern(1, 5 << 20))
            closing = threading.Timer(SOON_S, receiver.close)
            closing.start()
            with pytest.raises(ConnectError, match="the tensor receiver is gone"):
                sender.send_tensor(pattern(1, 5 << 20), timeout_s=WAIT_S)
            closing.join(WAIT_S)

    def test_a_queue_that_was_dropped_is_closed(self, nothing_left: None) -> None:
        receiver = TensorIpcReceiver()
        handle = receiver.handle
        del receiver
        gc.collect()
        with pytest.raises(ConnectError, match="the tensor queue cannot be reached"):
            TensorIpcSender(handle)

    def test_another_host_is_refused(self, receiver: TensorIpcReceiver) -> None:
        elsewhere = msgspec.structs.replace(receiver.handle, host="HOST-elsewhere")
        with pytest.raises(BackendUnavailableError, match="they share no memory"):
            TensorIpcSender(elsewhere)


class TestStrangers:
    def connect(self, queue: TensorIpcReceiver) -> socket.socket:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(WAIT_S)
        stranger.connect(bound_name(queue.handle.address))
        return stranger

    def is_cut_off(self, stranger: socket.socket) -> bool:
        try:
            while stranger.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        return True

    @settings(max_examples=100, deadline=None)
    @given(
        raw=st.one_of(
            st.binary(min_size=1, max_size=200),
            st.lists(
                st.one_of(
                    st.integers(-2, 9), st.text(max_size=40), st.binary(max_size=9), st.none()
                ),
                min_size=1,
            ).map(msgspec.msgpack.encode),
        )
    )
    def test_who_sends_nonsense_is_cut_off(self, queue: TensorIpcReceiver, raw: bytes) -> None:
        with self.connect(queue) as stranger:
            stranger.send(raw)
            assert self.is_cut_off(stranger)

    def test_packets_that_are_too_long_are_cut_off(self, queue: TensorIpcReceiver) -> None:
        with self.connect(queue) as stranger:
            stranger.send(b"\x91" * (70 << 10))
            assert self.is_cut_off(stranger)

    @pytest.mark.parametrize(
        ("changes", "read"),
        [
            ([{}, {"sequence": 2}], 2),
            ([{}, {"sequence": 1}], 1),
            ([{"sender": "f" * 32}], 0),
            ([{}, {"sequence": 5, "dtype": "float31"}], 1),
            ([{}, {"sequence": 5, "shape": [1 << 60]}], 1),
        ],
    )
    def test_who_lies_about_a_tensor_is_cut_off(
        self, queue: TensorIpcReceiver, changes: list[dict[str, object]], read: int
    ) -> None:
        name = uuid.uuid4().hex
        honest = TensorIpcHandle(None, "t", [2], "int8", "cpu", name, 1)
        with self.connect(queue) as stranger, Segment.create(4096) as probe:
            where = SegmentHandle(name=probe.name, nbytes=4096)
            stranger.send(encode(Hello(PROTOCOL, name, "a stranger", where, 0)))
            assert decode_welcome(stranger.recv(9999)).refusal == ""
            for change in changes:
                handle = msgspec.structs.replace(honest, **change)
                stranger.send(encode(InPacket(handle, bytearray(b"\1\2"))))
            if read < len(changes):
                assert self.is_cut_off(stranger)
            for _ in range(read):
                assert queue.recv_any(WAIT_S).tensor.tolist() == [1, 2]
            assert queue.pending == 0

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("weightsync-" + "0" * 32, "cannot open the sender's shared memory"),
            ("../../etc/passwd", "cannot open the sender's shared memory"),
        ],
    )
    def test_memory_that_is_not_there_is_refused(
        self, queue: TensorIpcReceiver, name: str, reason: str
    ) -> None:
        hello = [1, 1, "0" * 32, "me", {"kind": "segment", "name": name, "nbytes": 4096}, 5]
        with self.connect(queue) as stranger:
            stranger.send(msgspec.msgpack.encode(hello))
            assert reason in msgspec.msgpack.decode(stranger.recv(9999))[2]
            assert self.is_cut_off(stranger)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"offset": 10}, "lies outside segment"),
            ({"offset": 1 << 40}, "lies outside segment"),
            ({"offset": 4096}, "lies outside segment"),
            ({"offset": 4096 + BLOCK + 64}, "lies outside segment"),
            ({"nbytes": 8192}, "lies outside segment"),
            ({"nbytes": 4096 + 2 * BLOCK, "offset": 4096 + BLOCK}, "the handle says 2101248"),
            ({"name": "weightsync-" + "0" * 32}, "cannot open segment"),
        ],
    )
    def test_a_block_that_lies_is_an_error_for_who_asks(
        self, receiver: TensorIpcReceiver, sender: TensorIpcSender, change: object, message: str
    ) -> None:
        assert isinstance(change, dict)
        sender.send_tensor(pattern(0, BLOCK))  # in the segment's first block
        real_post = sender._link.post

        def lie(packet: Callable[[], object], deadline: float) -> None:
            def changed() -> object:
                honest = packet()
                where = msgspec.structs.replace(honest.segment, **change)  # type: ignore[attr-defined]
                return msgspec.structs.replace(honest, segment=where)  # type: ignore[type-var]

            real_post(changed, deadline)  # type: ignore[arg-type]

        sender._link.post = lie  # type: ignore[method-assign]
        handle = sender.send_tensor(pattern(1, BLOCK))
        sender._link.post = real_post  # type: ignore[method-assign]
        with pytest.raises(TransferError, match=message):
            receiver.recv_tensor(handle)


class TestProcesses:
    def test_several_senders_and_any_order(self, receiver: TensorIpcReceiver) -> None:
        sizes = (100, 50_000, BLOCK)
        with producers(receiver.handle, 3) as senders:
            orders = [(who, seed) for seed in range(12) for who in range(3)]
            for who, seed in orders:
                senders[who].order(seed + 100 * who, sizes[seed % 3], f"r{seed}")
            handles = {order: senders[order[0]].handle() for order in orders}
            assert len({handle.sender for handle in handles.values()}) == 3
            for who, seed in reversed(orders[6:]):
                tensor = receiver.recv_tensor(handles[who, seed], WAIT_S)
                assert same(tensor, pattern(seed + 100 * who, sizes[seed % 3]))
            assert comes_true(lambda: receiver.pending == 6)
            assert receiver.cleanup_request_tensors("r0") == 3
            assert receiver.cleanup_request_tensors("r1") == 3

    def test_a_sender_that_is_killed(self, receiver: TensorIpcReceiver) -> None:
        with producers(receiver.handle, 1) as (sender,):
            handles = [sender.send(seed, BLOCK, "r") for seed in range(3)]
            coming = later(handles[-1], 1)
            held = receiver.recv_tensor(handles[0], WAIT_S)
            names = own_names()
            assert on_disk(names) == names != set()
            sender.kill()
            with pytest.raises(TransferError, match=r"sender producer \d+ died"):
                receiver.recv_tensor(coming, WAIT_S)
            assert same(receiver.recv_tensor(handles[1], WAIT_S), pattern(1, BLOCK))
            assert receiver.cleanup_request_tensors("r") == 1
            assert comes_true(lambda: not on_disk(names))
            assert comes_true(lambda: not own_names() & names)
            assert same(held, pattern(0, BLOCK))

    def test_a_receiver_that_is_killed(self, nothing_left: None) -> None:
        before = own_names()
        pipe, child = SPAWN.Pipe()
        process = SPAWN.Process(target=receive_one_and_hold, args=(child,))
        process.start()
        try:
            queue = answer(pipe, TensorQueueHandle)
            with TensorIpcSender(queue, max_nbytes=6 << 20) as sender:
                sender.send_tensor(pattern(1, 5 << 20))
                assert answer(pipe, int) == 5 << 20
                names = own_names() - before
                assert on_disk(names) == names != set()
                killing = threading.Timer(SOON_S, process.kill)
                killing.start()
                with pytest.raises(ConnectError, match="the tensor receiver is gone"):
                    sender.send_tensor(pattern(2, 5 << 20), timeout_s=WAIT_S)
                assert own_names() == before
                assert not on_disk(names)
        finally:
            process.kill()
            process.join(WAIT_S)
            pipe.close()


@pytest.mark.gpu
class TestGpu:
    """CUDA tensors stay on the GPU that both processes see, and go where nobody asks for them."""

    def test_one_goes_from_process_to_process(self, nothing_left: None) -> None:
        pipe, child = SPAWN.Pipe()
        process = SPAWN.Process(target=receive_on_gpu, args=(child,))
        process.start()
        try:
            with TensorIpcSender(answer(pipe, TensorQueueHandle)) as sender:
                for nbytes in (100, BLOCK):
                    tensor = pattern(3, nbytes).cuda()
                    torch.cuda.synchronize()
                    handle = sender.send_tensor(tensor, "r")
                    assert handle.device.startswith("cuda")
                    pipe.send(handle)
                    device, total = answer(pipe, tuple)
                    assert device.startswith("cuda")
                    assert total == int(tensor.sum())
                sender.send_tensor(pattern(4, BLOCK).cuda(), "aborted")
                pipe.send("aborted")
                assert answer(pipe, int) == 1
        finally:
            process.kill()
            process.join(WAIT_S)
            pipe.close()

    def test_a_receiver_without_that_gpu_gets_it_on_the_cpu(self, nothing_left: None) -> None:
        with (
            TensorIpcReceiver(gpus=[]) as receiver,
            TensorIpcSender(receiver.handle) as sender,
        ):
            for nbytes in (100, BLOCK):
                handle = sender.send_tensor(pattern(3, nbytes).cuda())
                assert handle.device == "cpu"
                assert same(receiver.recv_tensor(handle), pattern(3, nbytes))


FORKS = """
import os, gc, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from weightsync.errors import ConfigError, TransferError
from weightsync.queues.tensor_queue import TensorIpcReceiver, TensorIpcSender

def in_fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as exc:
            print(type(exc).__name__, exc, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


class TestForks:
    def script(self, text: str) -> str:
        return output([sys.executable, "-c", FORKS + text])

    def test_a_forked_process_is_refused_early(self, nothing_left: None) -> None:
        said = self.script("""
receiver = TensorIpcReceiver()
sender = TensorIpcSender(receiver.handle)
handle = sender.send_tensor(torch.ones(1))
in_fork(TensorIpcReceiver)
in_fork(lambda: TensorIpcSender(receiver.handle))
in_fork(lambda: receiver.recv_tensor(handle))
in_fork(lambda: sender.send_tensor(torch.ones(1)))
assert receiver.recv_tensor(handle) == 1
""").splitlines()
        assert len(said) == 4
        assert all(line.startswith("ConfigError") and "spawn" in line for line in said)
        assert "a tensor queue cannot be made in process" in said[0]
        assert "a tensor sender cannot be made in process" in said[1]
        assert "this tensor queue was made in process" in said[2]
        assert "this tensor sender was made in process" in said[3]

    def test_a_fork_gives_nothing_away(self, nothing_left: None) -> None:
        said = self.script("""
receiver = TensorIpcReceiver()
sender = TensorIpcSender(receiver.handle)
tensor = receiver.recv_tensor(sender.send_tensor(torch.ones(1 << 20)))
def drop():
    global tensor
    del tensor
    gc.collect()
    receiver.close()
    sender.close()
in_fork(drop)
print(sender.pool.blocks_in_use)
del tensor
print(sender.pool.blocks_in_use)
print(receiver.recv_tensor(sender.send_tensor(torch.ones(3))).tolist())
""").split("\n")
        assert said[:3] == ["1", "0", "[1.0, 1.0, 1.0]"]

    def test_a_fork_does_not_hide_the_end_of_its_parent(
        self, receiver: TensorIpcReceiver, tmp_path: Path
    ) -> None:
        queue = msgspec.json.encode(receiver.handle).decode()
        said = self.script(f"""
import msgspec
from weightsync.queues.tensor_packets import TensorQueueHandle, encode
sender = TensorIpcSender(msgspec.json.decode({queue!r}, type=TensorQueueHandle), name="parent")
handle = sender.send_tensor(torch.ones(1))
pid = os.fork()
if pid == 0:
    os.close(1)
    os.close(2)
    time.sleep(600)
    os._exit(0)
print(pid, encode(handle).hex(), flush=True)
os._exit(0)
""")
        pid, raw = said.split()
        try:
            handle = decode_handle(bytes.fromhex(raw))
            receiver.recv_tensor(handle)
            with pytest.raises(TransferError, match="sender parent died"):
                receiver.recv_tensor(later(handle, 1), WAIT_S)
        finally:
            os.kill(int(pid), signal.SIGKILL)

    def test_start_methods_are_looked_at(self) -> None:
        require_spawn(multiprocessing.get_context("spawn"))
        require_spawn(multiprocessing.get_context("forkserver"))
        with pytest.raises(ConfigError, match=r'the start method is "fork", .*get_context'):
            require_spawn(multiprocessing.get_context("fork"))


@pytest.mark.soak
def test_the_benchmark_runs(nothing_left: None) -> None:
    done = run([sys.executable, "-m", "benchmarks.tensor_queue", "--rounds", "1", "--tensors", "4"])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
