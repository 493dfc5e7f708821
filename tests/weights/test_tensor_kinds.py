"""Which tensors are sent and written to, by kind: the rows of the table in docs/sources.md."""

from __future__ import annotations

import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedBuffer
from torch.testing._internal.two_tensor import TwoTensor

import weightsync as ws
from tests.weights.meshes import member
from weightsync.weights.sources.base import as_source
from weightsync.weights.tensor_kinds import overlaps, state_beside

pytestmark = [
    pytest.mark.usefixtures("shm_clean"),
    pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated|experimental):UserWarning"),
]

Make = Callable[[], torch.Tensor]
PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
Named = dict[str, torch.Tensor]


def two(*shape: int) -> torch.Tensor:
    """A tensor of torch's own tests, whose values are in two inner tensors."""
    make: Any = TwoTensor
    made: torch.Tensor = make(torch.ones(shape), torch.ones(shape))
    return made


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, which does not describe its inner tensor."""

    within: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.within = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].within)
        raise NotImplementedError(f"{func} of a Wrapper")


class Marked(torch.Tensor):
    """A subclass with plain memory."""


class MarkedParameter(nn.Parameter):
    """A subclass of Parameter with plain memory."""


class Logging(torch.Tensor):
    """A subclass with plain memory that sees every operation."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def of_package(package: str, name: str) -> type[torch.Tensor]:
    """A class as a package defines it that is not installed here."""
    return type(name, (nn.Parameter,), {"__module__": f"{package}.nn.modules"})


def quantized_parameter(package: str, name: str) -> torch.Tensor:
    made: Any = of_package(package, name)
    tensor: torch.Tensor = made(torch.zeros(3, 4, dtype=torch.uint8), requires_grad=False)
    return tensor


def batched() -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def keep(row: torch.Tensor) -> torch.Tensor:
        kept.append(row)
        return row

    torch.vmap(keep)(torch.randn(2, 3))
    return kept[0]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 4)


def cut() -> torch.Tensor:
    tensor = torch.randn(64, 64)
    tensor.untyped_storage().resize_(16)
    return tensor


def freed() -> torch.Tensor:
    tensor = torch.randn(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4)


def masked() -> torch.Tensor:
    whole = torch.randn(3, 4)
    made: torch.Tensor = torch.masked.masked_tensor(whole, whole > 0)
    return made


REFUSED: dict[str, tuple[Make, str]] = {
    "inner tensors": (
        lambda: two(3, 4),
        r"a TwoTensor, whose values are in other tensors \(a, b\)",
    ),
    "inner tensors, not described": (
        lambda: Wrapper(torch.randn(3, 4)),
        r"a Wrapper, whose values are in other tensors \(within\)",
    ),
    "masked": (masked, "a MaskedTensor, whose values are in other tensors"),
    "bitsandbytes, 4 bits": (
        lambda: quantized_parameter("bitsandbytes", "Params4bit"),
        "a bitsandbytes Params4bit, with scales beside its bytes",
    ),
    "bitsandbytes, 8 bits": (
        lambda: quantized_parameter("bitsandbytes", "Int8Params"),
        "a bitsandbytes Int8Params, with scales beside its bytes",
    ),
    "torchao": (
        lambda: quantized_parameter("torchao", "Int4Tensor"),
        "a torchao Int4Tensor, with scales beside its bytes",
    ),
    "fake": (fake, "a FakeTensor, which has no values"),
    "not initialized": (UninitializedBuffer, "a UninitializedBuffer, without shape"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
        "nested",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor(
            [torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged
        ),
        "jagged",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8),
        r"quantized \(torch\.qint8\)",
    ),
    "of another dtype": (
        lambda: torch.zeros(3, 4, dtype=torch.complex32),
        r"of dtype torch\.complex32",
    ),
    "of torch.func": (batched, "without memory of its own"),
    "zeros without memory": (
        lambda: torch._efficientzerotensor((3, 4)),
        "without memory of its own",
    ),
    "cut": (cut, "larger than its storage"),
}


WRITABLE: dict[str, Make] = {
    "plain": lambda: torch.randn(3, 4),
    "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
    "buffer": lambda: nn.Buffer(torch.randn(3, 4)),
    "subclass with memory": lambda: torch.randn(3, 4).as_subclass(Marked),
    "subclass of Parameter": lambda: MarkedParameter(torch.randn(3, 4)),
    "subclass that sees operations": lambda: torch.randn(3, 4).as_subclass(Logging),
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "conjugate view": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.randn(4, 3).t(),
    "every second": lambda: torch.randn(3, 8)[:, ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "empty, any stride": lambda: torch.randn(8)[::2][:0],
    "one element, any stride": lambda: torch.randn(2)[::2],
    "one row, any stride": lambda: torch.randn(4, 3)[::4],
    "one column, any stride": lambda: torch.randn(3, 7).t()[:1].t().as_strided((3, 1), (1, 7)),
    "made in inference mode": in_inference_mode,
}
SENT: dict[str, Make] = {
    **WRITABLE,
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "overlapping": lambda: torch.randn(6).as_strided((3, 2), (1, 1)),
}
OVERLAPPING = ("expanded", "overlapping")


def holder(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module._buffers[name] = tensor  # register_buffer asks some of them for their shape
    return module


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of zeros, of the same shape and dtype."""
    return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)


def values(tensor: torch.Tensor) -> object:
    return torch.Tensor.resolve_neg(tensor.detach().resolve_conj()).tolist()


def hook(received: Named) -> Callable[[Any], None]:
    def load(weights: Any) -> None:
        received.update({name: tensor.clone() for name, tensor in weights})

    return load


@pytest.fixture
def receiver() -> Iterator[ws.WeightReceiver]:
    received: Named = {}
    made = ws.WeightReceiver(hook(received))
    yield made
    ws.close()
    made.close()


SOURCES: dict[str, Callable[[Named], object]] = {
    "module": lambda given: holder(**given),
    "state dict": lambda given: given,
    "callable": lambda given: lambda: iter(given.items()),
    "callable of a state dict": lambda given: lambda: given,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sent_is_refused_at_connect(kind: str) -> None:
    make, why = REFUSED[kind]
    given = {"good": torch.ones(2), "bad": make(), "worse": make()}
    for source in SOURCES.values():
        for cast in (None, torch.bfloat16):
            with pytest.raises(
                ws.ConfigError, match=f"2 tensors cannot be sent: bad, worse is {why}"
            ):
                as_source(source(given), dtype=cast)


def test_after_the_refusal_the_next_connect_works(receiver: ws.WeightReceiver) -> None:
    given = {"good": torch.ones(2), "bad": torch.eye(3).to_sparse()}
    for source in SOURCES.values():
        with pytest.raises(ws.ConfigError, match="bad is sparse_coo"):
            ws.connect(source(given), to=receiver.handle)
    with ws.connect({"good": torch.ones(2)}, to=receiver.handle) as sender:
        sender.send_weights()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_written_to_is_refused_by_the_receiver(kind: str) -> None:
    make, why = REFUSED[kind]
    module = holder(good=torch.ones(2), bad=make(), worse=make())
    for sink in (ws.WeightReceiver, ws.ModuleSink, ws.ShardedModuleSink):
        with pytest.raises(
            ws.ConfigError, match=f"2 tensors cannot be written to: bad, worse is {why}"
        ):
            sink(module)


def test_tensors_that_are_given_to_one_update_are_decided_too(
    receiver: ws.WeightReceiver,
) -> None:
    given = {kind: (make(), why) for kind, (make, why) in REFUSED.items()}
    for bad, why in given.values():
        with pytest.raises(ws.ConfigError, match=f"1 tensor cannot be sent: bad is {why}"):
            ws.send_weights([("good", torch.ones(2)), ("bad", bad)], to=receiver.handle)
    with ws.connect({"good": torch.ones(2)}, to=receiver.handle) as sender:
        for bad, why in given.values():
            refused = pytest.raises(ws.ConfigError, match=f"1 tensor cannot be sent: bad is {why}")
            with refused, sender.update() as update:
                update.send([("good", torch.ones(2)), ("bad", bad)])
            assert receiver.status().state == "READY"
        sender.send_weights()


@pytest.mark.parametrize("source", ["callable", "callable of a state dict", "WeightSource"])
def test_a_source_that_yields_another_kind_later_is_refused_then(
    source: str, receiver: ws.WeightReceiver
) -> None:
    """Its bytes would be read from address 0, or be those of one of several inner tensors."""
    given = {"good": torch.ones(2), "bad": torch.ones(3, 4)}

    class Own:
        manifest = ws.Manifest(
            (ws.TensorSpec("good", "float32", (2,)), ws.TensorSpec("bad", "float32", (3, 4)))
        )

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(given.items())

        def stable_tensors(self) -> None:
            return None

    made = {
        "callable": lambda: iter(given.items()),
        "callable of a state dict": lambda: given,
        "WeightSource": Own(),
    }[source]
    with ws.connect(made, to=receiver.handle) as sender:
        sender.send_weights()
        for make, why in REFUSED.values():
            given["bad"] = make()
            with pytest.raises(ws.ConfigError, match=f"cannot be sent: bad is {why}"):
                sender.send_weights()
            status = receiver.status()
            assert (status.state, status.version) == ("READY", 1)
        given["bad"] = torch.full((3, 4), 2.0)
        assert sender.send_weights().version == 2


@pytest.mark.parametrize("kind", ["inner tensors", "sparse", "cut"])
def test_stable_tensors_of_a_source_of_ones_own_are_decided(
    kind: str, receiver: ws.WeightReceiver
) -> None:
    make, why = REFUSED[kind]
    held = [make()]

    class Own:
        manifest = ws.Manifest((ws.TensorSpec("w", "float32", tuple(make().shape)),))

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "w", held[0]

        def stable_tensors(self) -> list[torch.Tensor]:
            return held

    with pytest.raises(ws.ConfigError, match=f"w is {why}"):
        ws.connect(Own(), to=receiver.handle)
    bad, held[0] = held[0], torch.zeros(tuple(make().shape))
    with ws.connect(Own(), to=receiver.handle) as sender:
        sender.send_weights()
        held[0] = bad
        with pytest.raises(ws.ConfigError, match=f"w is {why}"):
            sender.send_weights()


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_a_parameter_that_becomes_another_kind_in_its_place(
    cast: torch.dtype | None, receiver: ws.WeightReceiver
) -> None:
    module = holder(w=nn.Parameter(torch.ones(3, 4), requires_grad=False))
    with ws.connect(module, to=receiver.handle, dtype=cast, adopt=False) as sender:
        sender.send_weights()
        plain = module.get_parameter("w")
        swap: Any = torch.utils.swap_tensors
        swap(plain, nn.Parameter(two(3, 4)))
        with pytest.raises(ws.ConfigError, match="w is a TwoTensor"):
            sender.send_weights()
        module.w = nn.Parameter(torch.ones(3, 4))
        sender.send_weights()


def test_sources_that_wrap_others_decide_too() -> None:
    given = {
        "mlp.experts.gate_up_proj": two(2, 6, 4),
        "mlp.experts.down_proj": torch.randn(2, 4, 3),
    }
    with pytest.raises(ws.ConfigError, match="gate_up_proj is a TwoTensor"):
        ws.PerExpertSource(given)
    with pytest.raises(ws.ConfigError, match="gate_up_proj is a TwoTensor"):
        ws.FusedExpertsSource(given)


def test_a_described_source_is_decided_as_it_yields(receiver: ws.WeightReceiver) -> None:
    class Described:
        bad = True

        def metadata(self) -> list[Any]:
            return [types.SimpleNamespace(name="w", dtype=torch.float32, shape=(3, 4))]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "w", two(3, 4) if self.bad else torch.ones(3, 4)

    source = Described()
    with ws.connect(source, to=receiver.handle) as sender:
        with pytest.raises(ws.ConfigError, match="w is a TwoTensor"):
            sender.send_weights()
        source.bad = False
        sender.send_weights()


def test_all_names_at_once_cut_after_ten() -> None:
    given = {f"w{i}": torch.eye(3).to_sparse() for i in range(12)}
    given["q"] = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8)
    with pytest.raises(ws.ConfigError) as caught:
        as_source(given)
    assert str(caught.value).startswith("13 tensors cannot be sent: w0, w1, ")
    assert "w9 and 2 more is sparse_coo" in str(caught.value)
    assert "q is quantized (torch.quint8)" in str(caught.value)
    assert "\n" not in str(caught.value)


PATHS: dict[str, dict[str, Any]] = {
    "unpacked": {},
    "packed": {"packed": True},
    "not adopted": {"adopt": False},
    "delta": {"delta": "always"},
    "tcp": {"backend": "tcp"},
    "tcp, delta": {"backend": "tcp", "delta": "always"},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_values_arrive_of_every_kind_that_is_sent(path: str) -> None:
    received: Named = {}
    made = {f"t{i}": make() for i, make in enumerate(SENT.values())}
    kinds = dict(zip(made, SENT, strict=True))
    module = holder(**made, other=torch.ones(3))
    handle = ws.WeightReceiver(hook(received)).handle
    with ws.connect(module, to=handle, **PATHS[path]) as sender, torch.no_grad():
        for step in range(3):
            sender.send_weights()
            for name, tensor in made.items():
                assert values(received[name]) == values(tensor), (kinds[name], step)
            module.get_buffer("other").add_(1)


@pytest.mark.parametrize("source", ["state dict", "callable"])
def test_the_values_arrive_of_every_kind_that_a_callable_yields(
    source: str, receiver: ws.WeightReceiver
) -> None:
    received: Named = {}
    given = {kind: make() for kind, make in SENT.items()}
    handle = ws.WeightReceiver(hook(received)).handle
    with ws.connect(SOURCES[source](given), to=handle) as sender:
        sender.send_weights()
        with sender.update() as update:
            update.send(given.items())
    for kind, tensor in given.items():
        assert values(received[kind]) == values(tensor), kind


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("path", ["unpacked", "packed", "delta", "tcp"])
def test_every_kind_that_is_written_to_holds_the_values(path: str, apply: Any) -> None:
    made = {f"t{i}": make() for i, make in enumerate(WRITABLE.values())}
    kinds = dict(zip(made, WRITABLE, strict=True))
    served = holder(**made)
    source = {
        name: torch.randn(tuple(t.shape)).to(t.dtype) if t.numel() else like(t)
        for name, t in made.items()
    }
    receiver = ws.WeightReceiver(served, apply=apply)
    with ws.connect(holder(**source), to=receiver.handle, **PATHS[path]) as sender:
        for step in range(3):
            for tensor in source.values():
                tensor.mul_(2)
            assert sender.send_weights().verified == "held"
            for name, tensor in source.items():
                assert values(getattr(served, name)) == values(tensor), (kinds[name], step)


@pytest.mark.parametrize("kind", OVERLAPPING)
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_elements_that_share_memory_cannot_be_written_to(apply: Any, kind: str) -> None:
    module = holder(good=torch.ones(2), bad=SENT[kind]())
    with pytest.raises(ws.ConfigError, match="1 tensor cannot be written to: bad is expanded"):
        ws.WeightReceiver(module, apply=apply)


def test_which_elements_share_memory() -> None:
    assert not any(overlaps(make()) for make in WRITABLE.values())
    assert all(overlaps(SENT[kind]()) for kind in OVERLAPPING)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16}], ids=["as it is", "cast"])
def test_memory_that_was_freed_is_an_error_until_it_is_back(
    settings: dict[str, Any], source: str, receiver: ws.WeightReceiver
) -> None:
    given = {"w": freed(), "other": freed()}
    with ws.connect(SOURCES[source](given), to=receiver.handle, **settings) as sender:
        with pytest.raises(ws.ManifestMismatchError, match="no memory"):
            sender.send_weights()
        for tensor in given.values():
            tensor.untyped_storage().resize_(48)
            tensor.fill_(2)
        assert sender.send_weights().version == 1


def test_freed_memory_of_one_update(receiver: ws.WeightReceiver) -> None:
    with pytest.raises(ws.ManifestMismatchError, match="w has no memory"):
        ws.send_weights([("w", freed())], to=receiver.handle)
    with ws.connect({"w": torch.ones(3, 4)}, to=receiver.handle, takeover=True) as sender:
        mismatch = pytest.raises(ws.ManifestMismatchError, match="w has no memory")
        with mismatch, sender.update() as update:
            update.send([("w", freed())])
        sender.send_weights()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_server_without_its_memory_is_an_error_until_it_is_back(apply: Any) -> None:
    served = holder(w=freed())
    receiver = ws.WeightReceiver(served, apply=apply)
    with pytest.raises(ws.ManifestMismatchError, match=r"no memory \(offloaded\).*: w;"):
        ws.connect({"w": torch.ones(3, 4)}, to=receiver.handle)
    with pytest.raises(ws.ManifestMismatchError, match=r"no memory \(offloaded\): w"):
        receiver.sink.checksums()
    served.w.untyped_storage().resize_(48)  # type: ignore[operator]
    with ws.connect({"w": torch.ones(3, 4)}, to=receiver.handle) as sender:
        assert sender.send_weights().verified == "held"
    assert values(served.w) == values(torch.ones(3, 4))  # type: ignore[arg-type]


def test_tensors_on_the_meta_device(receiver: ws.WeightReceiver) -> None:
    module, served = nn.Linear(4, 3), nn.Linear(4, 3)
    module.to("meta")
    for source in (module.state_dict(), lambda: module.state_dict().items()):
        with pytest.raises(ws.ConfigError, match="cannot be sent: weight, bias is on the meta"):
            ws.connect(source, to=receiver.handle)
    with pytest.raises(ws.ManifestMismatchError, match="meta device"):
        ws.connect(module, to=receiver.handle)
    module.to_empty(device="cpu")
    other = ws.WeightReceiver(served.to("meta"))
    with pytest.raises(ws.ManifestMismatchError, match=r"no memory \(offloaded\)"):
        ws.connect(module, to=other.handle)
    served.to_empty(device="cpu")
    with ws.connect(module, to=other.handle) as sender:
        assert sender.send_weights().verified == "held"


def test_shards_are_decided_by_their_local_tensors() -> None:
    with member(0, (1,)) as mesh:
        check_shards(mesh)


def check_shards(mesh: DeviceMesh) -> None:
    whole = torch.randn(4, 3)
    plain = DTensor.from_local(whole, mesh, [Shard(0)])
    odd = DTensor.from_local(two(4, 3), mesh, [Shard(0)], run_check=False)
    for source in SOURCES.values():
        with pytest.raises(ws.ConfigError, match="sent: odd is a DTensor of a TwoTensor"):
            as_source(source({"plain": plain, "odd": odd}))
    with pytest.raises(ws.ConfigError, match="written to: odd is a DTensor of a TwoTensor"):
        ws.WeightReceiver(holder(plain=plain, odd=odd))
    served: Any = holder(w=DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)]))
    with ws.connect({"w": plain}, to=ws.WeightReceiver(served).handle) as sender:
        assert sender.send_weights().verified == "held"
    assert values(served.w.to_local()) == values(whole)


def test_parameters_of_inference_mode_stay_where_they_are(receiver: ws.WeightReceiver) -> None:
    """Moved into shared memory, torch would refuse every view of them outside of that mode."""
    module = holder(w=in_inference_mode())
    address = module.w.data_ptr()  # type: ignore[operator]
    with ws.connect(module, to=receiver.handle) as sender:
        sender.send_weights()
        assert module.w.view(-1).data_ptr() == address  # type: ignore[operator]


class QuantState:
    """As bitsandbytes keeps it: an object with tensors in it."""

    def __init__(self) -> None:
        self.absmax = torch.ones(2)


STATE: dict[str, Any] = {
    "quant_state": QuantState(),
    "weight_scale": 0.5,
    "scale": torch.ones(1),
    "zero_point": 3,
    "SCB": [torch.ones(1)],
    "lookup": {"low": torch.ones(1)},
}
NO_STATE: dict[str, Any] = {
    "main_grad": torch.ones(3, 4),
    "ds_tensor": torch.ones(3, 4),
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "weight_loader": lambda *_: None,
    "scale_later": None,
    "owner": nn.Linear(2, 2),
}


@pytest.mark.parametrize("key", STATE)
@pytest.mark.parametrize("side", ["module", "callable", "one call", "receiver"])
def test_state_beside_the_bytes_is_warned_of_by_name(
    side: str, key: str, receiver: ws.WeightReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.ones(3, 4)
    setattr(tensor, key, STATE[key])
    for name, value in NO_STATE.items():
        setattr(tensor, name, value)
    with caplog.at_level(logging.WARNING, "weightsync"):
        if side == "receiver":
            ws.WeightReceiver(holder(w=tensor, plain=torch.ones(1)))
        elif side == "one call":
            ws.send_weights([("w", tensor)], to=receiver.handle)
            ws.send_weights([("w", tensor)], to=receiver.handle)
        else:
            given = {"w": tensor, "plain": torch.ones(1)}
            with ws.connect(SOURCES[side](given), to=receiver.handle) as sender:
                sender.send_weights()
                sender.send_weights()
    said = [r.getMessage() for r in caplog.records if "beside their bytes" in r.getMessage()]
    use = "written" if side == "receiver" else "sent"
    assert len(said) == 1
    assert said[0].startswith(
        f"1 tensors have state beside their bytes, which is not {use}: w ({key});"
    )


def test_other_attributes_are_no_state() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))):
        for name, value in NO_STATE.items():
            setattr(tensor, name, value)
        assert state_beside(tensor) == []


def test_extra_state_of_modules_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"amax": 1}

    with caplog.at_level(logging.WARNING, "weightsync"):
        as_source(nn.Sequential(WithExtra(2, 2), nn.Linear(2, 2)))
        ws.WeightReceiver(nn.Sequential(WithExtra(2, 2)))
    assert [r.getMessage() for r in caplog.records] == [
        "the extra state (get_extra_state) of these modules is not sent: WithExtra",
        "the extra state (get_extra_state) of these modules is not written: WithExtra",
    ]


class Derived(nn.Linear):
    """Two buffers that may be derived from its weight, and buffers that are not."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("largest", self.weight.detach().amax(), persistent=False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("absent", None, persistent=False)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)


def test_buffers_that_may_be_derived_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weightsync"):
        ws.WeightReceiver(nn.Sequential(Derived(), Rotary()), on_commit=lambda _: None).close()
        ws.WeightReceiver(nn.Sequential(nn.Linear(2, 2), Rotary())).close()
        assert not caplog.records
        ws.WeightReceiver(nn.Sequential(Derived(), Rotary(), Derived())).close()
    (record,) = caplog.records
    assert record.getMessage().startswith("2 buffers are not in the state dict")
    assert "weights: 0.largest, 2.largest; derive them in" in record.getMessage()


def test_no_quantizer_is_imported_to_know_its_classes() -> None:
    before = {"bitsandbytes", "torchao"} & set(sys.modules)  # tests of their real tensors
    with pytest.raises(ws.ConfigError, match="bitsandbytes"):
        as_source({"w": quantized_parameter("bitsandbytes", "Params4bit")})
    assert {"bitsandbytes", "torchao"} & set(sys.modules) == before


def test_the_table_of_the_documentation_names_these_tests() -> None:
    section = PAGE.read_text().partition("## Kinds of tensors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", section))
    assert named
    assert named <= set(globals())
