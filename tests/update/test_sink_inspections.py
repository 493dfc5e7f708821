"""A staged update inspects the receiving module once, after its bytes have arrived."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.update.uniform import fill, make, values
from weightsync.backends.ipc.transfer import OpenedMemory
from weightsync.weights.copying import arena
from weightsync.weights.sinks.module_sink import ModuleTensors, _PointerTarget, _StagedTarget
from weightsync.wire import codec
from weightsync.wire.messages import UpdateRequest

pytestmark = pytest.mark.usefixtures("shm_clean")

Way = Literal["pointer", "copy", "in_place"]


@dataclass
class Pair:
    """A model, a receiver of it, and a sender; `seen` counts its messages by type."""

    way: Way
    model: nn.Linear = field(default_factory=lambda: make(0))
    served: nn.Linear = field(default_factory=lambda: make(0))
    seen: Counter[type] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        staged = self.way != "in_place"
        sink = ws.ModuleSink(self.served, swap=self.way if staged else "auto")  # type: ignore[arg-type]
        self.receiver = ws.WeightReceiver(sink, apply="staged" if staged else "in_place")
        self.sender = ws.connect(self.model, to=self.carry)

    def carry(self, message: Mapping[str, object]) -> dict[str, object]:
        self.seen[type(codec.from_plain(message))] += 1
        return self.receiver.handle(message)

    def send(self, value: int) -> None:
        fill(self.model, value)
        self.sender.send_weights()
        assert values(self.served) == {value}

    def messages(self) -> int:
        return self.seen.pop(UpdateRequest, 0)


@pytest.fixture(params=["pointer", "copy", "in_place"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    for value in (1, 2):
        made.send(value)
    made.messages()
    yield made
    made.sender.close()
    made.receiver.close()


def test_each_side_looks_once_and_twice_where_weights_in_use_are_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    look = ModuleTensors.refresh

    def counted(found: ModuleTensors, **terms: bool) -> bool:
        looks.append(found.module)
        return look(found, **terms)

    monkeypatch.setattr(ModuleTensors, "refresh", counted)
    for value in (3, 4, 5):
        looks.clear()
        pair.send(value)
        assert looks.count(pair.model) == 1
        assert looks.count(pair.served) == (2 if pair.way == "in_place" else 1)


def replace(module: nn.Module) -> None:
    module.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True)


def move(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [replace, move])
def test_a_model_changed_between_updates_gets_the_next_one(
    pair: Pair, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another message; the update after that finds a target of the changed model."""
    followed: list[object] = []
    follow = _StagedTarget.follow

    def counted(target: _StagedTarget) -> None:
        followed.append(target)
        follow(target)

    monkeypatch.setattr(_StagedTarget, "follow", counted)
    for value in (3, 4):
        change(pair.served)
        pair.send(value)
        pair.send(value + 10)
        assert pair.messages() == 2
    changes = 0 if pair.way == "in_place" else 2
    assert len(followed) == changes
    followed.clear()
    pair.send(5)
    assert not followed


@pytest.mark.parametrize("pair", ["copy"], indirect=True)
def test_tensors_that_were_replaced_are_freed(pair: Pair) -> None:
    before = [weakref.ref(p) for p in pair.served.parameters()]
    replace(pair.served)
    pair.send(3)
    gc.collect()
    assert [find() for find in before] == [None, None]


def test_a_part_is_not_taken_for_the_whole(pair: Pair) -> None:
    fill(pair.model, 3)
    with pair.sender.update(partial=True) as update:
        update.send([("bias", pair.model.bias)])
    assert set(pair.served.bias.tolist()) == {3}
    assert set(pair.served.weight.flatten().tolist()) == {2}
    pair.send(4)


def test_a_model_that_is_changed_during_an_update(pair: Pair) -> None:
    """It gets the staged weights; those written to the tensors that it had do not arrive."""

    def send_and_replace() -> None:
        with pair.sender.update() as update:
            update.send(pair.model.state_dict().items())
            replace(pair.served)

    fill(pair.model, 3)
    if pair.way == "in_place":
        with pytest.raises(ws.TransferError, match="moved or replaced during the update"):
            send_and_replace()
    else:
        send_and_replace()
        assert values(pair.served) == {3}
    pair.send(4)


def test_a_model_that_is_compiled_keeps_its_addresses_from_then_on() -> None:
    model, served = make(1), make(0)
    receiver = ws.WeightReceiver(served)
    with ws.connect(model, to=receiver.handle) as sender:
        sender.send_weights()
        replace(served)
        served.compile(backend="eager")
        before = [p.data_ptr() for p in served.parameters()]
        for value in (2, 3, 4):
            fill(model, value)
            sender.send_weights()
            assert values(served) == {value}
            assert [p.data_ptr() for p in served.parameters()] == before
    receiver.close()


@pytest.mark.parametrize("values_sent", [(3,), (3, 4, 5)])
@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_memory_that_a_user_gave_back_to_the_model_is_not_written(
    pair: Pair, values_sent: tuple[int, ...]
) -> None:
    """Old weights, kept as views and put in place again, lie where the next update was staged."""
    kept = {name: tensor.detach() for name, tensor in pair.served.state_dict().items()}
    for value in values_sent:
        pair.send(value)
    pair.served.load_state_dict(kept, assign=True)
    del kept
    before = values(pair.served)
    fill(pair.model, 6)
    with pair.sender.update() as update:
        update.send(pair.model.state_dict().items())
        assert values(pair.served) == before
    assert values(pair.served) == {6}
    assert torch.equal(next(pair.served.parameters()), next(pair.model.parameters()))


@pytest.mark.parametrize("pair", ["pointer", "copy"], indirect=True)
def test_a_model_that_is_changed_while_its_target_is_opened(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    destinations, changed = ws.ModuleSink.destinations, list[str]()

    def change_after(sink: ws.ModuleSink, layout: Any) -> Any:
        found = destinations(sink, layout)
        if not changed:
            replace(pair.served)
            changed.append("replaced")
        return found

    replace(pair.served)
    pair.send(3)
    monkeypatch.setattr(ws.ModuleSink, "destinations", change_after)
    for value in (4, 5, 6):  # the first of them opens a target
        pair.send(value)
    assert changed


def to_meta(module: nn.Module) -> None:
    module.to("meta")


def expand(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.ones(1).expand(parameter.shape)


@pytest.mark.parametrize("change", [to_meta, expand])
@pytest.mark.parametrize("during", [False, True])
def test_tensors_that_cannot_be_written_to_are_refused(
    pair: Pair, change: Any, during: bool
) -> None:
    fill(pair.model, 3)
    refused = pytest.raises(ws.WeightSyncError, match=r"cannot be written to|moved or replaced")
    with refused, pair.sender.update() as update:
        if not during:
            change(pair.served)
        update.send(pair.model.state_dict().items())
        change(pair.served)
    torn = pair.way == "in_place" and during
    status = pair.receiver.status()
    assert (status.state, status.version) == ("TORN" if torn else "READY", 2)
    pair.served.to_empty(device="cpu")
    for parameter in pair.served.parameters():
        parameter.data = torch.empty(parameter.shape)
    pair.send(4)


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_older_weights_that_a_user_shares_are_not_moved_any_more(pair: Pair) -> None:
    """torch moves the storage of a shared tensor, of which plans to copy know the address."""
    kept = pair.served.state_dict()
    pair.send(3)  # `kept` has the other memory, to which the next update will be written
    kept["weight"].share_memory_()
    assert set(kept["weight"].flatten().tolist()) == {2}
    for value in (4, 5, 6):
        pair.send(value)
        assert not pair.served.weight.untyped_storage().is_shared()
    assert set(kept["weight"].flatten().tolist()) == {2}


@pytest.mark.parametrize("step", ["begin", "validate", "commit"])
@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_older_weights_may_be_shared_during_an_update(
    pair: Pair, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is written through another storage than that of the views that are shared."""
    kept = pair.served.state_dict()
    pair.send(3)
    call = getattr(_PointerTarget, step)

    def share_and_call(target: _PointerTarget) -> None:
        if step == "begin":  # torch is copying what it shares, and moves it later
            call(target)
        kept["weight"].share_memory_()
        if step != "begin":
            call(target)

    with monkeypatch.context() as patch:
        patch.setattr(_PointerTarget, step, share_and_call)
        pair.send(4)
    assert kept["weight"].untyped_storage().is_shared()
    assert not pair.served.weight.untyped_storage().is_shared()
    pair.send(5)
    pair.send(6)


def share_when_begun(
    kept: torch.Tensor | torch.UntypedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = _PointerTarget.begin

    def begin_and_share(target: _PointerTarget) -> None:
        begin(target)
        kept.share_memory_()

    monkeypatch.setattr(_PointerTarget, "begin", begin_and_share)


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_a_storage_that_a_user_keeps_may_be_shared_during_an_update(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = pair.served.weight.untyped_storage()
    pair.send(3)
    share_when_begun(kept, monkeypatch)
    pair.send(4)
    assert kept.is_shared()
    assert not pair.served.weight.untyped_storage().is_shared()


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_memory_given_back_after_later_views_of_it_were_shared_is_not_written(pair: Pair) -> None:
    first = {name: tensor.detach() for name, tensor in pair.served.state_dict().items()}
    pair.send(3)
    pair.send(4)  # the memory of `first`, through another storage
    second = pair.served.state_dict()
    pair.send(5)
    second["weight"].share_memory_()
    pair.send(6)
    pair.send(7)
    pair.served.load_state_dict(first, assign=True)
    del first
    before = values(pair.served)
    fill(pair.model, 8)
    with pair.sender.update() as update:
        update.send(pair.model.state_dict().items())
        assert values(pair.served) == before
    assert values(pair.served) == {8}


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_older_weights_may_be_shared_before_tensors_are_copied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter with strides of its own is copied at the commit, also beside one that moves."""
    pair.served.weight.data = pair.served.weight.detach().t().contiguous().t()
    pair.send(3)
    pair.send(4)  # opens a target
    kept = pair.served.state_dict()["bias"]
    pair.send(5)
    share_when_begun(kept, monkeypatch)
    pair.send(6)


@pytest.mark.parametrize("case", ["dropped", "shared and dropped", "shared"])
@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_what_a_user_kept_costs_nothing_once_it_is_elsewhere(
    pair: Pair, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(of: Any, **terms: bool) -> Any:
            seen[name] += getattr(of, "module", pair.served) is pair.served
            return call(of, **terms)

        monkeypatch.setattr(owner, name, counted)

    count(arena, "with_new_storage")
    count(ModuleTensors, "refresh")
    kept = pair.served.state_dict()
    pair.send(3)
    if "shared" in case:
        kept["weight"].share_memory_()
    if case == "shared and dropped":
        kept.clear()  # the storage has been moved, and has no other user
    pair.send(4)
    if case == "dropped":
        kept.clear()
    assert seen["with_new_storage"] == 1
    for value in (5, 6, 7):
        seen.clear()
        pair.send(value)
        assert seen == {"refresh": 1}
        assert not pair.served.weight.untyped_storage().is_shared()


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_older_weights_that_a_user_keeps_cost_no_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are copies compiled again."""
    made: list[object] = []
    pair.send(3)
    monkeypatch.setattr(arena, "allocate", lambda nbytes, _: made.append(nbytes))
    monkeypatch.setattr(OpenedMemory, "keep", lambda *found: made.append(found))
    addresses = set[int]()
    for value in range(4, 10):
        kept = pair.served.state_dict()
        pair.send(value)
        addresses.add(pair.served.weight.data_ptr())
        assert kept["weight"].data_ptr() != pair.served.weight.data_ptr()
    assert len(addresses) == 2
    assert not made


def test_a_receiver_that_runs_in_inference_mode_leaves_no_inference_tensors() -> None:
    """Parameters could not be trained or assigned any more."""
    model, served = make(0), make(0)
    receiver = ws.WeightReceiver(ws.ModuleSink(served, swap="pointer"), apply="staged")

    def carry(message: Mapping[str, object]) -> dict[str, object]:
        with torch.inference_mode():
            return receiver.handle(message)

    with ws.connect(model, to=carry) as sender:
        for value in range(6):
            fill(model, value)
            sender.send_weights()
            kept = served.state_dict()
            assert not any(tensor.is_inference() for tensor in kept.values())
        served.load_state_dict(kept, assign=True)
        assert values(served) == {5}
    receiver.close()


def add_child(module: nn.Module) -> None:
    module.add_module("child", nn.Module())


def replace_one(module: nn.Module) -> None:
    module.load_state_dict({"bias": torch.zeros(32)}, assign=True, strict=False)


@pytest.mark.parametrize("change", [add_child, replace_one])
def test_a_change_of_one_part_keeps_no_more_memory(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors are pointed at two new arenas, and the old ones are freed."""
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = arena.allocate

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = allocate(nbytes, device)
        made.append(weakref.ref(buffer._base.pages))  # type: ignore[union-attr]
        return buffer

    monkeypatch.setattr(arena, "allocate", counted)
    pair = Pair("pointer")
    for value in (1, 2, 3):
        pair.send(value)
    for _ in range(2):
        change(pair.served)
        for value in (3, 4, 5):
            pair.send(value)
    gc.collect()
    assert len(made) > 2
    assert sum(find() is not None for find in made) == 2
    pair.sender.close()
    pair.receiver.close()


@pytest.mark.parametrize("pair", ["pointer"], indirect=True)
def test_a_buffer_that_views_a_parameter_shows_the_new_weights(pair: Pair) -> None:
    view = pair.served.weight.detach().view(-1)
    pair.served.register_buffer("flat", view, persistent=False)
    for value in (3, 4, 5):
        fill(pair.model, value)
        pair.sender.send_weights()
        assert set(pair.served.weight.flatten().tolist()) == {value}
        assert set(view.tolist()) == {value}


def add_odd_buffer(module: nn.Module) -> None:
    module.register_buffer("odd", torch.zeros(3, dtype=torch.complex128).to(torch.complex32))


def add_uninitialized(module: nn.Module) -> None:
    module.register_module("odd", nn.LazyLinear(4))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("change", [add_odd_buffer, add_uninitialized])
def test_a_module_that_cannot_be_described_is_taken_again_when_it_is_brought_back(
    pair: Pair, change: Any
) -> None:
    fill(pair.model, 3)
    change(pair.served)
    for _ in range(2):
        with pytest.raises(ws.WeightSyncError):
            pair.sender.send_weights()
    del pair.served.odd
    pair.send(4)


def test_an_empty_module_is_committed() -> None:
    model, served = nn.Module(), nn.Module()
    receiver = ws.WeightReceiver(ws.ModuleSink(served, swap="copy"), apply="staged")
    with ws.connect(model, to=receiver.handle) as sender:
        assert sender.send_weights().version == 1
    receiver.close()


COLLECTIONS = """
import gc
from torch import nn
import weightsync as ws

trainer, server = (nn.Sequential(*(nn.Linear(1, 1) for _ in range(3000))) for _ in range(2))
collections = []
with ws.connect(trainer, to=ws.WeightReceiver(server), delta="off") as sender:
    for _ in range(4):
        sender.send_weights()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    for _ in range(3):
        sender.send_weights()
    print(len(collections))
"""


def test_unpacked_updates_of_many_tensors_leave_nothing_to_the_garbage_collector() -> None:
    """Tuples of all tensors that are kept for a moment cost a full collection now and then."""
    command = [sys.executable, "-c", COLLECTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["0"]
