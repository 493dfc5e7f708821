"""Tensors that `dtype=` rounds, and that a receiver keeps in more digits: named in a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightsync as ws
from weightsync.errors import ManifestMismatchError
from weightsync.weights.sources.base import as_source

pytestmark = pytest.mark.usefixtures("shm_clean")

BF16 = torch.bfloat16


class Mixture(nn.Module):
    """A router in float32 beside a body of `dtype`."""

    def __init__(self, dtype: torch.dtype = BF16, router: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3, bias=False, dtype=router)
        self.body = nn.Linear(4, 3, bias=False, dtype=dtype)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.state_dict()[name].copy_(tensor)


def take(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A hook of which nobody knows in which dtypes it keeps tensors."""
    list(weights)


SINKS: dict[str, Callable[[], Any]] = {
    "a module that casts": lambda: ws.ModuleSink(Mixture(), cast=True),
    "a module's hook": lambda: Mixture().load_weights,
    "any hook": lambda: take,
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "dtype= rounds" in r.getMessage()]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("settings", [{}, {"packed": True}, {"backend": "tcp"}])
def test_a_router_that_is_rounded_and_widened_again_is_named(
    sink: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = ws.WeightReceiver(SINKS[sink]())
    with (
        caplog.at_level(logging.WARNING, "weightsync"),
        ws.connect(Mixture(), to=receiver.handle, dtype=BF16, **settings) as sender,
    ):
        sender.send_weights()
        sender.release()
        sender.send_weights()  # connects again, and does not say it again
    (said,) = warnings_of(caplog)
    may = "may keep" if sink == "any hook" else "keeps"
    assert said.startswith(
        f"dtype= rounds 1 tensors that WeightReceiver.handle {may} in more digits"
    )
    assert ": router.weight (float32); " in said


@pytest.mark.parametrize("sink", ["a module that casts", "a module's hook"])
def test_of_a_trainer_in_float32_only_what_is_kept_in_more_digits_is_named(
    sink: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = ws.WeightReceiver(SINKS[sink]())
    with caplog.at_level(logging.WARNING, "weightsync"):
        ws.connect(Mixture(torch.float32), to=receiver.handle, dtype=BF16).close()
    (said,) = warnings_of(caplog)
    assert "router.weight (float32)" in said
    assert "body" not in said


QUIET: dict[str, tuple[Callable[[], Any], Callable[[], Any], torch.dtype | None]] = {
    "all of it is rounded": (lambda: Mixture(torch.float32), lambda: take, BF16),
    "nothing is rounded": (Mixture, lambda: take, None),
    "a dtype of more digits": (Mixture, lambda: take, torch.float32),
    "kept as it is sent": (Mixture, lambda: Mixture(router=BF16), BF16),
    "widened, and not rounded before": (
        lambda: Mixture(router=BF16),
        lambda: ws.ModuleSink(Mixture(), cast=True),
        None,
    ),
    "cast by the receiver": (
        lambda: Mixture(torch.float32),
        lambda: ws.ModuleSink(Mixture(), cast=True),
        None,
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_other_casts_are_no_warning(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, sink, dtype = QUIET[case]
    with caplog.at_level(logging.WARNING, "weightsync"):
        ws.connect(make(), to=ws.WeightReceiver(sink()).handle, dtype=dtype).close()
    assert warnings_of(caplog) == []


def test_one_call_with_pairs_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    receiver = ws.WeightReceiver(ws.ModuleSink(Mixture(), cast=True))
    with caplog.at_level(logging.WARNING, "weightsync"):
        for _ in range(2):
            ws.send_weights(Mixture().state_dict(), to=receiver.handle, dtype=BF16)
    ws.close()
    (said,) = warnings_of(caplog)
    assert "router.weight (float32)" in said


def test_every_source_knows_what_it_rounds(tmp_path: Path) -> None:
    module = Mixture()
    wanted = {"router.weight": "float32"}
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    for source in (module, module.state_dict(), module.state_dict):
        assert as_source(source, dtype=BF16).rounded == wanted  # type: ignore[attr-defined]
        assert as_source(source).rounded == {}  # type: ignore[attr-defined]
    assert ws.SafetensorsSource(tmp_path, dtype=BF16).rounded == wanted
    fused = {
        "mlp.experts.gate_up_proj": torch.ones(2, 6, 4),
        "mlp.experts.down_proj": torch.ones(2, 4, 3),
        "mlp.gate.weight": torch.ones(2, 4, dtype=BF16),
    }
    each = ws.PerExpertSource(fused, dtype=BF16)
    names = [
        f"mlp.experts.{i}.{part}_proj.weight" for i in range(2) for part in ("gate", "up", "down")
    ]
    assert each.rounded == dict.fromkeys(names, "float32")
    parts = {name: tensor.clone() for name, tensor in ws.PerExpertSource(fused).tensors()}
    assert ws.FusedExpertsSource(parts, dtype=BF16).rounded == {
        "mlp.experts.gate_up_proj": "float32",
        "mlp.experts.down_proj": "float32",
    }


def test_the_advice_does_not_go_round_in_a_circle() -> None:
    """Neither of two calls is said to be mended by the other, which fails, too."""
    trainer, receiver = Mixture(torch.float32), ws.WeightReceiver(Mixture())
    for dtype, wrong in ((None, "body.weight"), (BF16, "router.weight")):
        with pytest.raises(ManifestMismatchError) as caught:
            ws.connect(trainer, to=receiver.handle, dtype=dtype)
        assert len(caught.value.mismatched) == 1
        assert caught.value.mismatched[0].startswith(wrong)
        assert "dtype=torch" not in str(caught.value)
        assert 'differs in dtype only: connect(dtype="receiver")' in str(caught.value)
        assert "ModuleSink(module, cast=True)" in str(caught.value)


@pytest.mark.parametrize(("dtype", "casts"), [("receiver", False), (None, True)])
def test_the_advice_works(dtype: Any, casts: bool) -> None:
    trainer, served = Mixture(torch.float32), Mixture()
    receiver = ws.WeightReceiver(ws.ModuleSink(served, cast=casts))
    with ws.connect(trainer, to=receiver.handle, dtype=dtype) as sender:
        assert sender.send_weights().verified == "held"
    assert torch.equal(served.router.weight, trainer.router.weight)
    assert torch.equal(served.body.weight, trainer.body.weight.to(BF16))


def test_a_cast_of_all_is_still_advised_where_it_works() -> None:
    receiver = ws.WeightReceiver(Mixture(router=BF16))
    with pytest.raises(ManifestMismatchError, match=r"differ in dtype only: dtype=torch\.bfloat16"):
        ws.connect(Mixture(torch.float32), to=receiver.handle)
    ws.connect(Mixture(torch.float32), to=receiver.handle, dtype=BF16).close()
