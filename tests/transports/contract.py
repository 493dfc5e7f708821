"""The contract of every transport, as tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    HandleError,
    ManifestMismatchError,
    NotReadyError,
    ProtocolError,
    RemoteError,
    SegmentError,
    StaleVersionError,
    TransferTimeout,
    UpdateConflictError,
    VerificationError,
    WeightSyncError,
)
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.transports.base import Transport
from weightsync.wire import codec
from weightsync.wire.messages import (
    AbortRequest,
    CheckReply,
    CheckRequest,
    FetchReply,
    FetchRequest,
    FinishRequest,
    InitReply,
    InitRequest,
    LabelRequest,
    PauseRequest,
    PrepareRequest,
    Request,
    ResetCacheRequest,
    ResumeRequest,
    ShutdownRequest,
    SleepRequest,
    StartRequest,
    StartTerms,
    Status,
    StatusRequest,
    StepReply,
    UpdateRequest,
    WakeRequest,
)
from weightsync.wire.offers import CudaHandle

Connect = Callable[[ScriptedReceiver], Transport]

HANDLE = CudaHandle(
    device="GPU-1",
    nbytes=64,
    handle=b"\x00\xff" * 32,
    base_offset=0,
    ref_counter_handle=b"\x01",
    ref_counter_offset=8,
    event_handle=b"",
    event_sync_required=True,
)
UPDATE = UpdateRequest(
    update_info=HandlesUpdate(
        names=["layer.weight", "größe"],
        dtype_names=["bfloat16", "float32"],
        shapes=[[2, 3], []],
        ipc_handles=[{"GPU-1": HANDLE}, {"GPU-1": HANDLE}],
    ),
    update_id="u1",
    start=StartTerms(version=3, label="step 3"),
    prepare=True,
)
REQUESTS: list[Request] = [
    InitRequest(),
    ShutdownRequest(sender="s"),
    StartRequest(update_id="u1", version=3),
    UPDATE,
    PrepareRequest(update_id="u1"),
    FinishRequest(update_id="u1", table_digest="ab"),
    AbortRequest(update_id="u1", reason="changed my mind"),
    LabelRequest(new_version="v"),
    CheckRequest(action="compare", checksums={"a": "0" * 16}),
    StatusRequest(),
    ResetCacheRequest(),
    PauseRequest(mode="wait"),
    ResumeRequest(),
    FetchRequest(fetch_id="f1", turn=2, reply={"state": "READY"}),
    SleepRequest(level=2),
    WakeRequest(tags=["weights"]),
]
ERRORS: list[WeightSyncError] = [
    ConfigError("fix the call"),
    BackendUnavailableError("no CUDA here"),
    ProtocolError("protocol 2 is wanted"),
    ManifestMismatchError(missing=["a"], unexpected=["b"], mismatched=["c: x"]),
    StaleVersionError(held=4, offered=3),
    UpdateConflictError("busy", state="UPDATING", update_id="u0"),
    NotReadyError("torn", state="TORN", update_id="u0"),
    HandleError("no such handle"),
    SegmentError("a link"),
    TransferTimeout("no progress"),
    VerificationError(names=["a", "b"]),
    AuthError("wrong token", status=403),
    WeightSyncError("unnamed"),
]
ATTRIBUTES = (
    *("missing", "unexpected", "mismatched", "held", "offered"),
    *("state", "update_id", "names", "status"),
)


class TransportContract:
    """Subclasses give the fixture `connect`, which returns a transport to a receiver."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        raise NotImplementedError

    @pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
    def test_a_request_arrives_as_it_was_sent(self, connect: Connect, request_: Request) -> None:
        receiver = ScriptedReceiver()
        reply = connect(receiver).call(request_, timeout_s=10)
        assert receiver.seen == [request_]
        assert reply == receiver.answer(request_)

    def test_each_call_has_its_own_kind_of_reply(self, connect: Connect) -> None:
        transport = connect(ScriptedReceiver())
        kinds = [type(transport.call(request, timeout_s=10)) for request in REQUESTS]
        assert kinds.count(InitReply) == 1
        assert kinds.count(CheckReply) == 1
        assert kinds.count(StepReply) == 5
        assert kinds.count(Status) == 8
        assert kinds.count(FetchReply) == 1

    @pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
    def test_the_peers_error_is_raised_as_the_same_class(
        self, connect: Connect, error: WeightSyncError
    ) -> None:
        transport = connect(ScriptedReceiver(error=error))
        with pytest.raises(type(error)) as caught:
            transport.call(FinishRequest(update_id="u1"), timeout_s=10)
        assert type(caught.value) is type(error)
        assert str(error) in str(caught.value)
        assert "weight_update" not in str(caught.value)  # no call of the user's
        for name in ATTRIBUTES:
            if hasattr(error, name):
                want = getattr(error, name)
                got = getattr(caught.value, name)
                assert (list(got) if isinstance(want, tuple) else got) == (
                    list(want) if isinstance(want, tuple) else want
                )

    def test_a_foreign_error_is_named(self, connect: Connect) -> None:
        transport = connect(ScriptedReceiver(error=ZeroDivisionError("by zero")))
        with pytest.raises(RemoteError, match="by zero") as caught:
            transport.call(FinishRequest(), timeout_s=10)
        assert caught.value.remote_type == "ZeroDivisionError"
        assert caught.value.remote_message == "by zero"

    def test_the_transport_works_on_after_errors(self, connect: Connect) -> None:
        receiver = ScriptedReceiver(error=StaleVersionError(held=4, offered=3))
        transport = connect(receiver)
        for _ in range(3):
            with pytest.raises(StaleVersionError):
                transport.call(FinishRequest(update_id="u1"), timeout_s=10)
        receiver.error = None
        assert transport.call(StatusRequest(), timeout_s=10) == receiver.answer(StatusRequest())

    def test_an_abort_passes_a_long_update(self, connect: Connect) -> None:
        receiver = ScriptedReceiver(hold=UpdateRequest)
        transport = connect(receiver)
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(transport.call, UPDATE, timeout_s=30)
            assert receiver.entered.wait(10)
            transport.call(StatusRequest(), timeout_s=10)
            transport.call(AbortRequest(update_id="u1"), timeout_s=10)
            assert not update.done()
            receiver.let_go.set()
            assert isinstance(update.result(10), StepReply)

    def test_threads_get_their_own_answers(self, connect: Connect) -> None:
        transport = connect(ScriptedReceiver())
        ids = [f"u{i}" for i in range(40)]
        with ThreadPoolExecutor(8) as pool:
            replies = list(
                pool.map(
                    lambda one: transport.call(FinishRequest(update_id=one), timeout_s=30), ids
                )
            )
        assert [getattr(reply, "update_id", None) for reply in replies] == ids

    def test_bytes_and_messages_are_counted(self, connect: Connect) -> None:
        transport = connect(ScriptedReceiver())
        assert (transport.sent_messages, transport.sent_nbytes) == (0, 0)
        transport.call(UPDATE, timeout_s=10)
        assert (transport.sent_messages, transport.sent_nbytes) == (1, len(codec.encode(UPDATE)))

    def test_a_closed_transport_says_so(self, connect: Connect) -> None:
        receiver = ScriptedReceiver()
        transport = connect(receiver)
        transport.call(StatusRequest(), timeout_s=10)
        transport.close()
        transport.close()
        with pytest.raises(ConnectError, match="closed"):
            transport.call(StatusRequest(), timeout_s=10)
        assert len(receiver.seen) == 1

    def test_closing_lets_a_call_in_flight_end(self, connect: Connect) -> None:
        receiver = ScriptedReceiver(hold=UpdateRequest)
        transport = connect(receiver)
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(transport.call, UPDATE, timeout_s=30)
            assert receiver.entered.wait(10)
            transport.close()
            receiver.let_go.set()
            assert isinstance(update.result(10), StepReply)

    def test_errors_name_the_target(self, connect: Connect) -> None:
        transport = connect(ScriptedReceiver(error=RuntimeError("x")))
        assert transport.target
        with pytest.raises(RemoteError, match=transport.target.replace(".", r"\.")):
            transport.call(StatusRequest(), timeout_s=10)
