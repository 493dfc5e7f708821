"""DequantizedSource: the values of torchao's and bitsandbytes' tensors, by their own packages.

With the real packages where they are installed, else with classes of their recorded contract:
torchao 0.18's `dequantize()`, and of bitsandbytes 0.50 the functions and attributes below.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws

pytestmark = pytest.mark.usefixtures("shm_clean")

WIDE, HIGH = 128, 64
REAL = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Int8Tensor(torch.Tensor):
    """As torchao's: bytes and scales in tensors inside, and `dequantize`."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self) -> Any:
        return ["qdata", "scale"], {}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].qdata, args[0].scale)
        raise NotImplementedError(f"{func} of an Int8Tensor")

    def dequantize(self) -> torch.Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale


Int8Tensor.__module__ = "torchao.quantization"


def by_torchao_contract(layer: nn.Linear) -> Callable[[], torch.Tensor]:
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
    made = Int8Tensor((layer.weight.detach() / scale).round().to(torch.int8), scale)
    layer.weight = nn.Parameter(made, requires_grad=False)
    return made.dequantize


def params(name: str, data: torch.Tensor, **kept: Any) -> Any:
    cls = type(name, (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    made: Any = cls(data, requires_grad=False)
    vars(made).update(kept)
    return made


def by_4_bit_contract(layer: nn.Linear) -> Callable[[], torch.Tensor]:
    whole = layer.weight.detach().clone()
    packed = torch.zeros(whole.numel() // 2, 1, dtype=torch.uint8)
    layer._parameters["weight"] = params("Params4bit", packed, quant_state=whole)
    return lambda: whole


def by_4_bit_contract_in_bfloat16(layer: nn.Linear) -> Callable[[], torch.Tensor]:
    """Packed values in a dtype that FSDP shards: `bnb_4bit_quant_storage`."""
    whole = layer.weight.detach().clone()
    packed = torch.ones(whole.numel() // 4, 1, dtype=torch.bfloat16)
    layer._parameters["weight"] = params("Params4bit", packed, quant_state=whole)
    return lambda: whole


def by_8_bit_contract(layer: Any) -> Callable[[], torch.Tensor]:
    """After a forward, which moves the scales to the layer's state."""
    scales = layer.weight.detach().abs().amax(1).float()
    data = (layer.weight.detach() * 127 / scales[:, None]).round().to(torch.int8)
    layer._parameters["weight"] = params("Int8Params", data, CB=None, SCB=None)
    layer.state = types.SimpleNamespace(SCB=scales)
    return lambda: data.float() * scales[:, None] / 127


def functional() -> types.ModuleType:
    made: Any = types.ModuleType("bitsandbytes.functional")
    made.dequantize_4bit = lambda _, quant_state: quant_state
    made.int8_vectorwise_dequant = lambda data, scales: data.float() * scales[:, None] / 127
    found: types.ModuleType = made
    return found


def by_torchao(name: str) -> Callable[[nn.Linear], Callable[[], torch.Tensor]]:
    def make(layer: nn.Linear) -> Callable[[], torch.Tensor]:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(layer, getattr(quantization, name)())
        weight: Any = layer.weight
        assert type(weight).__module__.startswith("torchao")
        dequantize: Callable[[], torch.Tensor] = weight.dequantize
        return dequantize

    return make


def by_4_bits(layer: Any) -> Callable[[], torch.Tensor]:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = bitsandbytes.nn.Params4bit(layer.weight.detach().clone(), requires_grad=False)
    layer.weight = weight.to("cpu")
    assert layer.weight.dtype is torch.uint8
    dequantize = bitsandbytes.functional.dequantize_4bit
    return lambda: dequantize(layer.weight.data, layer.weight.quant_state)


def by_4_bits_in_bfloat16(layer: Any) -> Callable[[], torch.Tensor]:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = bitsandbytes.nn.Params4bit(
        layer.weight.detach().clone(), requires_grad=False, quant_storage=torch.bfloat16
    )
    layer.weight = weight.to("cpu")
    assert layer.weight.dtype is torch.bfloat16
    assert layer.weight.numel() < WIDE * HIGH
    dequantize = bitsandbytes.functional.dequantize_4bit
    return lambda: dequantize(layer.weight.data, layer.weight.quant_state)


def by_8_bits(layer: Any) -> Callable[[], torch.Tensor]:
    """The weight after a forward, with the values of before."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    made = bitsandbytes.nn.Linear8bitLt(WIDE, HIGH, bias=False, has_fp16_weights=False)
    weight = bitsandbytes.nn.Int8Params(
        layer.weight.detach().clone(), requires_grad=False, has_fp16_weights=False
    )
    made.weight = weight
    made.to("cpu")
    values = made.weight.data.float() * made.weight.SCB[:, None] / 127
    made(torch.randn(2, WIDE).to(layer.weight.dtype))
    layer._parameters["weight"] = made.weight
    layer.state = made.state
    return lambda: values


KINDS: dict[str, Callable[[nn.Linear], Callable[[], torch.Tensor]]] = {
    "torchao's contract": by_torchao_contract,
    "bitsandbytes' contract, 4 bits": by_4_bit_contract,
    "bitsandbytes' contract, 4 bits in bfloat16": by_4_bit_contract_in_bfloat16,
    "bitsandbytes' contract, 8 bits": by_8_bit_contract,
    "torchao, int8": by_torchao("Int8WeightOnlyConfig"),
    "torchao, float8": by_torchao("Float8WeightOnlyConfig"),
    "torchao, 8 bits unpacked": by_torchao("IntxWeightOnlyConfig"),
    "bitsandbytes, 4 bits": by_4_bits,
    "bitsandbytes, 4 bits in bfloat16": by_4_bits_in_bfloat16,
    "bitsandbytes, 8 bits": by_8_bits,
}


def quantized(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A model with one quantized layer, and what the values of its weight are."""
    if kind.startswith("bitsandbytes' contract"):
        monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
        monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional())
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, while they are imported
        return model, KINDS[kind](model[0])


def plain() -> Any:
    return nn.Sequential(nn.Linear(WIDE, HIGH, bias=False), nn.Linear(HIGH, 8)).bfloat16()


def refused(kind: str) -> tuple[type[Exception], str]:
    """The error for the module itself: torchao's tensors are whole only where a server has such."""
    if kind.startswith("torchao"):
        seen = r"ws\.DequantizedSource.* 0\.weight: offered the inner tensors of torchao\."
        return ws.ManifestMismatchError, seen
    return ws.ConfigError, r"0\.weight is a .* ws\.DequantizedSource"


@REAL
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_holds_the_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a change of what is not quantized; the module itself is refused by name."""
    model, values = quantized(kind, monkeypatch)
    served = plain()
    receiver = ws.WeightReceiver(served)
    with closing(receiver):
        error, seen = refused(kind)
        with pytest.raises(error, match=seen):
            ws.connect(model, to=receiver.handle)
        assert receiver.version == 0
        source = ws.DequantizedSource(model, dtype=torch.bfloat16)
        with ws.connect(source, to=receiver.handle) as sender:
            for _ in range(2):
                with torch.no_grad():
                    model[1].weight.normal_()
                sender.send_weights()
                assert torch.equal(served[0].weight, values().to(torch.bfloat16))
                assert torch.equal(served[1].weight, model[1].weight)
    assert served[0].weight.count_nonzero() > WIDE


@REAL
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("bitsandbytes")])
def test_a_receiver_of_such_tensors_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = quantized(kind, monkeypatch)
    with pytest.raises(ws.ConfigError, match=r"1 tensor cannot be written to: 0\.weight is a"):
        ws.WeightReceiver(model)


def test_tied_tensors_are_sent_once() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(WIDE, HIGH, bias=False), nn.Linear(WIDE, HIGH, bias=False)
    by_torchao_contract(model.a)
    model.b.weight = model.a.weight
    assert ws.DequantizedSource(model).manifest.aliases == {"b.weight": "a.weight"}


def test_what_cannot_be_dequantized_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoiled: Any = (
        ("bitsandbytes' contract, 8 bits", lambda m: delattr(m, "state"), "AttributeError"),
        (
            "torchao's contract",
            lambda _: monkeypatch.setattr(Int8Tensor, "dequantize", lambda t: t),
            "becomes a Int8Tensor",
        ),
    )
    for kind, spoil, seen in spoiled:
        model, _ = quantized(kind, monkeypatch)
        spoil(model[0])
        with pytest.raises(ws.ConfigError, match=rf"^0\.weight, a .*{seen}") as raised:
            ws.DequantizedSource(model)
        assert "\n" not in str(raised.value)
    wrong: Any = model.state_dict
    with pytest.raises(ws.ConfigError, match="of a module, not method"):
        ws.DequantizedSource(wrong)
