"""Ready events with a driver on the CPU, which detects readers that do not wait.

The trainer's `connect`, the packing, the ring, the messages and the receivers are the real ones.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import weightsync as ws
from tests.backends.late_events import GivenUp, LateEvents, ignore_events, open_late
from tests.gpu.receiver_process import EveryDtype, as_bytes, digests, fill, receiver_process
from tests.offers import offered
from tests.weights.fused_cases import HostKernel
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc import sender as ipc_sender
from weightsync.backends.ipc.memory import ProbeMemory, fence_on_gpu
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.cuda import events
from weightsync.cuda.events import (
    CUDA,
    FENCE_VARIABLE,
    OpenFence,
    WriterFence,
    fence_from_environment,
    open_fence,
)
from weightsync.cuda.memory import OpenMemory
from weightsync.errors import (
    ConfigError,
    HandleError,
    TransferError,
    TransferTimeout,
)
from weightsync.shm.host_keys import host_key
from weightsync.shm.ring import Control
from weightsync.weights import fused
from weightsync.weights.copy_plan import DeviceCopyUnit
from weightsync.weights.layout import StreamLayout, aligned
from weightsync.weights.packer import Packer
from weightsync.weights.source import ModuleSource
from weightsync.wire.messages import InitRequest
from weightsync.wire.offers import KeyedHandle, ReadyEvents, SegmentHandle

pytestmark = pytest.mark.usefixtures("shm_clean")

BUCKET_NBYTES = 192 << 10
WAIT_S = 60.0
SILENT_S = 0.2
packings = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])


class Trainer:
    """A model, the engine that `connect` makes of it, and what happened in which order."""

    def __init__(self, events: LateEvents) -> None:
        self.events = events
        self.model = EveryDtype("cpu")
        self.log: list[str] = []
        self.settled: list[bool] = []
        events.before = self._late

    def engine(self, *args: Any, **kwargs: Any) -> IpcTrainerEngine:
        self._engine = IpcTrainerEngine(*args, make_fence=self.events.make_fence, **kwargs)
        return self._engine

    def telling(self, receiver: Callable[[Mapping[str, object]], object]) -> Any:
        def tell(message: Mapping[str, object]) -> object:
            if message["call"] == "update_weights":
                self.log.append("told")
            return receiver(message)

        return tell

    def _late(self, index: int) -> Sequence[torch.Tensor]:
        if self._engine.packed:
            buckets = self._engine._ring.tensors
            bucket = index % len(buckets)  # of this connection: the driver counts on
            self.log.append(f"recorded at {self._engine._control.published}")
            return [buckets[bucket]]
        self.log.append("recorded")
        assert self._engine._memory is not None
        return self._engine._memory.tensors

    def updates(self, to: object, *, packed: bool, verify: bool, count: int = 2) -> None:
        connect = partial(ws.connect, bucket_nbytes=BUCKET_NBYTES, num_buckets=2)
        with connect(self.model, to=to, packed=packed, verify=verify) as sender:  # type: ignore[arg-type]  # any callable
            for seed in range(count):
                fill(self.model, seed)
                report = sender.send_weights()
                assert report.path == "shared_memory"
                assert (report.verified != "none") is verify
            self.chunks = len(self._engine._packer.layout.chunks)
            self.events.close()  # while the memory that bytes come back to is there


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trainer]:
    events = LateEvents(tmp_path / "events")
    made = Trainer(events)
    plain = Packer.pack_stable

    def pack_stable(packer: Packer, *args: Any, wait: bool = True, **kwargs: Any) -> Any:
        made.settled.append(wait)
        return plain(packer, *args, wait=wait, **kwargs)

    monkeypatch.setattr("weightsync.backends.ipc.sender.IpcTrainerEngine", made.engine)
    monkeypatch.setattr(Packer, "pack_stable", pack_stable)
    yield made
    events.close()


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Receivers of this process open late events."""
    late = partial(open_fence, driver=LateEvents(trainer.events.path))
    monkeypatch.setattr("weightsync.backends.ipc.receiver.open_fence", late)


def test_a_reader_of_buckets_waits_for_what_was_recorded(trainer: Trainer) -> None:
    with receiver_process("cpu", prepare=partial(open_late, trainer.events.path)) as receiver:
        trainer.updates(receiver, packed=True, verify=False)
        assert receiver.digests() == digests(trainer.model)
    assert trainer.chunks > 4
    # Each chunk was recorded before it was published.
    assert trainer.log == [f"recorded at {n}" for n in range(2 * trainer.chunks)]
    assert trainer.settled == [False, False]


def test_a_reader_of_registered_memory_waits_for_what_was_recorded(trainer: Trainer) -> None:
    with receiver_process("cpu", prepare=partial(open_late, trainer.events.path)) as receiver:
        trainer.updates(trainer.telling(receiver), packed=False, verify=False)
        assert receiver.digests() == digests(trainer.model)
    assert trainer.log == ["recorded", "told"] * 2


@packings
@pytest.mark.usefixtures("opening")
def test_a_hook_is_given_what_has_come(trainer: Trainer, packed: bool) -> None:
    held: dict[str, torch.Tensor] = {}

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        held.update((name, tensor.clone()) for name, tensor in pairs)

    receiver = ws.WeightReceiver(ws.HookSink(load), apply="in_place")
    trainer.updates(receiver.handle, packed=packed, verify=False)
    receiver.close()
    assert trainer.log
    model = trainer.model.state_dict()
    assert set(held) <= set(model)
    assert all(torch.equal(as_bytes(tensor), as_bytes(model[n])) for n, tensor in held.items())


@packings
@pytest.mark.usefixtures("opening")
def test_a_verified_update_is_fenced_by_the_host(trainer: Trainer, packed: bool) -> None:
    theirs = EveryDtype("cpu")
    receiver = ws.WeightReceiver(theirs)
    trainer.updates(receiver.handle, packed=packed, verify=True)
    receiver.close()
    assert trainer.events.made > 0
    assert trainer.log == []
    assert trainer.settled == [True, True] * packed
    assert digests(theirs) == digests(trainer.model)


@pytest.mark.usefixtures("opening")
def test_other_tensors_than_the_registered_come_by_the_host(trainer: Trainer) -> None:
    theirs = EveryDtype("cpu")
    receiver = ws.WeightReceiver(theirs)
    with ws.connect(trainer.model, to=receiver.handle, packed=False, verify=False) as sender:
        fill(trainer.model, seed=1)
        sender.send_weights()
        assert trainer.log == ["recorded"]
        fill(trainer.model, seed=2)
        others = {n: t for n, t in trainer.model.state_dict().items() if "weight" not in n}
        with sender.update(partial=True) as update:
            update.send((name, tensor.clone()) for name, tensor in others.items())
        assert trainer.log == ["recorded"]
        ours, held = digests(trainer.model), digests(theirs)
        assert {name for name in ours if ours[name] == held[name]} == set(others)
    receiver.close()


@packings
def test_one_reader_that_takes_no_events_brings_the_host_back(
    trainer: Trainer, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = partial(open_fence, driver=LateEvents(trainer.events.path))
    opens: Iterator[Callable[..., object]] = iter([late, ignore_events, late, late])

    def opening(*args: Any, **kwargs: Any) -> object:
        return next(opens)(*args, **kwargs)

    monkeypatch.setattr("weightsync.backends.ipc.receiver.open_fence", opening)
    for taken in (False, True):
        models = [EveryDtype("cpu"), EveryDtype("cpu")]
        receivers = [ws.WeightReceiver(model) for model in models]
        trainer.log.clear()
        trainer.settled.clear()
        trainer.updates([r.handle for r in receivers], packed=packed, verify=False)
        for receiver in receivers:
            receiver.close()
        assert bool(trainer.log) is taken
        assert trainer.settled == [not taken] * 2 * packed
        assert [digests(model) for model in models] == [digests(trainer.model)] * 2


@pytest.mark.parametrize("refused", ["make", "open"])
def test_a_driver_without_events_is_one_warning(
    trainer: Trainer,
    refused: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer.events.refuses = [refused]
    late = partial(open_fence, driver=trainer.events)
    monkeypatch.setattr("weightsync.backends.ipc.receiver.open_fence", late)
    theirs = EveryDtype("cpu")
    receiver = ws.WeightReceiver(theirs)
    with caplog.at_level(logging.WARNING, "weightsync.cuda.events"):
        trainer.updates(receiver.handle, packed=True, verify=False)
    receiver.close()
    (record,) = [r for r in caplog.records if r.name == "weightsync.cuda.events"]
    assert f"the driver does not {refused} events; the sender waits" in record.getMessage()
    assert trainer.log == []
    assert digests(theirs) == digests(trainer.model)


@packings
def test_an_init_that_comes_again_may_say_otherwise(
    trainer: Trainer, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first was lost; the second time the driver refuses."""
    refusals: Iterator[list[str]] = iter([[], ["open"]])

    def opening(*args: Any, **kwargs: Any) -> object:
        driver = LateEvents(trainer.events.path, refuses=next(refusals))
        return open_fence(*args, driver=driver, **kwargs)

    monkeypatch.setattr("weightsync.backends.ipc.receiver.open_fence", opening)
    theirs = EveryDtype("cpu")
    receiver = ws.WeightReceiver(theirs)

    def twice(message: Mapping[str, Any]) -> object:
        if "init_info" in message["body"]:
            receiver.handle(message)
        return receiver.handle(message)

    trainer.updates(twice, packed=packed, verify=False)
    receiver.close()
    assert next(refusals, None) is None
    assert trainer.log == []
    assert digests(theirs) == digests(trainer.model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_torch_without_cuda_is_such_a_driver(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        control = Control.create(slots=2, readers=1, entries=1)
        stack.callback(control.close)
        fence = fence_on_gpu(control, torch.device("cuda", 0), 2, packed=True)
        assert fence.offer(0, 1) is None
        control.take_events(0, 1)
        assert not fence.left_to([0], verify=False, packed=True)
    (record,) = caplog.records
    assert "making an interprocess event failed" in record.getMessage()
    with pytest.raises(HandleError, match="of GPU GPU-one, which this process does not see"):
        CUDA.open("GPU-one", bytes(64))


def test_whoever_takes_a_place_over_has_to_say_it_again(tmp_path: Path) -> None:
    driver = LateEvents(tmp_path / "events")
    with ExitStack() as stack:
        control = Control.create(slots=2, readers=2, entries=1)
        stack.callback(control.close)
        fence = WriterFence(control, torch.device("cpu"), 2, packed=True, driver=driver)
        stack.callback(fence.close)

        def left_to(*readers: int) -> bool:
            return fence.left_to(readers, verify=False, packed=True)

        assert not left_to(0)
        fence.offer(0, 1)
        assert not left_to(0)
        control.take_events(0, 1)
        assert left_to(0)
        assert not left_to(0, 1)
        fence.offer(0, 2)  # to another process, which may not know of events
        assert not left_to(0)
        control.take_events(0, 2)
        assert left_to(0)


# What is offered


GPU, OTHER = "GPU-one", "GPU-two"
MEMORY: KeyedHandle = {GPU: SegmentHandle(name="x", nbytes=1)}


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        (
            ReadyEvents(device=GPU, buckets=[bytes(64), bytes(63)]),
            "an event handle has 64 bytes, this has 63",
        ),
        (
            ReadyEvents(device=GPU, registered=bytes(65)),
            "an event handle has 64 bytes, this has 65",
        ),
        (
            ReadyEvents(device=OTHER, buckets=[bytes(64)] * 2),
            "the ready events are of GPU GPU-two, the memory that they are for is on GPU-one",
        ),
        (ReadyEvents(device=GPU, buckets=[bytes(64)]), "1 ready events were offered for 2 buckets"),
    ],
)
def test_events_that_cannot_be_right_are_refused(
    tmp_path: Path, offer: ReadyEvents, said: str
) -> None:
    driver = LateEvents(tmp_path / "events", refuses=["open"])
    with pytest.raises(HandleError) as caught:
        open_fence(offer, MEMORY, [GPU, OTHER], num_buckets=2, driver=driver)
    assert said in str(caught.value)


def test_an_init_with_a_wrong_event_leaves_nothing_open() -> None:
    model = EveryDtype("cpu")
    receiver = ws.WeightReceiver(EveryDtype("cpu"))
    engine = IpcTrainerEngine(ModuleSource(model), TransferOptions(packed=True))
    wrong = ReadyEvents(device=host_key(), buckets=[b"short"] * 4)
    info = offered(engine)
    assert info.payload.ready is None
    offer = replace(info, payload=replace(info.payload, ready=wrong))
    with pytest.raises(HandleError, match="an event handle has 64 bytes, this has 5"):
        receiver.dispatch(InitRequest(init_info=offer))
    assert not engine._control.takes_events(0)
    receiver.dispatch(InitRequest(init_info=info))
    receiver.close()
    engine.close()


# The choice


def test_the_environment_says_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FENCE_VARIABLE, raising=False)
    assert fence_from_environment() == "host"
    monkeypatch.setenv(FENCE_VARIABLE, "event")
    assert fence_from_environment() == "event"
    monkeypatch.setenv(FENCE_VARIABLE, "fast")
    with pytest.raises(ConfigError, match="WEIGHTSYNC_GPU_FENCE is 'fast'; it may be host"):
        fence_from_environment()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of streams: the CPU counts as a GPU."""
    said: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            said.append("settle")

    class Lane:
        def run(self, work: Callable[[], None]) -> Lane:
            work()
            said.append("launch")
            return self

        def wait(self) -> None:
            said.append("settle")

        def wait_on_stream(self) -> None:
            said.append("hold")

    def kernel_of(units: Sequence[DeviceCopyUnit], *, among: int) -> HostKernel | None:
        return HostKernel() if units and len(units) == among else None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(fused, "_stream_of", lambda _: Lane())
    monkeypatch.setattr(fused, "kernel_of", kernel_of)
    return said


@pytest.mark.parametrize("flowing", [False, True], ids=["stable", "flowing"])
@pytest.mark.parametrize("wait", [False, True])
def test_a_packer_leaves_the_wait_only_if_told(log: list[str], wait: bool, flowing: bool) -> None:
    source = ModuleSource(EveryDtype("cpu"))
    plan = StreamLayout(source.manifest, bucket_nbytes=BUCKET_NBYTES)
    packer = Packer(plan, [torch.zeros(BUCKET_NBYTES, dtype=torch.uint8)])
    packer._on_host = False
    options: dict[str, Any] = {"verify": False, "wait": wait}
    if flowing:
        filled = packer.pack(source.tensors(), lambda _: 0, **options)
        wanted = ["settle"] * wait
    else:
        filled = packer.pack_stable(source.stable_tensors() or [], lambda _: 0, **options)
        wanted = ["launch", "settle" if wait else "hold"]
    for _ in filled:
        assert log == wanted
        log.clear()


class Noting(WriterFence):
    """Writes down what it was made with, and when it records."""

    log: list[str]
    devices: list[torch.device | None]

    def __init__(
        self, control: Control, device: torch.device | None, count: int, *, packed: bool
    ) -> None:
        self.devices.append(device)
        super().__init__(control, device, count, packed=packed, driver=self.driver)

    def record(self, index: int = 0) -> None:
        self.log.append("record")

    driver: LateEvents


@pytest.mark.parametrize(
    ("fence", "takes", "verify", "wanted"),
    [
        ("host", True, False, "settle"),
        ("event", True, False, "record"),
        ("event", False, False, "settle"),
        ("event", True, True, "settle"),
    ],
)
def test_registered_memory_has_one_fence(
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fence: Any,
    takes: bool,
    verify: bool,
    wanted: str,
) -> None:
    monkeypatch.setattr(ipc_sender, "ProbeMemory", lambda _: ProbeMemory())
    monkeypatch.setattr(Noting, "log", log, raising=False)
    monkeypatch.setattr(Noting, "devices", [], raising=False)
    monkeypatch.setattr(Noting, "driver", LateEvents(tmp_path / "events"), raising=False)
    device = torch.device("cpu")
    options = TransferOptions(packed=False, device=device)
    with ExitStack() as stack:
        source = ModuleSource(EveryDtype("cpu"))
        engine = IpcTrainerEngine(source, options, "cuda_ipc", fence=fence, make_fence=Noting)
        stack.callback(engine.close)
        if takes:
            engine._fence.offer(0, 7)
            engine._control.take_events(0, 7)
        engine.begin([0], verify=verify)
        assert Noting.devices == [device if fence == "event" else None]
        assert log == [wanted]
        log.clear()
        if wanted == "record":
            engine.begin([0, 1], verify=False)
            assert log == ["settle"]


# A reader's wait ends


class Asked:
    """An event that passes when `passed` says so, and the driver that opens it."""

    def __init__(self, passed: Callable[[], bool] = lambda: False) -> None:
        self.passed = passed

    def open(self, key: str, handle: bytes) -> Asked:
        return self


def fence_of(event: Asked) -> OpenFence:
    events = ReadyEvents(device=GPU, buckets=[bytes(64)], registered=bytes(64))
    return OpenFence(events, event)  # type: ignore[arg-type]  # readers open


def test_a_reader_gives_up_bytes_that_never_come() -> None:
    with pytest.raises(TransferTimeout, match=r"its GPU did not copy within 0\.05 s"):
        fence_of(Asked()).arrive(0, check=lambda: None, beat=lambda: 1, timeout_s=0.05)


def test_a_reader_is_patient_while_its_sender_beats() -> None:
    beats = itertools.count()
    begun = time.monotonic()
    late = Asked(lambda: time.monotonic() - begun > 1.5 * SILENT_S)
    fence_of(late).arrive(0, check=lambda: None, beat=lambda: next(beats), timeout_s=SILENT_S)
    assert late.passed()


def test_a_reader_looks_whether_its_sender_lives() -> None:
    def dead() -> None:
        raise ws.SegmentError("the sender died")

    with pytest.raises(ws.SegmentError, match="the sender died"):
        fence_of(Asked()).arrive(None, check=dead, beat=lambda: 1, timeout_s=WAIT_S)


@packings
def test_nothing_is_touched_before_it_has_come(
    trainer: Trainer, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that gives up has put nothing behind the event that may run later."""
    late = partial(open_fence, driver=GivenUp(trainer.events.path))
    monkeypatch.setattr("weightsync.backends.ipc.receiver.open_fence", late)
    theirs = EveryDtype("cpu")
    before = digests(theirs)
    receiver = ws.WeightReceiver(theirs, apply="in_place")
    with ws.connect(trainer.model, to=receiver.handle, packed=packed, verify=False) as sender:
        with pytest.raises(ws.TransferError, match="asking an event failed"):
            sender.send_weights()
        trainer.events.close()
    assert digests(theirs) == before
    assert receiver.may_generate
    receiver.close()


@pytest.fixture
def left(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events are open whenever a reader lets go of memory."""
    fences: list[OpenFence] = []  # as the traceback of an update would hold them
    found: list[int] = []
    driver = LateEvents(trainer.events.path)
    plain = OpenMemory.close

    def opening(*args: Any, **kwargs: Any) -> OpenFence | None:
        fence = open_fence(*args, driver=driver, **kwargs)
        assert fence is not None
        fences.append(fence)
        return fence

    def closing(memory: OpenMemory) -> None:
        if fences:  # else it is the probe's
            found.append(sum(len(fence._events) for fence in fences))
        plain(memory)

    monkeypatch.setattr("weightsync.backends.ipc.receiver.open_fence", opening)
    monkeypatch.setattr(OpenMemory, "close", closing)
    return found


def test_events_are_let_go_of_before_their_memory(trainer: Trainer, left: list[int]) -> None:
    receiver = ws.WeightReceiver(EveryDtype("cpu"))
    trainer.updates(receiver.handle, packed=True, verify=False)
    receiver.close()
    assert left == [0]


def test_events_of_an_init_that_fails_are_let_go_of(trainer: Trainer, left: list[int]) -> None:
    engine = trainer.engine(ModuleSource(trainer.model), TransferOptions(packed=True))
    receiver = ws.WeightReceiver(EveryDtype("cpu"))
    info = offered(engine)
    tight = aligned(-(-engine.manifest.nbytes // info.payload.entries))
    wrong = replace(info.payload, unit_nbytes=tight)
    with pytest.raises(HandleError, match="are needed"):
        receiver.dispatch(InitRequest(init_info=replace(info, payload=wrong)))
    receiver.close()
    engine.close()
    assert left == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_the_driver_says_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver fails when it is asked, not when it opens: an illegal access of long ago."""

    class Event:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with DSA")

        def record(self, stream: object) -> None:
            self.query()

    opened = object.__new__(events._CudaOpen)
    opened._event = Event()  # type: ignore[assignment]  # the two methods
    with pytest.raises(TransferError) as caught:
        opened.passed()
    assert str(caught.value) == (
        "asking an interprocess event failed: CUDA error: an illegal memory access"
    )
    own = object.__new__(events._CudaOwn)
    own._event, own._device = Event(), torch.device("cuda", 0)  # type: ignore[assignment]  # same
    with pytest.raises(TransferError, match="recording an interprocess event failed") as caught:
        own.record()
    assert not isinstance(caught.value, HandleError)  # which would have the sender leave the path
