"""Records messages of the present protocol: `python -m tests.wire.record`, once for each protocol.

The file has the schema of every struct, and at least one message with each: requests and replies of
real updates, and examples of what needs a GPU or several processes.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.transports.contract import UPDATE
from tests.wire import shapes
from tests.wire.scenes import SCENES, Handle, carried
from weightsync.report import DeltaReport, ReceiverReport, SyncReport
from weightsync.wire.messages import (
    CALL_OF,
    PROTOCOL,
    CheckReply,
    EmptyUpdate,
    FetchReply,
    InitRequest,
    Reply,
    Request,
    TensorPart,
    UpdateRequest,
)
from weightsync.wire.offers import ProbeInfo, ProbeRequest, SegmentHandle

DIRECTORY = Path(__file__).parent / "recorded"
Recorded = dict[str, Any]

_PROBE = ProbeInfo(
    handle={"HOST-1": SegmentHandle(name="weightsync-1", nbytes=64)}, nbytes=16, digest="0" * 32
)
_PART = TensorPart(
    shape=[4, 2],
    spans=[[(0, 2)], [(0, 2)]],
    nbytes=32,
    total="0123456789abcdef",
    words=1,
    pieces={8: "0a0b"},
)
_REPORT = SyncReport(
    version=2,
    label="step 2",
    update_id="u-2",
    tensors=3,
    nbytes=64,
    packed=True,
    path="tcp",
    apply="staged",
    verified="held",
    stall_s=0.25,
    seconds={"total": 1.5},
    control_nbytes=2048,
    control_messages=2,
    peak_extra_nbytes=128,
    receivers=(
        ReceiverReport(target="one", path="tcp", apply="staged", verified="held", stall_s=0.25),
    ),
    delta=DeltaReport(sent=True, lines=1, share=0.5, nbytes=64, saved_nbytes=64),
)
EXAMPLES: list[Request | tuple[str, Reply]] = [
    UPDATE,  # CUDA handles
    UpdateRequest(update_info=EmptyUpdate(), prepare=True),
    InitRequest(probe=ProbeRequest(backend="ipc", payload=_PROBE)),
    ("weight_checker", CheckReply(version=2, checksums={"a": "0" * 16}, parts={"b": _PART})),
    ("fetch_weights", FetchReply(report=_REPORT)),
]


class Recorder:
    """A line that keeps the first message of each shape: with other fields than those before."""

    def __init__(self) -> None:
        self.messages: dict[str, Recorded] = {}

    def line(self, handle: Handle) -> Handle:
        def call(message: Mapping[str, Any]) -> dict[str, Any]:
            name = message["call"]
            self.keep({"call": name, "request": message["body"]})
            reply: dict[str, Any] = carried(
                handle,
                message,
                reply=lambda reply: self.keep({"call": name, "reply": reply})["reply"],
                document=lambda document: self.keep({"problem": document})["problem"],
            )
            return reply

        return call

    def keep(self, message: Recorded) -> Recorded:
        """Note a message, unless one of its shape is noted; return it."""
        text = msgspec.json.encode(message).decode().replace(socket.gethostname(), "trainer-1")
        plain = json.loads(re.sub(r'("secret":")[0-9a-f]+', rf"\g<1>{'0' * 32}", text))
        shape = {(name, *sorted(fields)) for name, fields in shapes.structs_in(plain)}
        error = plain.get("problem", {}).get("error", "")
        self.messages.setdefault(f"{plain.get('call')} {error} {sorted(shape)}", plain)
        return message


def record() -> Recorded:
    """Return the recording of the present protocol."""
    recorder = Recorder()
    for scene in SCENES.values():
        scene(recorder.line)
    for example in EXAMPLES:
        if isinstance(example, tuple):
            recorder.keep({"call": example[0], "reply": example[1]})
        else:
            recorder.keep({"call": CALL_OF[type(example)], "request": example})
    messages = list(recorder.messages.values())
    return {"protocol": PROTOCOL, "schema": shapes.schema(), "messages": messages}


def main() -> None:
    """Write the recording, one struct or message to a line."""
    made = record()
    path = DIRECTORY / f"{PROTOCOL}.json"
    if path.exists():
        raise SystemExit(f"{path} is there already: what was recorded once does not change")
    structs = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in made["schema"].items())
    lines = ",\n".join(map(json.dumps, made["messages"]))
    DIRECTORY.mkdir(exist_ok=True)
    path.write_text(
        f'{{"protocol": {PROTOCOL},\n"schema": {{\n{structs}\n}},\n"messages": [\n{lines}\n]}}\n'
    )
    print(f"{path}: {len(made['messages'])} messages, {len(made['schema'])} structs")


if __name__ == "__main__":
    main()
