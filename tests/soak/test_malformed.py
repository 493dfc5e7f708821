"""A hundred thousand malformed inputs: typed errors only, and no weight changed."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import weightsync as ws
from tests.queues.test_codec import messages
from tests.soak.malformed import (
    Message,
    Recorder,
    damaged,
    mutated_bytes,
    mutated_json,
    random_json,
    whole_update,
)
from tests.soak.sizes import sizes
from weightsync.backends.ring import IpcInit, RingUpdate
from weightsync.backends.tcp.payload import RelayedUpdate, TcpInit
from weightsync.queues import tensor_packets
from weightsync.queues.codec import MessageCodec, split
from weightsync.receiver import WeightReceiver
from weightsync.shm.segment import Segment
from weightsync.testing import TinyModel
from weightsync.wire import codec
from weightsync.wire.messages import CALLS, ShutdownRequest
from weightsync.wire.offers import ManifestMessage, SegmentHandle

BATCH = 1_000
LEASE_S = 2.0
TOKEN = "0123456789abcdef" * 2


@dataclass
class Counted:
    """What became of the inputs."""

    refused: Counter[str] = field(default_factory=Counter)
    taken: int = 0

    def attempt(self, call: Callable[[], object]) -> bool:
        """Whether it was taken; a refusal is one of our errors, and nothing else is one."""
        try:
            call()
        except ws.WeightSyncError as exc:
            self.refused[type(exc).__name__] += 1
            return False
        self.taken += 1
        return True


class Target:
    """A live receiver, a sender whose update it has, and the messages of both."""

    def __init__(self, apply: str, stack: ExitStack) -> None:
        self.model = TinyModel()
        self.receiver = WeightReceiver(self.model, apply=apply, lease_s=LEASE_S)  # type: ignore[arg-type]  # one of both
        stack.callback(self.receiver.close)
        self._sent = TinyModel()
        self._fill(self._sent, 1)
        recorder = self.recorder = Recorder(self.receiver)
        self._sender = stack.enter_context(
            ws.connect(self._sent, to=recorder, packed=True, bucket_nbytes=4096, num_buckets=2)
        )
        self._sender.send_weights()
        other = TinyModel()
        self._fill(other, 2)
        segment = stack.enter_context(Segment.create(64 << 10))
        self.segment = segment.name.encode()
        self.carried = json.dumps({"update_info": whole_update(other, segment)}).encode()
        carried = {"update_info": whole_update(other, segment), "update_id": "never started"}
        self.messages: list[Message] = [
            *recorder.messages,
            ("update_weights", json.dumps(carried).encode()),
            ("start_weight_update", b'{"update_id":"u","version":5}'),
            ("abort_weight_update", b'{"update_id":"u","reason":"r"}'),
            ("weight_checker", b'{"action":"compare","checksums":{"norm":"00"}}'),
            ("update_weight_version", b'{"new_version":"v"}'),
            ("pause", b'{"mode":"keep"}'),
        ]
        self._held = self._bits()

    def feed(self, counted: Counted, call: str, body: bytes) -> None:
        """Whatever it is, it is refused, or does what it says; weights move only by a commit."""
        before = self.receiver.updates_total.get("committed", 0)
        counted.attempt(lambda: self.receiver.dispatch(codec.decode_request(call, body)))
        if self.receiver.updates_total.get("committed", 0) != before:
            self.heal()
        elif self.receiver.may_generate:
            assert self._bits() == self._held, (call, body)
        else:
            # A fleet_version that grew makes it wait for that version; in place, a damaged handle
            # may be noticed when weights were touched: TORN says so.
            status = self.receiver.status()
            assert status.state in ("CATCHING_UP", "TORN", "UPDATING", "PREPARED")
            assert status.detail
            assert status.state != "CATCHING_UP" or self._bits() == self._held
            self.heal()
        self.give_up()

    def give_up(self) -> None:
        """End the update that a message began."""
        update = self.receiver.open_update
        if update is not None:
            body = {"update_id": update.update_id}
            self.receiver.handle({"call": "abort_weight_update", "body": body})

    def heal(self) -> None:
        """The next update of the sender makes it whole."""
        self.give_up()
        self._sender.send_weights(self.receiver.version + 1)
        assert self._bits() == self._held
        assert self.receiver.may_generate

    def _bits(self) -> bytes:
        tensors = self.model.state_dict().values()
        return b"".join(tensor.numpy().tobytes() for tensor in tensors)

    @staticmethod
    def _fill(model: TinyModel, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))


@pytest.fixture(params=["staged", "in_place"])
def target(request: pytest.FixtureRequest, shm_clean: None) -> Iterator[Target]:
    logging.disable(logging.WARNING)
    with ExitStack() as stack:
        yield Target(request.param, stack)
    logging.disable(logging.NOTSET)


def many(count: int, inputs: st.SearchStrategy[object], check: Callable[..., None]) -> None:
    """Try `count` inputs, in batches: hypothesis remembers all of one."""
    for batch in range(-(-count // BATCH)):

        @seed(batch)
        @settings(
            max_examples=min(BATCH, count - batch * BATCH),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(given_input=inputs)
        def attempt(given_input: object) -> None:
            check(given_input)

        attempt()


@sizes(quick=300, whole=20_000)
def test_messages_to_a_live_receiver(target: Target, size: int) -> None:
    counted = Counted()
    bodies = [body for _, body in target.messages]
    inputs = st.one_of(
        st.sampled_from(target.messages).flatmap(
            lambda message: st.tuples(st.just(message[0]), mutated_json([message[1]]))
        ),
        st.tuples(
            st.sampled_from(list(CALLS)) | st.text(max_size=20),
            mutated_json(bodies) | random_json | st.binary(max_size=200),
        ),
    )
    # What luck may not find: memory that is not there, and a step of an update that is not open.
    target.feed(counted, "update_weights", target.carried.replace(target.segment, b"weightsync-0"))
    target.feed(counted, "finish_weight_update", b'{"update_id":"never"}')
    many(size, inputs, lambda message: target.feed(counted, *message))
    target.heal()
    print(f"{size} messages: {counted.taken} taken, refused {dict(counted.refused)}")
    assert sum(counted.refused.values()) > size / 2
    assert len(counted.refused) >= 3


def init_of(target: Target) -> bytes:
    """The init_info that its sender gave."""
    for call, body in target.messages:
        info = json.loads(body).get("init_info")
        if call == "init_weight_transfer_engine" and info:
            return json.dumps(info).encode()
    raise AssertionError("no init was recorded")


@sizes(quick=100, whole=2_000)
def test_no_damaged_offer_keeps_the_sender_out_whose_it_seems_to_be(
    target: Target, size: int
) -> None:
    """Each is that of now with one value replaced; after it the sender has to connect again."""
    counted = Counted()
    sender = json.loads(init_of(target))["sender"]
    variants = sum(1 for _ in damaged(newest_offer(target)))
    for at in range(0, variants, max(1, variants // size)):
        body = next(islice(damaged(newest_offer(target)), at, None))
        target.feed(counted, "init_weight_transfer_engine", body)
        target.receiver.dispatch(ShutdownRequest(sender=sender))
        target.heal()
    print(f"{counted.refused.total() + counted.taken} damaged offers: {counted.taken} taken")
    assert counted.refused["ProtocolError"] > size / 4
    assert counted.refused["HandleError"]


def newest_offer(target: Target) -> bytes:
    """What the sender said last to connect."""
    return next(
        body
        for call, body in reversed(target.recorder.messages)
        if call == "init_weight_transfer_engine" and json.loads(body).get("init_info")
    )


@sizes(quick=200, whole=10_000)
def test_parsers_of_handles_and_columns(target: Target, size: int) -> None:
    counted = Counted()
    init = init_of(target)
    updates = [
        json.dumps(json.loads(body)["update_info"]).encode()
        for call, body in target.messages
        if call == "update_weights"
    ]
    manifest = json.dumps(json.loads(init)["manifest"]).encode()

    def columns(body: bytes) -> None:
        try:
            message = msgspec.json.decode(body, type=ManifestMessage)
        except (msgspec.DecodeError, UnicodeDecodeError):
            counted.refused["DecodeError"] += 1
            return
        counted.attempt(lambda: codec.manifest_from_wire(message))

    def parse(body: bytes) -> None:
        columns(body)
        try:
            plain = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            counted.refused["DecodeError"] += 1
            return
        counted.attempt(lambda: codec.parse_init_info(plain))
        counted.attempt(lambda: codec.parse_update_info(plain))
        for kind in (IpcInit, TcpInit, RingUpdate, RelayedUpdate):
            counted.attempt(lambda kind=kind: codec.decode_payload(plain, kind))  # type: ignore[misc]

    payloads = [json.dumps(json.loads(init)["payload"]).encode()]
    payloads += [json.dumps(json.loads(update).get("payload")).encode() for update in updates]
    many(
        size,
        mutated_json([init, *updates, *payloads, manifest]) | random_json | st.binary(max_size=99),
        parse,
    )
    print(f"{size} bodies: {counted.taken} parsed, refused {dict(counted.refused)}")
    assert sum(counted.refused.values()) > size


@sizes(quick=200, whole=7_500)
def test_plain_messages(target: Target, size: int) -> None:
    """What a callback or an actor may be called with: any object at all."""
    counted = Counted()
    things = st.recursive(
        st.none() | st.integers() | st.binary(max_size=8) | st.text(max_size=8) | st.builds(object),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
        max_leaves=8,
    )
    calls = st.sampled_from([call for call in CALLS if "finish" not in call])
    shaped = st.fixed_dictionaries({"call": calls | things, "body": things})

    def handle(message: object) -> None:
        counted.attempt(lambda: target.receiver.handle(message))  # type: ignore[arg-type]  # on purpose
        target.give_up()

    many(size, things | shaped, handle)
    target.heal()
    print(f"{size} plain messages: {counted.taken} taken, refused {dict(counted.refused)}")
    assert sum(counted.refused.values()) > size / 2


@sizes(quick=200, whole=13_000)
def test_the_message_codec(size: int) -> None:
    """The codec of the message queue: a message whose bytes are damaged, or are none."""
    counted = Counted()
    reader = MessageCodec()

    def packed(message: object) -> bytes:
        encoded = MessageCodec().encode(message)
        room = bytearray(encoded.nbytes)
        encoded.write(memoryview(room))
        return bytes(room)

    damaged = messages.map(packed).flatmap(lambda raw: mutated_bytes([raw]))

    def read(raw: bytes) -> None:
        counted.attempt(lambda: reader.decode(*split(memoryview(raw))))
        counted.attempt(lambda: reader.decode(raw, []))

    many(size, damaged | st.binary(max_size=300), read)
    print(f"{size} messages of a queue: {counted.taken} read, refused {dict(counted.refused)}")
    assert counted.refused["ProtocolError"] > size


@sizes(quick=100, whole=12_000)
def test_packets_of_a_tensor_queue(size: int) -> None:
    counted = Counted()
    handle = tensor_packets.TensorIpcHandle("r", "t", [2, 3], "float32", "cpu", TOKEN, 7)
    segment = SegmentHandle(name="weightsync-" + TOKEN, nbytes=4096)
    valid: list[tensor_packets.Packet | tensor_packets.TensorIpcHandle] = [
        tensor_packets.Hello(1, TOKEN, "name", segment, 5),
        tensor_packets.Welcome(["GPU-0"]),
        tensor_packets.InPacket(handle, bytearray(24)),
        tensor_packets.InBlock(handle, segment, 3, 9),
        tensor_packets.Forget("name"),
        tensor_packets.Discard(4),
        tensor_packets.Goodbye(),
        handle,
    ]
    raws = [tensor_packets.encode(packet) for packet in valid]

    def read(raw: bytes) -> None:
        counted.attempt(lambda: tensor_packets.decode_sent(raw))
        counted.attempt(lambda: tensor_packets.decode_welcome(raw))
        counted.attempt(lambda: tensor_packets.decode_handle(raw))

    many(size, mutated_bytes(raws) | st.binary(max_size=200), read)
    print(f"{size} packets: {counted.taken} read, refused {dict(counted.refused)}")
    assert counted.refused["ProtocolError"] > size
