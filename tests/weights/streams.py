"""Random manifests and streams, for tests of layouts and copies."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from weightsync.specs import DTYPE_NBYTES, Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, as_bytes
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import ALIGNMENT, StreamLayout

SHAPES = st.lists(st.integers(0, 9), max_size=3) | st.lists(st.integers(1, 900), max_size=1)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    columns = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_NBYTES)), SHAPES), max_size=12))
    specs = (TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(columns))
    return Manifest(tuple(specs))


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most).map(lambda n: n * ALIGNMENT)


def every_dtype() -> Manifest:
    """One tensor of each dtype with an odd number of elements, a scalar and an empty one."""
    specs = [TensorSpec(dtype, dtype, (3, 37)) for dtype in DTYPE_NBYTES]
    return Manifest(
        (
            *specs,
            TensorSpec("scalar", "bfloat16", ()),
            TensorSpec("empty", "float32", (4, 0)),
            TensorSpec("large", "int64", (700,)),
        )
    )


def random_tensors(manifest: Manifest, seed: int = 0) -> list[torch.Tensor]:
    """Tensors of random bits (booleans of 0 and 1), each in memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for spec in manifest.specs:
        high = 2 if spec.dtype == "bool" else 256
        flat = torch.randint(0, high, (spec.nbytes,), dtype=torch.uint8, generator=generator)
        made.append(flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape))
    return made


def flat_memory(plan: StreamLayout) -> tuple[torch.Tensor, Memory]:
    buffer = torch.zeros(plan.nbytes, dtype=torch.uint8)
    return buffer, Memory.of_stream(plan, buffer)


def scattered_memory(manifest: Manifest, seed: int | None = None) -> Memory:
    """Return every tensor in new memory; zeros without a seed."""
    tensors = random_tensors(manifest, seed or 0)
    return Memory([as_bytes(t) if seed is not None else as_bytes(t).zero_() for t in tensors])


def stream_bytes(plan: StreamLayout, tensors: list[torch.Tensor]) -> bytes:
    """The stream, laid out by hand."""
    out = bytearray(plan.nbytes)
    for offset, tensor in zip(plan.offsets, tensors, strict=True):
        raw = bytes(as_bytes(tensor.contiguous()).tolist())
        out[offset : offset + len(raw)] = raw
    return bytes(out)
