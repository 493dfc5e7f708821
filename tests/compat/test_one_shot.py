"""`weightsync.send_weights`: one call a step, the connection kept per target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.segments import opened_since
from weightsync.shm.segment import live_segments
from weightsync.wire.messages import CALLS


class Watched:
    """A receiver that counts the calls it gets."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.receiver = ws.WeightReceiver(model)
        self.calls: list[str] = []

    def __call__(self, message: dict[str, object]) -> object:
        self.calls.append(str(message["call"]))
        return self.receiver.handle(message)

    def holds(self, model: nn.Module) -> bool:
        mine, theirs = self.model.state_dict(), model.state_dict()
        return all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.fixture
def watched() -> Iterator[Watched]:
    before = live_segments()
    made = Watched(nn.Linear(30, 20))
    yield made
    ws.close()
    made.receiver.close()
    assert not opened_since(before)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["module", "mapping", "generator"])
def test_each_kind_of_source(watched: Watched, kind: str, packed: bool) -> None:
    model = nn.Linear(30, 20)
    for version in (1, 2, 3):
        nn.init.normal_(model.weight)
        source = {
            "module": model,
            "mapping": model.state_dict(),
            "generator": ((name, p.detach()) for name, p in model.named_parameters()),
        }[kind]
        report = ws.send_weights(source, to=watched, packed=packed)  # type: ignore[arg-type]  # any of three
        assert report.version == version
        assert watched.holds(model)
    assert watched.calls.count("init_weight_transfer_engine") == 1
    assert watched.calls.count("update_weights") == 3
    assert set(watched.calls) <= set(CALLS)


def test_other_names_make_a_new_connection(watched: Watched) -> None:
    model = nn.Linear(30, 20)
    ws.send_weights(model.state_dict(), to=watched)
    with pytest.raises(ws.ManifestMismatchError) as caught:
        ws.send_weights({"other": torch.zeros(2)}, to=watched)
    assert caught.value.unexpected == ("other",)
    assert watched.holds(model)
    backwards = dict(reversed(model.state_dict().items()))
    assert ws.send_weights(backwards, to=watched).version == 2
    assert watched.calls.count("init_weight_transfer_engine") == 3


def test_close_ends_and_the_next_call_begins_again(watched: Watched) -> None:
    before = live_segments()
    model = nn.Linear(30, 20)
    ws.send_weights(model, to=watched)
    ws.close()
    ws.close()
    assert not opened_since(before)
    assert "shutdown_weight_transfer_engine" in watched.calls
    assert ws.send_weights(model, to=watched).version == 2


def test_a_cast_and_a_rewind(watched: Watched) -> None:
    watched.receiver.close()
    served = Watched(nn.Linear(30, 20, dtype=torch.bfloat16))
    model = nn.Linear(30, 20)
    ws.send_weights(dict(model.state_dict()), to=served, dtype=torch.bfloat16, version=9)
    assert served.holds(nn.Linear(30, 20).to(torch.bfloat16)) is False
    assert served.holds(model.to(torch.bfloat16))
    with pytest.raises(ws.StaleVersionError):
        ws.send_weights(dict(model.state_dict()), to=served, version=4)
    assert ws.send_weights(dict(model.state_dict()), to=served, version=4, rewind=True).version == 4


def test_no_target_is_an_error() -> None:
    with pytest.raises(ws.ConfigError, match="no receiver"):
        ws.send_weights({"a": torch.zeros(1)}, to=[])
