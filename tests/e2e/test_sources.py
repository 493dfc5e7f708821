"""Where tensors come from, and what trainers do between two updates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.e2e import models
from tests.e2e.models import BUCKET_NBYTES, digests, fill, soften
from tests.e2e.processes import Carrier, Host

packings = pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])


@packings
def test_float32_is_cast_on_the_way(host: Host, packed: bool) -> None:
    model = models.make("plain")
    receiver = host.receiver(model="bfloat16")
    with ws.connect(model, to=receiver, dtype=torch.bfloat16, packed=packed) as sender:
        for seed in (1, 2, 3):
            soften(model, seed)
            report = sender.send_weights()
            assert receiver.digests() == digests(
                (name, tensor.bfloat16()) for name, tensor in model.state_dict().items()
            )
            assert report.nbytes == sum(p.numel() for p in model.parameters()) * 2


@packings
def test_the_receiver_casts(host: Host, packed: bool) -> None:
    model = models.make("bfloat16")
    soften(model, 1)
    receiver = host.receiver(model="plain", cast=True)
    with ws.connect(model, to=receiver, packed=packed) as sender:
        sender.send_weights()
        assert receiver.digests() == digests(
            (name, tensor.float()) for name, tensor in model.state_dict().items()
        )


@packings
def test_names_are_mapped(host: Host, packed: bool) -> None:
    model = nn.ModuleDict({"policy": models.make("everything", seed=1)})
    receiver = host.receiver()
    with ws.connect(
        model, to=receiver, rename=lambda name: name.removeprefix("policy."), packed=packed
    ) as sender:
        sender.send_weights()
        assert receiver.digests() == digests(model["policy"])


@packings
def test_a_state_dict_is_read_anew(host: Host, packed: bool) -> None:
    model = models.make("plain", seed=1)
    state = dict(model.state_dict())
    receiver = host.receiver(model="plain")
    with ws.connect(state, to=receiver, packed=packed) as sender:
        for seed in (1, 2, 3):
            fill(model, seed)
            sender.send_weights()
            assert receiver.digests() == digests(model)
        state["large"] = torch.full_like(state["large"], 4.0)
        sender.send_weights()
        assert receiver.digests() == digests(state.items())


@packings
def test_a_factory_makes_fresh_tensors(host: Host, packed: bool) -> None:
    model = models.make("plain", seed=1)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.named_parameters():
            yield name, tensor.detach().clone()

    receiver = host.receiver(model="plain")
    with ws.connect(gathered, to=receiver, packed=packed, bucket_nbytes=BUCKET_NBYTES) as sender:
        for seed in (1, 2, 3):
            fill(model, seed)
            sender.send_weights()
            assert receiver.digests() == digests(model)


def test_a_factory_that_diverges_is_named_and_nothing_changes(host: Host) -> None:
    model = models.make("plain", seed=1)
    lose = False

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        pairs = list(model.named_parameters())
        yield from pairs[: 5 if lose else None]

    receiver = host.receiver(model="plain")
    with ws.connect(gathered, to=receiver) as sender:
        sender.send_weights()
        held = receiver.digests()
        lose = True
        fill(model, seed=2)
        with pytest.raises(ws.ManifestMismatchError, match=r"ended before 'layers\.2"):
            sender.send_weights()
        assert receiver.digests() == held
        assert receiver.reading() == 1
        lose = False
        sender.send_weights()
        assert receiver.digests() == digests(model)


@pytest.mark.parametrize("carrier", ["callback", "http"])
def test_a_subset_is_sent_explicitly(host: Host, carrier: Carrier) -> None:
    """verl#7495: an adapter alone, and what was not sent stays."""
    model = models.make("plain", seed=1)
    receiver = host.receiver(carrier, model="plain")
    with ws.connect(model, to=receiver.to) as sender:
        sender.send_weights()
        wanted = digests(model)
        for version in (2, 3):
            pair = ("layers.3.weight", torch.full((50, 40), float(version)))
            with sender.update(partial=True) as update:
                update.send([pair])
            assert update.last_report is not None
            assert update.last_report.version == version
            assert receiver.digests() == {**wanted, **digests([pair])}
            assert receiver.reading() == version
        sender.send_weights()
        assert receiver.digests() == digests(model)


def test_unirl_166_a_subset_is_refused_where_the_whole_is_due(host: Host) -> None:
    model = models.make("plain", seed=1)
    receiver = host.receiver(model="plain")
    held = receiver.digests()
    with (
        pytest.raises(ws.ManifestMismatchError) as caught,
        ws.connect({"large": model.state_dict()["large"]}, to=receiver) as sender,
    ):
        sender.send_weights()
    assert len(caught.value.missing) == 24
    assert receiver.digests() == held
    with pytest.raises(ws.ManifestMismatchError) as unknown:
        ws.connect({"nowhere": torch.zeros(3)}, to=receiver)
    assert unknown.value.unexpected == ("nowhere",)


@packings
def test_vllm_51665_tied_head(host: Host, packed: bool) -> None:
    """The head is tied here and a tensor of its own there: it arrives in both places."""
    tied = models.make("tied", seed=1)
    receiver = host.receiver(model="untied")
    with ws.connect(tied, to=receiver, packed=packed) as sender:
        for seed in (2, 3):
            fill(tied, seed)
            sender.send_weights()
            assert receiver.digests() == digests(tied)


@packings
def test_memory_may_be_released_and_replaced(host: Host, packed: bool) -> None:
    model = models.make("plain", seed=1)
    receiver = host.receiver(model="plain")
    with ws.connect(model, to=receiver, packed=packed) as sender:
        sender.send_weights()
        sender.release()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        fill(model, seed=2)
        assert sender.send_weights().version == 2
        assert receiver.digests() == digests(model)


@packings
def test_moved_storages_and_module_surgery_arrive(host: Host, packed: bool) -> None:
    model = models.make("plain", seed=1)
    receiver = host.receiver(model="plain")
    with ws.connect(model, to=receiver, packed=packed) as sender:
        sender.send_weights()
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        fill(model, seed=2)
        sender.send_weights()
        assert receiver.digests() == digests(model)
        old = model.get_parameter("large")
        kept = old.detach().clone()
        model.register_parameter("large", nn.Parameter(torch.ones(models.LARGE)))
        model.add_module("idle", nn.Identity())
        sender.send_weights()
        assert receiver.digests() == digests(model)
        assert torch.equal(old.view(torch.uint8), kept.view(torch.uint8))
        with torch.no_grad():
            model.get_parameter("large").mul_(3)
        sender.send_weights()
        assert receiver.digests() == digests(model)
        model.register_parameter("large", nn.Parameter(torch.ones(3)))
        with pytest.raises(ws.ManifestMismatchError, match="large"):
            sender.send_weights()


@packings
def test_swapping_averaged_weights_in_and_out_keeps_both(host: Host, packed: bool) -> None:
    """`param.data` set aside, replaced for one update, and put back: a common way to send EMA."""
    model = models.make("plain", seed=1)
    averaged = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters()}
    receiver = host.receiver(model="plain")
    with ws.connect(model, to=receiver, packed=packed) as sender:
        sender.send_weights()
        wanted = digests(model)
        for _ in range(2):
            aside = {name: p.data for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.data = averaged[name]
            sender.send_weights()
            assert receiver.digests() == digests(averaged.items())
            for name, parameter in model.named_parameters():
                parameter.data = aside[name]
            assert digests(model) == wanted
            sender.send_weights()
            assert receiver.digests() == wanted
    assert digests(model) == wanted


def test_a_resumed_trainer_rewinds(host: Host) -> None:
    model = models.make("plain", seed=1)
    receiver = host.receiver(model="plain")
    with ws.connect(model, to=receiver) as sender:
        sender.send_weights(version=10)
    fill(model, seed=2)
    held = receiver.digests()
    with ws.connect(model, to=receiver) as sender:
        with pytest.raises(ws.StaleVersionError, match="rewind=True") as caught:
            sender.send_weights(version=5)
        assert (caught.value.held, caught.value.offered) == (10, 5)
        assert receiver.digests() == held
        assert sender.send_weights(version=5, rewind=True).version == 5
        assert receiver.digests() == digests(model)
        assert sender.send_weights().version == 6


@packings
def test_two_receivers_are_kept_in_step(host: Host, packed: bool) -> None:
    model = models.make("everything", seed=1)
    receivers = [host.receiver("callback"), host.receiver("http", apply="in_place")]
    with ws.connect(
        model, to=[r.to for r in receivers], packed=packed, bucket_nbytes=BUCKET_NBYTES
    ) as sender:
        for seed in (1, 2, 3):
            fill(model, seed)
            report = sender.send_weights()
            assert all(receiver.digests() == digests(model) for receiver in receivers)
        assert len(report.receivers) == 2


@packings
def test_dynamo_9131_one_refusal_keeps_both_on_the_old_version(host: Host, packed: bool) -> None:
    model = models.make("plain", seed=1)
    receivers = [host.receiver("callback", model="plain"), host.receiver("http", model="plain")]
    with ws.connect(model, to=[r.to for r in receivers], packed=packed) as sender:
        sender.send_weights()
        held = digests(model)
        fill(model, seed=2)
        with ws.connect(models.make("plain", seed=3), to=receivers[1].to, takeover=True) as other:
            other.send_weights(version=9)
        with pytest.raises(ws.SenderReplacedError):
            sender.send_weights(version=2)
        with pytest.raises(ws.StaleVersionError) as caught:
            sender.send_weights(version=2)
        assert caught.value.held == 9
        assert (receivers[0].digests(), receivers[0].reading()) == (held, 1)
        assert [r.status()["state"] for r in receivers] == ["READY", "READY"]
        assert receivers[1].reading() == 9
        receivers[1].call("start_weight_update", {"update_id": "someone else's"})
        assert sender.send_weights().version == 10
        assert all(r.digests() == digests(model) and r.reading() == 10 for r in receivers)
