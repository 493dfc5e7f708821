"""Deltas whose bytes are damaged or made up: a typed error, and no byte outside of the memory.

The packets of a real delta are damaged and given to the memory of a receiver that holds its base.
A staged receiver keeps the weights in use; every receiver takes a whole update and a delta later.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import weightsync as ws
from tests.soak.sizes import sizes
from weightsync.weights.copying import arena
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.deltas import change_log as delta
from weightsync.weights.deltas.change_log import ChangeLog, DeltaSource, DeltaTarget
from weightsync.weights.deltas.coding import Section, encode
from weightsync.weights.lines import memory as lines
from weightsync.weights.lines.memory import LineMemory
from weightsync.weights.sinks.base import LoadTarget
from weightsync.weights.sources.base import ModuleSource

ERRORS = (ws.ProtocolError, ws.VerificationError, ws.BackendUnavailableError)
"""DeltaError is a ProtocolError."""
SHAPES = ((40, 16), (64,), (7, 33), (1,), (33, 5, 3))
GUARD = 4096
GUARD_BYTE = 0xA5
HEADER_NBYTES = 64

Packet = tuple[str, torch.Tensor]


class Model(nn.Module):
    """Tensors that end inside of a line, each between guard bytes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        sizes = [-(-2 * torch.Size(shape).numel() // 64) * 64 for shape in SHAPES]
        self.pool = torch.full((sum(sizes) + 64 * (len(SHAPES) + 1),), GUARD_BYTE).byte()
        self.is_guard = torch.ones_like(self.pool, dtype=torch.bool)
        at = 64
        for i, (shape, size) in enumerate(zip(SHAPES, sizes, strict=True)):
            nbytes = 2 * torch.Size(shape).numel()
            held = self.pool[at : at + nbytes].view(torch.bfloat16).view(shape)
            held.copy_(torch.randn(shape, generator=random))
            self.is_guard[at : at + nbytes] = False
            self.register_parameter(f"p{i}", nn.Parameter(held, requires_grad=False))
            at += size + 64

    def step(self, seed: int) -> None:
        """Change some values of each tensor, the last one among them."""
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            flat = parameter.view(-1)
            flat[torch.randint(flat.numel(), (3,), generator=random)] += 0.5
            flat[-1] -= 2

    def bits(self) -> list[bytes]:
        return [bits_of(tensor) for tensor in self.parameters()]


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


class GuardedPages:
    """Stands in for the memory that a staged receiver allocates: each has guards around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[mmap.mmap] = []
        monkeypatch.setattr(arena, "allocate", self._allocate)
        monkeypatch.setattr(arena, "_of_pages", self._of_pages)

    def _allocate(self, nbytes: int, _: torch.device) -> torch.Tensor:
        pages = mmap.mmap(-1, nbytes + 2 * GUARD)
        pages[:GUARD] = pages[-GUARD:] = bytes([GUARD_BYTE]) * GUARD
        self._made.append(pages)
        return self._of_pages(pages, nbytes)

    @staticmethod
    def _of_pages(pages: mmap.mmap, nbytes: int) -> torch.Tensor:
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        buffer.pages = pages  # type: ignore[attr-defined]  # tensors take attributes
        return buffer[GUARD : GUARD + nbytes]

    def check(self) -> None:
        untouched = bytes([GUARD_BYTE]) * GUARD
        assert all(p[:GUARD] == untouched == p[-GUARD:] for p in self._made)


@dataclass(frozen=True)
class Genuine:
    """The packets of a delta, with the fingerprints of the base and of the result."""

    packets: Sequence[Packet]
    base_total: str
    total: int


def make_delta(base: Model, new: Model, *, by_value: bool) -> Genuine:
    source = ModuleSource(base)
    log = ChangeLog(StreamLayout(source.manifest), keeps=by_value)
    log.record("base", source.tensors())
    made = DeltaSource(
        log,
        ModuleSource(new),
        "new",
        ["base"],
        lines.count_lines(log.layout),
        scrub=(1, 12),
        by_value=by_value,
    )
    packets = [(name, tensor.clone()) for name, tensor in made.tensors()]
    assert made.written_lines
    return Genuine(packets, made.terms.bases["base"], log.total)


class Victim:
    """A receiver that holds the base, and the genuine deltas by kind."""

    def __init__(
        self, kind: str, pages: GuardedPages, stack: ExitStack, *, packed: bool = True
    ) -> None:
        self.base, self.new, self._held = Model(1), Model(1), Model(2)
        self.new.step(3)
        self.deltas = {
            "lines": make_delta(self.base, self.new, by_value=False),
            "values": make_delta(self.base, self.new, by_value=True),
        }
        self.in_place = kind == "in place"
        self._pages = pages
        self._hooked: dict[str, bytes] = {}
        sink: Any = self._held
        if kind == "hook":
            sink = self._load
        elif not self.in_place:
            sink = ws.ModuleSink(self._held, swap=kind)  # type: ignore[arg-type]  # one of Swap
        self._receiver = ws.WeightReceiver(sink, apply="in_place" if self.in_place else "staged")
        # It sends no deltas, so that no thread prepares the memory meanwhile.
        self._sender = stack.enter_context(
            ws.connect(self.base, to=self._handle, packed=packed, delta="off")
        )
        self.send_whole()

    def _handle(self, message: Mapping[str, object]) -> object:
        """Handle a message; before a commit, prepare for a delta as if its sender had said so."""
        session = self._receiver._session
        if message["call"] == "finish_weight_update" and session._incoming is not None:
            session.load_targets.check_follows(session._incoming.load_targets)
        return self._receiver.handle(message)

    def _load(self, pairs: Any) -> None:
        self._hooked.update({name: bits_of(tensor) for name, tensor in pairs})

    def send_whole(self) -> None:
        assert self._sender.send_weights().verified != "none"
        assert self.in_use() == self.base.bits()

    def in_use(self) -> list[bytes]:
        return list(self._hooked.values()) or self._held.bits()

    def attempt(self, packets: Sequence[Packet], base_total: str) -> int | None:
        """Load packets as the receiver does, and abandon the update; return the result.

        None where they were refused. If they were not, they made the sender's weights.
        """
        load_target, memory = self._memory_of_base()
        target = DeltaTarget(load_target, memory, base_total)
        target.begin()
        try:
            for packet in packets:
                target.load([packet])
            target.validate()
            result = target.result()
        except ERRORS:
            return None
        else:
            written = load_target.memory
            assert written is not None
            assert list(map(bits_of, written.tensors)) == self.new.bits()
            return result
        finally:
            target.discard()
            self.check()

    def _memory_of_base(self) -> tuple[LoadTarget, LineMemory]:
        """Return where a delta is written; after a whole update if the base was overwritten."""
        digest = ModuleSource(self.base).manifest.digest
        targets = self._receiver._session.load_targets
        try:
            found = targets.of_delta(digest)
        except ws.DeltaError:
            self.send_whole()
            found = targets.of_delta(digest)
        return found.target, found.memory

    def check(self) -> None:
        """Check the guards, and that staged bytes are not in use."""
        self._pages.check()
        pool, is_guard = self._held.pool, self._held.is_guard
        assert bool((pool[is_guard] == GUARD_BYTE).all())
        if not self.in_place:
            assert self.in_use() == self.base.bits()


@pytest.fixture
def small_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_PACKET_LINES", 16)
    monkeypatch.setattr(delta, "SECTION_VALUES", 10)
    monkeypatch.setattr(delta, "_CODED_NBYTES", 64 * 6)
    monkeypatch.setattr(delta, "_EARLY_NBYTES", 100)
    monkeypatch.setattr(delta, "_BLOCK_LINES", 16)


@pytest.fixture(params=["pointer", "copy", "hook", "in place"])
def victim(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    small_packets: None,
) -> Iterator[Victim]:
    with ExitStack() as stack:
        yield Victim(request.param, GuardedPages(monkeypatch), stack)


TOP = (1 << 64) - 1
NUMBERS = st.sampled_from([0, 1, 2, 8, 16, 63, 64, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, TOP])
NUMBERS |= st.integers(0, TOP) | st.integers(0, 200)
DTYPES = (torch.int8, torch.float32, torch.bfloat16, torch.float64, torch.bool)


@dataclass(frozen=True)
class Damage:
    """One change of the packets; `place` and `number` are reduced to what there is."""

    what: str
    place: int
    number: int
    data: bytes

    def apply(self, packets: list[Packet], other: Sequence[Packet]) -> None:
        at = self.place % len(packets)
        name, tensor = packets[at]
        match self.what:
            case "drop":
                del packets[at]
            case "repeat":
                packets.insert(self.number % (len(packets) + 1), packets[at])
            case "of the other kind":
                packets[at] = other[self.number % len(other)]
            case "dtype":
                dtype = DTYPES[self.number % len(DTYPES)]
                flat = tensor.view(-1).view(torch.uint8)
                fits = flat[: len(flat) // dtype.itemsize * dtype.itemsize]
                packets[at] = name, fits.clone().view(dtype)
            case "shape":
                packets[at] = name, tensor.view(-1, 1 + (tensor.numel() % 2 == 0))
            case _:
                whole = bytearray(bits_of(tensor))
                self._overwrite(whole, self.place // len(packets))
                packets[at] = name, torch.tensor(whole, dtype=torch.uint8)

    def _overwrite(self, whole: bytearray, place: int) -> None:
        match self.what:
            case "section":
                whole[:] = self._made_up()
            case "bytes":
                begin = place % max(len(whole), 1)
                whole[begin : begin + len(self.data)] = self.data[: len(whole) - begin]
            case "cut":
                del whole[place % (len(whole) + 1) :]
            case "grow":
                whole += self.data
            case "zeros":
                whole[:] = bytes(len(whole))
            case "random":
                whole[:] = self.data
            case "word" if len(whole) >= 8:
                word = 8 * (place % min(len(whole) // 8, 8))
                struct.pack_into("<Q", whole, word, self.number)
            case "index" if len(whole) >= HEADER_NBYTES + 4:
                indices = (len(whole) - HEADER_NBYTES) // 68 or 1
                where = HEADER_NBYTES + 4 * (place % indices)
                struct.pack_into("<I", whole, where, self.number % (1 << 32))

    def _made_up(self) -> bytes:
        """A well-formed section of any positions, also beyond the model."""
        words = np.frombuffer(self.data[: len(self.data) // 8 * 8], np.uint64)
        limits = (1 << 20, 20_000, 200)
        positions, first = np.unique(words % np.uint64(limits[self.number % 3]), return_index=True)
        words = words[first]
        coded = encode(Section(positions, words.astype(np.uint16)))
        head = struct.pack("<QQ", delta._CODED_MAGIC, len(coded))
        return head.ljust(HEADER_NBYTES, b"\0") + coded


KINDS: tuple[str, ...] = (
    "drop",
    "repeat",
    "of the other kind",
    "dtype",
    "shape",
    "section",
    "bytes",
    "bytes",
)
KINDS += ("cut", "grow", "zeros", "random", "word", "word", "index", "index")
DAMAGES = st.lists(
    st.builds(
        Damage,
        st.sampled_from(KINDS),
        st.integers(0, 1 << 16),
        NUMBERS,
        st.binary(max_size=24) | st.binary(min_size=48, max_size=400),
    ),
    min_size=1,
    max_size=3,
)
BASES: st.SearchStrategy[str | None] = st.none() | st.integers(0, TOP).map("{:016x}".format)


@sizes(quick=125, whole=10_000)
def test_damaged_deltas_are_refused(victim: Victim, size: int) -> None:
    taken = refused = 0

    @settings(
        max_examples=size,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        kind=st.sampled_from(["lines", "values"]),
        damages=DAMAGES,
        base_total=BASES,
        heals=st.booleans(),
    )
    def attempt(kind: str, damages: list[Damage], base_total: str | None, heals: bool) -> None:
        nonlocal taken, refused
        genuine = victim.deltas[kind]
        other = victim.deltas["values" if kind == "lines" else "lines"].packets
        packets = list(genuine.packets)
        for damage in damages:
            if packets:
                damage.apply(packets, other)
        result = victim.attempt(packets, base_total or genuine.base_total)
        refused += result is None
        taken += result is not None
        if heals:
            victim.send_whole()
            assert victim.attempt(genuine.packets, genuine.base_total) == genuine.total

    attempt()
    print(f"{taken} taken, {refused} refused")
    assert refused > taken


@pytest.mark.usefixtures("small_packets")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["pointer", "copy", "hook", "in place"])
def test_bytes_between_tensors_do_not_stay(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused delta may leave bytes beyond the end of a tensor; later deltas are as before."""
    with ExitStack() as stack:
        victim = Victim(kind, GuardedPages(monkeypatch), stack, packed=packed)
        genuine = victim.deltas["lines"]
        damaged = [(name, packet.clone()) for name, packet in genuine.packets]
        for _, packet in damaged[:-1]:
            packet[HEADER_NBYTES + 16 * 4 :].view(16, 64)[:, -2:] = 0xFF
        assert victim.attempt(damaged, genuine.base_total) is None
        for _ in range(3):  # the memories of a staged receiver are used in turn
            victim.send_whole()
            assert victim.attempt(genuine.packets, genuine.base_total) == genuine.total


FLIPS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1200), st.integers(1, 255)))


@pytest.mark.usefixtures("small_packets")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@sizes(quick=60, whole=3_000)
def test_a_delta_damaged_on_its_way_does_no_harm(
    apply: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver has the sender's weights or an older version of them, or says that it has not.

    The next update brings it up to date, and the one after that is a delta again.
    """
    flips: list[tuple[int, int, int]] = []
    refused = 0
    genuine = DeltaSource.writers

    def damaged(source: DeltaSource) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
        for i, (name, write) in enumerate(genuine(source)):

            def write_damaged(target: torch.Tensor, i: int = i, write: Any = write) -> None:
                write(target)
                for packet, at, by in flips:
                    if packet == i:
                        target[at % len(target)] ^= by

            yield name, write_damaged

    monkeypatch.setattr(DeltaSource, "writers", damaged)
    trainer, held = Model(1), Model(2)
    receiver = ws.WeightReceiver(held, apply=apply)
    with ws.connect(trainer, to=receiver, delta="always", scrub=1.0) as sender:

        def send(step: int) -> bool:
            trainer.step(step)
            report = sender.send_weights()
            assert held.bits() == trainer.bits()
            return report.delta is not None and report.delta.sent

        @settings(
            max_examples=size,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(given_flips=FLIPS, step=st.integers(0, 1 << 16))
        def attempt(given_flips: list[tuple[int, int, int]], step: int) -> None:
            nonlocal refused
            before = held.bits()
            flips[:] = given_flips
            try:
                refused += not send(step)
            except ws.WeightSyncError:
                refused += 1
                assert held.bits() == before or not receiver.may_generate
            flips.clear()
            send(step + 1)
            assert send(step + 2)

        send(0)
        attempt()
        assert refused > size / 4
