"""A backend that breaks the contract is named with its method, and breaks nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partialmethod
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.backends import registry
from weightsync.backends.base import (
    HeldMemory,
    Reach,
    ReaderChanges,
    ReaderWatch,
    Received,
    Round,
    part,
)
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import contiguous_bytes
from weightsync.testing import TinyModel
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.codec import manifest_from_wire, manifest_to_wire
from weightsync.wire.messages import InitRequest, StartRequest
from weightsync.wire.offers import InitInfo

SHELF: list[list[torch.Tensor]] = []
"""Where the trainer's engine leaves tensors for the receiver's, in the same process."""


class ShelfSender(ws.TrainerWeightTransferEngine):
    def __init__(self, source: Any) -> None:
        self.source = source

    def init_payload(self, reader: Any, generation: int) -> Any:
        return None

    def begin(self, readers: Any, *, verify: bool, source: Any) -> Any:
        SHELF[:] = [[contiguous_bytes(tensor) for _, tensor in self.source.tensors()]]

    def transfer(self, check: Any) -> None:
        pass

    def end(self) -> None:
        SHELF.clear()

    @property
    def table_digest(self) -> None:
        return None

    def close(self) -> None:
        pass


class ShelfReceiver(ws.WeightTransferEngine):
    shut: int = 0

    def init_transfer_engine(self, init_info: Any) -> None:
        self.layout = StreamLayout(manifest_from_wire(init_info.manifest))

    def receive_weights(self, update_info: Any, context: Any) -> Any:
        context.write(self.layout, context.open_target(self.layout), SHELF[0])
        return Received(self.layout.manifest)

    def sender_alive(self) -> bool | None:
        return True

    def shutdown(self) -> None:
        type(self).shut += 1


class Shelf(ws.Backend):
    """A backend of one process, unverified; each test breaks one method of it."""

    name = "shelf"
    sender: type[ShelfSender] = ShelfSender
    receiver: type[ShelfReceiver] = ShelfReceiver

    def reach(self, trainer: Any, receiver: Any) -> Any:
        return Reach("shelf", 0.01)

    def trainer_engine(self, source: Any, path: str, options: Any, bases: Any) -> Any:
        return self.sender(source)

    def receiver_engine(self, device_keys: Any) -> Any:
        return self.receiver()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_endpoints", {})


def model(value: float) -> TinyModel:
    made = TinyModel()
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, value)
    return made


class Pair:
    """A receiver, and what senders of a backend do to it."""

    def __init__(self) -> None:
        self.held = model(0)
        self.receiver = ws.WeightReceiver(self.held, apply="staged")

    def connect(self, backend: Any = "shelf") -> ws.WeightSender:
        return ws.connect(
            model(1), to=self.receiver.handle, backend=backend, verify=False, timeout_s=5
        )

    @property
    def value(self) -> float:
        return float(self.held.scale.detach())


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    with closing(made.receiver):
        yield made


def test_the_backend_works_where_nothing_is_broken(pair: Pair) -> None:
    ws.register_backend(Shelf)
    with pair.connect() as sender:
        assert sender.send_weights().path == "shelf"
    assert pair.value == 1


def test_a_class_that_lacks_methods() -> None:
    class Lacking(ws.Backend):
        name = "lacking"

        def trainer_engine(self, source: Any, path: str, options: Any, bases: Any) -> Any: ...

    message = "Lacking lacks reach, receiver_engine: see the contract Backend of this version"
    with pytest.raises(ws.ConfigError, match=message):
        ws.register_backend(Lacking)
    with pytest.raises(ws.ConfigError, match=message):
        ws.connect(model(1), to=print, backend=Lacking)  # type: ignore[arg-type]  # what is tested


def test_a_backend_of_another_contract_lacks_and_differs_in_one_line() -> None:
    class Former(ws.Backend):
        name = "former"

        def reach(self, trainer: Any) -> Any: ...  # type: ignore[override]  # what is tested

        def trainer_engine(self, source: Any, path: str) -> Any: ...  # type: ignore[override]

    with pytest.raises(ws.ConfigError) as caught:
        ws.register_backend(Former)
    assert str(caught.value) == (
        "Former lacks receiver_engine and cannot be called as reach(trainer, receiver), "
        "trainer_engine(source, path, options, bases): see the contract Backend of this version of "
        "weightsync"
    )
    assert "former" not in registry.backend_names()


def former(method: str) -> Any:
    """Return a method without parameters of its own."""
    return {method: lambda _: None}


@pytest.mark.parametrize(
    ("side", "fields", "message"),
    [
        (
            "sender",
            former("begin"),
            r"Engine cannot be called as begin\(readers, \*, verify, source",
        ),
        ("sender", former("handshake"), r"Engine .* as handshake\(readers, generation\): see"),
        ("sender", former("table_digest"), "Engine cannot be called as table_digest, a property"),
        ("sender", {"end": 3}, r"Engine cannot be called as end\(\)"),
        ("receiver", former("receive_weights"), r"receive_weights\(update_info, context\)"),
        ("receiver", {"usage": lambda _, __: []}, r"Engine cannot be called as usage\(\)"),
        (
            "receiver",
            former("check_init_info") | {"beat": lambda _, __: None},
            r"Engine cannot be called as check_init_info\(init_info\), beat\(\): see",
        ),
    ],
)
def test_an_engine_of_another_contract_is_refused_before_an_update(
    pair: Pair, side: str, fields: dict[str, Any], message: str
) -> None:
    base = ShelfSender if side == "sender" else ShelfReceiver
    closed: list[object] = []
    end = "close" if side == "sender" else "shutdown"

    def note(own: object) -> None:
        closed.append(own)

    engine = type("Engine", (base,), {end: note, **fields})
    ws.register_backend(type("Other", (Shelf,), {side: engine}))
    with pytest.raises((ws.ConfigError, ws.BackendUnavailableError), match=message):
        pair.connect()
    assert len(closed) == 1
    assert pair.receiver.status().senders == {}
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


def test_a_receiver_engine_of_another_contract_is_passed_over(pair: Pair) -> None:
    engine = type("Engine", (ShelfReceiver,), former("receive_weights"))
    ws.register_backend(type("Other", (Shelf,), {"receiver": engine}))
    with pair.connect("auto") as sender:
        report = sender.send_weights()
    assert report.path == "shared_memory"
    assert "Engine cannot be called as receive_weights(" in report.skipped_paths["shelf"]


class HalfSender(ws.TrainerWeightTransferEngine):
    def __init__(self, source: Any) -> None: ...

    def transfer(self, check: Any) -> None: ...


class HalfReceiver(ws.WeightTransferEngine):
    def init_transfer_engine(self, init_info: Any) -> None: ...


@pytest.mark.parametrize(
    ("side", "engine", "lacking"),
    [
        ("sender", HalfSender, ("begin", "close", "end", "table_digest")),
        ("receiver", HalfReceiver, ("receive_weights", "sender_alive", "shutdown")),
    ],
)
def test_an_engine_that_lacks_methods_is_told_all_of_them(
    pair: Pair, side: str, engine: type, lacking: tuple[str, ...]
) -> None:
    ws.register_backend(type("Other", (Shelf,), {side: engine}))
    with pytest.raises(ws.BackendUnavailableError, match=engine.__name__) as caught:
        pair.connect()
    text = str(caught.value)
    assert "\n" not in text
    assert [name for name in lacking if name not in text] == []
    assert pair.receiver.status().senders == {}
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


def test_what_fits_the_contract_need_not_look_like_it(pair: Pair) -> None:
    """Other names, defaults, any number of arguments, and other kinds of methods."""

    class Sender(ShelfSender, HeldMemory, ReaderChanges):
        def begin(self, places: Any, source: Any, verify: Any, more: int = 0) -> Any:
            return super().begin(places, verify=verify, source=source)

        @staticmethod
        def transfer(check: Any) -> None: ...

        def end(self, *args: Any, **more: Any) -> None:
            super().end()

        @classmethod
        def unready(cls, *_: Any) -> Any:
            return []

        expect_finalizer = partialmethod(print)
        check: Any = staticmethod(dict)  # a builtin without a signature

    class Backend(Shelf):
        sender = Sender

    ws.register_backend(Backend)
    with pair.connect() as sender:
        assert sender.send_weights().path == "shelf"
    assert pair.value == 1


def test_a_method_of_a_mix_in_without_the_mix_in_is_named(pair: Pair) -> None:
    """Nothing would call it."""

    class Sender(ShelfSender):
        def unready(self, readers: Any) -> Any:
            return readers

    ws.register_backend(type("Other", (Shelf,), {"sender": Sender}))
    with pytest.raises(ws.ConfigError, match="Sender has unready without the mix-in ReaderChanges"):
        pair.connect()


def test_an_engine_without_mix_ins_has_their_defaults() -> None:
    """So its author need not know of them."""
    engine = ShelfSender(None)
    assert part(engine, HeldMemory).packed
    assert part(engine, ReaderWatch).late_readers == part(engine, ReaderChanges).unready([1]) == []
    own: Any = type("Own", (ShelfSender, ReaderChanges), {"unready": lambda _, readers: readers})(
        None
    )
    chosen: Any = part(own, ReaderChanges)
    assert chosen is own
    assert chosen.unready([1]) == [1]


def test_what_is_no_backend(pair: Pair) -> None:
    with pytest.raises(ws.ConfigError, match=r"TinyModel is no weightsync\.Backend"):
        ws.register_backend(TinyModel)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ws.ConfigError, match="there is no backend 'shelve'; known: auto"):
        pair.connect("shelve")


def test_reach_of_another_type(pair: Pair) -> None:
    class Broken(Shelf):
        def reach(self, trainer: Any, receiver: Any) -> Any:
            return "shelf"

    ws.register_backend(Broken)
    with pytest.raises(ws.ConfigError, match=r"'shelf': reach\(\) returned 'shelf', not a Reach"):
        pair.connect()


def test_a_trainer_engine_of_another_type(pair: Pair) -> None:
    class Broken(Shelf):
        sender = dict  # type: ignore[assignment]  # what is tested

        def trainer_engine(self, source: Any, path: str, options: Any, bases: Any) -> Any:
            return {}

    ws.register_backend(Broken)
    with pytest.raises(ws.ConfigError, match=r"'shelf': trainer_engine\(\) returned a dict"):
        pair.connect()


def test_a_receiver_engine_of_another_type(pair: Pair) -> None:
    class Broken(Shelf):
        def receiver_engine(self, device_keys: Any) -> Any:
            return object()

    ws.register_backend(Broken)
    message = r"'shelf': receiver_engine\(\) returned a object"
    with pytest.raises(ws.BackendUnavailableError, match=message):
        pair.connect()


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        (iter([Round(messages={})]), r"handshake\(\) returned a list_iterator, not a Generator"),
        ((step for step in [{0: None}]), r"handshake\(\) yielded a dict, not a Round"),
        ((step for step in [Round(messages={0: object()})]), r"handshake\(\) .* nor plain data"),
        ((step for step in list[Any]()), r"handshake\(\) sent WeightReceiver.handle nothing"),
    ],
)
def test_a_handshake_of_something_else(pair: Pair, yielded: Any, message: str) -> None:
    class Broken(ShelfSender):
        def handshake(self, readers: Any, generation: int) -> Any:
            return yielded

    class Backend(Shelf):
        sender = Broken

    ws.register_backend(Backend)
    with pytest.raises(ws.ConfigError, match=message):
        pair.connect()


def test_a_payload_that_is_no_plain_data(pair: Pair) -> None:
    class Broken(ShelfSender):
        def begin(self, readers: Any, *, verify: bool, source: Any) -> Any:
            return object()

    class Backend(Shelf):
        sender = Broken

    ws.register_backend(Backend)
    with (
        pair.connect() as sender,
        pytest.raises(ws.ConfigError, match=r"'shelf': begin\(\) .* plain"),
    ):
        sender.send_weights()
    assert pair.receiver.status().state == "READY"


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def returns(value: Any) -> Any:
    return lambda *_, **__: value


def reaches(**fields: Any) -> Any:
    return lambda *_: Reach("shelf", **fields)


@pytest.mark.parametrize(
    ("method", "does", "message"),
    [
        ("reach", returns([]), r"'shelf': reach\(\) returned \[\], not a Reach"),
        ("reach", reaches(cost="1"), r"reach\(\) failed: .* no number"),
        ("reach", reaches(cost=float("nan")), r"reach\(\) failed: .* no number"),
        ("reach", reaches(why_not=None), r"reach\(\) failed: .*Reach.why_not is a NoneType"),
        ("adjust", returns(None), r"'shelf': adjust\(\) returned a NoneType, not a TransferOpt"),
        ("adjust", fail, r"'shelf': adjust\(\) failed: RuntimeError: planted"),
        ("trainer_engine", fail, r"'shelf': trainer_engine\(\) failed: RuntimeError: planted"),
        ("receiver_engine", fail, r"'shelf': receiver_engine\(\) failed: RuntimeError: planted"),
    ],
)
def test_a_backend_that_breaks_the_contract_is_told_the_method(
    pair: Pair, method: str, does: Any, message: str
) -> None:
    ws.register_backend(type("Broken", (Shelf,), {method: does}))
    with pytest.raises((ws.ConfigError, ws.BackendUnavailableError), match=message):
        pair.connect()
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("max_readers", "3", r"'shelf': max_readers is a str, not a int \| None"),
        ("requires", ["ipc"], "'shelf': requires is a list, not a Mapping"),
        ("__init__", fail, r"Broken\(\) failed: RuntimeError: planted"),
    ],
)
def test_a_backend_that_cannot_be_used_is_not_registered(
    attribute: str, value: Any, message: str
) -> None:
    broken = type("Broken", (Shelf,), {attribute: value})
    with pytest.raises((ws.ConfigError, ws.BackendUnavailableError), match=message):
        ws.register_backend(broken)
    assert "shelf" not in registry.backend_names()


@pytest.mark.parametrize(
    ("method", "does", "message"),
    [
        ("extra_nbytes", None, r"Broken\.extra_nbytes is a NoneType, not a int"),
        ("written_nbytes", "9", r"Broken\.written_nbytes is a str, not a int"),
        ("table_digest", 9, r"Broken\.table_digest is a int, not a str \| None"),
        ("end", fail, r"Broken\.end\(\) failed: RuntimeError: planted"),
        ("close", fail, r"Broken\.close\(\) failed: RuntimeError: planted"),
    ],
)
def test_a_trainer_engine_that_breaks_the_contract_is_told_the_method(
    pair: Pair, method: str, does: Any, message: str
) -> None:
    broken = type("Broken", (ShelfSender, HeldMemory), {method: does})
    ws.register_backend(type("Other", (Shelf,), {"sender": broken}))
    with pytest.raises(ws.WeightSyncError, match=message), pair.connect() as sender:
        sender.send_weights()
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("init_transfer_engine", r"Broken.init_transfer_engine\(\) failed: RuntimeError: planted"),
        ("init_reply", r"Broken.init_reply\(\) failed: RuntimeError: planted"),
        ("sender_alive", r"Broken.sender_alive\(\) failed: RuntimeError: planted"),
    ],
)
def test_a_receiver_engine_that_fails_in_init_is_told_the_method(
    pair: Pair, method: str, message: str
) -> None:
    broken = type("Broken", (ShelfReceiver,), {method: fail})
    ws.register_backend(type("Other", (Shelf,), {"receiver": broken}))
    with pytest.raises(ws.BackendUnavailableError, match=message):
        pair.connect()
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


FOREIGN = Received(Manifest((TensorSpec("another", "float32", (2,)),)))
SURE = Received(Manifest(()), verified="weird")  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"Broken.receive_weights\(\) returned a NoneType, not a Received"),
        (FOREIGN, r"Broken.receive_weights\(\) reports 8 bytes .* no load target"),
        (SURE, r"Broken.receive_weights\(\) returned verified='weird', not one of none, "),
    ],
)
def test_a_result_of_something_else(pair: Pair, returned: Any, message: str) -> None:
    class Broken(ShelfReceiver):
        def receive_weights(self, update_info: Any, context: Any) -> Any:
            super().receive_weights(update_info, context)
            return returned

    class Backend(Shelf):
        receiver = Broken

    ws.register_backend(Backend)
    with pair.connect() as sender, pytest.raises(ws.ConfigError, match=message):
        sender.send_weights()
    assert pair.value == 0
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


def test_an_init_that_fails_is_shut_down(pair: Pair) -> None:
    class Broken(ShelfReceiver):
        shut = 0

        def init_reply(self) -> Any:
            return object()

    class Backend(Shelf):
        receiver = Broken

    ws.register_backend(Backend)
    with pytest.raises(ws.ConfigError, match=r"Broken.init_reply\(\) .* plain"):
        pair.connect()
    assert Broken.shut == 1
    assert pair.receiver.status().senders == {}


@pytest.mark.parametrize(
    ("method", "does", "reason"),
    [
        ("endpoint", fail, r"endpoint() failed: RuntimeError: planted"),
        ("endpoint", object, "endpoint() failed: TypeError"),
        ("reach", fail, "reach() failed: RuntimeError: planted"),
    ],
)
def test_an_installed_backend_that_fails_is_passed_over(
    pair: Pair, method: str, does: Any, reason: str
) -> None:
    ws.register_backend(type("Broken", (Shelf,), {method: lambda *given: does(*given[3:])}))
    with pair.connect("auto") as sender:
        report = sender.send_weights()
    assert report.path == "shared_memory"
    assert reason in report.skipped_paths["shelf"]
    with pytest.raises(ws.BackendUnavailableError) as caught:
        pair.connect("shelf")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("digest", "result", "message"),
    [
        ("0", ("none", 0), r"Broken.receive_weights\(\) verified nothing"),
        ("0", ("held", 0), r"Broken.receive_weights\(\) returned no fingerprints"),
        (None, ("held", 1), r"'shelf': table_digest is None after a verified transfer"),
    ],
)
def test_a_verified_update_that_was_not_verified(
    pair: Pair, digest: str | None, result: tuple[Any, int], message: str
) -> None:
    class Broken(ShelfReceiver):
        def receive_weights(self, update_info: Any, context: Any) -> Any:
            manifest = super().receive_weights(update_info, context).manifest
            level, each = result
            return Received(manifest, [7] * (each * len(manifest.specs)), level)

    class Backend(Shelf):
        sender = type("Other", (ShelfSender,), {"table_digest": digest})
        receiver = Broken

    ws.register_backend(Backend)
    with (
        ws.connect(model(1), to=pair.receiver.handle, backend="shelf", timeout_s=5) as sender,
        pytest.raises(ws.ConfigError, match=message),
    ):
        sender.send_weights()
    assert pair.value == 0
    assert pair.receiver.status().state == "READY"


def test_a_sender_that_cannot_be_looked_at_later_is_forgotten(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ShelfReceiver):
        looks = 0

        def sender_alive(self) -> bool | None:
            self.looks += 1
            return True if self.looks == 1 else fail()

    ws.register_backend(type("Other", (Shelf,), {"receiver": Broken}))
    with pytest.raises(ws.UnknownSenderError):
        pair.connect()
    assert "Broken.sender_alive() failed" in caplog.text
    with pair.connect("ipc") as sender:
        sender.send_weights()
    assert pair.value == 1


@pytest.mark.parametrize("method", ["finish_weight_update", "shutdown"])
def test_a_receiver_goes_on_after_an_engine_that_fails(
    pair: Pair, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Backend(Shelf):
        receiver = type("Broken", (ShelfReceiver,), {method: fail})

    ws.register_backend(Backend)
    with pair.connect() as sender:
        assert sender.send_weights().version == 1
        assert pair.receiver.status().state == "READY"
    assert pair.value == 1
    assert f"Broken.{method}() failed" in caplog.text
    with pair.connect("ipc") as sender:
        assert sender.send_weights().version == 2


def test_what_a_backend_lacked_may_come_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []

    class Late(Shelf):
        def endpoint(self, device: Any) -> Any:
            if not there:
                raise ws.BackendUnavailableError("not there yet")

    ws.register_backend(Late)
    assert pair.receiver.status().unusable_backends["shelf"] == "not there yet"
    there.append("now")
    monkeypatch.setattr(registry, "_ENDPOINTS_S", 0.0)
    with pair.connect() as sender:
        assert sender.send_weights().path == "shelf"


def test_the_engines_of_a_good_update_are_ended_and_not_cancelled(pair: Pair) -> None:
    calls: list[str] = []

    class Sender(ShelfSender):
        def transfer(self, check: Any) -> None:
            calls.append("transfer")

        def cancel(self) -> None:
            calls.append("cancel")

        def check(self) -> None:
            calls.append("check")

        def end(self) -> None:
            calls.append("end")

    ws.register_backend(type("Other", (Shelf,), {"sender": Sender}))
    with pair.connect() as sender:
        sender.send_weights()
        sender.send_weights()
    assert [call for call in calls if call != "check"] == ["transfer", "end"] * 2
    assert "check" not in calls[calls.index("end") : calls.index("transfer", 2)]


def test_an_error_of_the_transfer_counts_more_than_those_of_cancel(pair: Pair) -> None:
    ended: list[str] = []

    class Sender(ShelfSender):
        def transfer(self, check: Any) -> None:
            raise ws.TransferError("the transfer broke")

        def cancel(self) -> None:
            raise OSError("and so did cancel")

        def end(self) -> None:
            ended.append("end")

    ws.register_backend(type("Other", (Shelf,), {"sender": Sender}))
    with pair.connect() as sender, pytest.raises(ws.TransferError, match="the transfer broke"):
        sender.send_weights()
    assert ended
    assert pair.value == 0


@pytest.mark.parametrize("name", ["my backend!", "", "1st", None, "a/b"])
def test_a_name_that_no_message_can_carry_is_refused(pair: Pair, name: Any) -> None:
    with pytest.raises(ws.ConfigError, match="a name begins with a letter"):
        ws.register_backend(type("Other", (Shelf,), {"name": name}))
    assert "shelf" not in pair.receiver.status().backends


def test_a_plugin_that_cannot_be_made_leaves_the_others_working(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        value = "broken:Plugin"

        def load(self) -> Any:
            def init(_: object) -> None:
                raise RuntimeError("no licence")

            return type("Plugin", (Shelf,), {"name": "broken", "__init__": init})

    points = {**registry._entry_points(), "broken": Point()}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    assert "no licence" in pair.receiver.status().unusable_backends["broken"]
    with pair.connect("auto") as sender:
        assert sender.send_weights().path == "shared_memory"


@pytest.mark.parametrize("name", ["3fs", "my backend", "ends"])
def test_a_plugin_with_a_wrong_name_or_that_exits_leaves_the_others_working(
    name: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        value = "broken:Plugin"

        def load(self) -> Any:
            raise SystemExit(3)

    points = {**registry._entry_points(), name: Point()}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    unusable = pair.receiver.status().unusable_backends
    assert unusable == ({name: f"backend {name!r} cannot be imported: 3"} if name == "ends" else {})
    with pair.connect("auto") as sender:
        assert sender.send_weights().path == "shared_memory"
    with pytest.raises(ws.BackendUnavailableError, match=f"{name}.*cannot be imported"):
        pair.connect(name)


def test_a_payload_by_reader_has_one_for_each_reader(pair: Pair) -> None:
    class Sender(ShelfSender):
        def begin(self, readers: Any, *, verify: bool, source: Any) -> Any:
            return {readers[0] + 1: {"any": "thing"}}

    ws.register_backend(type("Other", (Shelf,), {"sender": Sender}))
    with pair.connect() as sender, pytest.raises(ws.ConfigError, match=r"begin\(\).*no payload"):
        sender.send_weights()


def test_an_engine_whose_heartbeat_fails_has_its_update_expire() -> None:
    class Receiver(ShelfReceiver):
        def sender_beat(self) -> int | None:
            raise OSError("unmounted")

        def usage(self) -> Any:
            raise OSError("unmounted")

    ws.register_backend(type("Other", (Shelf,), {"receiver": Receiver}))
    receiver = ws.WeightReceiver(model(0), apply="staged", lease_s=2.0)
    with (
        closing(receiver),
        ws.connect(model(1), to=receiver.handle, backend="shelf", verify=False) as sender,
    ):
        sent = next(iter(receiver.status().senders))
        receiver.dispatch(StartRequest(update_id="lost", version=5, sender=sent))
        deadline = time.monotonic() + 20
        while receiver.status().state != "READY" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert receiver.status().state == "READY"
        assert sender.send_weights().version


def test_an_init_that_claims_more_than_any_memory_has_is_refused_at_once(pair: Pair) -> None:
    """Its layout is not cut into runs, which takes time and memory by the byte."""
    ws.register_backend(Shelf)
    with pair.connect() as sender:
        sender.send_weights()
        status = pair.receiver.status()
        huge = Manifest((TensorSpec("a", "uint8", (1 << 46,)),))
        info = InitInfo(
            backend="shelf",
            path="shelf",
            protocol_min=1,
            protocol_max=1,
            sender="another",
            manifest=manifest_to_wire(huge),
            lease_s=5.0,
        )
        hook = ws.WeightReceiver(list, apply="staged")
        with closing(hook), pytest.raises(ws.WeightSyncError):
            hook.dispatch(InitRequest(init_info=info))
        assert pair.receiver.status().version == status.version
