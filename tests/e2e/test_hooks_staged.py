"""A bare `load_weights` hook that is staged: called in `finish`, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.e2e import models, processes, trainers
from tests.e2e.models import BUCKET_NBYTES, digests, fill
from tests.e2e.processes import Host, wait_until
from weightsync.update.lifecycle import ApplyChoice

KILLED = -9


@pytest.fixture
def host(shm_clean: None) -> Iterator[Host]:
    with processes.host() as running:
        yield running


@pytest.mark.parametrize(
    "dies",
    [trainers.at_its_first_tensor, trainers.in_the_middle_of_chunks],
    ids=["at its first tensor", "between chunks"],
)
def test_a_trainer_killed_in_the_middle_has_called_no_hook(
    host: Host, dies: Callable[[str], None]
) -> None:
    receiver = host.receiver("http", sink="hook", apply="staged", model="plain", lease_s=2.0)
    first, second = models.make("plain", seed=1), models.make("plain", seed=2)
    with ws.connect(first, to=receiver.url, packed=True, bucket_nbytes=BUCKET_NBYTES) as sender:
        sender.send_weights()
    held = receiver.digests()
    assert held == digests(first)
    assert processes.ended(dies, receiver.url) == KILLED
    assert receiver.reading() == 1
    wait_until(lambda: receiver.status()["state"] == "READY", "the dead update's end")
    assert receiver.digests() == held, "the hook was called before finish"
    with ws.connect(second, to=receiver.url, packed=True, bucket_nbytes=BUCKET_NBYTES) as sender:
        fill(second, seed=3)
        report = sender.send_weights()
    (said,) = report.receivers
    assert said.apply == "staged"
    assert said.peak_extra_nbytes >= report.nbytes, "what is kept aside is to be in the report"
    assert receiver.digests() == digests(second)


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_clones_for_a_hook_that_keeps_views_are_in_the_report(apply: ApplyChoice) -> None:
    sizes: list[int] = []

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            sizes.append(tensor.untyped_storage().nbytes())  # of a clone: the tensor's alone

    said: dict[bool, int] = {}
    for keeps_views in (False, True):
        sizes.clear()
        receiver = ws.WeightReceiver(ws.HookSink(load, keeps_views=keeps_views), apply=apply)
        with ws.connect(models.make("plain", seed=1), to=receiver.handle) as sender:
            (report,) = sender.send_weights().receivers
        said[keeps_views] = report.peak_extra_nbytes
        assert report.apply == apply
        receiver.close()
    cloned = sum(sizes) if apply == "staged" else max(sizes)
    assert said[True] - said[False] == cloned


class Recorder:
    """A hook that counts its calls, and fails in one of them if it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False
        self.held: dict[str, torch.Tensor] = {}

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls += 1
        for name, tensor in pairs:
            self.held[name] = tensor.clone()
            if self.fails:
                raise RuntimeError(f"no room for {name}")


@pytest.mark.usefixtures("shm_clean")
class TestInOneProcess:
    @pytest.mark.parametrize("packed", [True, False])
    def test_the_hook_is_called_in_finish_and_once(self, packed: bool) -> None:
        hook = Recorder()
        receiver = ws.WeightReceiver(hook, apply="staged")
        called_before_finish: list[int] = []

        def carry(message: dict[str, object]) -> object:
            if message["call"] == "finish_weight_update":
                called_before_finish.append(hook.calls)
            return receiver.handle(message)

        with ws.connect(nn.Linear(64, 64), to=carry, packed=packed) as sender:
            for _ in range(3):
                sender.send_weights()
        assert called_before_finish == [0, 1, 2]
        assert hook.calls == 3
        receiver.close()

    def test_what_fails_elsewhere_before_finish_leaves_what_was_there(self) -> None:
        hook, fail = Recorder(), threading.Event()
        receiver, other = ws.WeightReceiver(hook, apply="staged"), ws.WeightReceiver(Recorder())
        source = nn.Linear(64, 64)

        def carry(message: dict[str, object]) -> object:
            answer = other.handle(message)
            if message["call"] == "update_weights" and fail.is_set():
                raise ws.TransferError("this one cannot be prepared")
            return answer

        with ws.connect(source, to=[receiver.handle, carry]) as sender:
            sender.send_weights()
            before = {name: tensor.clone() for name, tensor in hook.held.items()}
            with torch.no_grad():
                source.weight.fill_(9.0)
            fail.set()
            with pytest.raises(ws.WeightSyncError, match="cannot be prepared"):
                sender.send_weights()
            assert hook.calls == 1
            assert all(torch.equal(hook.held[name], before[name]) for name in before)
            assert (receiver.version, receiver.may_generate) == (1, True)
            fail.clear()
            sender.send_weights()
        assert float(hook.held["weight"].min()) == 9.0
        receiver.close()
        other.close()

    def test_a_hook_that_fails_in_finish_is_torn(self) -> None:
        hook = Recorder()
        receiver = ws.WeightReceiver(hook, apply="staged")
        with ws.connect(nn.Linear(64, 64), to=receiver.handle) as sender:
            sender.send_weights()
            hook.fails = True
            with pytest.raises(ws.WeightSyncError):
                sender.send_weights()
            assert receiver.status().state == "TORN"
            with pytest.raises(ws.NotReadyError), receiver.reading():
                pass
            hook.fails = False
            sender.send_weights()
        assert receiver.status().state == "READY"
        receiver.close()

    def test_auto_stages_where_memory_allows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for free, wanted in ((1 << 40, "staged"), (1, "in_place")):
            monkeypatch.setattr(
                "weightsync.weights.copying.arena.available", lambda _, free=free: free
            )
            receiver = ws.WeightReceiver(Recorder())
            parts = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # in place, one at a time
            with ws.connect(parts, to=receiver.handle) as sender:
                report = sender.send_weights()
                (said,) = report.receivers
                assert (report.apply, said.apply) == (wanted, wanted)
                kept = said.peak_extra_nbytes
                assert kept >= report.nbytes if wanted == "staged" else kept < report.nbytes
            receiver.close()
