"""A sender that told any receiver to finish does not abort: another one may have committed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

import weightsync as ws
from tests.update.uniform import fill, make
from weightsync.errors import ConnectError
from weightsync.wire import codec
from weightsync.wire.messages import AbortRequest, FinishRequest, Request

pytestmark = pytest.mark.usefixtures("shm_clean")


class Line:
    """A receiver behind a callback, whose finish requests fail get lost while it is `cut`."""

    def __init__(self) -> None:
        self.model: nn.Module = make()
        self.receiver = ws.WeightReceiver(self.model)
        self.seen: list[Request] = []
        self.cut = False

    def __call__(self, message: Mapping[str, object]) -> dict[str, object]:
        request = codec.from_plain(message)
        self.seen.append(request)
        if isinstance(request, FinishRequest) and self.cut:
            raise ConnectError("cut")
        return self.receiver.handle(message)


@pytest.mark.parametrize("both", [True, False])
def test_no_abort_follows_a_finish(both: bool) -> None:
    model, lines = make(1), [Line(), Line()]
    with ws.connect(model, to=lines) as sender:
        sender.send_weights()
        fill(model, 2)
        for line in lines if both else lines[1:]:
            line.seen.clear()
            line.cut = True
        with pytest.raises(ws.WeightSyncError):
            sender.send_weights()
        for line in lines:
            ended = [r for r in line.seen if isinstance(r, FinishRequest | AbortRequest)]
            first = next(i for i, r in enumerate(ended) if isinstance(r, FinishRequest))
            assert not [r for r in ended[first:] if isinstance(r, AbortRequest)]
        for line in lines:
            line.cut = False
        assert sender.send_weights().version > 1
    for line in lines:
        line.receiver.close()
