"""A scripted receiver: replies, raises, or holds a call until it is released."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    REPLIES,
    CheckReply,
    FetchReply,
    InitReply,
    Reply,
    Request,
    SharedMemoryUsage,
    Status,
    StepReply,
    WorkerReport,
)
from weightsync.wire.offers import Message

STATUS = Status(
    instance="scripted",
    protocol=1,
    state="READY",
    version=7,
    may_generate=True,
    apply="staged",
    verification="held",
    label="step 7",
    device_keys=["HOST-1"],
    shared_memory=[
        SharedMemoryUsage(kind="ring", name="weightsync-1", nbytes=64, owner=False, age_s=0.5)
    ],
)


class ScriptedReceiver:
    """Replacement for a WeightReceiver, with behaviour that a real one cannot show on demand."""

    def __init__(
        self, *, error: Exception | None = None, hold: type[Message] | None = None
    ) -> None:
        self.error = error
        self.hold = hold
        self.seen: list[Request] = []
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.state = STATUS
        self.updates_total: Mapping[str, int] = {"committed": 3, "aborted": 1}
        self.last_reply: StepReply | None = None

    def dispatch(self, request: Request) -> Reply:
        self.seen.append(request)
        if self.hold is type(request):
            self.entered.set()
            assert self.let_go.wait(30)
        if self.error is not None:
            raise self.error
        return self.answer(request)

    def handle(self, message: Mapping[str, object]) -> dict[str, object]:
        return codec.reply_to_plain(self.dispatch(codec.from_plain(message)))

    def handle_json(self, call: str, body: bytes) -> bytes:
        return codec.encode(self.dispatch(codec.decode_request(call, body)))

    def status(self) -> Status:
        return self.state

    def report(self) -> WorkerReport:
        return WorkerReport(
            status=self.status(),
            updates_total=dict(self.updates_total),
            last_reply=self.last_reply,
        )

    def answer(self, request: Request) -> Reply:
        kind = REPLIES[CALL_OF[type(request)]]
        if kind is InitReply:
            return InitReply(status=self.state, path="shared_memory")
        if kind is CheckReply:
            return CheckReply(version=7, different=["a"], equal=False)
        if kind is Status:
            return self.state
        if kind is FetchReply:
            return FetchReply(request={"call": "weight_info", "body": {}})
        return StepReply(
            state="READY",
            version=7,
            update_id=getattr(request, "update_id", None),
            seconds={"load": 0.25},
            verified="held",
        )
