"""Linear weights quantized before they are sent, so that half the bytes move.

A weight `X.weight` of a linear layer, `[out, in]`, becomes two tensors that belong together:

    X.weight         float8_e4m3fn or int8   [out, in]
    X.weight_scale   the weight's dtype      [out, 1], or [ceil(out / 128), ceil(in / 128)]
                     uint8 of mxfp8          [out, in / 32], the exponents of powers of 2

`weight * weight_scale` is the weight again; of mxfp8 `weight * 2 ** (weight_scale - 127)`. The
rounding is that of the compressed-tensors package, bit for bit: a server that was started from a
checkpoint of that package holds the same bytes.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, shorten
from weightsync.specs import FLOATING, Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes
from weightsync.weights.copying.copy_plan import host_view
from weightsync.weights.copying.shards import Slice
from weightsync.weights.lines.memory import why_no_kernels
from weightsync.weights.sinks.base import uses
from weightsync.weights.sources.base import ModuleSource, WeightSource, Writers, checked
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.sources.wrapping import WrappingSource, innermost

logger = logging.getLogger(__name__)

SchemeName = Literal["fp8_channel", "fp8_block", "int8_channel", "mxfp8"]
QuantizedDtype = Literal["float8_e4m3fn", "int8"]
_WEIGHT = ".weight"
_UNUSED = uses(torch.empty(1, dtype=torch.uint8))
_MOST_KEPT = 4
_MX_BLOCK = (1, 32)
"""Values that share an exponent in the MX formats."""
_MX_NAN = 255
_SIGNIFICANDS: Mapping[torch.dtype, int] = {
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.float32: 23,
}
"""Bits of a significand in memory."""
_HALF_RANGE: Mapping[str, float] = {"float8_e4m3fn": 448.0, "int8": 127.5}
_OF_WEIGHTS = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of weights that are not quantized yet, and of scales."""
_NOT_HERE = ("transform_config", "sparsity_config")
"""Parts of a config of compressed-tensors whose weights are not only rounded."""
_SCALES = ("weight_scale", "weight_scale_inv")
_OF_QUANTIZED = re.compile(
    r"\.(weight_scale|weight_scale_inv|weight_packed|weight_zero_point|qweight|qzeros|scales)$"
)
_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)\.weight$")


def _half_range(dtype: str) -> float:
    """Return the half of a dtype's range. Raises ConfigError for one that is not quantized to."""
    half = _HALF_RANGE.get(dtype)
    if half is None:
        raise ConfigError(f"weights are quantized to {' or '.join(_HALF_RANGE)}, not {dtype!r}")
    return half


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """How linear weights are quantized, and which are not.

    - `dtype`: of the quantized weights.
    - `block`: rows and columns that share a scale; None: each row, an output channel, has its own.
    - `ignore`: names of layers that stay as they are, or `re:` and a regular expression that
      matches from the beginning of the name.
    - `scale`: the name of a scale, beside that of the weight.
    - `scale_dtype`: the dtype of scales, in which they are computed; None: that of the weight.
      `uint8` with a block of (1, 32) is mxfp8, whose scales are exponents.
    """

    dtype: QuantizedDtype
    block: tuple[int, int] | None = None
    ignore: tuple[str, ...] = ("lm_head",)
    scale: str = "weight_scale"
    scale_dtype: str | None = None

    def __post_init__(self) -> None:
        _half_range(self.dtype)
        if self.scale not in _SCALES:
            raise ConfigError(f"a scale is named {' or '.join(_SCALES)}, not {self.scale!r}")
        if self.block is not None and (self.dtype == "int8" or min(self.block) < 1):
            raise ConfigError(
                f"blocks are (rows, columns) of float8_e4m3fn, not {self.block} of {self.dtype}"
            )
        if self.is_mx and (self.block != _MX_BLOCK or self.dtype != "float8_e4m3fn"):
            raise ConfigError(
                f"scales that are exponents are of {_MX_BLOCK} float8_e4m3fn, not {self.block} of "
                f"{self.dtype}"
            )
        if self.scale_dtype not in (None, "uint8", *_OF_WEIGHTS):
            raise ConfigError(
                f"scales are {', '.join(_OF_WEIGHTS)} or uint8, not {self.scale_dtype!r}"
            )
        for pattern in self.ignore:
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as exc:
                raise ConfigError(f"ignore: {pattern!r} is no regular expression: {exc}") from exc

    @classmethod
    def of(cls, scheme: QuantizationScheme | str) -> QuantizationScheme:
        """Return a scheme by its name; a scheme itself as it is. Raises ConfigError for others."""
        if isinstance(scheme, QuantizationScheme):
            return scheme
        found = SCHEMES.get(str(scheme))
        if found is None:
            raise ConfigError(
                f"no quantization scheme {scheme!r}; there are {', '.join(SCHEMES)}, and "
                "QuantizationScheme(dtype=...)"
            )
        return found

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationScheme:
        """Return the scheme of the `quantization_config` of a checkpoint.

        Those of compressed-tensors with a scale for each channel or block, and `fp8` with blocks,
        as DeepSeek's. Raises ConfigError, which names the scheme, for any other.
        """
        method = config.get("quant_method")
        try:
            if method == "compressed-tensors":
                return _of_compressed_tensors(config)
            if method == "fp8" and config.get("weight_block_size"):
                rows, columns = config["weight_block_size"]
                ignored = config.get("modules_to_not_convert") or config.get("ignored_layers")
                return cls(
                    dtype="float8_e4m3fn",
                    block=(int(rows), int(columns)),
                    ignore=tuple(ignored or ("lm_head",)),
                    scale="weight_scale_inv",
                    scale_dtype="float32",
                )
        except (TypeError, ValueError, AttributeError, KeyError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"quantization_config of {method!r} cannot be read: {exc}") from exc
        raise _unknown(f"quant_method {method!r}")

    @property
    def is_mx(self) -> bool:
        """Whether scales are exponents of 2, in a byte with a bias of 127."""
        return self.scale_dtype == "uint8"

    def ignores(self, layer: str) -> bool:
        """Whether the weight of a layer stays as it is."""
        return any(
            re.match(pattern[3:], layer) is not None
            if pattern.startswith("re:")
            else pattern == layer
            for pattern in self.ignore
        )

    def scale_name(self, weight: str) -> str:
        """Return the name of the scale of `X.weight`."""
        return f"{weight.removesuffix(_WEIGHT)}.{self.scale}"

    def scale_spec(self, weight: TensorSpec) -> TensorSpec:
        """Return the spec of the scale of a weight."""
        rows, columns = weight.shape
        if self.block is None:
            shape = (rows, 1)
        else:
            shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return TensorSpec(self.scale_name(weight.name), self.scale_dtype or weight.dtype, shape)


SCHEMES: Mapping[str, QuantizationScheme] = {
    "fp8_channel": QuantizationScheme(dtype="float8_e4m3fn"),
    "fp8_block": QuantizationScheme(dtype="float8_e4m3fn", block=(128, 128)),
    "int8_channel": QuantizationScheme(dtype="int8"),
    "mxfp8": QuantizationScheme(dtype="float8_e4m3fn", block=_MX_BLOCK, scale_dtype="uint8"),
}
"""The schemes by name. All of them leave `lm_head` as it is."""


def _of_compressed_tensors(config: Mapping[str, Any]) -> QuantizationScheme:
    for part in _NOT_HERE:
        if config.get(part):
            raise _unknown(f"a {part} of compressed-tensors")
    groups = list(config["config_groups"].values())
    if len(groups) != 1:
        raise _unknown(f"{len(groups)} groups of layers of compressed-tensors")
    (group,) = groups
    if group["targets"] != ["Linear"]:
        raise _unknown(f"targets {group['targets']} of compressed-tensors")
    weights = group["weights"]
    strategy, kind, bits = (weights.get(key) for key in ("strategy", "type", "num_bits"))
    dtypes: Mapping[object, QuantizedDtype] = {"float": "float8_e4m3fn", "int": "int8"}
    is_mx = strategy == "group" and _is_mx(weights)
    known = strategy == "channel" or is_mx or (strategy == "block" and kind == "float")
    if bits != 8 or kind not in dtypes or not known or not weights.get("symmetric", True):
        how = "" if weights.get("symmetric", True) else " asymmetric"
        raise _unknown(f"{bits} bits, {kind}, by {strategy}{how}, of compressed-tensors")
    if (
        kind == "int"
        and group.get("input_activations") is None
        and config.get("format")
        not in (
            "int-quantized",
            "naive-quantized",
        )
    ):
        raise _unknown(f"format {config.get('format')!r} of compressed-tensors")
    if not is_mx and weights.get("scale_dtype") is not None:
        raise _unknown(f"scales in {weights['scale_dtype']} of compressed-tensors")
    block = weights["block_structure"] if strategy == "block" else None
    block = _MX_BLOCK if is_mx else block
    if isinstance(block, str):  # earlier releases write 128x128
        block = block.split("x")
    return QuantizationScheme(
        dtype=dtypes[kind],
        block=None if block is None else (int(block[0]), int(block[1])),
        ignore=tuple(config.get("ignore") or ()),
        scale_dtype="uint8" if is_mx else None,
    )


def _is_mx(weights: Mapping[str, Any]) -> bool:
    dtype = str(weights.get("scale_dtype")).removeprefix("torch.")
    return (weights["type"], weights.get("group_size"), dtype) == ("float", _MX_BLOCK[1], "uint8")


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"quantization by {what} is not known here: there are 8 bits as float or int with a scale "
        "for each channel, float8 blocks and mxfp8; send a checkpoint that is quantized so already"
    )


def quantize(
    weight: torch.Tensor, scheme: QuantizationScheme, memory: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight `[out, in]` quantized, and its scales.

    In float8, a row or a block with NaN becomes NaN, one with infinity 0, and NaN there; its scale
    is NaN or infinity. In int8, which has no NaN, these become 0: what is computed with the scale
    is NaN. In mxfp8 the exponent is 255, which is NaN. `memory`, uint8 with as many elements, may
    be used for the weight.
    """
    if scheme.scale_dtype is not None and not scheme.is_mx:
        weight = weight.to(TORCH_DTYPES[scheme.scale_dtype])
    with torch.no_grad():
        weight = weight.detach()
        made = _by_kernel(weight, scheme, memory) or _on_gpu(weight, scheme)
        return _by_torch(weight, scheme) if made is None else made


def _by_torch(
    weight: torch.Tensor, scheme: QuantizationScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    if scheme.is_mx:
        return _by_exponent(weight, scheme)
    if scheme.block is None:
        return _by_row(weight, scheme)
    return _by_block(weight, scheme, scheme.block)


def _by_kernel(
    weight: torch.Tensor, scheme: QuantizationScheme, memory: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what the compiled loop makes; None where there is none for this weight."""
    kernels = _kernels_of(weight)
    return None if kernels is None else _compiled(weight, scheme, memory, kernels)


def _kernels_of(weight: torch.Tensor) -> ModuleType | None:
    """Return the compiled loops; None where there are none, or none for this weight."""
    on_host = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    if not on_host or type(weight) is not torch.Tensor or not weight.numel() or why_no_kernels():
        return None
    return _kernels()


def _on_gpu(
    weight: torch.Tensor, scheme: QuantizationScheme
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what the kernels for a GPU make; None where there are none for this weight.

    Never run on a GPU: in Triton's interpreter only.
    """
    if weight.device.type != "cuda" or type(weight) is not torch.Tensor or not weight.numel():
        return None
    kernels = _gpu_kernels(weight.device)
    if kernels is None or weight.dtype not in kernels.DTYPES:
        return None
    return _by_triton(weight, scheme, kernels)


def _by_triton(
    weight: torch.Tensor, scheme: QuantizationScheme, kernels: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.resolve_neg().contiguous()
    if scheme.is_mx:
        made, scales = kernels.quantize_mx(weight)
    else:
        block = scheme.block or (1, weight.shape[1])
        half, integers = _half_range(scheme.dtype), scheme.dtype == "int8"
        made, scales = kernels.quantize(weight, block, half, integers=integers)
    return made.view(TORCH_DTYPES[scheme.dtype]), scales


@cache
def _gpu_kernels(device: torch.device) -> Any:
    """Return the kernels for a GPU; None where they do not compile, or do not round as the host."""
    try:
        found = import_module("weightsync.cuda.triton_quantize")
        for dtype in found.DTYPES:
            weight = _trial().to(dtype)
            for name, scheme in SCHEMES.items():
                made = _by_triton(weight.to(device), scheme, found)
                wanted = _by_torch(weight, scheme)
                if not all(_have_equal_bits(a.cpu(), b) for a, b in zip(made, wanted, strict=True)):
                    raise RuntimeError(f"{name} of {dtype} is not rounded as torch does")
    except Exception as exc:  # noqa: BLE001  # Triton and its compiler fail in many ways
        logger.warning("torch quantizes weights on %s, more slowly than Triton: %s", device, exc)
        return None
    return found


def _trial() -> torch.Tensor:
    """Return a weight of many magnitudes by which kernels are compared with torch."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 224, generator=generator) * torch.logspace(-3, 3, 224)


def _compiled(
    weight: torch.Tensor,
    scheme: QuantizationScheme,
    memory: torch.Tensor | None,
    kernels: ModuleType,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    made = torch.empty(weight.numel(), dtype=torch.uint8) if memory is None else memory
    loop = _Loop(weight, scheme, kernels)
    if not loop.round(made, 0):
        return None
    return made.view(TORCH_DTYPES[scheme.dtype]).view(weight.shape), loop.scales


class _Loop:
    """The compiled loop for one weight, `bfloat16[rows, columns]` in host memory.

    `scales` are those of all that was rounded so far.
    """

    def __init__(
        self, weight: torch.Tensor, scheme: QuantizationScheme, kernels: ModuleType
    ) -> None:
        rows, columns = weight.shape
        high, wide = scheme.block or (1, columns)
        shape = -(-rows // high), -(-columns // wide)
        self.scales = torch.empty(shape, dtype=torch.uint8 if scheme.is_mx else torch.bfloat16)
        self._sizes = columns, min(high, rows), min(wide, columns)
        self._scheme = scheme
        self._kernels = kernels
        plain = self._keeps = weight.resolve_neg().contiguous()
        # Not `numpy()`: torch resizes no storage of which it has once made such a view.
        self._values = np.frombuffer(host_view(plain.data_ptr(), plain.nbytes), np.uint16)

    def round(self, out: torch.Tensor, begin: int) -> bool:
        """Quantize the values from `begin` on to `out`, uint8[n]; all before were rounded.

        `begin` is a multiple of 32. Returns False, with nothing of use written, for values that
        the loop leaves to torch.
        """
        kernels, scheme, count = self._kernels, self._scheme, out.numel()
        if scheme.is_mx:
            groups = slice(begin // _MX_BLOCK[1], (begin + count) // _MX_BLOCK[1])
            values, exponents = self._values[begin : begin + count], self.scales.view(-1)[groups]
            return bool(kernels.quantize_mx(values, out.numpy(), exponents.numpy()))
        whole: bool = kernels.quantize(
            self._values,
            out.numpy(),
            self.scales.view(torch.uint16).numpy(),
            tuple(map(np.uint64, (*self._sizes, begin))),
            np.float32(_half_range(scheme.dtype)),
            scheme.dtype == "int8",
            kernels.CODES,
        )
        return whole


class _Written:
    """A weight that is quantized into memory that it is given, piece by piece.

    `scales` are whole when the weight is.
    """

    def __init__(self, weight: torch.Tensor, scheme: QuantizationScheme) -> None:
        if scheme.scale_dtype is not None and not scheme.is_mx:
            weight = weight.to(TORCH_DTYPES[scheme.scale_dtype])
        self._weight = weight.detach()
        self._scheme = scheme
        self._at = 0
        self._whole: torch.Tensor | None = None
        kernels = _kernels_of(self._weight)
        self._loop = None if kernels is None else _Loop(self._weight, scheme, kernels)
        if self._loop is None:
            self._round_by_torch()
        else:
            self.scales = self._loop.scales

    def write(self, target: torch.Tensor) -> None:
        """Write the next bytes of the quantized weight to `target`, uint8[n]."""
        begin, self._at = self._at, self._at + target.numel()
        if self._whole is None and self._loop is not None:
            if self._loop.round(target, begin):
                return
            # What the loop has written before has the same bits: it rounds as torch does.
            self._round_by_torch()
        if self._whole is not None:
            target.copy_(self._whole[begin : self._at])

    def _round_by_torch(self) -> None:
        with torch.no_grad():
            made, self.scales = _by_torch(self._weight, self._scheme)
        self._whole = contiguous_bytes(made)


class _Copied:
    """A tensor whose bytes are copied to memory that it is given, piece by piece."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._flat = contiguous_bytes(tensor)
        self._at = 0

    def write(self, target: torch.Tensor) -> None:
        """Write the next bytes of the tensor to `target`, uint8[n]."""
        begin, self._at = self._at, self._at + target.numel()
        target.copy_(self._flat[begin : self._at])


@cache
def _kernels() -> ModuleType | None:
    """Return the compiled loops; None where they cannot be compiled, or do not round as torch."""
    weight = _trial().bfloat16()
    try:
        from weightsync.weights.sources import quantize_kernels as found  # noqa: PLC0415  # `delta`

        for name, scheme in SCHEMES.items():
            made, wanted = _compiled(weight, scheme, None, found), _by_torch(weight, scheme)
            if made is None or not all(map(_have_equal_bits, made, wanted)):
                raise RuntimeError(f"{name} is not rounded as torch does")
    except Exception as exc:  # noqa: BLE001  # a compiler fails in many ways
        logger.warning("torch quantizes weights, more slowly than compiled loops would: %s", exc)
        return None
    return found


def _have_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class _Scratch:
    """Memory for quantized weights, used again when nobody has a view of it any more.

    Memory that is touched for the first time takes longer to write than to quantize. `nbytes` are
    those of the largest weight.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()  # several senders, of a thread each, may have one source

    def take(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return memory of any content for a weight; None for one that no compiled loop takes."""
        if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
            return None
        with self._lock:
            for memory in self._kept:
                if uses(memory) == _UNUSED:
                    return memory[: weight.numel()]
            made = torch.empty(max(self._nbytes, weight.numel()), dtype=torch.uint8)
            if len(self._kept) < _MOST_KEPT:
                self._kept.append(made)
            return made[: weight.numel()]


def _by_row(weight: torch.Tensor, scheme: QuantizationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = TORCH_DTYPES[scheme.dtype]
    if not weight.numel():
        scales = torch.full_like(weight[:, :0].sum(1, keepdim=True), torch.finfo(weight.dtype).eps)
        return weight.to(dtype), scales
    largest = torch.maximum(weight.amax(1, keepdim=True), weight.amin(1, keepdim=True).neg())
    scales = _scales(largest, scheme)
    return _rounded(weight, scales, scheme), scales


def _by_block(
    weight: torch.Tensor, scheme: QuantizationScheme, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    block = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = functional.pad(weight, (0, across * block[1] - columns, 0, down * block[0] - rows))
    blocks = padded.view(down, block[0], across, block[1])
    if not weight.numel():
        return weight.to(TORCH_DTYPES[scheme.dtype]), weight.new_zeros(down, across)
    largest = torch.maximum(blocks.amax((1, 3)), blocks.amin((1, 3)).neg())
    scales = _scales(largest, scheme)
    rounded = _rounded(blocks, scales[:, None, :, None], scheme).view(padded.shape)
    return rounded[:rows, :columns].contiguous(), scales


def _by_exponent(
    weight: torch.Tensor, scheme: QuantizationScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight of mxfp8, and its exponents."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // _MX_BLOCK[1], _MX_BLOCK[1])
    if not weight.numel():
        return weight.to(torch.float8_e4m3fn), weight.new_zeros(groups.shape[:2], dtype=torch.uint8)
    largest = torch.maximum(groups.amax(2), groups.amin(2).neg())
    exponents = _exponents(largest)
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)  # 2**-127 is not normal
    scales = bits.view(torch.float32).to(weight.dtype)
    if weight.dtype is torch.float16:  # such a small one is 0 in float16: the library takes 1
        exponents[scales == 0] = 127
        scales[scales == 0] = 1
    rounded = _rounded(groups, scales[:, :, None], scheme)
    return rounded.view(rows, columns), exponents


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """Return the exponents with which the largest values are in float8's range; 255 for NaN.

    A largest value from 1.75 * 2**e on counts as 2**(e + 1), which may be clamped; the largest of
    float8 is 1.75 * 2**8.
    """
    bits = _SIGNIFICANDS[largest.dtype]
    integer = torch.int32 if largest.dtype is torch.float32 else torch.int16
    power = (largest.view(integer).int() + (1 << (bits - 2))) >> bits
    bias = 15 if largest.dtype is torch.float16 else 127
    found = torch.where(power == 0, 0, power - bias + 127 - 8).clamp(0, _MX_NAN - 1)
    return torch.where(largest.isfinite(), found, _MX_NAN).to(torch.uint8)


def _scales(largest: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """Return the scales for the largest values of what shares one; never 0."""
    scales = largest / _half_range(scheme.dtype)
    return torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)


def _rounded(
    weight: torch.Tensor, scales: torch.Tensor, scheme: QuantizationScheme
) -> torch.Tensor:
    scaled = weight / scales
    scaled += 0.0  # the zero point of compressed-tensors: no zero is negative
    if scheme.dtype == "int8":
        if not scales.isfinite().all():
            scaled.nan_to_num_(nan=0.0)
        return scaled.clamp_(-128, 127).round_().to(torch.int8)
    return scaled.clamp_(-448, 448).to(torch.float8_e4m3fn)


class QuantizedSource(WrappingSource):
    """The tensors of `source`, the weights of linear layers quantized, each followed by its scale.

    `source` is what `connect` takes; `dtype` casts before. `scheme` is a QuantizationScheme, or
    `fp8_channel`, `fp8_block` (128 x 128), `int8_channel` or `mxfp8`.

    Of a module, the weights of `nn.Linear` are quantized, unless another layer shares them, as
    embeddings do. Of other sources, and of tensors that another source makes of a module's: all of
    two dimensions whose name ends with `.weight`, but not embeddings. The layers of `scheme.ignore`
    stay as they are.

    Ranks quantize their shards of rows where each row has its own scale, and send them without a
    gather. Else they gather, and the report says why.

    Raises ConfigError for an unknown scheme, for a source that is quantized already, where there is
    nothing to quantize, and for a weight whose rows mxfp8 cannot cut in groups of 32.
    """

    def __init__(
        self,
        source: object,
        scheme: QuantizationScheme | SchemeName,
        *,
        dtype: Dtype | None = None,
    ) -> None:
        super().__init__(source, dtype=dtype)
        self.scheme = QuantizationScheme.of(scheme)
        before = self.source.manifest
        _refuse_quantized(before)
        names = _linear_weights(self.source)
        places = before.places()
        self.quantized = frozenset(
            spec.name
            for spec in before.specs
            if spec.name in names and not any(map(self._ignores, places[spec.name]))
        )
        if not self.quantized:
            raise ConfigError(
                f"the source has no linear weight to quantize: {shorten(before.index)}; "
                f"left out are {', '.join(self.scheme.ignore) or 'none'}"
            )
        if self.scheme.is_mx:
            _refuse_cut_groups([spec for spec in before.specs if spec.name in self.quantized])
        sizes = [math.prod(spec.shape) for spec in before.specs if spec.name in self.quantized]
        self._scratch = _Scratch(max(sizes))
        aliases = dict(before.aliases)
        for alias, name in before.aliases.items():
            if name in self.quantized:
                aliases[self.scheme.scale_name(alias)] = self.scheme.scale_name(name)
        self._manifest = Manifest(tuple(self._specs(before.specs)), aliases)

    @property
    def manifest(self) -> Manifest:
        """That of the source, with quantized weights, each followed by its scale."""
        return self._manifest

    @property
    def belong_together(self) -> Mapping[str, str]:
        """The name of the scale of each quantized weight: neither is sent without the other."""
        return {name: self.scheme.scale_name(name) for name in self.quantized}

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, quantized one by one when they are requested."""
        scratch = self._scratch
        for name, tensor in pairs:
            if name in self.quantized:
                weight, scales = quantize(tensor, self.scheme, scratch.take(tensor))
                yield name, weight
                del weight
                yield self.scheme.scale_name(name), scales
            else:
                yield name, tensor

    writes_pieces = True

    def writers(self) -> Writers | None:
        """Return what writes each tensor: quantized weights where they go, without a copy.

        None of a subclass, which may make other tensors.
        """
        return self._writers() if type(self).convert is QuantizedSource.convert else None

    def _writers(self) -> Writers:
        pairs = checked(self.source.tensors(), self.source.manifest)
        for (name, tensor), spec in zip(pairs, self.source.manifest.specs, strict=True):
            tensor = tensor.to(TORCH_DTYPES[spec.dtype])  # noqa: PLW2901  # as `converted` does
            if name in self.quantized:
                written = _Written(tensor, self.scheme)
                yield name, written.write
                yield self.scheme.scale_name(name), _Copied(written.scales).write
            else:
                yield name, _Copied(tensor).write

    def hold(self, held: Holdings) -> Holdings:
        """Return the boxes of rows, quantized; the reasons where a box does not have whole rows."""
        cut = {
            name: why
            for name, box in zip(held.names, held.boxes, strict=True)
            if name in self.quantized and (why := self._why_gathered(box))
        }
        if cut:
            return Holdings([], [], tuple, gathered=cut, stays=False)
        index = self.source.manifest.index
        dtypes = [TORCH_DTYPES[self.source.manifest.specs[index[n]].dtype] for n in held.names]
        parts: list[tuple[str, Slice]] = []
        for name, box in zip(held.names, held.boxes, strict=True):
            parts.append((name, box))
            if name in self.quantized:
                shape = self.scheme.scale_spec(self.source.manifest.specs[index[name]]).shape
                whole = self.scheme.block is not None and self.scheme.block[0] > 1
                rows = ((0, shape[0]),) if whole else box.spans[0]
                scale = Slice(shape, (rows, ((0, shape[1]),)))
                parts.append((self.scheme.scale_name(name), scale))

        sizes = [math.prod(box.local_shape) for name, box in parts if name in self.quantized]
        scratch = _Scratch(max(sizes, default=0))

        def read() -> Iterator[torch.Tensor]:
            for (name, tensor), dtype in zip(held.pairs(), dtypes, strict=True):
                if name in self.quantized:
                    local = tensor.detach().to(dtype)
                    yield from quantize(local, self.scheme, scratch.take(local))
                else:
                    yield tensor

        return Holdings(
            [name for name, _ in parts],
            [box for _, box in parts],
            read,
            buffers=held.buffers,
            stays=False,
            may_wait=held.may_wait,
        )

    def _why_gathered(self, box: Slice) -> str:
        if self.scheme.block is not None and self.scheme.block[0] > 1 and not box.is_whole:
            return "a shard may cut the blocks that share a scale"
        if box.spans[1] != ((0, box.shape[1]),):
            return "the shards cut the rows that share a scale"
        return ""

    def _ignores(self, name: str) -> bool:
        return self.scheme.ignores(name.removesuffix(_WEIGHT))

    def _specs(self, specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        for spec in specs:
            if spec.name in self.quantized:
                yield replace(spec, dtype=self.scheme.dtype)
                yield self.scheme.scale_spec(spec)
            else:
                yield spec


def _refuse_quantized(manifest: Manifest) -> None:
    """Raise ConfigError for tensors that are quantized weights, or scales of some."""
    quantized = (FLOATING | {"int8", "uint8"}) - set(_OF_WEIGHTS)
    found = [
        f"{spec.name} ({spec.dtype})"
        for spec in manifest.specs
        if _OF_QUANTIZED.search(spec.name)
        or (spec.name.endswith(_WEIGHT) and spec.dtype in quantized)
    ]
    found += [f"{name} (of torchao)" for name in manifest.descriptions]
    if found:
        raise ConfigError(
            f"the source is quantized already: {shorten(found)}; send it as it is, without "
            "QuantizedSource and quantize="
        )


def _refuse_cut_groups(specs: Sequence[TensorSpec]) -> None:
    long = [spec.name for spec in specs if spec.dtype == "float64"]
    if long:
        raise ConfigError(
            f"mxfp8 is made of float32, float16 and bfloat16, not of float64: {shorten(long)}; "
            "give QuantizedSource a dtype, to which they are cast before"
        )
    cut = [f"{spec.name} {list(spec.shape)}" for spec in specs if spec.shape[1] % _MX_BLOCK[1]]
    if cut:
        raise ConfigError(
            f"mxfp8 has a scale for each 32 values of a row, and these rows are no multiple of "
            f"that: {shorten(cut)}; name their layers in ignore"
        )


def _linear_weights(source: WeightSource) -> set[str]:
    """Return the names of the weights of linear layers, as `source` sends them."""
    manifest, inner = source.manifest, innermost(source)
    known: dict[str, bool] = {}
    if isinstance(inner, ModuleSource):
        linear = _weights_of_linear(inner.module)
        names, tensors = inner.made_of()
        known = {name: id(tensor) in linear for name, tensor in zip(names, tensors, strict=True)}
    found = set()
    for spec in manifest.specs:
        if len(spec.shape) != 2 or spec.dtype not in FLOATING or not spec.name.endswith(_WEIGHT):
            continue
        names_of = [spec.name, *(a for a, name in manifest.aliases.items() if name == spec.name)]
        by_name = not any(map(_EMBEDDING.search, names_of))
        if known.get(spec.name, by_name):
            found.add(spec.name)
    return found


def _weights_of_linear(module: nn.Module) -> set[int]:
    """Return the ids of the weights that linear layers alone have."""
    linear: set[int] = set()
    others: set[int] = set()
    for layer in module.modules():
        own = {id(parameter) for parameter in layer._parameters.values() if parameter is not None}
        if isinstance(layer, nn.Linear):
            linear |= own
        else:
            others |= own
    return linear - others


def scheme_of(said: Sequence[tuple[str, Any]]) -> QuantizationScheme:
    """Return the scheme that receivers say, each with its name and its quantization_config.

    Raises ConfigError where one says none, for unlike schemes, and as `from_config` does.
    """
    silent = [target for target, config in said if not config]
    if silent:
        raise ConfigError(
            f'quantize="receiver": {shorten(silent)} says no quantization scheme: it serves its '
            "weights unquantized, or quantizes them itself; connect without quantize="
        )
    schemes = {QuantizationScheme.from_config(config) for _, config in said}
    if len(schemes) > 1:
        targets = shorten(target for target, _ in said)
        raise ConfigError(
            f'quantize="receiver": {targets} have unlike schemes; connect to those of '
            "each scheme by itself"
        )
    return schemes.pop()
