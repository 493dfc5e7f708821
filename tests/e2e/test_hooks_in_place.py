"""A `load_weights` hook in place: it may write to what it is given, and gets whole layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.shm import segment
from weightsync.shm.host_keys import host_key
from weightsync.weights.copying.layout import StreamLayout, layer_of
from weightsync.weights.sinks.base import Apply, LoadTarget, NamedTensor

pytestmark = pytest.mark.usefixtures("shm_clean")

LAYERS, WIDTH = 4, 24
TENSOR_NBYTES = WIDTH * WIDTH * 4
# No multiple of a page: neighbouring buckets have pages in common.
BUCKET_NBYTES = 64 * 45


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("nothing", torch.zeros(0))


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            tensor.fill_(value + number)


def counted(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2)


def through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] = 7


def inside_inference_mode(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.add_(1)


WRITES: list[Callable[[torch.Tensor], None]] = [
    counted,
    through_data,
    through_numpy,
    inside_inference_mode,
]


class Writer:
    """Keeps copies of what it is given, and then writes to it."""

    def __init__(self, write: Callable[[torch.Tensor], None]) -> None:
        self.write = write
        self.held: dict[str, torch.Tensor] = {}

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self.held[name] = tensor.clone()
            self.write(tensor)
            del tensor

    def holds(self, model: nn.Module) -> bool:
        return all(torch.equal(self.held[n], t) for n, t in model.state_dict().items())


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
class TestWrites:
    def test_the_next_update_has_the_senders_bytes(
        self, packed: bool, verify: bool, write: Callable[[torch.Tensor], None]
    ) -> None:
        hooks, model = [Writer(write), Writer(lambda _: None)], Model()
        receivers = [ws.WeightReceiver(hook, apply="in_place") for hook in hooks]
        to: Any = [receiver.handle for receiver in receivers]
        settings: dict[str, Any] = {"bucket_nbytes": BUCKET_NBYTES, "num_buckets": 3}
        with ws.connect(model, to=to, packed=packed, verify=verify, **settings) as sender:
            for step in range(4):
                fill(model, 10.0 * step)
                sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                report = sender.send_weights()
                assert report.verified == ("arrived" if verify else "none")
                assert all(hook.holds(model) for hook in hooks), f"stale bytes in update {step}"
                now = model.state_dict()
                assert all(torch.equal(now[n], t) for n, t in sent.items()), "the trainer's changed"
        for receiver in receivers:
            receiver.close()

    def test_one_unverified_update_after_others(
        self, packed: bool, verify: bool, write: Callable[[torch.Tensor], None]
    ) -> None:
        """What was written in one is not left for another, whatever that one compares."""
        hook, model = Writer(write), Model()
        receiver = ws.WeightReceiver(hook, apply="in_place")
        settings: dict[str, Any] = {"bucket_nbytes": BUCKET_NBYTES, "num_buckets": 3}
        to: Any = receiver.handle
        with closing(receiver), ws.connect(model, to=to, packed=packed, **settings) as sender:
            for step, compares in enumerate((verify, not verify, verify)):
                sender.verify = compares
                fill(model, 10.0 * step)
                sender.send_weights()
                assert hook.holds(model)


class KeepsCopies(ws.WeightSink):
    """A sink of the user's, which is given views though it says that it keeps what it is given."""

    keeps_views = True

    def __init__(self, write: Callable[[torch.Tensor], None]) -> None:
        self.writer = Writer(write)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def staged_nbytes(self, layout: StreamLayout) -> int:
        return layout.nbytes

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        return Loads(self.writer)


class Loads(LoadTarget):
    in_place = True

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        self.writer(pairs)

    def commit(self) -> None:
        pass


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_sink_of_the_users(write: Callable[[torch.Tensor], None], packed: bool) -> None:
    sink, model = KeepsCopies(write), Model()
    receiver = ws.WeightReceiver(sink, apply="in_place")
    to: Any = receiver.handle
    with closing(receiver), ws.connect(model, to=to, packed=packed, bucket_nbytes=640) as sender:
        for step in range(3):
            fill(model, 10.0 * step)
            sender.send_weights()
            assert sink.writer.holds(model)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_over_the_network(write: Callable[[torch.Tensor], None]) -> None:
    hook, model = Writer(write), Model()
    receiver = ws.WeightReceiver(hook, apply="in_place")
    settings: dict[str, Any] = {"bucket_nbytes": BUCKET_NBYTES, "num_buckets": 3}
    to: Any = receiver.handle
    with closing(receiver), ws.connect(model, to=to, backend="tcp", **settings) as sender:
        for step in range(4):
            fill(model, 10.0 * step)
            assert sender.send_weights().path == "tcp"
            assert hook.holds(model)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_fetched(write: Callable[[torch.Tensor], None]) -> None:
    served = Model()
    hook, source = Writer(write), ws.WeightReceiver(served)
    receiver = ws.WeightReceiver(hook, apply="in_place")
    to: Any = source.handle
    with closing(source), closing(receiver):
        for step in range(2):
            fill(served, 10.0 * step)
            ws.fetch(to=receiver, sources=to)
            assert hook.holds(served)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_handles_in_the_message(write: Callable[[torch.Tensor], None]) -> None:
    """As vLLM's clients send them; the segment is theirs, and is not written."""
    hook = Writer(write)
    receiver = ws.WeightReceiver(hook, apply="in_place")
    with closing(receiver), segment.Segment.create(4096) as memory:
        for step in range(3):
            memory.tensor().fill_(step + 1)
            shown = bytes(memory.buffer)
            receiver.handle({"call": "update_weights", "body": {"update_info": handles(memory)}})
            assert bytes(memory.buffer) == shown
            assert set(hook.held["w"].tolist()) == {step + 1}


def handles(memory: segment.Segment) -> dict[str, object]:
    handle = {"kind": "segment", "name": memory.name, "nbytes": memory.nbytes}
    return {
        "names": ["w"],
        "dtype_names": ["uint8"],
        "shapes": [[1000]],
        "ipc_handles": [{host_key(): handle}],
    }


def test_the_pages_of_a_hook_are_its_own_where_the_kernel_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without /proc/self/pagemap all pages are mapped again."""
    monkeypatch.setattr(segment, "_written_pages", lambda *_: None)
    hook, model = Writer(through_numpy), Model()
    receiver = ws.WeightReceiver(hook, apply="in_place")
    to: Any = receiver.handle
    with closing(receiver), ws.connect(model, to=to, packed=False, verify=False) as sender:
        for step in range(3):
            fill(model, 10.0 * step)
            sender.send_weights()
            assert hook.holds(model)


def test_a_hook_that_writes_and_raises_leaves_nothing_behind() -> None:
    fails = True

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            tensor.data.mul_(2)
            tensor.add_(1)
            if fails:
                raise RuntimeError("no room")
        writer(pairs)

    writer, model = Writer(lambda _: None), Model()
    receiver = ws.WeightReceiver(load, apply="in_place")
    to: Any = receiver.handle
    with closing(receiver), ws.connect(model, to=to, packed=False, verify=False) as sender:
        with pytest.raises(ws.RemoteError, match="no room"):
            sender.send_weights()
        fails = False
        receiver.sink.load_weights = writer  # type: ignore[attr-defined]  # a HookSink's
        sender.send_weights()
        assert writer.holds(model)


def test_a_staged_hook_may_write_as_well() -> None:
    """The arena is its own; what is built on it is not lent to others, nor a base for deltas."""
    hook, model = Writer(counted), Model()
    receiver = ws.WeightReceiver(hook, apply="staged")
    to: Any = receiver.handle
    with closing(receiver), ws.connect(model, to=to, delta="always") as sender:
        for step in range(3):
            fill(model, 10.0 * step)
            sender.send_weights()
            assert hook.holds(model)
        assert not receiver.status().fetchable


@pytest.mark.parametrize("write", WRITES[1:3], ids=lambda write: write.__name__)
def test_what_a_staged_hook_wrote_is_not_fetched(write: Callable[[torch.Tensor], None]) -> None:
    """Though torch did not count it: the arena is not a copy of the weights any more."""
    model = Model()
    receiver = ws.WeightReceiver(Writer(write), apply="staged")
    to: Any = receiver.handle
    with closing(receiver), ws.connect(model, to=to) as sender:
        sender.send_weights()
        assert not receiver.status().fetchable
        with pytest.raises(ws.ConfigError, match="keeps no whole copy"):
            ws.fetch(to=Model(), sources=to)


class Fuses:
    """Loads the layers of which it is given q, k and v in one call, as one tensor."""

    def __init__(self, *, names: bool = False) -> None:
        self.names = names
        self.held: dict[str, torch.Tensor] = {}
        self.calls: list[list[str]] = []

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        given = dict(pairs)
        self.calls.append(list(given))
        loaded = []
        for layer in {layer_of(name) for name in given if ".q." in name}:
            parts = [f"{layer}.{part}.weight" for part in "qkv"]
            if all(part in given for part in parts):
                self.held[layer] = torch.cat([given[part] for part in parts])
                loaded += parts
        loaded += [name for name in given if "layers" not in name]
        return loaded if self.names else None

    def holds(self, model: Model) -> bool:
        return all(
            torch.equal(
                self.held[f"layers.{number}"],
                torch.cat([getattr(layer, part).weight.detach() for part in "qkv"]),
            )
            for number, layer in enumerate(model.layers)
        )


BUCKETS = [BUCKET_NBYTES, 3 * BUCKET_NBYTES, 640, 1 << 20]


class TestTogether:
    @pytest.mark.parametrize("backend", ["auto", "tcp"])
    @pytest.mark.parametrize("bucket_nbytes", BUCKETS)
    def test_a_hook_that_fuses_loads_all_layers(self, bucket_nbytes: int, backend: str) -> None:
        hook, model = Fuses(), Model()
        receiver = ws.WeightReceiver(hook, apply="in_place")
        settings: dict[str, Any] = {"bucket_nbytes": bucket_nbytes, "num_buckets": 2}
        to: Any = receiver.handle
        with (
            closing(receiver),
            ws.connect(model, to=to, packed=True, backend=backend, **settings) as sender,
        ):
            for step in range(3):
                fill(model, 10.0 * step)
                report = sender.send_weights()
                assert hook.holds(model)
                assert report.receivers[0].names_nothing
                assert "the hook named no tensors" in str(report)
        names = [name for call in hook.calls for name in call]
        assert names == [*model.state_dict()] * 3

    def test_the_names_that_it_returns_are_those_of_all_layers(self) -> None:
        hook, model = Fuses(names=True), Model()
        receiver = ws.WeightReceiver(hook, apply="in_place")
        to: Any = receiver.handle
        with closing(receiver), ws.connect(model, to=to, packed=True, bucket_nbytes=640) as sender:
            report = sender.send_weights()
            assert not report.receivers[0].names_nothing
            assert "the hook named" not in str(report)

    def test_where_it_does_not_get_them_together_the_reason_names_the_setting(self) -> None:
        sink = ws.HookSink(Fuses(names=True), together=None)
        receiver, model = ws.WeightReceiver(sink, apply="in_place"), Model()
        to: Any = receiver.handle
        with closing(receiver), ws.connect(model, to=to, packed=True, bucket_nbytes=640) as sender:
            with pytest.raises(ws.ManifestMismatchError, match=r"together=.*staged") as raised:
                sender.send_weights()
            assert set(raised.value.missing) == {n for n in model.state_dict() if "layers" in n}

    def test_parts_of_a_users_own_need_not_be_neighbours(self) -> None:
        """All q of the model in one call, and so on; they come last in the last bucket."""
        calls: list[list[str]] = []
        held: dict[str, torch.Tensor] = {}

        def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            given = {name: tensor.clone() for name, tensor in pairs}
            calls.append(list(given))
            held.update(given)

        def kind(name: str) -> str:
            return name.split(".")[-2] if "layers" in name else name

        model = Model()
        sink = ws.HookSink(load, together=kind)
        receiver = ws.WeightReceiver(sink, apply="in_place")
        to: Any = receiver.handle
        with closing(receiver), ws.connect(model, to=to, packed=True, bucket_nbytes=640) as sender:
            for step in range(2):
                calls.clear()
                fill(model, 10.0 * step)
                sender.send_weights()
                assert all(torch.equal(held[n], t) for n, t in model.state_dict().items())
                for part in "qkv":
                    names = {f"layers.{number}.{part}.weight" for number in range(LAYERS)}
                    assert any(names <= set(call) for call in calls)
                assert sorted(n for call in calls for n in call) == sorted(model.state_dict())

    def test_with_clones_one_part_at_a_time(self) -> None:
        calls: list[list[str]] = []

        def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            calls.append([name for name, _ in pairs])

        sink = ws.HookSink(load, keeps_views=True)
        receiver, model = ws.WeightReceiver(sink, apply="in_place"), Model()
        to: Any = receiver.handle
        with closing(receiver), ws.connect(model, to=to, packed=True) as sender:
            report = sender.send_weights()
        assert [len({layer_of(name) for name in call}) for call in calls] == [1] * len(calls)
        assert report.receivers[0].peak_extra_nbytes == 2 * 3 * TENSOR_NBYTES

    def test_another_together_is_refused(self) -> None:
        with pytest.raises(ws.ConfigError, match="together is a function"):
            ws.HookSink(print, together="layer")  # type: ignore[arg-type]  # a mistake
