"""A receiver that takes the weights in use from another one, and one that joins a fleet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.e2e.models import digests, fill, make, touch
from tests.server.live import TOKEN
from tests.update import uniform
from tests.update.test_servers import Served
from weightsync import receiver
from weightsync.errors import ConnectError, TransportTimeout
from weightsync.transports import polled
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.polled import PolledTransport
from weightsync.update import fetch_client, fetch_server
from weightsync.update.lifecycle import State
from weightsync.weights.lines import spot_check
from weightsync.wire import codec
from weightsync.wire.messages import (
    AbortRequest,
    EmptyUpdate,
    FetchReply,
    FetchRequest,
    FinishRequest,
    PauseRequest,
    RegisteredUpdate,
    Reply,
    Request,
    ShutdownRequest,
    StartRequest,
    StartTerms,
    StatusRequest,
    UpdateRequest,
)

KINDS = ["everything", "tied", "decoder-bfloat16"]
TIMEOUT_S = 10.0


class Source:
    """A receiver with a trainer, which has sent it version 7."""

    def __init__(
        self, sink: Any, trainer: nn.Module, delta: Any = "always", **options: Any
    ) -> None:
        self.trainer = trainer
        self.receiver = ws.WeightReceiver(sink, **options)
        self.sender = ws.connect(trainer, to=self.receiver, delta=delta, scrub=1.0)
        self.sender.send_weights(7, label="seven")

    def renew(self) -> None:
        """Replace the weights."""
        touch(self.trainer, self.sender.version)
        self.sender.send_weights(label=None)


@pytest.fixture
def made() -> Iterator[Callable[..., Source]]:
    sources: list[Source] = []

    def make_source(sink: Any, trainer: nn.Module, delta: Any = "always", **options: Any) -> Source:
        sources.append(Source(sink, trainer, delta, **options))
        return sources[-1]

    yield make_source
    for source in sources:
        source.sender.close()
        source.receiver.close()


def watched(receiver: ws.WeightReceiver, before: Callable[[Request], None]) -> list[Request]:
    """Call `before` with each request; return the list of all, which grows."""
    dispatch, seen = receiver.dispatch, []

    def look(request: Request) -> Reply:
        seen.append(request)
        before(request)
        return dispatch(request)

    receiver.dispatch = look  # type: ignore[method-assign]  # to look at messages
    return seen


def updates(seen: list[Request]) -> int:
    return sum(isinstance(request, UpdateRequest) for request in seen)


class Hook:
    """A `load_weights` hook that copies."""

    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}

    def __call__(self, pairs: Any) -> None:
        self.got.update((name, tensor.clone()) for name, tensor in pairs)


class TestFetch:
    @pytest.mark.parametrize("model", KINDS)
    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    @pytest.mark.parametrize("swap", ["pointer", "copy"])
    def test_every_bit_arrives(self, made: Any, model: str, apply: Any, swap: Any) -> None:
        source = made(ws.ModuleSink(make(model, 1), swap=swap), make(model), apply=apply)
        held = make(model, 2)
        receiver = ws.WeightReceiver(held)
        report = ws.fetch(receiver, source.receiver)
        assert digests(held) == digests(source.trainer)
        assert (receiver.version, receiver.label) == (7, "seven")
        assert receiver.status().weights_id == source.receiver.status().weights_id
        assert (report.version, report.label, report.verified) == (7, "seven", "held")
        assert report.receivers[0].source == "WeightReceiver.handle"
        assert receiver.status().senders == {}

    def test_a_module_and_a_hook(self, made: Any) -> None:
        source = made(make("everything", 1), make("everything"))
        held, hook = make("everything", 2), Hook()
        ws.fetch(held, [source.receiver])
        ws.fetch(hook, source.receiver)
        assert digests(held) == digests(source.trainer)
        got = digests(hook.got.items())  # tied tensors once
        assert digests(source.trainer) == {**got, "head.weight": got["embedding.weight"]}

    def test_the_copy_of_a_staged_hook(self, made: Any) -> None:
        source = made(Hook(), make("everything"), apply="staged")
        held = make("everything", 2)
        for _ in range(2):
            assert source.receiver.status().fetchable
            ws.fetch(held, source.receiver)
            assert digests(held) == digests(source.trainer)
            source.renew()

    @pytest.mark.parametrize("delta", ["always", "auto", "off"])
    def test_a_copy_that_the_hook_has_changed_since_is_not_lent(
        self, made: Any, delta: Any
    ) -> None:
        """After it has returned, and in a way that torch does not count."""
        hook = Hook()
        source = made(hook, make("plain"), delta, apply="staged")
        target = source.receiver._session.load_targets._whole[1]
        target.memory.tensors[0].numpy()[:] ^= 0xFF
        held = make("plain", 2)
        before = digests(held)
        with pytest.raises(ws.ConfigError, match="hook of this receiver has changed the tensors"):
            ws.fetch(held, source.receiver)
        assert digests(held) == before
        source.sender.resync(*source.sender.targets)
        ws.fetch(held, source.receiver)
        assert digests(held) == digests(source.trainer)

    def test_a_hook_that_keeps_nothing(self, made: Any) -> None:
        source = made(Hook(), make("plain"), apply="in_place")
        assert not source.receiver.status().fetchable
        with pytest.raises(ws.ConfigError, match="keeps no whole copy"):
            ws.fetch(make("plain"), source.receiver)

    def test_a_copy_is_not_lent_after_an_update_of_some_tensors(self, made: Any) -> None:
        source = made(Hook(), make("plain"), apply="staged")
        with source.sender.update(partial=True) as update:
            update.send([("large", torch.ones_like(source.trainer.large))])
        assert not source.receiver.status().fetchable
        with pytest.raises(ws.ConfigError, match="keeps no whole copy"):
            ws.fetch(make("plain"), source.receiver)

    def test_weights_that_no_trainer_has_sent(self) -> None:
        loaded, held = make("plain", 3), make("plain")
        source = ws.WeightReceiver(loaded, version=4)
        receiver = ws.WeightReceiver(held)
        assert ws.fetch(receiver, source).version == receiver.version == 4
        assert digests(held) == digests(loaded)

    def test_an_older_version_than_it_holds(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        receiver = ws.WeightReceiver(make("plain", 2), version=90)
        ws.fetch(receiver, source.receiver)
        assert receiver.version == 7

    def test_a_chain_of_receivers(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        last = source.receiver
        for seed in range(2, 5):
            receiver = ws.WeightReceiver(make("plain", seed))
            ws.fetch(receiver, last)
            last = receiver
        assert digests(last.sink.module) == digests(source.trainer)

    def test_several_at_a_time(self, made: Any) -> None:
        source = made(make("everything", 1), make("everything"))
        models = [make("everything", seed) for seed in range(2, 6)]
        threads = [threading.Thread(target=ws.fetch, args=(m, source.receiver)) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(digests(model) == digests(source.trainer) for model in models)

    def test_the_next_source_is_asked(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)
        gone = "http://127.0.0.1:9/nobody"
        report = ws.fetch(held, [gone, source.receiver], token="x")
        assert digests(held) == digests(source.trainer)
        assert report.receivers[0].source == "WeightReceiver.handle"

    def test_no_source_at_all(self) -> None:
        with pytest.raises(ws.ConfigError, match="sources="):
            ws.fetch(make("plain"), [])
        with pytest.raises(ws.ConnectError):
            ws.fetch(make("plain"), "http://127.0.0.1:9/nobody", token="x")

    def test_another_model(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("tied", 2)
        before = digests(held)
        with pytest.raises(ws.ManifestMismatchError):
            ws.fetch(held, source.receiver)
        assert digests(held) == before
        source.renew()

    def test_a_receiver_that_belongs_to_a_trainer(self, made: Any) -> None:
        source, other = made(make("plain", 1), make("plain")), made(make("plain", 2), make("plain"))
        with pytest.raises(ws.SenderConflictError):
            ws.fetch(other.receiver, source.receiver)
        other.renew()


def test_a_source_that_answers_nothing_is_given_up_before_the_time_of_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiver, "SOURCE_ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(TransportTimeout, match=r"within 0\.3 s"):
            ws.fetch(to=make("plain"), sources=url, timeout_s=120.0)
        assert time.monotonic() - begin < 60.0


class TestReplaced:
    """The source commits other weights while they are sent."""

    @pytest.mark.parametrize("moment", ["before", "after"])
    @pytest.mark.parametrize(
        ("swap", "apply"), [("pointer", "staged"), ("copy", "staged"), ("copy", "in_place")]
    )
    def test_it_begins_again(self, made: Any, swap: Any, apply: Any, moment: str) -> None:
        source = made(ws.ModuleSink(make("wide", 1), swap=swap), make("wide"), apply=apply)
        held = make("wide", 2)
        receiver = ws.WeightReceiver(held)
        dispatch, seen = receiver.dispatch, []

        def renewing(request: Request) -> Reply:
            seen.append(request)
            first = isinstance(request, UpdateRequest) and updates(seen) == 1
            if first and moment == "before":
                source.renew()
            reply = dispatch(request)
            if first and moment == "after":
                source.renew()
            return reply

        receiver.dispatch = renewing  # type: ignore[method-assign]  # to act between messages
        assert ws.fetch(receiver, source.receiver).version == receiver.version == 8
        assert digests(held) == digests(source.trainer)
        assert updates(seen) == 2

    def test_it_gives_up_in_time(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)
        before = digests(held)
        receiver = ws.WeightReceiver(held)
        watched(receiver, lambda r: source.renew() if isinstance(r, UpdateRequest) else None)
        with pytest.raises(ws.SourceBusyError, match="replaced the weights meanwhile"):
            ws.fetch(receiver, source.receiver, timeout_s=1)
        assert digests(held) == before
        assert receiver.status().state == "READY"

    @pytest.mark.parametrize(("sink", "apply"), [("hook", "staged"), ("module", "in_place")])
    def test_a_source_in_an_update_is_asked_after_it(
        self, made: Any, sink: str, apply: Any
    ) -> None:
        trainer = make("plain")
        source = made(Hook() if sink == "hook" else make("plain", 1), trainer, apply=apply)
        held = make("plain", 2)
        done = threading.Event()

        def fetch() -> None:
            ws.fetch(held, source.receiver)
            done.set()

        thread = threading.Thread(target=fetch)
        with source.sender.update() as update:
            fill(trainer, 5)
            update.send(trainer.state_dict().items())
            thread.start()
            assert not done.wait(0.5)
        thread.join()
        if sink == "hook":  # which keeps no copy of an update in parts
            assert done.is_set()
        assert digests(held) == digests(trainer)


class TestBadPeers:
    def test_a_receiver_that_calls_no_more(
        self, made: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = made(make("plain", 1), make("plain"))
        with monkeypatch.context() as patch:
            patch.setattr(polled, "SILENCE_S", 0.3)
            source.receiver.dispatch(FetchRequest(fetch_id="f", timeout_s=2))
            deadline = time.monotonic() + TIMEOUT_S
            while any(t.name == "weightsync-fetch-server" for t in threading.enumerate()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        source.renew()
        held = make("plain", 2)
        ws.fetch(held, source.receiver)
        assert digests(held) == digests(source.trainer)

    def test_too_many(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch_server, "MAX_FETCHES", 1)
        source = made(make("plain", 1), make("plain"))
        source.receiver.dispatch(FetchRequest(fetch_id="f", timeout_s=2))
        with pytest.raises(ws.SourceBusyError, match="fetch from this one already"):
            ws.fetch(make("plain"), source.receiver, timeout_s=0.5)

    def test_a_receiver_that_is_closed(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        source.receiver.dispatch(FetchRequest(fetch_id="f", timeout_s=2))
        source.receiver.close()
        with pytest.raises(ws.ProtocolError, match="closed"):
            ws.fetch(make("plain"), source.receiver, timeout_s=1)

    def test_a_source_that_asks_for_something_else(self) -> None:
        paused: list[str] = []
        receiver = ws.WeightReceiver(make("plain"), on_pause=paused.append)
        told: list[Any] = []

        def source(message: Mapping[str, Any]) -> object:
            request = codec.from_plain(message)
            assert isinstance(request, FetchRequest)
            told.append(request.problem)
            if request.turn:
                return codec.reply_to_plain(FetchReply(problem=request.problem))
            return codec.reply_to_plain(FetchReply(request=codec.to_plain(PauseRequest())))

        with pytest.raises(ws.ProtocolError, match="may not make this request pause"):
            ws.fetch(receiver, source)
        assert not paused
        assert any(told)

    @pytest.mark.parametrize("answer", ["nothing", "a report"])
    def test_a_source_that_sends_nothing(self, answer: str) -> None:
        held = make("plain")
        before = digests(held)
        good = ws.WeightReceiver(make("plain", 1), version=3)
        report = ws.fetch(make("plain"), good)
        told = FetchReply(report=report if answer == "a report" else None)

        def source(_: Mapping[str, Any]) -> object:
            time.sleep(0.05)
            return codec.reply_to_plain(told)

        error = ws.ProtocolError if answer == "a report" else ws.TransportTimeout
        with pytest.raises(error, match=r"did not arrive|sent nothing"):
            ws.fetch(held, source, timeout_s=0.5)
        assert digests(held) == before

    @pytest.mark.parametrize(
        "request_",
        [
            ShutdownRequest(),
            AbortRequest(),
            AbortRequest(update_id="theirs"),
            FinishRequest(update_id="theirs"),
            StartRequest(update_id="x"),
            UpdateRequest(update_info=EmptyUpdate()),
            UpdateRequest(
                update_id="x",
                update_info=RegisteredUpdate(sender="theirs", epoch=1, registered=True),
                start=StartTerms(),
            ),
            PauseRequest(),
        ],
        ids=lambda request: type(request).__name__,
    )
    def test_what_belongs_to_others_is_not_for_a_source(self, made: Any, request_: Request) -> None:
        """Its requests are refused, and the open update of a trainer goes on."""
        trained = made(make("plain", 1), make("plain"))

        def source(message: Mapping[str, Any]) -> object:
            request = codec.from_plain(message)
            assert isinstance(request, FetchRequest)
            if request.turn:
                return codec.reply_to_plain(FetchReply(problem=request.problem))
            return codec.reply_to_plain(FetchReply(request=codec.to_plain(request_)))

        with trained.sender.update() as update:
            fill(trained.trainer, 5)
            update.send(trained.trainer.state_dict().items())
            with pytest.raises(ws.ProtocolError, match="may not make this request"):
                ws.fetch(trained.receiver, source)
        assert digests(trained.receiver.sink.module) == digests(trained.trainer)

    def test_a_trainer_that_comes_meanwhile_wins(self, made: Any) -> None:
        """A further attempt would take its update back."""
        source = made(make("plain", 1), make("plain"))
        held, other = make("plain", 2), make("plain", 3)
        receiver = ws.WeightReceiver(held)

        alone = threading.Lock()

        def busy(_: Mapping[str, Any]) -> object:
            with alone:  # it is called by several threads
                if receiver.version == 0:
                    with ws.connect(other, to=receiver) as sender:
                        sender.send_weights(40)
            raise ws.SourceBusyError("later")

        with pytest.raises(ws.UpdateConflictError, match="by somebody else"):
            ws.fetch(receiver, [busy, source.receiver])
        assert receiver.version == 40
        assert digests(held) == digests(other)

    def test_a_torn_source_is_asked_once(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        source.receiver._session.lifecycle.torn_by = "x"
        begun = time.monotonic()
        with pytest.raises(ws.NotReadyError):
            ws.fetch(make("plain"), source.receiver, timeout_s=60)
        assert time.monotonic() - begun < 30
        source.receiver._session.lifecycle.torn_by = ""

    def test_all_sources_are_named_in_the_error(self, made: Any) -> None:
        nobody = "http://127.0.0.1:9/nobody"
        keeps_nothing = made(Hook(), make("plain"), apply="in_place")
        with pytest.raises(ws.ConnectError, match=r"keeps no whole copy.*127\.0\.0\.1:9"):
            ws.fetch(make("plain"), [keeps_nothing.receiver, nobody], token="x")

    def test_a_source_that_dies_in_the_middle(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)
        before = digests(held)
        receiver = ws.WeightReceiver(held)
        died = threading.Event()
        watched(receiver, lambda r: died.set() if isinstance(r, UpdateRequest) else None)

        def dying(message: Mapping[str, Any]) -> object:
            if died.is_set():
                raise ConnectError("it is gone")
            return source.receiver.handle(message)

        with pytest.raises(ws.ConnectError, match="it is gone"):
            ws.fetch(receiver, dying)
        assert digests(held) == before
        assert receiver.status().state == "READY"
        assert receiver.status().senders == {}
        ws.fetch(receiver, source.receiver)
        assert digests(held) == digests(source.trainer)

    def test_replies_that_are_lost(self, made: Any) -> None:
        """Each reply of the source is lost once: the call is made again."""
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)

        def losing(message: Mapping[str, Any]) -> object:
            source.receiver.handle(message)
            return source.receiver.handle(message)

        ws.fetch(held, losing)
        assert digests(held) == digests(source.trainer)


def check_nothing() -> None:
    pass


class TestPolledTransport:
    def test_a_turn_that_is_repeated_has_the_same_answer(self) -> None:
        transport = PolledTransport(None, check_nothing)
        replies: list[Reply] = []
        thread = threading.Thread(
            target=lambda: replies.append(transport.call(StatusRequest(), timeout_s=TIMEOUT_S))
        )
        thread.start()
        first = FetchRequest(fetch_id="f")
        asked = transport.take(first)
        assert codec.from_plain(asked.request) == StatusRequest()
        assert transport.take(first) == asked
        status = ws.WeightReceiver(make("plain")).status()
        answer = FetchRequest(fetch_id="f", turn=1, reply=codec.reply_to_plain(status))
        assert transport.take(answer) == FetchReply()
        thread.join()
        assert [type(reply) for reply in replies] == [type(status)]
        with pytest.raises(ws.ProtocolError, match="turn 0 comes after turn 1"):
            transport.take(first)

    def test_a_reply_that_is_none(self) -> None:
        transport = PolledTransport(None, check_nothing)
        errors: list[Exception] = []

        def call() -> None:
            try:
                transport.call(AbortRequest(), timeout_s=TIMEOUT_S)
            except ws.WeightSyncError as exc:
                errors.append(exc)

        thread = threading.Thread(target=call)
        thread.start()
        transport.take(FetchRequest(fetch_id="f"))
        transport.take(FetchRequest(fetch_id="f", turn=1, reply={"state": 3}))
        thread.join()
        assert [type(error) for error in errors] == [codec.InvalidReplyError]

    def test_calls_end_in_time(self) -> None:
        transport = PolledTransport(None, check_nothing)
        with pytest.raises(TransportTimeout):
            transport.call(StatusRequest(), timeout_s=0.1)
        transport.close()
        with pytest.raises(ConnectError):
            transport.call(StatusRequest(), timeout_s=0.1)

    @pytest.mark.parametrize(
        "address", ["192.0.2.1", "nowhere", "", "::2", "0.0.0.0", "::", "224.0.0.1", "127.0.0.1"]
    )
    def test_an_address_of_others_is_not_taken(self, address: str) -> None:
        assert PolledTransport(address, check_nothing).local_address is None


class TestJoining:
    """`sender.add()` has a receiver fetch from one of the fleet."""

    def test_it_gets_what_the_others_hold_though_the_source_has_changed(self, made: Any) -> None:
        source = made(make("everything", 1), make("everything"))
        sent, held = digests(source.trainer), make("everything", 2)
        receiver = ws.WeightReceiver(held)
        fill(source.trainer, 9)
        report = source.sender.add(receiver)
        assert digests(held) == sent
        assert (receiver.version, receiver.label, receiver.status().state) == (7, "seven", "READY")
        assert report.receivers[0].source == "WeightReceiver.handle"
        source.renew()
        assert digests(held) == digests(source.trainer)

    def test_the_next_update_is_a_delta_for_both(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        source.sender.send_weights()
        receiver = ws.WeightReceiver(make("plain", 2))
        source.sender.add(receiver)
        touch(source.trainer, 3)
        delta = source.sender.send_weights().delta
        assert delta.sent, delta.reason
        assert digests(receiver.sink.module) == digests(source.trainer)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("swap", "apply"), [("pointer", "staged"), ("copy", "staged"), ("copy", "in_place")]
    )
    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize("delta", ["always", "auto", "off"])
    def test_it_does_not_get_what_other_code_threw_away(
        self, made: Any, swap: Any, apply: Any, strided: bool, delta: Any
    ) -> None:
        """Of the two that could lend, one has lost a tensor, in a way that torch does not count."""
        trainer, server = make("plain"), make("plain", 1)
        parameters = dict(server.named_parameters())
        if strided:
            parameters["large"].data = parameters["large"].detach().T.contiguous().T
        source = made(ws.ModuleSink(server, swap=swap), trainer, delta, apply=apply)
        parameters["large"].data.zero_()
        held = make("plain", 2)
        source.sender.add(ws.WeightReceiver(held))
        assert digests(held) == digests(trainer)
        source.renew()
        assert digests(held) == digests(server) == digests(trainer)

    @pytest.mark.parametrize(
        ("apply", "by"),
        [
            ("staged", "a line"),
            ("in_place", "a line"),
            ("in_place", "the fingerprint of the base"),
            ("staged", "the fingerprint of the result"),
        ],
    )
    def test_it_does_not_get_what_a_delta_found_changed(
        self, made: Any, apply: Any, by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The delta is refused, and the whole model that follows does not arrive."""
        if by != "a line":  # no line that is read happens to show the change
            monkeypatch.setattr(spot_check.SpotCheck, "changed", lambda _: [])
            monkeypatch.setattr(spot_check.SpotCheck, "changed_in", lambda *_: [])
        source = made(make("plain", 1), make("plain"), apply=apply)
        lender, held = source.receiver, make("plain", 2)
        if by == "the fingerprint of the result":
            source.renew()  # that of the base is then carried on, and not computed anew
        for thread in threading.enumerate():
            if thread.name == "weightsync-catch-up":
                thread.join()
        version = lender.version
        before, dispatch = digests(held), source.receiver.dispatch
        dict(lender.sink.module.named_parameters())["large"].data.zero_()
        if by == "the fingerprint of the result":  # as where the other memory missed an update
            lender._session.load_targets._whole[1]._behind = None

        def failing(request: Request) -> Reply:
            info = request.update_info if isinstance(request, UpdateRequest) else None
            if isinstance(info, RegisteredUpdate) and info.delta is None:
                raise ws.TransferError("planted")
            reply: Reply = dispatch(request)
            return reply

        lender.dispatch = failing
        touch(source.trainer, 3)
        with pytest.raises(ws.TransferError, match="planted"):
            source.sender.send_weights()
        lender.dispatch = dispatch
        assert lender.version == version
        with pytest.raises(ws.WeightSyncError, match="changed since"):
            source.sender.add(ws.WeightReceiver(held))
        assert digests(held) == before
        source.sender.send_weights()
        source.sender.add(ws.WeightReceiver(held))
        assert digests(held) == digests(source.trainer)

    def test_one_that_was_removed_and_written_to_gets_them_again(self, made: Any) -> None:
        """It still says that it holds the fleet's version, and torch has counted no write."""
        source, held = made(make("plain", 1), make("plain")), make("plain", 2)
        receiver = ws.WeightReceiver(held)
        source.sender.add(receiver)
        source.sender.remove(source.sender.targets[-1])
        dict(held.named_parameters())["large"].data.zero_()
        report = source.sender.add(receiver)
        assert report.verified == "held"
        assert digests(held) == digests(source.trainer)

    def test_one_that_was_removed_and_written_to_gets_them_from_the_source(self, made: Any) -> None:
        """As above, where no receiver of the fleet can lend."""
        hook, held = Hook(), make("plain", 2)
        source, receiver = made(hook, make("plain"), apply="in_place"), ws.WeightReceiver(held)
        source.sender.add(receiver)
        source.sender.remove(source.sender.targets[-1])
        dict(held.named_parameters())["large"].data.zero_()
        report = source.sender.add(receiver)
        assert (report.verified, report.receivers[0].source) == ("held", "")
        assert digests(held) == digests(source.trainer)

    @pytest.mark.parametrize("later", ["replaced", "uncounted"])
    def test_weights_that_are_no_senders_have_an_id_of_their_own_each_time(
        self, made: Any, later: str
    ) -> None:
        source = made(make("plain", 1), make("plain"))
        lender = source.receiver.sink.module
        with torch.no_grad():
            lender.get_parameter("large").mul_(2)  # torch counts this one
        held = []
        for seed in (2, 3):
            taken = ws.WeightReceiver(make("plain", seed))
            ws.fetch(to=taken, sources=[source.receiver.handle])
            held.append((taken.version, taken.status().weights_id))
            assert digests(taken.sink.module) == digests(lender)  # type: ignore[attr-defined]
            if later == "replaced":
                lender.large = nn.Parameter(torch.rand_like(lender.large))
            else:
                lender.get_parameter("large").data.zero_()
        assert held[0][0] == held[1][0]
        assert held[0][1] != held[1][1]

    def test_all_workers_of_a_server(self) -> None:
        trainer = uniform.make(3.0)
        one, two = Served(1), Served(2)
        try:
            with ws.connect(trainer, to=one.url, token=TOKEN) as sender:
                sender.send_weights(5)
                uniform.fill(trainer, 4.0)
                report = sender.add(two.url)
                assert report is not None
                assert {r.source for r in report.receivers} == {one.url}
                assert two.held == [("READY", 5, 3.0)] * 2
                sender.send_weights()
                assert one.held + two.held == [("READY", 6, 4.0)] * 3
        finally:
            one.close()
            two.close()

    def test_the_source_sends_where_no_receiver_can(self, made: Any) -> None:
        source = made(Hook(), make("plain"), apply="in_place")
        held = make("plain", 2)
        report = source.sender.add(ws.WeightReceiver(held))
        assert digests(held) == digests(source.trainer)
        assert report.receivers[0].source == ""

    def test_the_source_sends_where_a_fetch_fails(
        self, made: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = made(make("plain", 1), make("plain"))
        handle: Callable[[FetchRequest], Reply] = source.receiver._handlers[FetchRequest]

        def refuse(request: FetchRequest) -> Reply:
            if request.turn:
                raise ConnectError("it is gone")
            return handle(request)

        source.receiver._handlers[FetchRequest] = refuse
        held = make("plain", 2)
        report = source.sender.add(ws.WeightReceiver(held))
        assert digests(held) == digests(source.trainer)
        assert report.receivers[0].source == ""
        assert "could not fetch" in caplog.text

    def test_another_receiver_of_the_fleet_is_asked(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        other = ws.WeightReceiver(make("plain", 2))
        source.sender.add(other)

        def refuse(_: Request) -> Reply:
            raise ConnectError("it is gone")

        source.receiver._handlers[FetchRequest] = refuse
        sent, held = digests(source.trainer), make("plain", 3)
        fill(source.trainer, 9)
        source.sender.add(ws.WeightReceiver(held))
        assert digests(held) == sent

    @pytest.mark.parametrize(
        ("swap", "apply"), [("pointer", "staged"), ("copy", "staged"), ("copy", "in_place")]
    )
    def test_weights_that_other_code_has_changed_are_not_fetched(
        self, made: Any, swap: Any, apply: Any
    ) -> None:
        model = make("plain", 1)
        source = made(ws.ModuleSink(model, swap=swap), make("plain"), apply=apply)
        with torch.no_grad():
            model.get_parameter("large")[3, 3] += 1
        held = make("plain", 2)
        report = source.sender.add(ws.WeightReceiver(held))
        assert report.receivers[0].source == ""
        assert digests(held) == digests(source.trainer)

    def test_weights_that_were_cast_are_not_fetched(self, made: Any) -> None:
        source = made(ws.ModuleSink(make("bfloat16", 1), cast=True), make("plain"))
        held = make("plain", 2)
        report = source.sender.add(ws.WeightReceiver(held))
        assert report.receivers[0].source == ""
        assert digests(held) == digests(source.trainer)

    def test_a_torn_receiver_that_joins_is_healed(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)
        receiver = ws.WeightReceiver(held, apply="in_place")
        source.sender.add(receiver)
        source.sender.remove(source.sender.targets[1])
        receiver._session.lifecycle.torn_by = "x"
        receiver._session.lifecycle.state = State.TORN
        touch(held, 1)
        source.sender.add(receiver)
        assert receiver.status().state == "READY"
        assert digests(held) == digests(source.trainer)

    def test_weights_under_the_same_version_that_differ_are_not_fetched(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        other = ws.WeightReceiver(make("plain", 2))
        source.sender.add(other)
        other._session.lifecycle.weights_id = "others"
        held = make("plain", 3)
        report = source.sender.add(ws.WeightReceiver(held))
        assert report.receivers[0].source == ""
        assert digests(held) == digests(source.trainer)

    def test_a_sender_that_took_the_fleet_over(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        sent = digests(source.trainer)
        source.sender.close()
        with ws.connect(make("plain", 8), to=source.receiver) as sender:
            receiver = ws.WeightReceiver(make("plain", 2))
            sender.add(receiver)
            assert digests(receiver.sink.module) == sent  # type: ignore[attr-defined]
            assert receiver.status().state == "READY"
            sender.send_weights()

    def test_one_of_the_fleet_is_refused(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        with pytest.raises(ws.ConfigError, match="name every receiver once"):
            source.sender.add(source.receiver)


def test_a_fetch_that_is_interrupted_leaves_the_receiver_as_it_was(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(make("plain", 1), make("plain"))
    held = make("plain", 2)
    before = digests(held)
    receiver = ws.WeightReceiver(held)
    loads = threading.Event()
    goes_on = threading.Event()

    def stop_at_update(request: Request) -> None:
        if isinstance(request, UpdateRequest):
            loads.set()
            assert goes_on.wait(TIMEOUT_S)

    watched(receiver, stop_at_update)

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert loads.wait(TIMEOUT_S)
            goes_on.set()
            raise KeyboardInterrupt

    class Events:
        Event, Lock, Thread = Interrupted, threading.Lock, threading.Thread

    monkeypatch.setattr(fetch_client, "threading", Events)
    with pytest.raises(KeyboardInterrupt):
        fetch_client.fetch_from(
            CallbackTransport(source.receiver.handle),
            receiver.dispatch,
            target="x",
            timeout_s=TIMEOUT_S,
        )
    assert digests(held) == before
    assert receiver.status().state == "READY"


class TestEnds:
    def test_a_trainer_that_comes_and_goes_before_the_update_wins(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held, other = make("plain", 2), make("plain", 3)
        receiver = ws.WeightReceiver(held)
        dispatch = receiver.dispatch
        once: list[bool] = []

        def overtaking(request: Request) -> Reply:
            if isinstance(request, UpdateRequest) and request.start and not once:
                once.append(True)
                with ws.connect(other, to=dispatching) as sender:
                    sender.send_weights(40)
            return dispatch(request)

        def dispatching(message: Mapping[str, Any]) -> object:
            return codec.reply_to_plain(dispatch(codec.from_plain(message)))

        receiver.dispatch = overtaking  # type: ignore[method-assign]  # to act between messages
        with pytest.raises((ws.UpdateConflictError, ws.SenderConflictError)):
            ws.fetch(receiver, source.receiver, timeout_s=2)
        assert receiver.version == 40
        assert digests(held) == digests(other)

    def test_a_source_that_answers_nothing_at_once_is_not_called_without_pause(self) -> None:
        """As a server of something else, whose fields a reply may have."""
        calls: list[Mapping[str, Any]] = []

        def foreign(message: Mapping[str, Any]) -> object:
            calls.append(message)
            return {"status": "ok"}

        with pytest.raises(ws.TransportTimeout, match="sent nothing for"):
            ws.fetch(ws.WeightReceiver(make("plain")), foreign, timeout_s=1)
        assert 0 < len(calls) < 40

    def test_a_report_that_is_lost_is_made_here(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)
        receiver = ws.WeightReceiver(held)

        def dying(message: Mapping[str, Any]) -> object:
            if receiver.version:
                raise ConnectError("it is gone")
            return source.receiver.handle(message)

        report = ws.fetch(receiver, dying)
        assert (report.version, report.label, report.verified) == (7, "seven", "held")
        assert report.path == "shared_memory"
        assert digests(held) == digests(source.trainer)
        assert receiver.status().senders == {}
        assert receiver.shared_memory_usage() == []
        phases = dict(report.seconds)
        total, waited = phases.pop("total"), report.receivers[0].seconds["wait"]
        assert "wait" not in phases
        assert 0 < waited <= phases["load"] <= total == sum(phases.values())

    def test_a_module_made_in_inference_mode(self, made: Any) -> None:
        with torch.inference_mode():
            module = make("plain", 1)
        source = made(module, make("plain"))
        source.renew()
        held = make("plain", 2)
        ws.fetch(held, source.receiver)
        assert digests(held) == digests(source.trainer)

    def test_weights_of_no_sender_have_one_id_until_they_are_written(self) -> None:
        module = make("plain", 1)
        source = ws.WeightReceiver(module, version=3)
        ids = []
        for _ in range(2):
            receiver = ws.WeightReceiver(make("plain", 2))
            ws.fetch(receiver, source)
            ids.append(receiver.status().weights_id)
        fill(module, 5)
        receiver = ws.WeightReceiver(make("plain", 2))
        ws.fetch(receiver, source)
        ids.append(receiver.status().weights_id)
        assert ids[0] == ids[1] != ids[2]

    def test_one_that_is_given_up_changes_nothing(self, made: Any) -> None:
        source = made(make("plain", 1), make("plain"))
        held = make("plain", 2)
        before, receiver, stop = digests(held), ws.WeightReceiver(held), threading.Event()
        stop.set()
        with pytest.raises(ws.ProtocolError):
            fetch_client.fetch_from(
                CallbackTransport(source.receiver.handle),
                receiver.dispatch,
                target="x",
                timeout_s=TIMEOUT_S,
                stop=stop,
            )
        assert digests(held) == before
