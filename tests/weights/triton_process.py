"""Triton in a process of its own: interpreted, or compiled for a GPU without having one."""

from __future__ import annotations

import os
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
