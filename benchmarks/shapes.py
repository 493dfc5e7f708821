"""Workloads of the benchmarks: lists of tensors, synthetic or of real models. Imports no torch.

`width` narrows a real model: hidden size, feed-forward size and the widths of attention are divided
by it, while layers, experts, the vocabulary and each head's size (so the norms of queries and keys)
stay. The number of tensors is that of the real model, whatever the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

DType = Literal["bfloat16", "float16", "float32"]
Shape = tuple[int, ...]
ITEM_NBYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
HEAD = 128
QWEN3_VOCABULARY = 151_936


class Tensor(NamedTuple):
    """Name, shape and dtype of one parameter."""

    name: str
    shape: Shape
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What changes between updates: a share of all values at random, or as a step was recorded.

    `recorded` is the step's learning rate and number, as `1e-06/6`.
    """

    share: float = 0.0
    recorded: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload; `name` is its key in results, `title` its name in tables.

    `step` says which few values change between updates, None if it does not matter.
    """

    name: str
    title: str
    tensors: tuple[Tensor, ...]
    step: Step | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtype(self) -> str:
        """The dtype of all tensors, or `mixed`."""
        dtypes = {tensor.dtype for tensor in self.tensors}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"


def equal(nbytes: int, count: int, dtype: DType = "bfloat16", *, columns: int = 64) -> list[Tensor]:
    """Return `count` equal tensors of about `nbytes` bytes in all, with rows of `columns`."""
    numel = max(1, nbytes // count // ITEM_NBYTES[dtype])
    columns = columns if numel % columns == 0 else 1
    return [Tensor(f"weights.{i}", (numel // columns, columns), dtype) for i in range(count)]


def mixed(nbytes: int, count: int) -> list[Tensor]:
    """Return tensors of three dtypes and of sizes 1 : 2 : 4 : 8, about `nbytes` in all."""
    dtypes: tuple[DType, ...] = ("bfloat16", "float32", "float16")
    shares = [1 << (i % 4) for i in range(count)]
    unit = nbytes / sum(shares)
    return [
        Tensor(f"weights.{i}", (max(1, int(unit * share) // ITEM_NBYTES[dtype]),), dtype)
        for i, share in enumerate(shares)
        for dtype in (dtypes[i % 3],)
    ]


def smollm2() -> list[Tensor]:
    """Return the 272 tensors of SmolLM2-135M: 30 layers, three key heads, a tied head."""
    hidden, ffn, keys = 576, 1536, 192
    return _decoder(
        layers=30,
        hidden=hidden,
        vocabulary=49_152,
        tied=True,
        layer=lambda prefix: (
            *_attention(prefix, hidden, hidden, keys, norms=False),
            *_ffn(f"{prefix}mlp.", hidden, ffn),
        ),
    )


def qwen3_8b(width: int = 1) -> list[Tensor]:
    """Return the 399 tensors of Qwen3-8B, 16.4 GB in bf16 at width 1."""
    hidden, ffn = 4096 // width, 12_288 // width
    queries, keys = 32 * HEAD // width, 8 * HEAD // width
    return _decoder(
        layers=36,
        hidden=hidden,
        vocabulary=QWEN3_VOCABULARY,
        tied=False,
        layer=lambda prefix: (
            *_attention(prefix, hidden, queries, keys, norms=True),
            *_ffn(f"{prefix}mlp.", hidden, ffn),
        ),
    )


def qwen3_30b_a3b(width: int = 1) -> list[Tensor]:
    """Return the 18,867 tensors of Qwen3-30B-A3B as published, 61 GB in bf16 at width 1.

    Every expert has three tensors of its own there; transformers fuses them after loading.
    """
    hidden, ffn, experts = 2048 // width, 768 // width, 128
    queries, keys = 32 * HEAD // width, 4 * HEAD // width
    return _decoder(
        layers=48,
        hidden=hidden,
        vocabulary=QWEN3_VOCABULARY,
        tied=False,
        layer=lambda prefix: (
            *_attention(prefix, hidden, queries, keys, norms=True),
            (f"{prefix}mlp.gate.weight", (experts, hidden)),
            *(
                part
                for expert in range(experts)
                for part in _ffn(f"{prefix}mlp.experts.{expert}.", hidden, ffn)
            ),
        ),
    )


def _decoder(
    *,
    layers: int,
    hidden: int,
    vocabulary: int,
    tied: bool,
    layer: Callable[[str], Sequence[tuple[str, Shape]]],
) -> list[Tensor]:
    def parts() -> Iterator[tuple[str, Shape]]:
        yield "model.embed_tokens.weight", (vocabulary, hidden)
        for number in range(layers):
            prefix = f"model.layers.{number}."
            yield from layer(prefix)
            yield f"{prefix}input_layernorm.weight", (hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not tied:
            yield "lm_head.weight", (vocabulary, hidden)

    return [Tensor(name, shape, "bfloat16") for name, shape in parts()]


def _attention(
    prefix: str, hidden: int, queries: int, keys: int, *, norms: bool
) -> list[tuple[str, Shape]]:
    own = f"{prefix}self_attn."
    parts: list[tuple[str, Shape]] = [
        (f"{own}q_proj.weight", (queries, hidden)),
        (f"{own}k_proj.weight", (keys, hidden)),
        (f"{own}v_proj.weight", (keys, hidden)),
        (f"{own}o_proj.weight", (hidden, queries)),
    ]
    if norms:
        parts += [(f"{own}q_norm.weight", (HEAD,)), (f"{own}k_norm.weight", (HEAD,))]
    return parts


def _ffn(prefix: str, hidden: int, ffn: int) -> list[tuple[str, Shape]]:
    return [
        (f"{prefix}gate_proj.weight", (ffn, hidden)),
        (f"{prefix}up_proj.weight", (ffn, hidden)),
        (f"{prefix}down_proj.weight", (hidden, ffn)),
    ]
