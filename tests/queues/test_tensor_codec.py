"""Messages with tensors in them, by each of the three ways, and what is no such message."""

from __future__ import annotations

import functools
import gc
import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from tests.queues.tensor_senders import SPAWN, WAIT_S, any_of, comes_true
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ProtocolError,
    SegmentError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.queues.tensor_codec import (
    INLINE_NBYTES,
    SETTING,
    Frame,
    TensorDecoder,
    TensorEncoder,
    chosen_tensor_ipc,
    pinnable,
)
from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.queues.tensor_queue import TensorIpcReceiver, TensorIpcSender
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes, tensor_data

WAYS = ["direct_rpc", "torch_shm"]
SMALL, LARGE = 8, INLINE_NBYTES + 64


class Image(msgspec.Struct, frozen=True, kw_only=True):
    pixels: torch.Tensor
    grid: torch.Tensor | None = None


@dataclass
class Position:
    offset: int
    mask: torch.Tensor | None = None


class Request(msgspec.Struct, kw_only=True):
    request_id: str
    prompt: list[int] = []
    embeddings: torch.Tensor | None = None
    images: list[Image] = []
    media: dict[str, Any] = {}
    positions: list[Position] = []


Pair = tuple[TensorEncoder, TensorDecoder[Any]]


@pytest.fixture(scope="module")
def queue() -> Iterator[TensorIpcReceiver]:
    with TensorIpcReceiver() as made:
        yield made


@pytest.fixture
def sender(queue: TensorIpcReceiver) -> Iterator[TensorIpcSender]:
    with TensorIpcSender(queue.handle, max_nbytes=32 << 20) as made:
        yield made


@pytest.fixture(params=WAYS)
def encoder(request: pytest.FixtureRequest, sender: TensorIpcSender) -> TensorEncoder:
    return TensorEncoder(request.param, lambda: sender)


def read(frames: list[Frame], kind: Any = None, queue: TensorIpcReceiver | None = None) -> Any:
    return TensorDecoder(kind, queue).decode(frames)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def same(one: Any, other: Any) -> bool:
    """Compare structures of any depth; tensors by dtype, shape and bytes."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(contiguous_bytes(one), contiguous_bytes(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


class TestRoundTrip:
    def test_a_whole_request(self, encoder: TensorEncoder, queue: TensorIpcReceiver) -> None:
        request = Request(
            request_id="r",
            prompt=[1, 2],
            embeddings=floats(LARGE),
            images=[Image(pixels=floats(3, LARGE), grid=torch.tensor([1, 2, 3]))],
            media={
                "video": [[floats(LARGE), floats(2)], []],
                "audio": {"wave": floats(LARGE), "rate": 16_000},
            },
            positions=[Position(3, torch.ones(LARGE, dtype=torch.bool)), Position(4)],
        )
        got = read(encoder.encode(request, "r"), Request, queue)
        assert (got.request_id, got.prompt) == ("r", [1, 2])
        assert same(got.embeddings, request.embeddings)
        assert same(got.images[0].pixels, request.images[0].pixels)
        assert same(got.images[0].grid, request.images[0].grid)
        assert same(got.media, request.media)
        assert same(got.positions[0].mask, request.positions[0].mask)
        assert (got.positions[0].offset, got.positions[1]) == (3, Position(4))
        assert queue.pending == 0

    @pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=list(TORCH_DTYPES))
    @pytest.mark.parametrize("shape", [(), (0, 4), (3, 2), (2, 3, LARGE)], ids=str)
    def test_every_dtype_and_shape(
        self,
        encoder: TensorEncoder,
        queue: TensorIpcReceiver,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> None:
        tensor = any_of(dtype, shape)
        assert same(read(encoder.encode(tensor), torch.Tensor, queue), tensor)

    @pytest.mark.parametrize("rows", [3, 3000])
    def test_tensors_that_are_not_contiguous(
        self, encoder: TensorEncoder, queue: TensorIpcReceiver, rows: int
    ) -> None:
        wide = torch.arange(rows * 8.0).view(rows, 8)
        message = {"t": wide.t(), "strided": wide[1:, ::3], "expanded": wide[:, :1].expand(rows, 5)}
        assert same(read(encoder.encode(message), None, queue), message)

    @settings(max_examples=60, deadline=None)
    @given(
        message=st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(1 << 63), (1 << 64) - 1)
            | st.text(max_size=20)
            | st.sampled_from([0, 1, 7, SMALL, LARGE]).map(lambda n: torch.arange(float(n)))
            | st.sampled_from([LARGE]).map(lambda n: torch.ones(n, dtype=torch.bfloat16)),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.text(max_size=5), inner, max_size=4)
            ),
            max_leaves=12,
        ),
        way=st.sampled_from(WAYS),
    )
    def test_any_nesting_keeps_its_structure(
        self, queue: TensorIpcReceiver, message: Any, way: str
    ) -> None:
        with TensorIpcSender(queue.handle) as sender:
            encoder = TensorEncoder(way, lambda: sender)
            assert same(read(encoder.encode(message), None, queue), message)

    def test_own_types_go_through_hooks(self) -> None:
        encoder = TensorEncoder("direct_rpc", enc_hook=lambda value: [value.real, value.imag])
        frames = encoder.encode([1 + 2j, torch.ones(2)])
        decoder = TensorDecoder(
            tuple[complex, torch.Tensor], dec_hook=lambda kind, value: kind(*value)
        )
        number, tensor = decoder.decode(frames)
        assert number == 1 + 2j
        assert same(tensor, torch.ones(2))

    def test_a_hook_may_read_a_message_within(self) -> None:
        encoder = TensorEncoder("direct_rpc")
        inner = encoder.encode([7, torch.ones(LARGE)])

        def hook(kind: type, value: Any) -> Any:
            if isinstance(value, int):
                return kind(value)
            return decoder.decode([value, inner[1]])[0]

        decoder = TensorDecoder(tuple[complex, torch.Tensor], dec_hook=hook)
        number, tensor = decoder.decode(encoder.encode([inner[0], torch.zeros(LARGE)]))
        assert number == 7
        assert same(tensor, torch.zeros(LARGE))

    def test_several_threads_may_use_one_codec(self, queue: TensorIpcReceiver) -> None:
        encoder, decoder = TensorEncoder("direct_rpc"), TensorDecoder()

        def go(number: int) -> bool:
            message = [torch.full((LARGE,), number), number, torch.full((2,), number)]
            return same(decoder.decode(encoder.encode(message)), message)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(go, range(200)))


class TestWays:
    def test_small_ones_stand_in_line(self, sender: TensorIpcSender) -> None:
        for way in WAYS:
            frames = TensorEncoder(way, lambda: sender).encode([torch.ones(SMALL)])
            assert len(frames) == 1
            assert same(read(frames), [torch.ones(SMALL)])

    def test_large_ones_are_frames_that_copy_nothing(self) -> None:
        tensors = [floats(LARGE), floats(2, LARGE)]
        main, *rest = TensorEncoder("direct_rpc").encode(tensors)
        assert len(main) < 100
        assert [memoryview(frame).nbytes for frame in rest] == [4 * LARGE, 8 * LARGE]
        tensors[0][0] = 77.0
        assert same(read([main, *rest]), tensors)

    def test_large_ones_go_through_the_queue(
        self, sender: TensorIpcSender, queue: TensorIpcReceiver
    ) -> None:
        tensor = floats(LARGE)
        frames = TensorEncoder("torch_shm", lambda: sender).encode([tensor], key="r")
        assert len(frames) == 1
        assert len(frames[0]) < 200
        assert same(read(frames, None, queue), [tensor])

    def test_the_key_reaches_whoever_cleans_up(
        self, sender: TensorIpcSender, queue: TensorIpcReceiver
    ) -> None:
        frames = TensorEncoder("torch_shm", lambda: sender).encode([floats(LARGE)], key="aborted")
        while not queue.cleanup_request_tensors("aborted"):  # it has not arrived yet
            time.sleep(0.01)
        with pytest.raises(TransferError, match="request was cleaned up"):
            read(frames, None, queue)

    def test_the_size_is_a_setting(self) -> None:
        tensor = torch.ones(10)
        assert len(TensorEncoder("direct_rpc", inline_nbytes=40).encode(tensor)) == 1
        assert len(TensorEncoder("direct_rpc", inline_nbytes=39).encode(tensor)) == 2

    def test_writable_frames_are_used_as_they_are(self) -> None:
        main, frame = TensorEncoder("direct_rpc").encode(floats(LARGE))
        buffer = bytearray(frame)
        tensor = read([main, buffer])
        tensor.zero_()
        assert not any(buffer)
        before = bytes(frame)
        copy = read([main, before])
        copy.zero_()
        assert any(before)

    def test_frames_at_odd_addresses_are_copied(self) -> None:
        original = floats(LARGE)
        main, frame = TensorEncoder("direct_rpc").encode(original)
        shifted = memoryview(bytearray(b"x") + bytes(frame))[1:]
        tensor = read([main, shifted])
        assert tensor.data_ptr() % 4 == 0
        assert same(tensor, original)

    def test_only_memory_of_the_cpu_is_pinned(self) -> None:
        assert pinnable(torch.ones(1))
        assert not pinnable(torch.ones(1, device="meta"))
        assert not pinnable(torch.ones(0))
        decoder = TensorDecoder(None, pin_memory=True)
        got = decoder.decode(TensorEncoder("direct_rpc").encode([torch.ones(3), floats(LARGE)]))
        assert all(tensor.is_pinned() == torch.cuda.is_available() for tensor in got)


class Carrier:
    """A carrier that works in memory, and can be told to fail."""

    def __init__(self, *errors: WeightSyncError | None) -> None:
        self.errors = list(errors)
        self.held: dict[bytes, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        handle = f"{key}/{len(self.held)}".encode()
        self.held[handle] = tensor
        return handle

    def take_back(self, handle: bytes) -> None:
        del self.held[handle]

    def take(self, handle: bytes) -> torch.Tensor:
        return self.held.pop(handle)

    def drop(self, handle: bytes) -> None:
        del self.held[handle]


class TestFallback:
    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    def test_without_a_queue(self, caplog: pytest.LogCaptureFixture) -> None:
        encoder = TensorEncoder("torch_shm")
        assert encoder.tensor_ipc == "direct_rpc"
        assert encoder.fallback_reason == "no tensor queue was given"
        for _ in range(3):
            assert len(encoder.encode(floats(LARGE))) == 2
        assert self.warnings(caplog) == [
            "tensors are sent in their messages, not in shared memory: no tensor queue was given"
        ]

    def test_where_the_queue_cannot_be_reached(self, caplog: pytest.LogCaptureFixture) -> None:
        elsewhere = TensorQueueHandle(address="0" * 32, host="HOST-elsewhere")
        encoder = TensorEncoder("torch_shm", functools.partial(TensorIpcSender, elsewhere))
        assert encoder.tensor_ipc == "direct_rpc"
        assert "they share no memory" in str(encoder.fallback_reason)
        assert len(self.warnings(caplog)) == 1
        tensor = floats(LARGE)
        assert same(read(encoder.encode(tensor)), tensor)

    @pytest.mark.parametrize(
        "error", [BackendUnavailableError("no memory is shared"), ConnectError("it is gone")]
    )
    def test_when_it_stops_working(
        self, caplog: pytest.LogCaptureFixture, error: WeightSyncError
    ) -> None:
        carrier = Carrier(None, error)
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        tensors = [floats(LARGE) for _ in range(4)]
        frames = encoder.encode(tensors, "r")
        assert (len(frames), len(carrier.held)) == (4, 1)
        assert (encoder.tensor_ipc, encoder.fallback_reason) == ("direct_rpc", str(error))
        assert len(self.warnings(caplog)) == 1
        assert same(TensorDecoder(None, carrier).decode(frames), tensors)

    @pytest.mark.parametrize("error", [TransferTimeout("it is full"), SegmentError("too large")])
    def test_for_one_tensor_without_room(
        self, caplog: pytest.LogCaptureFixture, error: WeightSyncError
    ) -> None:
        carrier = Carrier(error, None, error)
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        tensors = [floats(LARGE) for _ in range(4)]
        frames = encoder.encode(tensors, "r")
        assert (len(frames), len(carrier.held), encoder.crowded_out) == (3, 2, 2)
        assert (encoder.tensor_ipc, encoder.fallback_reason) == ("torch_shm", None)
        assert len(self.warnings(caplog)) == 1
        assert same(TensorDecoder(None, carrier).decode(frames), tensors)

    def test_a_queue_that_is_closed_under_it(self) -> None:
        with TensorIpcReceiver() as receiver:
            sender = TensorIpcSender(receiver.handle)
            encoder = TensorEncoder("torch_shm", lambda: sender)
        tensor = floats(LARGE)
        assert same(read(encoder.encode(tensor)), tensor)
        assert "the tensor receiver is gone" in str(encoder.fallback_reason)

    def test_the_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(SETTING, raising=False)
        assert chosen_tensor_ipc() == "torch_shm"
        monkeypatch.setenv(SETTING, "direct_rpc")
        assert chosen_tensor_ipc() == "direct_rpc"
        assert chosen_tensor_ipc("torch_shm") == "torch_shm"
        assert TensorEncoder().fallback_reason is None
        with pytest.raises(ConfigError, match="tensor_ipc is 'zeromq'; wanted"):
            TensorEncoder("zeromq")
        monkeypatch.setenv(SETTING, "on")
        with pytest.raises(ConfigError, match=f"{SETTING} is 'on'; wanted"):
            TensorEncoder()


class TestFailures:
    def test_what_cannot_be_encoded_leaves_nothing_behind(self) -> None:
        carrier = Carrier()
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        for bad in (
            object(),
            torch.eye(2).to_sparse(),
            torch.empty(2, dtype=torch.bits8),
            1 << 70,
        ):
            with pytest.raises(ConfigError, match="this message cannot be encoded"):
                encoder.encode([floats(LARGE), bad])
            assert not carrier.held

    @pytest.mark.parametrize("kind", [dict[str, int], list[torch.Tensor], tuple[torch.Tensor, int]])
    def test_what_cannot_be_decoded_leaves_nothing_behind(self, kind: Any) -> None:
        carrier = Carrier()
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        frames = encoder.encode([floats(LARGE), "no tensor", floats(LARGE)])
        assert len(carrier.held) == 2
        with pytest.raises(ProtocolError, match="this message cannot be read: Expected"):
            TensorDecoder(kind, carrier).decode(frames)
        assert not carrier.held

    def test_the_queue_drops_them_too(
        self, sender: TensorIpcSender, queue: TensorIpcReceiver
    ) -> None:
        encoder = TensorEncoder("torch_shm", lambda: sender)
        frames = encoder.encode([floats(1 << 16), "no tensor", floats(1 << 16)])
        with pytest.raises(ProtocolError):
            read(frames, list[torch.Tensor], queue)
        assert comes_true(lambda: sender.pool.blocks_in_use == 0)
        with pytest.raises(ConfigError):
            encoder.encode([floats(1 << 16), object()])
        later = sender.send_tensor(torch.ones(1))
        queue.recv_tensor(later)
        assert sender.pool.blocks_in_use == 0

    def test_a_field_that_is_no_tensor_is_named(self) -> None:
        raw = msgspec.msgpack.encode({"request_id": "r", "images": [{"pixels": 3}]})
        with pytest.raises(ProtocolError, match=r"a tensor, got `int` - at `\$.images\[0\]"):
            read([raw], Request)

    def test_shared_memory_without_a_queue_to_read_it(self, sender: TensorIpcSender) -> None:
        frames = TensorEncoder("torch_shm", lambda: sender).encode(floats(LARGE))
        with pytest.raises(ProtocolError, match="no tensor queue was given to read it from"):
            read(frames)

    def test_a_message_that_is_too_long(self) -> None:
        decoder = TensorDecoder(None, max_message_nbytes=100)
        with pytest.raises(ProtocolError, match="may have 100 bytes, this has 10"):
            decoder.decode(TensorEncoder("direct_rpc").encode("x" * 99))

    @pytest.mark.parametrize(
        ("tensor", "frames", "message"),
        [
            ((2, ["float32", [2], 1]), [b"x" * 7], "float32[2] takes 8 bytes, and 7 came"),
            ((2, ["float32", [2], 1]), [], "auxiliary frame 1, which is missing"),
            ((2, ["float32", [2], 2]), [b"x" * 8], "auxiliary frame 2, which is missing"),
            ((2, ["float32", [2], 0]), [b"x" * 8], "Expected `int` >= 1"),
            ((2, ["float32", [-2], 1]), [b"x" * 8], "Expected `int` >= 0"),
            ((2, ["float31", [2], 1]), [b"x" * 8], "unknown dtype 'float31'"),
            ((2, ["float32", [1 << 40, 1 << 40], 1]), [b"x" * 8], "too many for one tensor"),
            ((2, ["float32", [1 << 61, 0], 1]), [b""], "too many for one tensor"),
            ((2, ["float32", [1] * 17, 1]), [b"x" * 8], "length <= 16"),
            ((2, ["float32", [2], 1]), [b"x" * 8, b"y"], "no tensor is in number 2"),
            ((1, ["int8", [3], b"12"]), [], "int8[3] takes 3 bytes, and 2 came"),
            ((1, ["int8", [3]]), [], "a tensor of this message cannot be read"),
            ((3, "no handle"), [], "no handle of a tensor in a queue"),
            ((7, 1), [], "a message has the unknown extension 7"),
        ],
    )
    def test_each_lie_is_told(
        self,
        queue: TensorIpcReceiver,
        tensor: tuple[int, object],
        frames: list[bytes],
        message: str,
    ) -> None:
        code, content = tensor
        raw = msgspec.msgpack.encode([Ext(code, msgspec.msgpack.encode(content))])
        with pytest.raises(ProtocolError) as caught:
            read([raw, *frames], None, queue)
        assert message in str(caught.value)

    def test_a_frame_belongs_to_one_tensor(self) -> None:
        place = Ext(2, msgspec.msgpack.encode(["int8", [2], 1]))
        with pytest.raises(ProtocolError, match="missing or another tensor's"):
            read([msgspec.msgpack.encode([place, place]), bytearray(2)])

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_damaged_messages_are_refused_or_read(
        self, queue: TensorIpcReceiver, data: st.DataObject
    ) -> None:
        request = Request(
            request_id="r", embeddings=torch.ones(3), media={"x": [torch.ones(LARGE)]}
        )
        frames = [bytearray(frame) for frame in TensorEncoder("direct_rpc").encode(request)]
        main = frames[0]
        for _ in range(data.draw(st.integers(1, 4))):
            main[data.draw(st.integers(0, len(main) - 1))] = data.draw(st.integers(0, 255))
        del main[data.draw(st.integers(1, len(main))) :]
        try:
            got = read(list(frames), data.draw(st.sampled_from([Request, None])), queue)
        except WeightSyncError:
            return
        if isinstance(got, Request) and got.embeddings is not None:
            assert got.embeddings.numel() * got.embeddings.element_size() == 12

    @settings(max_examples=300, deadline=None)
    @given(frames=st.lists(st.binary(max_size=60), max_size=3))
    def test_nonsense_is_refused_or_read(
        self, queue: TensorIpcReceiver, frames: list[bytes]
    ) -> None:
        for kind in (Request, None):
            try:
                read(list(frames), kind, queue)
            except WeightSyncError:
                continue

    def test_deep_nesting_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="this message cannot be read"):
            read([b"\x91" * 100_000])
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(ConfigError, match="this message cannot be encoded"):
            TensorEncoder("direct_rpc").encode(deep)


class TestTensorData:
    @pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=list(TORCH_DTYPES))
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
    def test_the_bytes_of_every_dtype(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = any_of(dtype, shape)
        data = tensor_data(tensor)
        assert (data.format, data.ndim, data.readonly) == ("B", 1, True)
        assert bytes(data) == bytes(contiguous_bytes(tensor).tolist())

    def test_it_is_a_view_that_keeps_the_memory(self) -> None:
        tensor = torch.arange(5, dtype=torch.uint8)
        data = tensor_data(tensor)
        tensor[1] = 200
        assert data[1] == 200
        expected = tensor.tolist()
        del tensor
        gc.collect()
        torch.full((5,), 9, dtype=torch.uint8)
        assert list(data) == expected

    def test_rows_that_lie_apart_are_copied(self) -> None:
        tensor = torch.arange(6, dtype=torch.uint8).view(2, 3).t()
        assert list(tensor_data(tensor)) == [0, 3, 1, 4, 2, 5]

    def test_other_tensors_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="cannot be sent"):
            tensor_data(torch.empty(2, dtype=torch.bits8))


def send_requests(queue: TensorQueueHandle, address: str, way: str) -> None:
    """Be an API server: send three requests, and the tensors of a fourth that is never sent."""
    encoder = TensorEncoder(way, lambda: TensorIpcSender(queue))
    with zmq.Context() as context, context.socket(zmq.PUSH) as pipe:
        pipe.connect(address)
        for number in range(3):
            image = Image(pixels=torch.full((3, LARGE), float(number)))
            request = Request(request_id=f"r{number}", images=[image, image])
            pipe.send_multipart(encoder.encode(request, request.request_id), copy=False)
        pipe.close(linger=int(WAIT_S * 1000))
        encoder.encode([floats(LARGE)], "never sent")


class TestBetweenProcesses:
    @pytest.mark.parametrize("way", WAYS)
    def test_requests_reach_an_engine_core(self, way: str) -> None:
        process = None
        with (
            TensorIpcReceiver(grace_s=0.1) as receiver,
            zmq.Context() as context,
            context.socket(zmq.PULL) as pipe,
        ):
            try:
                pipe.bind("tcp://127.0.0.1:0")
                address = pipe.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(address, bytes)
                where = address.decode().rstrip("\0")
                process = SPAWN.Process(target=send_requests, args=(receiver.handle, where, way))
                process.start()
                decoder = TensorDecoder(Request, receiver)
                for number in range(3):
                    assert pipe.poll(int(WAIT_S * 1000))
                    frames = pipe.recv_multipart(copy=False)
                    assert len(frames) == (3 if way == "direct_rpc" else 1)
                    request = decoder.decode([memoryview(frame.buffer) for frame in frames])
                    assert request.request_id == f"r{number}"
                    for image in request.images:
                        assert same(image.pixels, torch.full((3, LARGE), float(number)))
                process.join(WAIT_S)
                assert process.exitcode == 0
                assert comes_true(lambda: receiver.pending == 0)
            finally:
                if process is not None:
                    process.kill()
                    process.join(WAIT_S)


def test_the_page_says_what_works() -> None:
    page = Path(__file__).parents[2] / "docs" / "tensor-queue.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    sent = floats(3, LARGE)
    names: dict[str, Any] = {
        "TensorIpcReceiver": TensorIpcReceiver,
        "TensorIpcSender": TensorIpcSender,
        "TensorEncoder": TensorEncoder,
        "TensorDecoder": TensorDecoder,
        "Request": Request,
        "request": Request(request_id="request-8", embeddings=sent),
        "pixels": sent,
    }
    try:
        for block in blocks:
            exec(block, names)
        assert same(names["pixels"], sent)
        assert same(names["request"].embeddings, sent)
        assert len(names["frames"]) == 1
    finally:
        names["sender"].close()
        names["receiver"].close()
