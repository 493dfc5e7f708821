"""NaN and infinity in weights: found in every dtype, and told or refused as asked."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any, Literal

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.crew import crew
from weightsync.weights.sources.finite import not_finite

NAN, INF = float("nan"), float("inf")
ONLY_NAN = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, NAN) for name in ONLY_NAN),
        *((name, value) for name in DTYPES for value in (NAN, INF, -INF)),
    ],
)
def test_one_value_is_found(name: str, value: float) -> None:
    dtype = getattr(torch, name)
    plain = torch.linspace(-1, 1, 1000)
    spoiled = plain.clone()
    spoiled[700] = value
    both = [plain.to(dtype), spoiled.to(dtype)]
    assert not_finite(["plain", "spoiled"], both) == ["spoiled"]


def test_infinities_that_cancel_and_sums_that_overflow() -> None:
    cancel = torch.tensor([INF, -INF, 1.0])
    large = torch.full((1000,), 6e4, dtype=torch.float16)
    huge = torch.full((100,), 3e38)
    tensors = [cancel, large, huge, torch.empty(0), torch.ones(3, dtype=torch.int8)]
    assert not_finite(["cancel", "large", "huge", "empty", "int"], tensors) == ["cancel"]


def spoiled() -> Any:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = NAN
    return model


@pytest.mark.parametrize("settings", [{}, {"packed": True}])
@pytest.mark.parametrize("kind", ["module", "callable", "snapshot"])
@pytest.mark.parametrize("policy", ["off", "warn", "raise"])
def test_what_is_asked_for_is_done(
    policy: Literal["off", "warn", "raise"],
    kind: str,
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, held = spoiled(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    source: Any = model if kind != "callable" else model.named_parameters
    before = [p.detach().clone() for p in held.parameters()]
    with (
        caplog.at_level(logging.WARNING, "weightsync"),
        closing(ws.WeightReceiver(held)) as receiver,
        ws.connect(source, to=receiver, check_finite=policy, **settings) as sender,
    ):
        send: Any = sender.send_weights
        if kind == "snapshot":
            send = lambda: sender.send_async().result(60)  # noqa: E731  # as the other
        if policy == "raise":
            with pytest.raises(ws.VerificationError, match="1 tensors hold NaN or inf") as caught:
                send()
            assert caught.value.names == ("1.weight",)
            assert all(torch.equal(a, b) for a, b in zip(before, held.parameters(), strict=True))
            with torch.no_grad():
                model[1].weight.zero_()
            assert send().not_finite == ()
            return
        report = send()
        assert report.not_finite == (("1.weight",) if policy == "warn" else ())
        assert ("NaN or infinity in 1.weight" in str(report)) == (policy == "warn")
        told = [r for r in caplog.records if "1 tensors hold NaN or infinity" in r.message]
        assert len(told) == (policy == "warn")


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_receiver_in_place_is_not_torn_by_tensors_that_stay(
    policy: Literal["warn", "raise"],
) -> None:
    held = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        closing(ws.WeightReceiver(held, apply="in_place")) as receiver,
        ws.connect(spoiled(), to=receiver, check_finite=policy) as sender,
    ):
        if policy == "raise":
            with pytest.raises(ws.VerificationError):
                sender.send_weights()
        else:
            sender.send_weights()
        assert receiver.status().state == "READY"
        assert receiver.version == (policy == "warn")


def test_pairs_of_a_block_are_looked_at() -> None:
    receiver = ws.WeightReceiver(nn.Linear(4, 4))
    with ws.connect(nn.Linear(4, 4), to=receiver, check_finite="warn") as sender:
        with sender.update(partial=True) as update:
            update.send([("bias", torch.full((4,), INF))])
        assert update.last_report is not None
        assert update.last_report.not_finite == ("bias",)


def test_another_word_is_refused() -> None:
    with pytest.raises(ws.ConfigError, match="check_finite must be off, warn or raise, not 'yes'"):
        ws.connect(nn.Linear(2, 2), to=ws.WeightReceiver(nn.Linear(2, 2)), check_finite="yes")  # type: ignore[arg-type]


def on_ranks(rank: int) -> tuple[str, ...]:
    """Return what both ranks are told of a tensor that only rank 0's reader needs."""
    to = ws.WeightReceiver(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) if rank == 0 else ()
    with ws.connect(spoiled(), to=to, check_finite="raise") as sender:
        with pytest.raises(ws.VerificationError) as caught:
            sender.send_weights()
        return tuple(caught.value.names)


def test_all_ranks_raise() -> None:
    with crew(2) as ranks:
        assert ranks.run(on_ranks) == [("1.weight",)] * 2
