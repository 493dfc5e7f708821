"""QuantizedSource: compressed-tensors' rounding, bit for bit, and weight and scale together."""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weightsync as ws
from weightsync.specs import TensorSpec
from weightsync.tensors import TORCH_DTYPES as DTYPE_OF
from weightsync.weights.copying.shards import Slice
from weightsync.weights.lines.memory import why_no_kernels
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.weights.sources import quantized
from weightsync.weights.sources.base import ModuleSource
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.sources.quantized import SCHEMES, QuantizationScheme, quantize

with warnings.catch_warnings():
    # torch's own, where it compiles: the library does so when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import quantize as library_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

pytestmark = pytest.mark.usefixtures("shm_clean")

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
WEIGHTS: dict[str, dict[str, Any]] = {
    "fp8_channel": {"type": "float", "strategy": "channel"},
    "fp8_block": {"type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int8_channel": {"type": "int", "strategy": "channel"},
    "mxfp8": {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}


def arguments(scheme: str, block: tuple[int, int] | None = None) -> dict[str, Any]:
    found = {**WEIGHTS[scheme], "num_bits": 8, "symmetric": True, "dynamic": False}
    return found if block is None else {**found, "block_structure": list(block)}


def library_scales(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the scales of compressed-tensors for the smallest and largest of each row or block."""
    if args.group_size is not None:
        groups = weight.view(weight.shape[0], -1, args.group_size)
        by_group: torch.Tensor = calculate_qparams(groups.amin(2), groups.amax(2), args)[0]
        return by_group
    if args.block_structure is None:
        ends = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scales: torch.Tensor = calculate_qparams(*ends, args)[0]
        return scales
    high, wide = args.block_structure
    down, across = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
    scales = torch.empty(down, across, dtype=weight.dtype)
    for i, j in itertools.product(range(down), range(across)):
        part = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        scales[i, j] = calculate_qparams(part.amin(), part.amax(), args)[0]
    return scales


def by_library(
    weight: torch.Tensor, scheme: str, block: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    args = QuantizationArgs.model_validate(arguments(scheme, block))
    scales = library_scales(weight, args)
    dtype = args.pytorch_dtype()
    zeros = torch.zeros_like(scales)
    made = library_quantize(weight, scales, zeros, args, dtype=dtype)
    return made, compress_mx_scale(scales, torch.uint8) if scheme == "mxfp8" else scales


def assert_equal_bits(
    made: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for ours, theirs in zip(made, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.is_contiguous()
        assert torch.equal(
            ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
        )


SIZES = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 64, 127, 130]))


@st.composite
def weights(draw: st.DrawFn, columns: st.SearchStrategy[int] = SIZES) -> torch.Tensor:
    """Weights of every shape class, with rows of zeros, of one value, and of extreme ones."""
    shape = draw(SIZES), draw(columns)
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    made = torch.randn(shape, generator=generator)
    row = draw(st.integers(0, shape[0] - 1))
    kind = draw(st.sampled_from(["plain", "zero", "-zero", "one", "tiny", "huge", "spread"]))
    info = torch.finfo(dtype)
    if kind in ("zero", "-zero"):
        made[row] = 0.0 if kind == "zero" else -0.0
    elif kind == "one":
        made[row] = -0.37
    elif kind == "tiny":
        made[row] *= info.smallest_normal
    elif kind == "huge":
        made[row] *= info.max / 8
    elif kind == "spread":
        made *= torch.exp2(torch.randint(-14, 8, shape, generator=generator).float())
    return made.to(dtype)


@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel"])
@given(weight=weights())
@settings(max_examples=350, deadline=None)
def test_rows_are_rounded_as_the_library_does(scheme: str, weight: torch.Tensor) -> None:
    assert_equal_bits(quantize(weight, SCHEMES[scheme]), by_library(weight, scheme))


@given(weight=weights(), block=st.tuples(st.sampled_from([4, 16, 128]), st.sampled_from([8, 128])))
@settings(max_examples=350, deadline=None)
def test_blocks_are_rounded_as_the_library_does(
    weight: torch.Tensor, block: tuple[int, int]
) -> None:
    """Also of shapes that are no multiple of a block."""
    scheme = QuantizationScheme(dtype="float8_e4m3fn", block=block)
    assert_equal_bits(quantize(weight, scheme), by_library(weight, "fp8_block", block))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    ("shape", "block"),
    [((130, 2500), (128, 128)), ((5, 1300), (2, 600)), ((260, 4200), (256, 1024))],
)
def test_blocks_of_weights_that_no_cache_holds(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """They are taken in strips of columns; a long row of a block is a loop of its own."""
    weight = torch.randn(shape).bfloat16()
    weight[:, 1200:1400] *= torch.logspace(-6, 6, 200).bfloat16()[: shape[1] - 1200]
    weight[3, :130] = 0
    scheme = QuantizationScheme(dtype="float8_e4m3fn", block=block)
    assert_equal_bits(quantize(weight, scheme), by_library(weight, "fp8_block", block))


@given(weight=weights(columns=st.integers(1, 9).map(lambda groups: 32 * groups)))
@settings(max_examples=350, deadline=None)
def test_groups_of_mxfp8_are_rounded_as_the_library_does(weight: torch.Tensor) -> None:
    assert_equal_bits(quantize(weight, SCHEMES["mxfp8"]), by_library(weight, "mxfp8"))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_largest_value_of_mxfp8_has_the_exponent_of_the_library(dtype: torch.dtype) -> None:
    """All finite bfloat16 values that float16 has too, up to where the library has infinity."""
    bits = torch.arange(0, 1 << 15, dtype=torch.int16)
    values = bits.view(torch.bfloat16).to(dtype)
    values = values[values < 0.8 * torch.finfo(dtype).max]
    weight = torch.zeros(values.numel(), 32, dtype=dtype)
    weight[:, 0], weight[:, 1:] = values, values[:, None] * torch.linspace(-1, 1, 31).to(dtype)
    assert_equal_bits(quantize(weight, SCHEMES["mxfp8"]), by_library(weight, "mxfp8"))


def test_mxfp8_of_values_where_the_library_has_infinity() -> None:
    """1.75 * 2**127 and more: the exponent is that of 2**120, and nothing is NaN."""
    weight = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    values, exponents = quantize(weight, SCHEMES["mxfp8"])
    assert exponents.tolist() == [[120 + 127]]
    assert values.float().tolist() == [[256.0] * 32]


def test_nan_and_infinity_in_mxfp8() -> None:
    """The exponent is 255, which is NaN in E8M0; other groups are as without them."""
    weight = torch.randn(3, 96)
    weight[0, 3], weight[2, 40] = float("nan"), float("inf")
    values, exponents = quantize(weight, SCHEMES["mxfp8"])
    assert (exponents == 255).nonzero().tolist() == [[0, 0], [2, 1]]
    assert values[2, 40].float().isnan()
    assert values[2, 32:40].float().count_nonzero() == 0
    wanted = by_library(torch.where(weight.isfinite(), weight, 0), "mxfp8")
    assert torch.equal(values[1].view(torch.uint8), wanted[0][1].view(torch.uint8))
    assert torch.equal(exponents[1], wanted[1][1])


def test_a_shard_of_rows_has_its_own_exponents_in_mxfp8() -> None:
    """Nothing is gathered. A shard that cuts rows is."""
    weight = torch.randn(6, 64)
    source = ws.QuantizedSource({"a.weight": weight}, "mxfp8")
    for spans, part in ((((2, 6),), ((0, 64),)), weight[2:]), ((((0, 6),), ((0, 32),)), None):
        box = Slice((6, 64), spans)
        held = Holdings(["a.weight"], [box], partial(iter, [part]), stays=False)
        made = source.hold(held)
        if part is None:
            assert made.gathered
            continue
        assert made.names == ["a.weight", "a.weight_scale"]
        assert [box.local_shape for box in made.boxes] == [(4, 64), (4, 2)]
        whole = quantize(weight, SCHEMES["mxfp8"])
        for ours, theirs in zip((tensor for _, tensor in made.pairs()), whole, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs[2:].view(torch.uint8))


def test_rows_that_mxfp8_cannot_cut_are_refused_in_one_line() -> None:
    weight = torch.ones(4, 40)
    refused({"a.weight": weight}, "mxfp8", r"no multiple of that: a\.weight \[4, 40\]; name their")
    scheme = QuantizationScheme(
        dtype="float8_e4m3fn", block=(1, 32), scale_dtype="uint8", ignore=("a",)
    )
    assert ws.QuantizedSource({"a.weight": weight, "b.weight": weight[:, :32]}, scheme).quantized


@pytest.fixture(params=["compiled", "divided", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numba, on a processor that has the table and on others, and without numba."""
    if request.param == "torch":
        monkeypatch.setitem(vars(quantized), "why_no_kernels", lambda: "numba is not installed")
        return
    assert not why_no_kernels()
    kernels = quantized._kernels()
    assert kernels is not None
    if request.param == "divided":
        monkeypatch.setattr(kernels, "CODES", np.zeros(0, np.uint8))


@pytest.mark.parametrize("fault", ["no compiler", "other bits"])
def test_loops_that_do_not_round_as_torch_are_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a compiler or a processor that nobody has tried."""
    kernels = quantized._kernels()
    assert kernels is not None

    def fails(*_: object) -> bool:
        raise RuntimeError("cannot select an instruction")

    if fault == "no compiler":
        monkeypatch.setattr(kernels, "quantize", fails)
    else:
        monkeypatch.setattr(kernels, "CODES", kernels.CODES + np.uint8(1))
    quantized._kernels.cache_clear()
    try:
        weight = torch.randn(4, 64).bfloat16()
        made = quantize(weight, SCHEMES["fp8_channel"])
    finally:
        quantized._kernels.cache_clear()
    assert_equal_bits(made, by_library(weight, "fp8_channel"))
    assert "torch quantizes weights, more slowly" in caplog.text


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_of_a_row_is_rounded_as_the_library_does(dtype: torch.dtype) -> None:
    """All finite bfloat16 values beside a largest one, and as many of the other dtypes."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    values = bits.view(torch.bfloat16).to(dtype)
    values = values[values.isfinite()].clone()
    for largest in (1.0, 448.0, 3.3e-3, 60000.0):
        weight = torch.stack([values.clamp(-largest, largest), -values.clamp(-largest, largest)])
        for scheme in ("fp8_channel", "int8_channel"):
            assert_equal_bits(quantize(weight, SCHEMES[scheme]), by_library(weight, scheme))


@pytest.mark.parametrize("exponent", [8, 9, 96, 112, 127, 200, 245])
def test_codes_are_what_a_division_makes_of_every_value_and_every_scale(exponent: int) -> None:
    """All bfloat16 values up to the largest that such a scale has, by each of its 128 significands.

    Exponents of value and scale are added, so that a few are enough: the least for which codes are
    looked up, that of common weights, and the largest.
    """
    from weightsync.weights.sources import quantize_kernels as kernels

    magnitudes = np.arange(0, 0x7F80, dtype=np.uint16)
    values = np.concatenate([magnitudes, magnitudes | np.uint16(0x8000)])
    at, count = np.uint64(values.ctypes.data), np.uint64(values.size)
    looked_up, divided = np.empty(values.size, np.uint8), np.empty(values.size, np.uint8)
    for significand in range(128):
        bits = (exponent << 7) + significand
        exact = np.array([bits << 16], np.uint32).view(np.float32)[0]
        found_at, exact_at = np.uint64(looked_up.ctypes.data), np.uint64(divided.ctypes.data)
        codes_at = np.uint64(kernels.CODES.ctypes.data)
        ahead = np.uint64(0)
        kernels._to_float8_by_table(at, found_at, count, np.uint32(bits), codes_at, ahead)
        kernels._to_float8(at, exact_at, count, exact)
        assert np.array_equal(looked_up, divided)
        if not significand % 32:
            scaled = torch.from_numpy(values).view(torch.bfloat16) / float(exact)
            scaled = (scaled + 0.0).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert np.array_equal(divided, scaled.view(torch.uint8).numpy())


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_lie_in_memory_in_another_order(scheme: str) -> None:
    """Transposed, cut out, expanded, negated by a bit; and one that begins at an odd address."""
    plain = torch.randn(2 * 160, 2 * 96).bfloat16()
    flat = torch.randn(160 * 96 + 1).bfloat16()
    for weight in (
        plain[:96, :160].t(),
        plain[::2, 7:103],
        plain[:1, :96].expand(160, 96),
        plain[:160, :1].expand(160, 96),
        torch._neg_view(plain[:160, :96].contiguous()),
        flat[1:].view(160, 96),
    ):
        values, scales = quantize(weight, SCHEMES[scheme])
        wanted = by_library(weight.resolve_neg().contiguous(), scheme)
        assert_equal_bits((values.contiguous(), scales.contiguous()), wanted)


@pytest.mark.usefixtures("loops")
def test_a_block_that_is_larger_than_the_weight_takes_no_memory_of_its_size() -> None:
    weight = torch.randn(5, 40).bfloat16()
    scheme = QuantizationScheme(dtype="float8_e4m3fn", block=(1 << 24, 1 << 24))
    assert_equal_bits(quantize(weight, scheme), by_library(weight, "fp8_block", (5, 40)))


def test_two_threads_that_quantize_at_once_have_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Senders of one source may have a thread each."""
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    scratch, both = quantized._Scratch(32), threading.Barrier(2)
    scratch.take(weight)
    uses = vars(quantized)["uses"]

    def meet(memory: torch.Tensor) -> int:
        found: int = uses(memory)
        with suppress(threading.BrokenBarrierError):  # the other one waits for its turn
            both.wait(0.5)
        return found

    monkeypatch.setitem(vars(quantized), "uses", meet)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(scratch.take, [weight, weight])
    assert first is not None
    assert second is not None
    assert first.data_ptr() != second.data_ptr()


class Linears(nn.Module):
    """Two linear layers, one that is ignored, and what is never quantized."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 192, dtype=dtype)
        self.up = nn.Linear(192, 288, dtype=dtype)
        self.down = nn.Linear(288, 192, bias=False, dtype=dtype)
        self.gate = nn.Linear(192, 8, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(192, dtype=dtype)
        self.lm_head = nn.Linear(192, 40, bias=False, dtype=dtype)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_().mul_(0.05)


IGNORED = ("lm_head", "re:.*gate$")


def config_of(scheme: str) -> dict[str, Any]:
    kind = WEIGHTS[scheme]["type"]
    group: dict[str, Any] = {"targets": ["Linear"], "weights": arguments(scheme)}
    if kind == "int":
        activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        group["input_activations"] = activations
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if scheme == "mxfp8" else f"{kind}-quantized",
        "ignore": list(IGNORED),
        "config_groups": {"group_0": group},
    }


def compressed(model: Linears, scheme: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a copy that the library has compressed."""
    copied: Any = Linears(model.up.weight.dtype)
    copied.load_state_dict(model.state_dict())
    apply_quantization_config(copied, QuantizationConfig.model_validate(config_of(scheme)))
    for layer in copied.modules():
        found = getattr(layer, "quantization_scheme", None)
        if found is not None:
            layer.weight_scale.data.copy_(library_scales(layer.weight.detach(), found.weights))
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor: Any = ModelCompressor
    compressor.from_pretrained_model(copied).compress_model(copied)
    return {name: tensor.detach() for name, tensor in copied.state_dict().items()}


def received() -> tuple[dict[str, torch.Tensor], Any]:
    got: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> list[str]:
        now = {name: tensor.clone() for name, tensor in pairs}
        got.update(now)
        return list(now)

    return got, load


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_gets_the_checkpoint_that_the_library_makes(
    scheme: str, dtype: torch.dtype
) -> None:
    """By the config of that checkpoint; four updates of one sender."""
    model, (got, load) = Linears(dtype), received()
    source = ws.QuantizedSource(model, QuantizationScheme.from_config(config_of(scheme)))
    receiver = ws.WeightReceiver(load)
    with closing(receiver), ws.connect(source, to=receiver.handle) as sender:
        for _ in range(4):
            model.step()
            sender.send_weights()
            wanted = compressed(model, scheme)
            assert got.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert_equal_bits((got[name], got[name]), (tensor, tensor))


class Held(nn.Module):
    """A module with the tensors that a quantized source sends, as an engine holds them."""

    def __init__(self, source: ws.QuantizedSource) -> None:
        super().__init__()
        for spec in source.manifest.specs:
            path, _, last = spec.name.rpartition(".")
            layer: nn.Module = self
            for part in path.split("."):
                if part not in layer._modules:
                    layer.add_module(part, nn.Module())
                layer = layer.get_submodule(part)
            layer.register_buffer(last, torch.zeros(spec.shape, dtype=DTYPE_OF[spec.dtype]))

    def assert_is(self, source: Any) -> None:
        held = self.state_dict()
        sent = dict(source.tensors())
        assert held.keys() == sent.keys()
        for name, tensor in sent.items():
            assert_equal_bits((held[name], held[name]), (tensor, tensor))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("delta", ["off", "always"])
def test_updates_and_deltas_of_a_module_that_is_quantized(
    scheme: Any, apply: Any, delta: Any
) -> None:
    """What a delta carries are the quantized bytes that changed."""
    torch.manual_seed(0)  # a row that has the largest value of a block changes the whole block
    model = Linears()
    source = ws.QuantizedSource(model, scheme)
    served = Held(source)
    receiver = ws.WeightReceiver(served, apply=apply)
    with (
        closing(receiver),
        ws.connect(source, to=receiver.handle, delta=delta, packed=True) as sender,
    ):
        for _ in range(2):
            model.step()
            sender.send_weights()
            served.assert_is(source)
        for _ in range(2):
            with torch.no_grad():
                model.up.weight[3] += 0.01
            report = sender.send_weights()
            served.assert_is(source)
    assert report.verified == "held"
    if delta == "always":
        assert report.delta is not None
        assert report.delta.sent
        assert 0 < report.delta.lines < 20


def test_about_half_the_bytes_move() -> None:
    model = Linears()
    source = ws.QuantizedSource(model, "fp8_channel")
    whole = sum(spec.nbytes for spec in ModuleSource(model).manifest.specs)
    quantized = 192 * 288 * 2
    sent = sum(spec.nbytes for spec in source.manifest.specs if "lm_head" not in spec.name)
    assert sent < whole - quantized


def test_memory_is_used_again_when_nobody_has_a_view_of_it() -> None:
    source = ws.QuantizedSource(nn.Sequential(*[Linears() for _ in range(3)]), "fp8_channel")
    places = {t.data_ptr() for _, t in source.tensors() if t.dtype is torch.float8_e4m3fn}
    assert len(places) == 1
    kept = dict(source.tensors())
    again = dict(source.tensors())
    for name, tensor in kept.items():
        assert_equal_bits((tensor, tensor), (again[name], again[name]))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_in_fp8(scheme: str, dtype: torch.dtype) -> None:
    """A row with NaN is NaN. One with infinity is 0, and NaN there. Its scale shows it."""
    weight = torch.randn(300, 40).to(dtype)
    weight[0, 3], weight[140, 0], weight[141, 1] = float("nan"), float("inf"), float("-inf")
    made = quantize(weight, SCHEMES[scheme])
    wanted = by_library(weight, scheme)
    for ours, theirs in zip(made, wanted, strict=True):
        assert torch.equal(ours.float().isnan(), theirs.float().isnan())
        assert torch.equal(ours.float().nan_to_num(), theirs.float().nan_to_num())
    if scheme == "fp8_channel":
        values, scales = made[0].float(), made[1]
        assert values[0].isnan().all()
        assert values[140, 0].isnan()
        assert not values[140, 1:].any()
        assert scales[0].isnan()
        assert scales[140].isinf()


def test_nan_and_infinity_in_int8() -> None:
    """It has no NaN: the scale alone shows it, and what is computed is NaN."""
    weight = torch.randn(5, 40)
    weight[0, 3], weight[2, 0] = float("nan"), float("inf")
    values, scales = quantize(weight, SCHEMES["int8_channel"])
    assert values[0].count_nonzero() == values[2].count_nonzero() == 0
    assert (values.float() * scales)[[0, 2]].isnan().all()
    finite = [1, 3, 4]
    wanted = by_library(weight[finite], "int8_channel")
    assert_equal_bits((values[finite].clone(), scales[finite].clone()), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (1, 1)])
def test_weights_without_elements(scheme: str, shape: tuple[int, int]) -> None:
    shape = (shape[0], 32 * shape[1]) if scheme == "mxfp8" else shape
    values, scales = quantize(torch.ones(shape, dtype=torch.bfloat16), SCHEMES[scheme])
    spec = TensorSpec("x.weight", "bfloat16", shape)
    assert tuple(values.shape) == shape
    assert tuple(scales.shape) == SCHEMES[scheme].scale_spec(spec).shape
    assert scheme == "mxfp8" or not (scales == 0).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_of_a_layer_without_rows(scheme: Any) -> None:
    """A rank without experts has such ones; and rows of zeros stay zeros."""
    tensors = {"a.weight": torch.randn(0, 64), "b.weight": torch.randn(4, 64)}
    tensors["b.weight"][2] = 0
    source = ws.QuantizedSource(tensors, scheme)
    served = Held(source)
    receiver = ws.WeightReceiver(served)
    with closing(receiver), ws.connect(source, to=receiver.handle) as sender:
        assert sender.send_weights().verified == "held"
    served.assert_is(source)
    assert not served.state_dict()["b.weight"][2].float().count_nonzero()


@pytest.mark.parametrize("kind", ["state dict", "callable", "module"])
def test_which_tensors_are_quantized(kind: str) -> None:
    """Of a module by the classes of its layers, of others by name and shape."""
    model = Linears()
    model.head_too = nn.Linear(192, 40, bias=False, dtype=torch.bfloat16)
    model.head_too.weight = model.embed_tokens.weight
    given = {"state dict": model.state_dict(), "callable": model.state_dict, "module": model}[kind]
    scheme = QuantizationScheme(dtype="float8_e4m3fn", ignore=IGNORED)
    source = ws.QuantizedSource(given, scheme)
    assert source.quantized == {"up.weight", "down.weight"}
    names = [spec.name for spec in source.manifest.specs]
    for name in source.quantized:
        assert names[names.index(name) + 1] == name + "_scale"


def test_tied_linear_layers_have_one_scale_by_two_names() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.b.weight = model.a.weight
    source = ws.QuantizedSource(model, "int8_channel")
    assert source.manifest.aliases == {"b.weight": "a.weight", "b.weight_scale": "a.weight_scale"}
    served = nn.Module()
    served.a, served.b = nn.Module(), nn.Module()
    for layer in (served.a, served.b):
        layer.register_buffer("weight", torch.zeros(4, 4, dtype=torch.int8))
        layer.register_buffer("weight_scale", torch.zeros(4, 1))
    receiver = ws.WeightReceiver(served)
    with closing(receiver), ws.connect(source, to=receiver.handle) as sender:
        sender.send_weights()
    held = served.state_dict()
    made = quantize(model.a.weight, SCHEMES["int8_channel"])
    assert_equal_bits((held["b.weight"], held["b.weight_scale"]), made)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_one_by_one_are_quantized_and_their_router_is_not(scheme: Any) -> None:
    """Each expert as the library quantizes it, though the trainer holds all of them in one."""
    model, layer = nn.Module(), nn.Module()
    model.mlp = layer
    layer.gate = nn.Parameter(torch.randn(2, 32))
    layer.experts = nn.ParameterDict(
        {"gate_up_proj": torch.randn(2, 128, 32), "down_proj": torch.randn(2, 32, 64)}
    )
    source = ws.QuantizedSource(ws.PerExpertSource(model), scheme)
    assert len(source.quantized) == 6
    got, load = received()
    receiver = ws.WeightReceiver(load)
    with closing(receiver), ws.connect(source, to=receiver.handle) as sender:
        sender.send_weights()
    for expert in range(2):
        halves = layer.experts["gate_up_proj"][expert].detach()
        down = layer.experts["down_proj"][expert].detach()
        for name, weight in (("gate", halves[:64]), ("up", halves[64:]), ("down", down)):
            found = f"mlp.experts.{expert}.{name}_proj.weight"
            wanted = by_library(weight.contiguous(), scheme)
            assert_equal_bits((got[found], got[found + "_scale"]), wanted)


@pytest.mark.parametrize("given", ["quantized on the way", "already"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_neither_a_weight_nor_its_scale_is_sent_alone(scheme: Any, given: str) -> None:
    model = Linears()
    source: Any = ws.QuantizedSource(model, scheme)
    as_given = source if given != "already" else dict(source.tensors())
    served = Held(source)
    receiver = ws.WeightReceiver(served)
    weight, scale = quantize(model.up.weight + 1, SCHEMES[scheme])
    pairs = [("up.weight", weight), ("up.weight_scale", scale)]
    with closing(receiver), ws.connect(as_given, to=receiver.handle) as sender:
        sender.send_weights()
        for one, other in (pairs, reversed(pairs)):
            with (
                pytest.raises(ws.ConfigError, match=rf"^a quantized.*{one[0]} without {other[0]}$"),
                sender.update(partial=True) as update,
            ):
                update.send([one])
            assert receiver.version == 1
            served.assert_is(source)
        with sender.update(partial=True) as update:
            update.send(pairs)
        held = served.state_dict()
        assert_equal_bits((held["up.weight"], held["up.weight_scale"]), (weight, scale))


def refused(source: object, scheme: Any, match: str) -> None:
    with pytest.raises(ws.ConfigError, match=match) as raised:
        ws.QuantizedSource(source, scheme)
    assert "\n" not in str(raised.value)


def test_a_source_that_is_quantized_already_is_refused() -> None:
    model = Linears()
    source = ws.QuantizedSource(model, "fp8_channel")
    refused(source, "fp8_channel", r"quantized already: up\.weight \(float8_e4m3fn\)")
    refused(dict(source.tensors()), "int8_channel", "quantized already")
    refused({"x.weight_packed": torch.ones(2, dtype=torch.int32)}, "fp8_block", "x.weight_packed")
    of_amd = torch.ones(4, 4).to(torch.float8_e4m3fnuz)
    refused({"x.weight": of_amd}, "fp8_channel", r"already: x\.weight \(float8_e4m3fnuz\)")


def test_mxfp8_of_float64_is_refused_and_cast_before() -> None:
    tensors = {"x.weight": torch.randn(4, 32, dtype=torch.float64)}
    refused(tensors, "mxfp8", r"not of float64: x\.weight; give QuantizedSource a dtype")
    made = dict(ws.QuantizedSource(tensors, "mxfp8", dtype=torch.float32).tensors())
    wanted = by_library(tensors["x.weight"].float(), "mxfp8")
    assert_equal_bits((made["x.weight"], made["x.weight_scale"]), wanted)


def test_unknown_schemes_are_refused_by_name() -> None:
    refused(Linears(), "fp6", "no quantization scheme 'fp6'; there are fp8_channel")
    refused({"norm.weight": torch.ones(4)}, "fp8_channel", "no linear weight to quantize")
    wrong: dict[str, Any]
    for wrong in (
        {"dtype": "uint8"},
        {"dtype": "int8", "block": (128, 128)},
        {"dtype": "float8_e4m3fn", "block": (0, 4)},
        {"dtype": "int8", "ignore": ("re:(",)},
        {"dtype": "int8", "scale": "scale"},
        {"dtype": "float8_e4m3fn", "scale_dtype": "uint8"},
        {"dtype": "float8_e4m3fn", "scale_dtype": "uint8", "block": (32, 1)},
        {"dtype": "float8_e4m3fn", "scale_dtype": "int8"},
        {"dtype": "float8_e4m3fn", "scale_dtype": "float8_e4m3fn"},
    ):
        with pytest.raises(ws.ConfigError):
            QuantizationScheme(**wrong)


def changed(**weights: Any) -> dict[str, Any]:
    config = config_of("fp8_channel")
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


UNKNOWN: dict[str, dict[str, Any]] = {
    "quant_method 'awq'": {"quant_method": "awq", "bits": 4},
    "quant_method 'fp8'": {"quant_method": "fp8", "activation_scheme": "static"},
    "8 bits, float, by group": changed(strategy="group", group_size=64, scale_dtype="torch.uint8"),
    "4 bits, int, by group": changed(num_bits=4, type="int", strategy="group"),
    "8 bits, float, by tensor": changed(strategy="tensor"),
    "asymmetric": changed(symmetric=False),
    "8 bits, int, by block": changed(strategy="block", type="int"),
    "'block_structure'": changed(strategy="block"),
    "scales in torch.float32": changed(scale_dtype="torch.float32"),
    "a transform_config": {**config_of("fp8_channel"), "transform_config": {"config_groups": {}}},
    "a sparsity_config": {**config_of("fp8_channel"), "sparsity_config": {"format": "dense"}},
    "2 groups": {**config_of("fp8_channel"), "config_groups": {"a": {}, "b": {}}},
    "cannot be read": {"quant_method": "compressed-tensors"},
}


@pytest.mark.parametrize("seen", UNKNOWN)
def test_a_config_of_another_scheme_is_refused_in_one_line(seen: str) -> None:
    with pytest.raises(ws.ConfigError, match=seen) as raised:
        QuantizationScheme.from_config(UNKNOWN[seen])
    assert "\n" not in str(raised.value)


def test_blocks_as_earlier_releases_of_compressed_tensors_write_them() -> None:
    written = changed(strategy="block", block_structure="128x64")
    assert QuantizationScheme.from_config(written).block == (128, 64)


def test_deepseeks_config() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    scheme = QuantizationScheme.from_config(config)
    weight = torch.randn(200, 130, dtype=torch.bfloat16)
    source = ws.QuantizedSource({"up.weight": weight}, scheme)
    sent = dict(source.tensors())
    assert list(sent) == ["up.weight", "up.weight_scale_inv"]
    wanted = by_library(weight.float(), "fp8_block")
    assert_equal_bits((sent["up.weight"], sent["up.weight_scale_inv"]), wanted)


def quantized_receiver(model: nn.Module, config: dict[str, Any] | None) -> ws.WeightReceiver:
    scheme = QuantizationScheme.from_config(config or config_of("fp8_channel"))
    sink = ModuleSink(Held(ws.QuantizedSource(model, scheme)))
    sink.quantization = config
    return ws.WeightReceiver(sink)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_scheme_is_what_the_receiver_says(scheme: str) -> None:
    model = Linears(torch.float32)
    receivers = [quantized_receiver(Linears(torch.bfloat16), config_of(scheme)) for _ in range(2)]
    to = [receiver.handle for receiver in receivers]
    with ws.connect(model, to=to, quantize="receiver", dtype=torch.bfloat16) as sender:
        model.step()
        sender.send_weights()
    rounded = Linears(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    wanted = QuantizationScheme.from_config(config_of(scheme))
    for receiver in receivers:
        module: Any = receiver.sink.module  # type: ignore[attr-defined]  # a ModuleSink's
        module.assert_is(ws.QuantizedSource(rounded, wanted))
        receiver.close()


def test_what_receivers_say_of_their_scheme_and_cannot_be_done() -> None:
    model = Linears()
    schemes = [config_of("fp8_channel"), config_of("fp8_block"), None]
    first, second, silent = (quantized_receiver(model, config) for config in schemes)
    source = ws.QuantizedSource(model, "fp8_channel")
    for what, to, match in (
        (model, [first, second], "unlike schemes; connect to those of each"),
        (model, [first, silent], "says no quantization scheme"),
        (source, [first], "quantized already"),
    ):
        with pytest.raises(ws.ConfigError, match=match):
            ws.connect(what, to=[one.handle for one in to], quantize="receiver")
    wrong: Any = "fp8_channel"
    with pytest.raises(ws.ConfigError, match='quantize is "receiver", not'):
        ws.connect(model, to=first.handle, quantize=wrong)
    with pytest.raises(ws.ConfigError, match="name a dtype"):
        ws.connect(model, to=first.handle, quantize="receiver", dtype="receiver")
    first.sink.quantization = UNKNOWN["quant_method 'awq'"]
    with pytest.raises(ws.ConfigError, match="quant_method 'awq' is not known here"):
        ws.connect(model, to=first.handle, quantize="receiver")
    for receiver in (first, second, silent):
        receiver.close()


def test_a_quantized_receiver_of_other_weights_says_so() -> None:
    receiver = quantized_receiver(Linears(), config_of("fp8_channel"))
    for model in (Linears(), {"up.weight": torch.ones(288, 192, dtype=torch.float8_e4m3fn)}):
        with (
            pytest.raises(ws.ManifestMismatchError, match=r'connect\(quantize="receiver"\)'),
            ws.connect(model, to=receiver.handle) as sender,
        ):
            sender.send_weights()
    receiver.close()


def test_a_server_that_comes_back_with_another_scheme_is_refused() -> None:
    model = Linears()
    first = quantized_receiver(model, config_of("fp8_channel"))
    second = quantized_receiver(model, config_of("fp8_block"))
    now = [first]

    def restarted(message: dict[str, Any]) -> dict[str, Any]:
        return dict(now[0].handle(message))

    with ws.connect(model, to=restarted, quantize="receiver") as sender:
        sender.send_weights()
        now[0] = second
        held = second.sink.module.state_dict()  # type: ignore[attr-defined]  # a ModuleSink's
        before = {name: tensor.clone() for name, tensor in held.items()}
        with pytest.raises(ws.ManifestMismatchError, match=r"up\.weight_scale: offered") as raised:
            sender.send_weights()
        assert "\n" not in str(raised.value)
    assert second.version == 0
    for name, tensor in before.items():
        assert_equal_bits((held[name], held[name]), (tensor, tensor))
    with ws.connect(model, to=restarted, quantize="receiver") as sender:
        assert sender.send_weights().version == 1
    for receiver in (first, second):
        receiver.close()
