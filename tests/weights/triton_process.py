"""Triton in a process of its own: interpreted, or compiled for a GPU without having one."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

from tests.weights.fused_cases import Case, check_case


def interpret() -> None:
    """Set the environment of the process, which Triton reads at import."""
    os.environ["TRITON_INTERPRET"] = "1"


def check_interpreted(cases: list[Case]) -> None:
    """Raise AssertionError if the results of Triton's interpreter are wrong."""
    from weightsync.cuda import triton_kernels as kernels

    for case in cases:
        check_case(case, kernels, "cpu")


def sum_lines_interpreted(counts: list[int]) -> None:
    """Raise AssertionError if Triton's interpreter adds up lines in another way than torch."""
    import torch

    from weightsync.cuda import triton_kernels as kernels
    from weightsync.weights.lines import memory as lines

    for count in counts:
        words = torch.randint(-(1 << 62), 1 << 62, (8 * count,))
        expected = lines.line_sums(words.view(torch.uint8), 11)
        assert torch.equal(kernels.line_sums(words, 11), expected), count


def quantize_interpreted(seed: int) -> None:
    """Raise AssertionError if Triton's interpreter rounds in another way than torch on the host."""
    import torch

    from weightsync.cuda import triton_quantize as kernels
    from weightsync.weights.sources import quantized

    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of what is divided by infinity
    generator = torch.Generator().manual_seed(seed)
    schemes = {
        **quantized.SCHEMES,
        "blocks of 5 x 24": quantized.QuantizationScheme(dtype="float8_e4m3fn", block=(5, 24)),
    }
    for name, scheme in schemes.items():
        large = (130, 160) if scheme.block == (128, 128) else (9, 160)
        shapes = [(1, 32), (5, 96)] if scheme.is_mx else [(7, 33), large]
        for dtype, shape in itertools.product(kernels.DTYPES, shapes):
            weight = torch.randn(shape, generator=generator)
            powers = torch.randint(-30, 12, (shape[0], 1), generator=generator)
            weight = (weight * torch.exp2(powers.float())).to(dtype)
            kinds: tuple[str, ...] = ("plain", "zero", "tiny", "huge", "nan", "inf", "-inf")
            if shape == large:
                kinds = "plain", "-inf"
            for kind in kinds:
                made = weight.clone()
                row, column = shape[0] // 2, shape[1] // 3
                if kind == "zero":
                    made[row] = -0.0
                elif kind in ("tiny", "huge"):
                    info = torch.finfo(dtype)
                    made[row] *= info.smallest_normal if kind == "tiny" else info.max / 2**14
                elif kind != "plain":
                    made[row, column] = float(kind)
                found = quantized._by_triton(made, scheme, kernels)
                wanted = quantized._by_torch(made, scheme)
                for ours, theirs in zip(found, wanted, strict=True):
                    _assert_equal_but_signs_of_nan(ours, theirs, f"{name} {dtype} {shape} {kind}")


def compare_before_use() -> None:
    """Raise AssertionError if kernels that round otherwise than torch are used on a device."""
    import torch

    from weightsync.cuda import triton_quantize as kernels
    from weightsync.weights.sources import quantized

    device = torch.device("cpu")  # the comparison itself asks for no GPU
    assert quantized._gpu_kernels(device) is kernels
    quantized._gpu_kernels.cache_clear()
    genuine: Any = kernels.quantize
    kernels.quantize = lambda weight, block, half, *, integers: genuine(
        weight, block, half * 1.01, integers=integers
    )
    assert quantized._gpu_kernels(device) is None
    kernels.quantize = genuine
    quantized._gpu_kernels.cache_clear()


def _assert_equal_but_signs_of_nan(ours: Any, theirs: Any, what: str) -> None:
    import torch

    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    if ours.is_floating_point():
        is_nan = theirs.float().isnan()
        assert torch.equal(ours.float().isnan(), is_nan), what
        ours, theirs = ours[~is_nan], theirs[~is_nan]
    same = ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    assert torch.equal(*same), what


def compile_quantizing_for_hopper(dtype: str, integers: bool) -> list[str]:
    """Return the PTX of the kernels that quantize weights of a dtype."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weightsync.cuda import triton_quantize as kernels

    is_short = dtype == "bfloat16"
    memory = "*i16" if is_short else "*i32"
    block: dict[str, Any] = {
        "HALF": 127.5 if integers else 448.0,
        "EPS": 0x3C000000,
        "IS_SHORT": is_short,
        "INTEGERS": integers,
        "TILE_HIGH": 32,
        "TILE_WIDE": 128,
    }
    sizes = dict.fromkeys(("rows", "columns", "high", "wide", "across"), "i32")
    group: dict[str, Any] = {"IS_SHORT": is_short, "GROUPS": 64}
    listed: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (
            kernels._quantize_block,
            {"weight": memory, "out": "*u8", "scales": memory, **sizes},
            block,
        ),
        (
            kernels._quantize_groups,
            {"weight": memory, "out": "*u8", "exponents": "*u8", "groups": "i32"},
            group,
        ),
    ]
    made = []
    for kernel, signature, constants in listed:
        source = ASTSource(
            fn=kernel,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constexprs={(kernel.arg_names.index(name),): v for name, v in constants.items()},
        )
        target, options = GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}
        compiled = triton.compile(source, target=target, options=options)
        made.append(str(compiled.asm["ptx"]))
    return made


def compile_for_hopper(
    alignment: int, copies: bool, mixes: bool, reads_back: bool = True
) -> dict[str, str]:
    """Return the compiled kernel: Triton's intermediate form and PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weightsync.cuda import triton_kernels as kernels

    kernel: Any = kernels._mix_tiles
    constants = {
        "ALIGNMENT": alignment,
        "ELEMENT": kernels._WORDS[alignment],
        "COPIES": copies,
        "MIXES": mixes,
        "READS_BACK": reads_back and copies,
    }
    source = ASTSource(
        fn=kernel,
        signature={"table": "*i64", "sums": "*i64", **dict.fromkeys(constants, "constexpr")},
        constexprs={(kernel.arg_names.index(name),): v for name, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(2)},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": kernels.NUM_WARPS},
    )
    return {form: str(compiled.asm[form]) for form in ("ttgir", "ptx")}
