"""Messages that meet in one receiver: while a step runs, in the wrong order, or from two senders.

Also tested: a retry of a load in flight, an abort that overtakes its start, and late repeats
(tests/test_receiver.py, TestIdempotence); a load that takes longer than the lease
(test_leases.py); a close during a load (tests/test_sender.py); orders at random (tests/protocol).
"""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import weightsync as ws
from tests.offers import offered, registered
from tests.update.uniform import values
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.shm.segment import live_segments
from weightsync.specs import Manifest, ManifestDifference
from weightsync.update import session
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import Apply, LoadTarget
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.weights.sources.base import ModuleSource
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    InitRequest,
    PrepareRequest,
    Request,
    ShutdownRequest,
    StartRequest,
    StartTerms,
    StepReply,
    UpdateRequest,
)
from weightsync.wire.offers import InitInfo, Owner

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 30.0
SHORT_S = 0.2
EACH = ("staged", "in_place")


def make(value: float) -> nn.Module:
    made = nn.Linear(4, 4)
    fill(made, value)
    return made


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.fill_(value)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class StoppingSink(ModuleSink):
    """Stops in the method `stops_in`, once, until `go_on`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stops_in = ""
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def arm(self, method: str) -> None:
        self.stops_in = method
        self.stopped.clear()
        self.go_on.clear()

    def _pass(self, method: str) -> None:
        if method == self.stops_in:
            self.stops_in = ""
            self.stopped.set()
            assert self.go_on.wait(WAIT_S)

    def difference(self, offered: Manifest) -> ManifestDifference:
        self._pass("difference")
        return super().difference(offered)

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Return a target of which an engine that loads asks `is_unused`: "load" stops there."""
        target = super().open_target(layout, apply)
        is_unused = target.is_unused

        def asked() -> bool:
            self._pass("load")
            return is_unused()

        target.is_unused = asked  # type: ignore[method-assign]
        return target

    def commit_all(self, load_targets: Any) -> None:
        super().commit_all(load_targets)
        self._pass("commit_all")


class Sender:
    """A sender's engine without its transport: every message is made by hand."""

    def __init__(self, term: int = 0, *, packed: bool = False) -> None:
        self.module = make(0)
        self.dead = False
        self._packed = packed
        self._sending: threading.Thread | None = None
        self.id = secrets.token_hex(8)
        self.owner = Owner(id=self.id, name=f"owner of term {term}", term=term)
        before = {segment.name for segment in live_segments()}
        options = TransferOptions(timeout_s=WAIT_S, packed=packed)
        self.engine = IpcTrainerEngine(ModuleSource(self.module), options)
        offered(self.engine)
        self._segments = {segment.name for segment in live_segments()} - before

    def offer(self) -> InitInfo:
        return replace(offered(self.engine, sender=self.id), owner=self.owner)

    def init(self, receiver: ws.WeightReceiver) -> None:
        receiver.dispatch(InitRequest(init_info=self.offer()))

    def update(self, value: float, update_id: str, *, prepare: bool = True) -> UpdateRequest:
        fill(self.module, value)
        payload = self.engine.begin([0], verify=True)
        if self._packed:  # waits for its reader
            self._sending = threading.Thread(target=self._transfer)
            self._sending.start()
        else:
            self._transfer()
        info = registered(payload, sender=self.id)
        return UpdateRequest(
            update_id=update_id, start=StartTerms(), update_info=info, prepare=prepare
        )

    def _transfer(self) -> None:
        with suppress(InterruptedError):
            self.engine.transfer(self._check)

    def _check(self) -> None:
        if self.dead:
            raise InterruptedError

    def die(self) -> None:
        """As SIGKILL does, release the locks that say that the sender lives."""
        self.dead = True
        if self._sending is not None:
            self._sending.join()
        for segment in live_segments():
            if segment.name in self._segments and segment._lock is not None:
                segment._lock.release()


class Meeting:
    """A receiver with a sender that is connected, and threads for messages that meet."""

    def __init__(
        self, apply: ApplyChoice = "staged", lease_s: float = WAIT_S, *, packed: bool = False
    ) -> None:
        self.served = make(0)
        self.sink = StoppingSink(self.served)
        self.released: list[str] = []
        self.receiver = ws.WeightReceiver(
            self.sink,
            apply=apply,
            lease_s=lease_s,
            on_release=lambda: self.released.append(self.receiver.status().state),
        )
        self.sender = Sender(packed=packed)
        self.sender.init(self.receiver)
        self.pool = ThreadPoolExecutor(8)
        self._senders = [self.sender]

    def another(self, term: int = 0) -> Sender:
        self._senders.append(Sender(term))
        return self._senders[-1]

    @property
    def state(self) -> tuple[str, int]:
        status = self.receiver.status()
        return status.state, status.version

    def say(self, request: Request) -> StepReply:
        reply = self.receiver.dispatch(request)
        assert isinstance(reply, StepReply)
        return reply

    def stopped_in(self, method: str, request: Request) -> Future[StepReply]:
        """Send a request, which stops in this method of the sink."""
        self.sink.arm(method)
        running = self.pool.submit(self.say, request)
        assert self.sink.stopped.wait(WAIT_S)
        return running

    def readable(self) -> bool:
        try:
            with self.receiver.reading(timeout_s=0.0):
                return True
        except ws.NotReadyError:
            return False

    def the_next_update_succeeds(self, sender: Sender | None = None) -> None:
        """The last step of a test."""
        sender = sender or self.sender
        self.say(sender.update(9, "next"))
        assert self.say(FinishRequest(update_id="next")).state == "READY"
        assert values(self.served) == {9}

    def close(self) -> None:
        self.sink.go_on.set()
        self.pool.shutdown()
        self.receiver.close()
        for sender in self._senders:
            sender.engine.close()


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    meetings: list[Meeting] = []

    def make_meeting(*args: Any, **options: Any) -> Meeting:
        meetings.append(Meeting(*args, **options))
        return meetings[-1]

    yield make_meeting
    for meeting in meetings:
        meeting.close()


Meet = Callable[..., Meeting]


class TestWhileAStepRuns:
    @pytest.mark.parametrize("step", ["init", "load", "prepare", "finish"])
    def test_status_is_told_and_readers_go_on(self, meet: Meet, step: str) -> None:
        """But for readers during the swap, who say at once that they cannot."""
        here = meet()
        method, state = {
            "init": ("difference", "READY"),
            "load": ("load", "UPDATING"),
            "prepare": ("difference", "UPDATING"),
            "finish": ("commit_all", "PREPARED"),
        }[step]
        if step == "init":
            here.sink.arm(method)
            running: Future[Any] = here.pool.submit(here.sender.init, here.receiver)
            assert here.sink.stopped.wait(WAIT_S)
        else:
            request: Request = here.sender.update(1, "u", prepare=step == "finish")
            if step != "load":
                here.say(request)
                steps = {"prepare": PrepareRequest, "finish": FinishRequest}
                request = steps[step](update_id="u")
            running = here.stopped_in(method, request)
        status = here.receiver.status()
        assert (status.state, status.busy, status.version) == (state, True, 0)
        readers = [here.pool.submit(here.readable) for _ in range(4)]
        assert {r.result(WAIT_S) for r in readers} == {step != "finish"}
        assert here.receiver.report().status.busy
        assert not running.done()
        here.sink.go_on.set()
        running.result(WAIT_S)
        assert not here.receiver.status().busy
        here.say(AbortRequest(update_id="u"))
        here.the_next_update_succeeds()

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("apply", EACH)
    def test_a_sender_that_dies_while_its_message_waits_changes_nothing(
        self, meet: Meet, apply: ApplyChoice, packed: bool
    ) -> None:
        here = meet(apply, packed=packed)
        running = here.stopped_in("load", here.sender.update(1, "u"))
        here.sender.die()
        here.sink.go_on.set()
        error = running.exception(WAIT_S)
        assert isinstance(error, ws.SegmentError)
        assert "the sender died" in str(error)
        assert here.state == ("READY", 0)
        assert here.readable()
        assert values(here.served) == {0}

    @pytest.mark.parametrize("step", ["load", "prepare"])
    def test_an_abort_waits_for_it(self, meet: Meet, step: str) -> None:
        here = meet()
        request: Request = here.sender.update(1, "u", prepare=False)
        if step == "prepare":
            here.say(request)
            running = here.stopped_in("difference", PrepareRequest(update_id="u"))
        else:
            running = here.stopped_in("load", request)
        aborting = here.pool.submit(here.say, AbortRequest(update_id="u"))
        until(lambda: here.state == ("ABORTING", 0))
        assert here.readable()
        assert not aborting.done()
        here.sink.go_on.set()
        assert aborting.result(WAIT_S).state == "READY"
        assert isinstance(running.exception(WAIT_S), (ws.TransferError, ws.UpdateConflictError))
        assert here.receiver.updates_total == {"aborted": 1}
        here.the_next_update_succeeds()

    def test_an_abort_of_what_does_not_stop_returns_after_the_lease(self, meet: Meet) -> None:
        here = meet(lease_s=SHORT_S)
        running = here.stopped_in("load", here.sender.update(1, "u"))
        assert here.say(AbortRequest(update_id="u")).state == "ABORTING"
        with pytest.raises(ws.UpdateConflictError):
            here.say(StartRequest(update_id="v"))
        here.sink.go_on.set()
        assert running.exception(WAIT_S)
        until(lambda: here.state == ("READY", 0))
        here.the_next_update_succeeds()

    def test_an_abort_that_an_init_outlasts_ends_with_it(
        self, meet: Meet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the sender lives or not: it has aborted the update."""
        here = meet(lease_s=1.0)
        beats = itertools.count()
        monkeypatch.setattr(here.receiver._session.senders, "beat", lambda _: next(beats))
        here.say(here.sender.update(1, "u", prepare=False))
        here.sink.arm("difference")
        running = here.pool.submit(here.sender.init, here.receiver)
        assert here.sink.stopped.wait(WAIT_S)
        assert here.say(AbortRequest(update_id="u")).state == "ABORTING"
        here.sink.go_on.set()
        running.result(WAIT_S)
        over = time.monotonic()
        until(lambda: here.state == ("READY", 0))
        assert time.monotonic() - over < 3.0
        here.the_next_update_succeeds()

    def test_an_abort_comes_too_late_for_a_commit(self, meet: Meet) -> None:
        here = meet()
        here.say(here.sender.update(1, "u"))
        running = here.stopped_in("commit_all", FinishRequest(update_id="u"))
        aborting = [here.pool.submit(here.say, AbortRequest(update_id=i)) for i in ("u", "u", "u")]
        time.sleep(SHORT_S)
        assert here.state == ("PREPARED", 0)
        assert not any(future.done() for future in aborting)
        here.sink.go_on.set()
        assert running.result(WAIT_S).version == 1
        for future in aborting:
            assert (future.result(WAIT_S).state, future.result().version) == ("READY", 1)
        assert values(here.served) == {1}
        assert here.say(FinishRequest(update_id="u")) == running.result()
        here.the_next_update_succeeds()

    def test_a_finish_that_is_repeated_meanwhile_gets_its_reply(self, meet: Meet) -> None:
        here = meet()
        here.say(here.sender.update(1, "u"))
        running = here.stopped_in("commit_all", FinishRequest(update_id="u"))
        again = [here.pool.submit(here.say, FinishRequest(update_id="u")) for _ in range(3)]
        time.sleep(SHORT_S)
        here.sink.go_on.set()
        for future in again:
            assert future.result(WAIT_S) is running.result(WAIT_S)
        assert here.receiver.updates_total == {"committed": 1}

    def test_a_repeat_waits_no_longer_than_the_lease(self, meet: Meet) -> None:
        here = meet(lease_s=SHORT_S)
        request = here.sender.update(1, "u")
        running = here.stopped_in("load", request)
        with pytest.raises(ws.TransportTimeout, match=r"still runs after 0\.2 s"):
            here.say(request)
        with pytest.raises(ws.UpdateConflictError, match=r"busy for 0\.2 s with update u"):
            here.say(PrepareRequest(update_id="u"))
        here.sink.go_on.set()
        assert running.result(WAIT_S).state == "PREPARED"
        assert here.say(FinishRequest(update_id="u")).version == 1

    def test_a_close_that_waits_in_vain_leaves_the_memory(
        self, meet: Meet, caplog: pytest.LogCaptureFixture
    ) -> None:
        here = meet(lease_s=SHORT_S)
        running = here.stopped_in("load", here.sender.update(1, "u"))
        here.receiver.close()
        assert "a loader is still running" in caplog.text
        assert here.receiver.shared_memory_usage()
        here.sink.go_on.set()
        assert running.exception(WAIT_S)
        here.receiver.close()
        assert not here.receiver.shared_memory_usage()

    def test_a_start_of_another_update_waits_for_nothing(self, meet: Meet) -> None:
        here = meet()
        here.say(here.sender.update(1, "u"))
        running = here.stopped_in("commit_all", FinishRequest(update_id="u"))
        with pytest.raises(ws.UpdateConflictError, match="held by update u"):
            here.say(StartRequest(update_id="v"))
        here.sink.go_on.set()
        running.result(WAIT_S)
        here.say(StartRequest(update_id="v"))


def test_others_go_on_while_an_update_is_discarded(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = meet()
    whole = here.receiver._session.load_targets._whole
    assert whole is not None
    seen: list[tuple[str, bool]] = []

    def discard() -> None:
        state = here.pool.submit(lambda: here.receiver.status().state).result(WAIT_S)
        seen.append((state, here.pool.submit(here.readable).result(WAIT_S)))

    monkeypatch.setattr(whole[1], "discard", discard)
    here.say(here.sender.update(1, "u"))
    assert here.say(AbortRequest(update_id="u")).state == "READY"
    assert seen == [("ABORTING", True)]
    here.the_next_update_succeeds()


class TestTwoSenders:
    def test_who_takes_over_ends_a_load(self, meet: Meet) -> None:
        here = meet()
        running = here.stopped_in("load", here.sender.update(1, "u"))
        with pytest.raises(ws.SenderConflictError):
            here.another().init(here.receiver)
        second = here.another(term=1)
        taking = here.pool.submit(second.init, here.receiver)
        until(lambda: here.state == ("ABORTING", 0))
        assert not taking.done()
        here.sink.go_on.set()
        assert "was replaced as the owner" in str(running.exception(WAIT_S))
        taking.result(WAIT_S)
        assert list(here.receiver.status().senders) == [second.id]
        here.the_next_update_succeeds(second)

    @pytest.mark.parametrize("apply", EACH)
    def test_a_prepared_update_is_finished_between_takeover_and_shutdown(
        self, meet: Meet, apply: ApplyChoice
    ) -> None:
        """The new owner keeps it for recovery; then the old one's last messages arrive."""
        here = meet(apply)
        second = here.another(term=1)
        here.say(here.sender.update(1, "u"))
        second.init(here.receiver)
        status = here.receiver.status()
        assert (status.state, status.update_id, status.orphaned) == ("PREPARED", "u", True)
        assert list(status.senders) == [second.id]
        with pytest.raises(ws.UpdateConflictError, match="update u is open"):
            here.receiver.dispatch(ShutdownRequest(sender=here.sender.id))
        reply = here.say(FinishRequest(update_id="u"))
        assert (reply.state, reply.version, values(here.served)) == ("READY", 1, {1})
        assert here.readable()
        here.receiver.dispatch(ShutdownRequest(sender=here.sender.id))
        assert list(here.receiver.status().senders) == [second.id]
        assert here.state == ("READY", 1)
        here.the_next_update_succeeds(second)

    @pytest.mark.parametrize("apply", EACH)
    def test_a_prepared_update_is_aborted_by_who_took_over(
        self, meet: Meet, apply: ApplyChoice
    ) -> None:
        here = meet(apply)
        second = here.another(term=1)
        here.say(here.sender.update(1, "u"))
        second.init(here.receiver)
        reply = here.say(AbortRequest(update_id="u"))
        assert reply.state == ("READY" if apply == "staged" else "TORN")
        with pytest.raises(ws.UpdateConflictError):
            here.say(FinishRequest(update_id="u"))
        here.receiver.dispatch(ShutdownRequest(sender=here.sender.id))
        here.the_next_update_succeeds(second)

    def test_an_update_that_is_prepared_as_it_is_taken_over_is_kept(
        self, meet: Meet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its sender has the reply, and may have committed it elsewhere."""
        here = meet()
        second = here.another(term=1)
        here.say(here.sender.update(1, "u", prepare=False))

        def prepares_meanwhile(owner: Owner) -> str:
            here.say(PrepareRequest(update_id="u"))
            return owner.name

        monkeypatch.setattr("weightsync.update.session.describe", prepares_meanwhile)
        second.init(here.receiver)
        assert here.state == ("PREPARED", 0)
        assert here.say(FinishRequest(update_id="u")).version == 1
        here.the_next_update_succeeds(second)

    def test_an_abort_without_an_id_ends_the_session_that_it_found(
        self, meet: Meet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = meet()
        held = here.receiver._session
        opened = here.say(StartRequest())
        abort = held._abort

        def another_starts(*args: Any) -> StepReply:
            monkeypatch.undo()
            here.say(AbortRequest(update_id=opened.update_id))
            here.say(StartRequest(update_id="another"))
            return abort(*args)

        monkeypatch.setattr(held, "_abort", another_starts)
        with pytest.raises(ws.UpdateConflictError):
            here.say(AbortRequest())
        assert here.receiver.status().update_id == "another"
        here.say(AbortRequest(update_id="another"))
        here.the_next_update_succeeds()

    def test_both_start_at_once_and_one_is_refused(self, meet: Meet) -> None:
        here = meet()
        for _ in range(20):
            together = threading.Barrier(4)

            def start(update_id: str, together: threading.Barrier = together) -> str:
                together.wait(WAIT_S)
                try:
                    here.say(StartRequest(update_id=update_id))
                except ws.UpdateConflictError:
                    return ""
                return update_id

            ids = [secrets.token_hex(4) for _ in range(4)]
            started = list(here.pool.map(start, ids))
            (opened,) = filter(None, started)
            assert here.receiver.status().update_id == opened
            here.say(AbortRequest(update_id=opened))
        here.the_next_update_succeeds()


class TestADeadSender:
    @pytest.mark.parametrize(("prepare", "state"), [(True, "PREPARED"), (False, "TORN")])
    def test_in_place_it_blocks_readers_no_longer(
        self, meet: Meet, prepare: bool, state: str
    ) -> None:
        """Its lease is much longer; readers that waited are refused."""
        here = meet("in_place", lease_s=600.0)
        here.say(here.sender.update(1, "u", prepare=prepare))

        def read() -> str:
            with pytest.raises(ws.NotReadyError) as refused, here.receiver.reading():
                pass
            return refused.value.update_id

        reading = [here.pool.submit(read) for _ in range(3)]
        here.released.clear()
        time.sleep(SHORT_S)
        assert not any(future.done() for future in reading)
        here.sender.die()
        assert [future.result(WAIT_S) for future in reading] == ["u"] * 3
        until(lambda: len(here.released) == 1)
        assert here.state == (state, 0)
        status = here.receiver.status()
        assert status.orphaned is prepare
        second = here.another()
        second.init(here.receiver)
        if prepare:
            assert here.say(FinishRequest(update_id="u")).version == 1
            assert values(here.served) == {1}
            assert here.readable()
        here.the_next_update_succeeds(second)

    def test_staged_it_stays_for_recovery(self, meet: Meet) -> None:
        here = meet(lease_s=SHORT_S)
        here.say(here.sender.update(1, "u"))
        here.sender.die()
        time.sleep(3 * SHORT_S)
        status = here.receiver.status()
        assert (status.state, status.orphaned) == ("PREPARED", True)
        assert here.readable()
        second = here.another()
        second.init(here.receiver)
        assert here.say(FinishRequest(update_id="u")).version == 1
        here.the_next_update_succeeds(second)


class TestReaders:
    @pytest.mark.parametrize("apply", EACH)
    def test_many_threads_read_whole_versions_during_updates(
        self, meet: Meet, apply: ApplyChoice
    ) -> None:
        here = meet(apply)
        over, mixed, steps = threading.Event(), [], [0] * 4

        def read(number: int) -> None:
            while not over.is_set():
                with here.receiver.reading() as version:
                    found = values(here.served)
                    with here.receiver.reading(timeout_s=0.0) as inner:  # nested: never blocked
                        time.sleep(1e-4)
                        if not (found == values(here.served) == {float(version)}):
                            mixed.append((version, found))
                        if inner != version:
                            mixed.append((inner, found))
                steps[number] += 1

        readers = [here.pool.submit(read, number) for number in range(4)]
        for version in range(1, 31):
            here.say(here.sender.update(version, f"u{version}"))
            here.say(FinishRequest(update_id=f"u{version}"))
        until(lambda: all(steps))
        over.set()
        for future in readers:
            future.result(WAIT_S)
        assert not mixed

    def test_a_start_between_the_commit_and_the_reply_is_kept(
        self, meet: Meet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = meet()
        here.say(here.sender.update(1, "u"))
        table = here.receiver._session.table
        genuine = table.committed

        def committed(*args: Any) -> None:
            here.pool.submit(here.say, StartRequest(update_id="v")).result(WAIT_S)
            genuine(*args)

        monkeypatch.setattr(table, "committed", committed)
        reply = here.say(FinishRequest(update_id="u"))
        assert (reply.update_id, reply.state, reply.version) == ("u", "READY", 1)
        status = here.receiver.status()
        assert (status.state, status.update_id, status.version) == ("UPDATING", "v", 1)
        assert here.receiver.open_update is not None
        assert here.readable()
        assert here.say(AbortRequest(update_id="v")).state == "READY"
        monkeypatch.undo()
        here.the_next_update_succeeds()

    def test_starts_that_arrive_at_the_commit_are_kept(self, meet: Meet) -> None:
        """The next update may start as soon as a status says READY: before finish has replied."""
        here = meet()
        over = threading.Event()
        lost: list[str] = []
        count = [0]

        def start() -> None:
            while not over.is_set():
                update_id = secrets.token_hex(8)
                try:
                    here.say(StartRequest(update_id=update_id))
                except ws.UpdateConflictError:
                    continue
                count[0] += 1
                if here.receiver.status().update_id != update_id:
                    lost.append(update_id)
                here.say(AbortRequest(update_id=update_id))

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            starting = [here.pool.submit(start) for _ in range(2)]
            done = 0
            deadline = time.monotonic() + WAIT_S
            while done < 30 or not count[0]:
                assert time.monotonic() < deadline
                update_id = secrets.token_hex(8)
                try:
                    here.say(here.sender.update(done + 1, update_id))
                    here.say(FinishRequest(update_id=update_id))
                except ws.WeightSyncError:
                    continue
                done += 1
            over.set()
            for future in starting:
                future.result(WAIT_S)
        finally:
            over.set()
            sys.setswitchinterval(before)
        assert not lost
        here.the_next_update_succeeds()


_FORKS = """
import os, signal, threading, time
from torch import nn
import weightsync as ws

receiver = ws.WeightReceiver(nn.Linear(2, 2))
receiver.handle({"call": "start_weight_update", "body": {"update_id": "open"}})
over = threading.Event()

def read():
    while not over.is_set():
        with receiver.reading():
            receiver.version

threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if not child:
        signal.alarm(20)
        with receiver.reading(timeout_s=1.0):
            assert receiver.status().update_id == "open"
        receiver.handle({"call": "abort_weight_update", "body": {"update_id": "open"}})
        receiver.handle({"call": "start_weight_update", "body": {"update_id": "mine"}})
        receiver.close()
        os._exit(0)
    _, code = os.waitpid(child, 0)
    assert code == 0, f"a forked child ended with {code}"
over.set()
for thread in threads:
    thread.join()
assert receiver.status().update_id == "open"
receiver.close()
"""


def test_a_forked_child_does_not_wait_for_threads_it_does_not_have() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FORKS], timeout=240, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_a_receiver_that_is_made_during_a_fork_waits_for_it() -> None:
    """The fork looks at all receivers, and a set must not grow meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        session._before_fork()
        try:
            making = pool.submit(ws.WeightReceiver, make(0))
            with pytest.raises(TimeoutError):
                making.result(SHORT_S)
        finally:
            session._after_fork()
        making.result(WAIT_S).close()
