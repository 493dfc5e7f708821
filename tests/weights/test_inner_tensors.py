"""Tensors of torchao, sent whole: their inner tensors, to tensors of the same class and attributes.

With the real torchao where it is installed, and with a class of its recorded contract (0.18): the
inner tensors are attributes that `__tensor_flatten__` names, beside plain attributes.
"""

from __future__ import annotations

import copy
import enum
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.integrations.sglang.receiving import ModelSink
from weightsync.integrations.sglang.sink import FilesSink
from weightsync.specs import Manifest, TensorSpec, compare, described_name
from weightsync.tensors import contiguous_bytes
from weightsync.weights.inner_tensors import InnerTensors, NotFlatError
from weightsync.weights.sources.base import IterableSource
from weightsync.weights.sources.cast import CastSource

pytestmark = [
    pytest.mark.usefixtures("shm_clean"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

WIDE, HIGH = 128, 64
aten = torch.ops.aten


class Int8Tensor(torch.Tensor):
    """As torchao's: inner tensors, attributes, and the operators that it defines for both."""

    qdata: Any
    scale: torch.Tensor
    block_size: Any
    kwargs: Any

    @staticmethod
    def __new__(cls, qdata: Any, scale: torch.Tensor, block_size: Any, kwargs: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.bfloat16)

    def __init__(
        self, qdata: Any, scale: torch.Tensor, block_size: Any, kwargs: Any = None
    ) -> None:
        self.qdata, self.scale, self.block_size, self.kwargs = qdata, scale, block_size, kwargs

    def __tensor_flatten__(self) -> Any:
        return ["qdata", "scale"], {"block_size": self.block_size, "kwargs": self.kwargs}

    def _like(self, made: Callable[[torch.Tensor], torch.Tensor]) -> Int8Tensor:
        return type(self)(made(self.qdata), made(self.scale), self.block_size, self.kwargs)

    def dequantize(self) -> torch.Tensor:
        inner = self.qdata.dequantize() if isinstance(self.qdata, Int8Tensor) else self.qdata
        return (inner.float() * self.scale.float()).bfloat16()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].dequantize(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._like(torch.Tensor.detach)
        if func is aten.clone.default:
            return args[0]._like(torch.clone)
        if func is aten.copy_.default:
            args[0].qdata.copy_(args[1].qdata)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(f"{func} of an {cls.__name__}")


class Other(Int8Tensor):
    """Another class, with equal inner tensors and attributes."""


for made_by_torchao in (Int8Tensor, Other):
    made_by_torchao.__module__ = "torchao.quantization"


class Mapped(enum.Enum):
    SYMMETRIC = 1
    ASYMMETRIC = 2


@dataclass
class PerRow:
    dim: int = -1


class Matmul(NamedTuple):
    emulate: bool = False


@dataclass
class Activations:
    granularity: PerRow
    mapping: Mapped
    matmul: Matmul


def contract(weight: torch.Tensor, cls: type[Int8Tensor] = Int8Tensor, **kept: Any) -> Int8Tensor:
    weight = weight.detach()
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    kept = {"block_size": [1, WIDE], **kept}
    return cls((weight.float() / scale).round().to(torch.int8), scale, **kept)


def nested(weight: torch.Tensor) -> Int8Tensor:
    inner = contract(weight, kwargs=Activations(PerRow(), Mapped.SYMMETRIC, Matmul()))
    return Int8Tensor(inner, torch.full((1, 1), 0.5), (1, 1), {"by": Mapped.SYMMETRIC})


def by_torchao(name: str, **given: Any) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, name)(**given))

    return quantize


def by_nf4(model: nn.Module) -> None:
    workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(workflows.to_nf4(layer.weight.detach(), 64, 32))


def by_contract(made: Callable[[torch.Tensor], Int8Tensor]) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(made(layer.weight), requires_grad=False)

    return quantize


KINDS: dict[str, Callable[[nn.Module], None]] = {
    "contract": by_contract(contract),
    "contract, nested": by_contract(nested),
    "torchao, int8": by_torchao("Int8WeightOnlyConfig"),
    "torchao, float8": by_torchao("Float8WeightOnlyConfig"),
    "torchao, 8 bits unpacked": by_torchao("IntxWeightOnlyConfig"),
    "torchao, int8 activations": by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao, int8 activations and groups": by_torchao("Int8DynamicActivationIntxWeightConfig"),
    "torchao, nf4": by_nf4,
}


def model_of(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, HIGH, bias=False), nn.Linear(HIGH, WIDE)).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao, while it is imported
        KINDS[kind](model)
    return model


def plain(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, HIGH, bias=False), nn.Linear(HIGH, WIDE)).bfloat16()


def parts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every plain tensor of a model by its name, also those inside of others."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        flat: Any = tensor
        if hasattr(flat, "__tensor_flatten__"):
            found |= {f"{name}.{key}": part for key, part in InnerTensors(flat).parts.items()}
        else:
            found[name] = flat.detach()
    return found


def put(model: nn.Module, other: nn.Module) -> None:
    """Write the values of another model into a model's own tensors."""
    with torch.no_grad():
        for tensor, value in zip(parts_of(model).values(), parts_of(other).values(), strict=True):
            tensor.copy_(value)


def assert_same(server: Any, trainer: Any) -> None:
    held, sent = parts_of(server), parts_of(trainer)
    assert held.keys() == sent.keys()
    for name, tensor in sent.items():
        assert tensor.numel()
        assert torch.equal(contiguous_bytes(held[name]), contiguous_bytes(tensor)), name
    given = torch.randn(3, WIDE).bfloat16()
    with torch.no_grad():
        assert torch.equal(server(given), trainer(given))


def differ(one: Any, other: Any) -> set[str]:
    first, second = parts_of(one), parts_of(other)
    return {name for name, tensor in first.items() if not torch.equal(tensor, second[name])}


def copy_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in parts_of(model).items()}


def assert_kept(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    now = parts_of(model)
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


WAYS = [
    ("staged", "pointer", True),
    ("staged", "copy", True),
    ("in_place", "auto", True),
    ("staged", "auto", False),
]


@pytest.mark.parametrize(("apply", "swap", "packed"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_four_updates_and_back(kind: str, apply: Any, swap: Any, packed: bool) -> None:
    """Every inner tensor has the sender's bits, and the parameter is the same object."""
    trainer, server = model_of(kind, 0), model_of(kind, 9)
    weight = server[0].weight
    inner = [id(getattr(weight, name)) for name in weight.__tensor_flatten__()[0]]
    sink = ws.ModuleSink(server, swap=swap)
    with (
        closing(ws.WeightReceiver(sink, apply=apply)) as receiver,
        ws.connect(trainer, to=receiver.handle, packed=packed) as sender,
    ):
        for version, seed in enumerate((1, 2, 3, 4, 1), 1):
            put(trainer, model_of(kind, seed))
            assert sum(name.startswith("0.weight.") for name in differ(server, trainer)) > 1
            report = sender.send_weights()
            assert (report.version, report.verified, report.apply) == (version, "held", apply)
            assert_same(server, trainer)
        put(trainer, model_of(kind, 4))
        assert sender.send_weights(2, rewind=True).version == 2
        assert_same(server, trainer)
    assert server[0].weight is weight
    assert [id(getattr(weight, name)) for name in weight.__tensor_flatten__()[0]] == inner
    assert_same(server, trainer)  # also after close()


@pytest.mark.parametrize("kind", ["contract", "contract, nested", "torchao, int8"])
def test_a_delta_carries_the_lines_of_inner_tensors_that_changed(kind: str) -> None:
    pytest.importorskip("numba")
    trainer, server = model_of(kind, 0), model_of(kind, 9)
    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(trainer, to=receiver.handle, delta="always") as sender,
    ):
        sender.send_weights()
        inner: Any = parts_of(trainer)
        name = next(name for name in inner if name.startswith("0.") and name.endswith("qdata"))
        for step in range(4):
            with torch.no_grad():
                inner[name].view(-1)[step * 999] ^= 3
                inner["1.weight.scale"].view(-1)[0] *= 2
            assert differ(server, trainer) == {name, "1.weight.scale"}
            report = sender.send_weights()
            assert_same(server, trainer)
            assert report.verified == "held"
            assert report.delta is not None
            assert (report.delta.lines, report.delta.nbytes < 1000) == (2, True)


def refused_pairs() -> Iterator[Any]:
    """What is sent, what is held, and what the one line says."""
    same = "the inner tensors of torchao.quantization.Int8Tensor"
    changed = {
        "class": (
            lambda w: contract(w, Other),
            f"offered the inner tensors of torchao.quantization.Other, wanted {same}",
        ),
        "block size": (
            lambda w: contract(w, block_size=[1, 32]),
            f"offered {same} with block_size=[1, 32], wanted {same} with block_size=[1, {WIDE}]",
        ),
        "type of a value": (
            lambda w: contract(w, block_size=(1, WIDE)),
            f"offered {same} with block_size=(1, {WIDE}), wanted {same} with block_size=[1,",
        ),
        "field of a dataclass": (
            lambda w: contract(w, kwargs=Activations(PerRow(0), Mapped.SYMMETRIC, Matmul())),
            f"offered {same} with kwargs=Activations(granularity=PerRow(dim=0), mapping=Mapped."
            f"SYMMETRIC, matmul=Matmul(emulate=False)), wanted {same} with kwargs=None",
        ),
        "dtype inside": (
            lambda w: with_scale(contract(w), torch.bfloat16),
            f"offered {same} with scale=bfloat16[{HIGH}, 1], wanted {same} with scale=float32[",
        ),
        "shape inside": (
            lambda w: Int8Tensor(contract(w).qdata, torch.ones(1, 1), [1, WIDE]),
            f"offered {same} with scale=float32[1, 1], wanted {same} with scale=float32[{HIGH}, 1]",
        ),
        "plain": (lambda w: w, f"offered bfloat16[{HIGH}, {WIDE}], wanted {same}"),
    }
    for name, (made, said) in changed.items():
        yield pytest.param(made, contract, said, id=name)
    yield pytest.param(
        contract, lambda w: w, f"offered {same}, wanted bfloat16[{HIGH}, {WIDE}]", id="to plain"
    )


def with_scale(made: Int8Tensor, dtype: torch.dtype) -> Int8Tensor:
    made.scale = made.scale.to(dtype)
    return made


def half_quantized(made: Callable[[torch.Tensor], torch.Tensor], seed: int) -> Any:
    model = plain(seed)
    model[0].weight = nn.Parameter(made(model[0].weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("sent", "held", "said"), list(refused_pairs()))
def test_other_classes_and_attributes_are_refused_in_one_line(
    sent: Any, held: Any, said: str, cast: bool
) -> None:
    """Also by a sink that casts other tensors."""
    trainer, server = half_quantized(sent, 0), half_quantized(held, 1)
    before = copy_of(server)
    with closing(ws.WeightReceiver(ws.ModuleSink(server, cast=cast))) as receiver:
        for dtype in (None, "receiver"):
            with pytest.raises(ws.ManifestMismatchError) as raised:
                ws.connect(trainer, to=receiver.handle, dtype=dtype)
            text = str(raised.value)
            assert f"1 mismatched: 0.weight: {said}" in text
            assert "ws.DequantizedSource(model)" in text
            assert "\n" not in text
            assert receiver.version == 0
        assert_kept(server, before)


def test_the_advice_is_for_the_names_where_these_differ() -> None:
    trainer: Any = nn.Module()
    server = half_quantized(contract, 1)
    trainer.model = half_quantized(contract, 0)
    with closing(ws.WeightReceiver(server)) as receiver:
        with pytest.raises(ws.ManifestMismatchError, match=r"removeprefix\('model\.'\)"):
            ws.connect(trainer, to=receiver.handle)
        with pytest.raises(ws.ManifestMismatchError, match=r"DequantizedSource.*unexpected: more"):
            ws.connect({**server.state_dict(), "more": trainer.model[0].weight}, to=receiver.handle)


def replace(weight: Any, block: int) -> None:
    weight.block_size = [1, block]


def write(weight: Any, block: int) -> None:
    weight.block_size[1] = block


@pytest.mark.parametrize("change", [replace, write])
def test_an_attribute_that_changes_after_connect_is_refused_until_it_is_back(change: Any) -> None:
    trainer, server = half_quantized(contract, 0), half_quantized(contract, 1)
    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(trainer, to=receiver.handle) as sender,
    ):
        sender.send_weights()
        before = copy_of(server)
        for changed in (trainer, server):
            put(trainer, half_quantized(contract, 5))
            change(changed[0].weight, 32)
            for _ in range(2):
                with pytest.raises(ws.ManifestMismatchError, match=r"block_size=\[1, 32\]"):
                    sender.send_weights()
                assert_kept(server, before)
            change(changed[0].weight, WIDE)
        assert receiver.version == 1
        sender.send_weights()
        assert_same(server, trainer)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_inner_tensors_that_are_replaced_are_found(apply: Any) -> None:
    """On both sides, also where torch swaps what is inside of a parameter."""
    trainer, server = half_quantized(contract, 0), half_quantized(contract, 1)
    with (
        closing(ws.WeightReceiver(server, apply=apply)) as receiver,
        ws.connect(trainer, to=receiver.handle) as sender,
    ):
        sender.send_weights()
        for model in (trainer, server, trainer):
            model[0].weight.scale = torch.rand(HIGH, 1)
            sender.send_weights()
            assert_same(server, trainer)
        for seed, model in enumerate((trainer, server, trainer), 2):
            other = nn.Parameter(contract(plain(seed)[0].weight), requires_grad=False)
            torch.utils.swap_tensors(model[0].weight, other)  # type: ignore[no-untyped-call]  # as torch has it
            sender.send_weights()
            assert_same(server, trainer)


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_of_what_is_inside_is_refused(whole: bool) -> None:
    """By the sender, and by a receiver whose sender does not know that they belong together."""
    trainer, server = half_quantized(contract, 0), half_quantized(contract, 1)
    new: Any = half_quantized(contract, 2)[0].weight
    unaware = ws.StateDictSource(trainer.state_dict())
    unaware.belong_together = {}  # type: ignore[attr-defined]  # as an optional member
    before = copy_of(server)
    every = list(InnerTensors(new).named("0.weight"))
    with closing(ws.WeightReceiver(server)) as receiver:
        for source, error, seen in (
            (trainer, ws.ConfigError, r"0\.weight\.\S+.* without 0\.weight\."),
            (unaware, ws.ManifestMismatchError, r"0\.weight: offered a part of its inner tensors"),
        ):
            with ws.connect(source, to=receiver.handle) as sender:
                for left in range(len(every)):
                    part = [pair for i, pair in enumerate(every) if (i == left) is not whole]
                    with (
                        pytest.raises(error, match=seen),
                        sender.update(partial=True) as update,
                    ):
                        update.send(part)
                    assert_kept(server, before)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torchao, nf4"])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_delta_does_not_build_on_what_was_written_through_a_parameter(
    kind: str, apply: Any
) -> None:
    """Torch counts such a write (`copy_`) on the parameter, and on nothing inside of it."""
    pytest.importorskip("numba")
    trainer, server = model_of(kind, 0), model_of(kind, 9)
    with (
        closing(ws.WeightReceiver(server, apply=apply)) as receiver,
        ws.connect(trainer, to=receiver.handle, delta="always", scrub=0) as sender,
    ):
        for step in range(3):
            sender.send_weights()
            assert sender.send_weights().delta is not None
            with torch.no_grad():
                changed = server[1].weight.detach().clone()
                # One line of many: a line of each tensor is looked at before a delta.
                max(InnerTensors(changed).parts.values(), key=torch.numel).view(-1)[2000 + step] = 3
                server[1].weight.copy_(changed)
                trainer[1].bias += 1
            assert len(differ(server, trainer)) == 2
            sender.send_weights()
            assert_same(server, trainer)


@pytest.mark.parametrize("way", ["module", "pairs", "cast"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_through_a_parameter_while_it_is_sent_fails_the_update(kind: str, way: str) -> None:
    trainer, server, other = model_of(kind, 0), model_of(kind, 1), model_of(kind, 2)
    writes = False
    receiver = ws.WeightReceiver(server)

    def handle(message: Any, **given: Any) -> Any:
        nonlocal writes
        if writes:
            writes = False
            with torch.no_grad():
                trainer[1].weight.copy_(other[1].weight)
        return receiver.handle(message, **given)

    source = trainer if way != "cast" else CastSource(ws.ModuleSource(trainer), {})
    with closing(receiver), ws.connect(source, to=handle) as sender:
        sender.send_weights()
        before = copy_of(server)

        def send() -> None:
            nonlocal writes
            if way != "pairs":
                writes = True
                sender.send_weights()
                return
            with sender.update() as update:
                writes = True  # from its start on
                update.send(trainer.named_parameters())

        with pytest.raises(ws.VerificationError, match=r"1\.weight"):
            send()
        assert_kept(server, before)
        sender.send_weights()
        assert_same(server, trainer)


def test_a_callable_that_makes_its_tensors_has_two_at_a_time() -> None:
    """The last one and the next one; also when it is called at `connect`."""
    trainer = model_of("contract", 0)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            weight = contract(trainer[0].weight.dequantize())
            made.append(weakref.ref(weight.qdata))
            alive.append(sum(find() is not None for find in made))
            yield f"{i}.weight", weight
            del weight

    source = IterableSource(tensors)
    assert sum(1 for _ in source.tensors()) == 18
    assert len(alive) == 12
    assert max(alive) == 2


@pytest.mark.parametrize("handles", [False, True])
def test_a_server_in_inference_mode_takes_deltas(handles: bool) -> None:
    pytest.importorskip("numba")
    trainer, server = model_of("contract", 0), model_of("contract", 1)
    with torch.inference_mode():
        receiver = ws.WeightReceiver(server)

    def handle(message: Any, **given: Any) -> Any:
        with torch.inference_mode(handles):
            return receiver.handle(message, **given)

    with closing(receiver), ws.connect(trainer, to=handle, delta="always") as sender:
        sender.send_weights()
        for step in range(3):
            with torch.no_grad():
                trainer[1].bias += 1
            report = sender.send_weights()
            assert report.delta is not None
            assert report.delta.lines > 0
            assert report.delta.nbytes < 1000
            assert_same(server, trainer)
            if step == 0:  # walked anew, in inference mode
                server[0].scale = nn.Identity()
                sender.send_weights()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_write_through_a_parameter_after_written_is_read_again(replaces: bool) -> None:
    """Also where the module is walked anew, which forgets what was counted until then."""
    trainer, server = model_of("contract, nested", 0), model_of("contract, nested", 1)
    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(trainer, to=receiver.handle) as sender,
    ):
        sender.send_weights()
        for seed in (2, 3):
            sender.written()
            with torch.no_grad():
                trainer[1].weight.copy_(model_of("contract, nested", seed)[1].weight)
            if replaces:
                trainer[0].replaced = nn.Identity()
            assert len(differ(server, trainer)) > 1
            assert sender.send_weights().verified == "held"
            assert_same(server, trainer)


@pytest.mark.parametrize("kind", ["generator", "callable"])
def test_a_write_through_a_parameter_that_was_yielded_is_found(kind: str) -> None:
    trainer: Any = model_of("contract, nested", 0)
    source = IterableSource(SOURCES[kind](trainer))
    # A state dict has other wrappers, which share the count of the parameter alone.
    inner = [trainer[0].weight.qdata] if kind == "generator" else []
    for wrapper in (trainer[0].weight, *inner):
        for at in range(4):
            pairs = source.shards()
            for _ in range(at + 1):
                next(pairs)
            with torch.no_grad():
                wrapper.copy_(wrapper.clone())
            assert len(list(pairs)) == 8 - at
            assert source.changed
            source.changed = []
            assert len(list(source.shards())) == 9
            assert not source.changed


def test_a_part_of_the_model_is_sent_by_its_parameters() -> None:
    trainer, server = model_of("contract", 0), model_of("contract", 1)
    new: Any = model_of("contract", 2)
    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(trainer, to=receiver.handle) as sender,
    ):
        sender.send_weights()
        with sender.update(partial=True) as update:
            update.send([("1.weight", new[1].weight)])
        assert differ(server, trainer) == {"1.weight.qdata", "1.weight.scale"}
        with torch.no_grad():
            trainer[1].weight.copy_(new[1].weight)
        assert_same(server, trainer)
        other = contract(new[1].weight.dequantize(), block_size=[1, 16])
        with (
            pytest.raises(ws.ConfigError, match=r"1\.weight"),
            sender.update(partial=True) as update,
        ):
            update.send([("1.weight", other)])
        assert_same(server, trainer)


def test_an_update_that_fails_leaves_every_inner_tensor() -> None:
    """After the bytes of some inner tensors, not of all."""
    trainer, server = model_of("contract", 0), model_of("contract", 1)
    fails = False

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(trainer.named_parameters()):
            if i and fails:
                raise RuntimeError("no more")
            yield name, tensor

    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(tensors, to=receiver.handle) as sender,
    ):
        sender.send_weights()
        before = copy_of(server)
        put(trainer, model_of("contract", 5))
        fails = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no more"):
                sender.send_weights()
            assert_kept(server, before)
        fails = False
        sender.send_weights()
        assert_same(server, trainer)


SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "state dict": lambda model: model.state_dict(),
    "callable": lambda model: model.state_dict,
    "generator": lambda model: lambda: ((n, p) for n, p in model.named_parameters()),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_renames_parameters_and_casts_plain_tensors_alone(kind: str) -> None:
    trainer, server = half_quantized(contract, 0), nn.Module()
    trainer[1].float()
    server.m = half_quantized(contract, 1)
    renamed = {name: f"m.{name}" for name, _ in trainer.named_parameters()}
    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(
            SOURCES[kind](trainer), to=receiver.handle, dtype=torch.bfloat16, rename=renamed
        ) as sender,
    ):
        for seed in (3, 4):
            sent = half_quantized(contract, seed)
            put(trainer, sent)
            sender.send_weights()
            assert_same(server.m, sent)


@pytest.mark.parametrize("kind", ["module", "state dict", "callable"])
def test_tied_parameters_are_sent_once(kind: str) -> None:
    def tied(seed: int) -> Any:
        model: Any = nn.Module()
        model.a, model.b = half_quantized(contract, seed)[0], half_quantized(contract, 8)[0]
        model.b.weight = model.a.weight
        return model

    trainer, server = tied(0), tied(1)
    with (
        closing(ws.WeightReceiver(server)) as receiver,
        ws.connect(SOURCES[kind](trainer), to=receiver.handle) as sender,
    ):
        report = sender.send_weights()
    assert report.nbytes == HIGH * WIDE + 4 * HIGH
    assert not differ(server, trainer)
    with (  # as a checkpoint has tied tensors: under one of their names
        closing(ws.WeightReceiver(tied(2))) as receiver,
        ws.connect({"a.weight": trainer.a.weight}, to=receiver.handle) as sender,
    ):
        sender.send_weights()
        assert not differ(receiver.sink.module, trainer)  # type: ignore[attr-defined]


def test_one_call_sends_pairs_and_modules() -> None:
    trainer, server = half_quantized(contract, 0), half_quantized(contract, 1)
    with closing(ws.WeightReceiver(server)) as receiver:
        for given in (trainer, trainer.state_dict(), list(trainer.named_parameters())):
            put(trainer, half_quantized(contract, torch.seed() % 99))
            ws.send_weights(given, receiver.handle)
            assert_same(server, trainer)
        ws.close()


@pytest.mark.parametrize("given", [False, True])
def test_a_hook_gets_inner_tensors_only_where_its_manifest_has_them(given: bool) -> None:
    """Else it would be given bytes without what they mean."""
    trainer = half_quantized(contract, 0)
    arrived: dict[str, torch.Tensor] = {}
    manifest = ws.ModuleSource(trainer).manifest if given else None

    def load(weights: Any) -> None:
        arrived.update((name, tensor.clone()) for name, tensor in weights)

    with closing(ws.WeightReceiver(load, manifest=manifest)) as receiver:
        if not given:
            with pytest.raises(ws.ManifestMismatchError, match=r"DequantizedSource.* 0\.weight:"):
                ws.connect(trainer, to=receiver.handle)
            assert not arrived
            return
        with ws.connect(trainer, to=receiver.handle) as sender:
            sender.send_weights()
    assert torch.equal(arrived["0.weight.qdata"], trainer[0].weight.qdata)
    assert torch.equal(arrived["0.weight.scale"], trainer[0].weight.scale)


def test_a_server_of_sglang_refuses_them_before_it_asks_its_model() -> None:
    manifest = ws.ModuleSource(half_quantized(contract, 0)).manifest
    unused: Any = None
    for sink in (FilesSink(unused, None, unused), ModelSink(unused, "cpu")):
        with pytest.raises(ws.ManifestMismatchError, match=r"0\.weight: offered the inner tensors"):
            sink.difference(manifest).check(partial=False)


PACKED = (
    "CodebookQuantizedPackedTensor",
    "Float8OpaqueTensor",
    "Float8Sparse2x4_1DData1DMetadataTensor",
    "Float8Sparse2x4_2DData2DMetadataTensor",
    "Int4OpaqueTensor",
    "Int4PlainInt32Tensor",
    "Int4PreshuffledTensor",
    "Int4TilePackedTo4dTensor",
    "Int8LutTensor",
    "IntxOpaqueTensor",
    "UIntxBitPackedTensor",
)


def opaque(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor under the name of a class that packs for the processor."""
    return contract(weight, type(name, (Int8Tensor,), {"__module__": "torchao.quantization"}))


NOT_WHOLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    **{name: (partial(opaque, name=name), "it is packed for the processor") for name in PACKED},
    "callable": (lambda w: contract(w, kwargs=len), "its attribute kwargs has a builtin_function"),
    "object": (
        lambda w: contract(w, kwargs=[nn.Identity()]),
        "its attribute kwargs has a Identity, which is not compared",
    ),
    "tensor in an attribute": (
        lambda w: contract(w, kwargs={"scale": torch.ones(1)}),
        "its attribute kwargs has a Tensor",
    ),
    "inner of another kind": (
        lambda w: Int8Tensor(w.to_sparse(), torch.ones(1, 1), [1, 1]),
        "its qdata is a torch.sparse_coo Tensor",
    ),
}


@pytest.mark.parametrize("kind", NOT_WHOLE)
def test_what_is_not_sent_whole_is_refused_by_name(kind: str) -> None:
    made, why = NOT_WHOLE[kind]
    model = half_quantized(made, 0)
    with closing(ws.WeightReceiver(half_quantized(contract, 1))) as receiver:
        for source in (model, model.state_dict(), model.named_parameters):
            with pytest.raises(ws.ConfigError, match=rf"0\.weight is a torchao .*{why}"):
                ws.connect(source, to=receiver.handle)
    with pytest.raises(ws.ConfigError, match=rf"written to: 0\.weight is a torchao .*{why}"):
        ws.WeightReceiver(model)


def test_a_tensor_that_nothing_names_is_found() -> None:
    model = half_quantized(contract, 0)
    model[0].weight.cached = torch.ones(1)
    why = "0.weight is a torchao .* it keeps cached beside what __tensor_flatten__ names"
    for use in (ws.WeightReceiver, ws.ModuleSource):
        with pytest.raises(ws.ConfigError, match=why):
            use(model)


def test_it_is_not_quantized_again() -> None:
    with pytest.raises(ws.ConfigError, match=r"quantized already: 0\.weight \(of torchao\)"):
        ws.QuantizedSource(half_quantized(contract, 0), "fp8_channel")


def test_a_description_tells_values_apart() -> None:
    """Equal texts mean equal values; a long one is cut, and ends with a hash of all of it."""
    weight = plain()[0].weight
    values: list[Any] = [
        *(None, True, 1, 1.0, "1", "None", [1], (1,), torch.int8, torch.float16),
        *(Mapped.SYMMETRIC, Mapped.ASYMMETRIC, Matmul(), Matmul(True), PerRow(), PerRow(1)),
        *(
            {"a": 1},
            {"b": 1},
            {"a=1, b": 1},
            {"a": 1, "b": 1},
            {},
            [],
            (),
            float("nan"),
            float("inf"),
            torch.Size([2]),
            (2, 3),
        ),
        *("x" * 2000, "x" * 1999 + "y"),
    ]
    texts = [InnerTensors(contract(weight, kwargs=value)).description for value in values]
    assert len(set(texts)) == len(values)
    assert all(len(text) < 700 for text in texts)
    again = [InnerTensors(contract(weight, kwargs=copy.deepcopy(v))).description for v in values]
    assert again == texts
    places = [torch.device("cpu"), torch.device("cuda:1")]
    assert len({InnerTensors(contract(weight, kwargs=each)).description for each in places}) == 1
    for value in ({1, 2}, PerRow, {1: 2}, lambda: 1):
        with pytest.raises(NotFlatError, match=r"its attribute kwargs has a .*, which is not comp"):
            InnerTensors(contract(weight, kwargs=value))


def test_a_comparison_has_one_entry_for_each_parameter() -> None:
    def of(*named: tuple[str, str]) -> Manifest:
        specs = []
        for name, text in named:
            specs += [TensorSpec(described_name(name, text), "uint8", (0,))] if text else []
            inner = [f"{name}.qdata", f"{name}.scale.low"] if text else [name]
            specs += [TensorSpec(each, "int8", (2,)) for each in inner]
        return Manifest(tuple(specs))

    offered, wanted = of(("a", "X; n=1"), ("b", "X"), ("c", "")), of(("a", "X; n=2"), ("b", ""))
    found = compare(offered, wanted)
    assert found.unexpected == ("c",)
    assert found.missing == ()
    assert found.mismatched == (
        "a: offered the inner tensors of X with n=1, wanted the inner tensors of X with n=2",
        "b: offered the inner tensors of X, wanted int8[2]",
    )
    assert compare(offered, offered) == compare(offered, offered.subset(offered.index))
    part = compare(offered.subset(["a.qdata"]), offered)
    assert part.cut == ("a: offered a part of its inner tensors, wanted with a.<X; n=1>",)
    assert part.missing == ("a.<X; n=1>", "a.scale.low", "b.<X>", "b.qdata", "b.scale.low", "c")
    assert offered.together == {
        "a.qdata": "a.<X; n=1>",
        "a.scale.low": "a.<X; n=1>",
        "b.qdata": "b.<X>",
        "b.scale.low": "b.<X>",
    }
