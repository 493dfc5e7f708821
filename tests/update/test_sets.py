"""Sets: several parts of one trainer are in use together, or as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from msgspec.structs import replace
from torch import nn

import weightsync as ws
from tests.children import CONTEXT
from tests.interrupts import Interrupt
from tests.serve.adapted import dying_before
from tests.server.live import serving
from weightsync.errors import TransferCancelled
from weightsync.ranks.stop import StopSignal
from weightsync.server import weight_router
from weightsync.transports.http import HttpTransport
from weightsync.update.sets import SetUpdate, new_set_id
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Request,
    StatusRequest,
    UpdateRequest,
)

WAIT_S = 60.0
POLICY, DRAFT = (6, 5), (4, 3)

pytestmark = pytest.mark.usefixtures("shm_clean")


def part(shape: tuple[int, int], value: float = 0.0) -> nn.Linear:
    made = nn.Linear(*shape)
    fill(made, value)
    return made


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def value_of(receiver: ws.WeightReceiver) -> float:
    """The value of which all tensors of a receiver are full."""
    module: Any = receiver.sink.module  # type: ignore[attr-defined]  # sinks of modules
    values = {v for p in module.parameters() for v in p.detach().flatten().tolist()}
    (value,) = values
    return float(value)


class Server:
    """A policy and a draft model behind one URL, and the modules of their trainer."""

    def __init__(self, **options: Any) -> None:
        self.fails: dict[str, BaseException] = {}
        self.policy = ws.WeightReceiver(part(POLICY), on_commit=self._hook("policy"), **options)
        self.draft = ws.WeightReceiver(
            part(DRAFT), on_commit=self._hook("draft"), beside=self.policy, **options
        )
        self.app = FastAPI()
        self.app.include_router(weight_router(self.policy, token=None))
        self.app.include_router(weight_router(self.draft, token=None), prefix="/draft")
        self.modules = {"": part(POLICY), "draft": part(DRAFT)}

    def _hook(self, name: str) -> Callable[[int], None]:
        def on_commit(_: int) -> None:
            if name in self.fails:
                raise self.fails.pop(name)

        return on_commit

    def fill(self, value: float) -> None:
        for module in self.modules.values():
            fill(module, value)

    @property
    def state(self) -> list[tuple[int, float]]:
        return [(each.version, value_of(each)) for each in (self.policy, self.draft)]

    @property
    def used_state(self) -> list[tuple[int, float]]:
        """The state as a decode step sees it: a commit may be under way."""
        with self.policy.reading():  # the draft's gate is the policy's
            return self.state

    def close(self) -> None:
        self.policy.close()
        self.draft.close()


@pytest.fixture
def served() -> Iterator[tuple[Server, str]]:
    made = Server()
    with serving(made.app) as url:
        yield made, url
    made.close()


def test_all_parts_have_one_version(served: tuple[Server, str]) -> None:
    server, url = served
    with ws.connect(server.modules["draft"], to=url, at="draft") as alone:
        assert alone.targets == [f"{url}/draft"]
        for _ in range(4):
            alone.send_weights()
    with ws.connect_set(server.modules, to=url) as sender:
        for version in (5, 6, 7):
            server.fill(version)
            reports = sender.send_weights(label=f"step {version}")
            assert [report.version for report in reports] == [version, version]
            assert [report.verified for report in reports] == ["held", "held"]
            assert sum(report.control_messages for report in reports) == 4
            assert len({report.update_id for report in reports}) == 1
            assert server.state == [(version, version), (version, version)]
        assert sender.version == 7
        server.fill(1)
        with pytest.raises(ws.StaleVersionError):
            sender.send_weights(3)
        sender.send_weights(3, rewind=True)
    assert server.state == [(3, 1.0), (3, 1.0)]
    assert server.policy.label is None


def test_no_reader_sees_parts_of_two_updates(served: tuple[Server, str]) -> None:
    server, url = served
    seen: list[tuple[float, float]] = []
    over = False

    def read() -> None:
        while not over:
            first, second = (
                (server.policy, server.draft) if len(seen) % 2 else (server.draft, server.policy)
            )
            with first.reading():
                before = value_of(first)
                time.sleep(0.0005)
                with second.reading():
                    seen.append((before, value_of(second)))

    with ws.connect_set(server.modules, to=url) as sender, ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for value in range(1, 60):
                server.fill(value)
                sender.send_weights()
        finally:
            over = True
        for reader in readers:
            reader.result(WAIT_S)
    assert [one for one in seen if one[0] != one[1]] == []
    assert len({value for value, _ in seen}) > 10


def failing_pairs(module: nn.Module, fails: list[BaseException]) -> Callable[[], Any]:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in module.named_parameters():
            yield name, parameter.detach()
            if fails:
                raise fails.pop()

    return pairs


@pytest.mark.parametrize("fails", ["", "draft"])
def test_a_part_that_fails_before_the_commit_leaves_all_as_they_were(
    served: tuple[Server, str], fails: str
) -> None:
    server, url = served
    errors: list[BaseException] = []
    sources: dict[str, Any] = dict(server.modules)
    sources[fails] = failing_pairs(server.modules[fails], errors)
    with ws.connect_set(sources, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        errors.append(RuntimeError("this part is broken"))
        with pytest.raises(RuntimeError, match="this part is broken"):
            sender.send_weights()
        assert server.state == [(1, 1.0), (1, 1.0)]
        assert server.policy.open_update is None
        assert server.draft.open_update is None
        reports = sender.send_weights()
        assert server.state == [(reports[0].version, 2.0)] * 2


@pytest.mark.parametrize("fails", ["policy", "draft"])
def test_a_part_that_fails_in_the_commit_takes_the_others_back(
    served: tuple[Server, str], fails: str
) -> None:
    server, url = served
    with ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        server.fails[fails] = RuntimeError("no place for it")
        with pytest.raises(ws.WeightSyncError, match="no place for it"):
            sender.send_weights()
        assert server.state == [(1, 1.0), (1, 1.0)]
        assert server.policy.may_generate
        assert server.draft.may_generate
        reports = sender.send_weights()
        assert server.state == [(reports[0].version, 2.0)] * 2


def test_a_part_that_was_aborted_is_not_committed_by_the_others(
    served: tuple[Server, str],
) -> None:
    """A finish that comes after a message that aborted another part."""
    server, url = served
    update = new_set_id(2)
    with ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        calls = held_before_finish(server, sender, update)
        server.draft.dispatch(AbortRequest(update_id=update, reason="a test says so"))
        finish = calls[server.policy]
        with pytest.raises(ws.UpdateConflictError, match="1 of the 2 parts of this set are left"):
            server.policy.dispatch(finish)
    assert server.state == [(1, 1.0), (1, 1.0)]
    assert server.policy.open_update is None


def held_before_finish(
    server: Server, sender: ws.SetSender, update_id: str
) -> dict[ws.WeightReceiver, FinishRequest]:
    """Send an update up to its finishes, and return these, by their receivers."""
    reached = threading.Barrier(3)

    class Held(SetUpdate):
        def ready(self) -> None:
            reached.wait(WAIT_S)
            raise TransferCancelled("the test finishes this update")

    found: dict[ws.WeightReceiver, FinishRequest] = {}
    receivers = (server.policy, server.draft)
    for each, receiver in zip(sender.senders, receivers, strict=True):
        assert each._coordinator is not None
        each._coordinator.fleet.members[0].transport.call = (  # type: ignore[method-assign]  # of this test
            without_aborts(each._coordinator.fleet.members[0].transport.call)
        )
        found[receiver] = FinishRequest(update_id=update_id)
    held = Held(2)
    held.update_id = update_id
    version = sender.version + 1
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(each._send_in_set, held, version, None, False, StopSignal())
            for each in sender.senders
        ]
        reached.wait(WAIT_S)
    for future in work:
        with pytest.raises(TransferCancelled):
            future.result(WAIT_S)
    assert [receiver.status().state for receiver in receivers] == ["PREPARED"] * 2
    return found


def without_aborts(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(request: Request, **options: Any) -> Any:
        if isinstance(request, AbortRequest):
            raise ws.ConnectError("not sent by this test")
        return call(request, **options)

    return called


@pytest.mark.parametrize("path", ["", "draft"])
def test_no_finish_is_sent_when_a_part_got_another_table(
    served: tuple[Server, str], path: str
) -> None:
    """An orphaned part, which gets no digest with a finish, has been compared before."""
    server, url = served
    with ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        part = sender.senders[list(server.modules).index(path)]
        assert part._coordinator is not None
        transport = part._coordinator.fleet.members[0].transport
        call, sent = transport.call, []

        def called(request: Request, **options: Any) -> Any:
            sent.append(type(request))
            reply = call(request, **options)
            loads = isinstance(request, UpdateRequest)
            return replace(reply, table_digest="0" * 32) if loads else reply

        transport.call = called  # type: ignore[method-assign]  # of this test
        with pytest.raises(ws.VerificationError, match="the table of fingerprints that arrived"):
            sender.send_weights()
        assert sent.count(UpdateRequest) == 1
        assert FinishRequest not in sent
        assert server.state == [(1, 1.0), (1, 1.0)]
        transport.call = call  # type: ignore[method-assign]
        sender.send_weights()
        assert [value for _, value in server.state] == [2.0, 2.0]


def test_a_finish_waits_for_that_of_the_other_part() -> None:
    server = Server(lease_s=1.0)
    with serving(server.app) as url, ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        finishes = held_before_finish(server, sender, new_set_id(2))
        with pytest.raises(ws.UpdateConflictError, match="not all of the 2 parts of this set got"):
            server.policy.dispatch(finishes[server.policy])
        assert server.state == [(1, 1.0), (1, 1.0)]
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.policy.dispatch, finishes[server.policy])
            time.sleep(0.2)
            assert not first.done()
            second = server.draft.dispatch(finishes[server.draft])
            assert (first.result(WAIT_S).state, second.state) == ("READY", "READY")  # type: ignore[union-attr]  # StepReplies
        assert server.state == [(2, 2.0), (2, 2.0)]
        again = server.draft.dispatch(finishes[server.draft])
        assert again.version == 2  # type: ignore[union-attr]  # as above
    server.close()


def losing_finishes(sender: ws.WeightSender, count: int) -> list[str | None]:
    """Lose this many finishes of a sender; return the list to which their updates are added."""
    assert sender._coordinator is not None
    transport = sender._coordinator.fleet.members[0].transport
    call, lost = transport.call, list[str | None]()

    def called(request: Request, **options: Any) -> Any:
        if isinstance(request, FinishRequest) and len(lost) < count:
            lost.append(request.update_id)
            raise ws.ConnectError("this finish is lost")
        return call(request, **options)

    transport.call = called  # type: ignore[method-assign]  # of these tests
    return lost


def test_a_finish_that_is_lost_several_times_fails_one_attempt_of_the_set() -> None:
    server = Server(lease_s=1.0)
    with serving(server.app) as url, ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        lost = losing_finishes(sender.senders[1], 3)
        reports = sender.send_weights()
        assert len(lost) == 3
        assert len({report.update_id for report in reports} | set(lost)) == 2
        assert server.state == [(reports[0].version, 2.0)] * 2
    server.close()


def test_a_finish_that_was_lost_and_comes_later_commits_no_part_alone() -> None:
    """The other part was given up meanwhile, and so long ago that its receiver forgot it."""
    server = Server(lease_s=1.0)
    with serving(server.app) as url, ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.fill(2)
        policy, draft = sender.senders
        lost = losing_finishes(draft, 4)  # the last one before another attempt
        with pytest.raises(ws.WeightSyncError):
            sender.send_weights()
        assert server.state == [(1, 1.0), (1, 1.0)]
        policy.send_weights()  # it aborts the update of the set
        for i in range(300):
            server.policy.dispatch(AbortRequest(update_id=f"other{i}"))
        server.fill(3)
        draft.send_weights()  # first comes the finish that was lost
        for receiver in (server.policy, server.draft):
            assert not {each.update_id for each in receiver.recent_updates}.intersection(lost)
        sender.send_weights()
        assert [value for _, value in server.state] == [3.0, 3.0]
    server.close()


def send_until_killed(url: str, call: type[Request], count: int, pipe: Connection) -> None:
    """Send a set, and another one; die before a request of this type of that one."""
    modules = {"": part(POLICY, 1), "draft": part(DRAFT, 1)}
    with ws.connect_set(modules, to=url) as sender:
        sender.send_weights()
        for module in modules.values():
            fill(module, 2)
        pipe.send("ready")
        with dying_before(call, count):
            sender.send_weights()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", ["a set", "the policy alone", "the draft alone"])
@pytest.mark.parametrize(
    ("call", "count"),
    [(UpdateRequest, 1), (UpdateRequest, 2), (FinishRequest, 1), (FinishRequest, 2)],
    ids=["update 1", "update 2", "finish 1", "finish 2"],
)
def test_a_trainer_that_is_killed_leaves_all_parts_old_or_all_new(
    served: tuple[Server, str], call: type[Request], count: int, after: str
) -> None:
    server, url = served
    ours, theirs = CONTEXT.Pipe()
    victim = CONTEXT.Process(target=send_until_killed, args=(url, call, count, theirs), daemon=True)
    victim.start()
    victim.join(WAIT_S)
    assert ours.poll()
    assert victim.exitcode == -9
    deadline = time.monotonic() + 10
    while server.used_state not in ([(1, 1.0)] * 2, [(2, 2.0)] * 2):
        assert time.monotonic() < deadline, server.used_state
        time.sleep(0.01)
    if call is UpdateRequest:
        assert server.state == [(1, 1.0)] * 2
    before = server.state
    server.fill(3)
    if after == "a set":
        with ws.connect_set(server.modules, to=url) as sender:
            sender.send_weights()
        assert [value for _, value in server.state] == [3.0, 3.0]
        return
    path = "" if after == "the policy alone" else "draft"
    with ws.connect(server.modules[path], to=url, at=path):
        settled = server.state
    assert settled in (before, [(2, 2.0)] * 2)
    with ws.connect_set(server.modules, to=url) as sender:
        sender.send_weights()
    assert [value for _, value in server.state] == [3.0, 3.0]


def test_the_parts_that_a_dead_sender_prepared_are_settled_together(
    served: tuple[Server, str],
) -> None:
    """The finish of one, by the sender after it, commits the other: it waits for no dead sender."""
    server, url = served
    _, theirs = CONTEXT.Pipe()
    victim = CONTEXT.Process(
        target=send_until_killed, args=(url, FinishRequest, 1, theirs), daemon=True
    )
    victim.start()
    victim.join(WAIT_S)
    assert [each.status().state for each in (server.policy, server.draft)] == ["PREPARED"] * 2
    update_id = server.policy.status().update_id
    server.policy.dispatch(FinishRequest(update_id=update_id))
    assert server.state == [(2, 2.0), (2, 2.0)]
    with ws.connect_set(server.modules, to=url):  # which removes what the dead sender has left
        pass


def test_a_receiver_that_was_restarted_is_connected_again(served: tuple[Server, str]) -> None:
    server, url = served
    with ws.connect_set(server.modules, to=url) as sender:
        server.fill(1)
        sender.send_weights()
        server.draft.close(for_good=False)
        server.fill(2)
        sender.send_weights()
    assert [value for _, value in server.state] == [2.0, 2.0]


def test_a_transport_is_one_for_each_part(served: tuple[Server, str]) -> None:
    """Each part closes its own, those of the parts below the URL first."""
    server, url = served
    transport = HttpTransport(url)
    with ws.connect_set(server.modules, to=transport) as sender:
        for value in (1, 2):
            server.fill(value)
            sender.send_weights()
            assert server.state == [(value, value), (value, value)]
    with pytest.raises(ws.ConnectError, match="closed"):
        transport.call(StatusRequest(), timeout_s=5)


def test_what_is_no_set_is_refused(served: tuple[Server, str]) -> None:
    server, url = served
    with pytest.raises(ws.ConfigError, match="two parts at least, and this has 1"):
        ws.connect_set([server.modules[""]], to=url)
    with pytest.raises(ws.ConfigError, match="same receiver"):
        ws.connect_set([part(POLICY), part(POLICY)], to=url, takeover=True)
    apart = ws.WeightReceiver(part(DRAFT))
    server.app.include_router(weight_router(apart, token=None), prefix="/apart")
    with pytest.raises(ws.ConfigError, match="are not receivers of one set"):
        ws.connect_set({"": part(POLICY), "apart": part(DRAFT)}, to=url)
    with pytest.raises(ws.ConfigError, match="a set has no on_failure="):
        ws.connect_set(server.modules, to=url, on_failure="drop")
    with pytest.raises(ws.ConfigError, match="is no path of a receiver"):
        ws.connect(server.modules[""], to=url, at="../draft")
    with pytest.raises(ws.ConfigError, match="those of the receiver that is `beside`"):
        ws.WeightReceiver(part(DRAFT), beside=server.policy, on_hold=lambda _: None)
    assert server.policy.status().senders == {}


def test_an_update_of_one_part_waits_for_readers_of_the_other(served: tuple[Server, str]) -> None:
    server, url = served
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with server.policy.reading():
            entered.set()
            assert leave.wait(WAIT_S)

    with (
        ws.connect(server.modules["draft"], to=url, at="draft") as sender,
        ThreadPoolExecutor(2) as pool,
    ):
        reader = pool.submit(read)
        assert entered.wait(WAIT_S)
        server.fill(4)
        sending: Future[ws.SyncReport] = pool.submit(sender.send_weights)
        time.sleep(0.2)
        assert not sending.done()
        assert value_of(server.draft) == 0.0
        leave.set()
        reader.result(WAIT_S)
        sending.result(WAIT_S)
    assert server.state == [(0, 0.0), (1, 4.0)]


def test_ready_is_for_all_or_for_none() -> None:
    update = SetUpdate(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(update.ready)
        update.failed(RuntimeError("first"))
        update.failed(RuntimeError("second"))
        with pytest.raises(ws.TransferError, match=r"another part of the set failed.*first"):
            waiting.result(WAIT_S)
    update = SetUpdate(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(update.ready)
        update.ready()
        update.failed(RuntimeError("in the commit"))
        waiting.result(WAIT_S)
    assert update.error is None


def test_no_part_is_ready_after_one_has_failed() -> None:
    """Also when as many have called as there are parts."""
    update = SetUpdate(2)
    update.failed(RuntimeError("the first one"))
    for _ in range(2):
        with pytest.raises(ws.TransferError, match="the first one"):
            update.ready()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_part_that_ends_in_any_way_is_not_waited_for(error: type[BaseException]) -> None:
    update = SetUpdate(2)

    def fail() -> None:
        with update.part():
            raise error("stop")

    def become_ready() -> None:
        with update.part():
            update.ready()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(become_ready)
        with pytest.raises(error):
            fail()
        with pytest.raises(ws.TransferError, match="stop"):
            waiting.result(WAIT_S)
    update.await_parts()
    with pytest.raises(ws.TransferError, match="stop"):
        become_ready()


def test_an_interrupt_ends_all_parts(served: tuple[Server, str]) -> None:
    """At each point of the thread that starts them and waits; also where one has not begun."""
    server, url = served
    with ws.connect_set(server.modules, to=url) as sender:
        at, more = 0, True
        while more:
            at += 1
            server.fill(-at)
            interrupt = Interrupt("_send", at)
            with suppress(KeyboardInterrupt), interrupt.traced():
                sender.send_weights()
            more = bool(interrupt.raised)
            assert server.state[0] == server.state[1], at
            server.fill(at)
            sender.send_weights()
            assert [value for _, value in server.state] == [at, at]
    assert at > 10
