"""The fused copy: its tables on the host, its kernel in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from tests.protocol import plants
from tests.protocol.plants import TENSOR_NBYTES, Plant, Scene
from tests.weights import triton_process
from tests.weights.fused_cases import Case, HostKernel, check_case, host_mix64
from weightsync.cuda.tiles import TILE_WORDS
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying import fused
from weightsync.weights.copying.checksums import WORD
from weightsync.weights.copying.copy_plan import DeviceCopyUnit
from weightsync.weights.copying.fingerprint import mix64
from weightsync.weights.copying.fused import (
    Batch,
    PairCopies,
    chunk_batches,
    fuse,
    hashers,
    kernel_of,
)
from weightsync.weights.copying.layout import StreamLayout

WAIT_S = 100.0
TILE_NBYTES = TILE_WORDS * WORD

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which torch for the CPU does not bring: pip install --no-deps triton",
)
SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(1, 300).map(lambda words: words * WORD),
    st.sampled_from([TILE_NBYTES, TILE_NBYTES + 8, 2 * TILE_NBYTES + 3, TILE_NBYTES - 1]),
)
SHIFTS = st.tuples(st.sampled_from([0, 0, 8, 4, 2, 1]), st.sampled_from([0, 0, 8, 4, 6, 3]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = tuple(draw(st.lists(SIZES, min_size=1, max_size=5)))
    shifts = tuple(draw(SHIFTS) for _ in sizes)
    unit_nbytes = draw(st.sampled_from([64, 512, TILE_NBYTES, 1 << 20]))
    bucket_nbytes = draw(st.sampled_from([512, TILE_NBYTES + 64, 1 << 20]))
    largest = max(*sizes, 64)
    if largest > 8 * unit_nbytes:
        unit_nbytes = TILE_NBYTES
    if largest > 8 * bucket_nbytes:
        bucket_nbytes = TILE_NBYTES
    return Case(sizes, shifts, unit_nbytes, bucket_nbytes)


ODD = Case(
    sizes=(1, 7, 8, 0, 63, TILE_NBYTES, TILE_NBYTES + 9, 4096, 3),
    shifts=((0, 0), (1, 0), (8, 8), (0, 0), (2, 6), (0, 0), (4, 4), (0, 8), (3, 1)),
    unit_nbytes=TILE_NBYTES,
    bucket_nbytes=2 * TILE_NBYTES,
)


def test_odd_tensors() -> None:
    check_case(ODD, HostKernel(), "cpu")


@given(cases())
@settings(max_examples=30, deadline=None)
def test_any_tensors(case: Case) -> None:
    check_case(case, HostKernel(), "cpu")


@pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_seen(plant: Plant) -> None:
    flat = torch.cat([plants.content(1), plants.content(2)])
    before = host_mix64(flat)
    assert before == mix64(flat)
    plant(Scene(flat[:TENSOR_NBYTES], flat[TENSOR_NBYTES:], plants.content(3)))
    assert host_mix64(flat) != before


def test_a_batch_made_in_inference_mode_serves_outside_of_it() -> None:
    source = torch.arange(100, dtype=torch.uint8)
    with torch.inference_mode():
        batch = Batch([DeviceCopyUnit((torch.zeros_like(source),), (source,), ())], HostKernel())
    for _ in range(2):
        batch.launch()
        assert batch.fingerprints() == [mix64(source)]


def test_tensors_that_are_packed_may_be_freed() -> None:
    plan = StreamLayout(Manifest((TensorSpec("t", "uint8", (64,)),)), bucket_nbytes=64)
    tensor = torch.zeros(64, dtype=torch.uint8)
    buckets = [torch.zeros(64, dtype=torch.uint8)]
    alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    batches = chunk_batches(plan, [tensor], buckets, verify=True, kernel=HostKernel())
    assert batches
    del tensor
    assert alive.expired()  # type: ignore[no-untyped-call]  # torch's


class StrayKernel(HostKernel):
    """Reads every tile eight bytes too late."""

    def _do(self, source: int, *rest: object) -> None:
        super()._do(source + WORD, *rest)  # type: ignore[arg-type]


def test_a_kernel_that_reads_elsewhere_is_found_out() -> None:
    with pytest.raises(AssertionError):
        check_case(ODD, StrayKernel(), "cpu")


@pytest.mark.parametrize("kernel", [None, HostKernel()], ids=["torch", "fused"])
def test_pairs_are_copied_bit_for_bit_or_cast(kernel: HostKernel | None) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    sources = [
        every.view(torch.bfloat16),
        every[:77].view(torch.float16).view(7, 11).t(),  # strided
        every[1:6].view(torch.bfloat16),  # no whole word, and not aligned
        torch.zeros(0),
        torch.tensor(3.5),
        torch.arange(5, dtype=torch.uint8).view(torch.bool),
        torch.arange(4).to(torch.complex128),
        torch.arange(6).to(torch.complex64),
    ]
    targets = [torch.zeros_like(source) for source in sources]
    cast = torch.tensor([1.0, 2.5]), torch.zeros(2, dtype=torch.bfloat16)
    written = targets[0]._version
    copies = PairCopies([*zip(targets, sources, strict=True), cast[::-1]], kernel=kernel)
    for _ in range(2):
        copies.enqueue()
        for target, source in zip(targets, sources, strict=True):
            assert (
                target.contiguous()
                .view(-1)
                .view(torch.uint8)
                .equal(source.contiguous().view(-1).view(torch.uint8))
            )
            target.zero_()
        assert cast[1].tolist() == [1, 2.5]
    assert targets[0]._version - written == 4, "torch counts writes by the kernel too"


def test_shards_stay_with_torch() -> None:
    flat = torch.arange(64, dtype=torch.uint8)
    rows = flat.view(torch.int64)[2:4], torch.zeros(2, dtype=torch.int64)
    unit = DeviceCopyUnit((rows[1],), (rows[0],), (), arrived=(flat,))
    assert fuse([unit], verify=True, kernel=HostKernel()) == [unit]


def test_memory_of_the_host_stays_with_torch() -> None:
    flat = torch.arange(100, dtype=torch.uint8)
    unit = DeviceCopyUnit((flat.clone(),), (flat,), ())
    assert kernel_of([unit], among=1) is None
    assert fuse([unit], verify=True) == [unit]
    assert [hasher() for hasher in hashers([unit])] == [unit.fingerprint()]


def test_a_kernel_that_fails_falls_open_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(fused, "import_module", missing)
    fused._proved.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert fused._proved(torch.device("cpu")) is None
    finally:
        fused._proved.cache_clear()
    (record,) = caplog.records
    assert "No module named 'triton'" in record.getMessage()


def test_a_kernel_that_does_not_do_as_torch_does_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "import_module", lambda _: StrayKernel())
    fused._proved.cache_clear()
    try:
        assert fused._proved(torch.device("cpu")) is None
    finally:
        fused._proved.cache_clear()
    assert "as torch does" in caplog.text


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=triton_process.interpret) as pool:
        yield pool


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    assert "TRITON_INTERPRET" not in os.environ
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@needs_triton
def test_odd_tensors_interpreted(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(triton_process.check_interpreted, [ODD]).result(WAIT_S)


@needs_triton
def test_sums_of_lines_interpreted(interpreter: ProcessPoolExecutor) -> None:
    counts = [1, 7, 255, 256, 257, 1000]
    interpreter.submit(triton_process.sum_lines_interpreted, counts).result(WAIT_S)


@needs_triton
def test_weights_quantized_interpreted(interpreter: ProcessPoolExecutor) -> None:
    """With NaN, infinity, zeros, and shapes that are no multiple of a block; all schemes."""
    interpreter.submit(triton_process.quantize_interpreted, 0).result(WAIT_S)


@needs_triton
def test_kernels_that_do_not_quantize_as_torch_are_not_used(
    interpreter: ProcessPoolExecutor,
) -> None:
    interpreter.submit(triton_process.compare_before_use).result(WAIT_S)


@needs_triton
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantizing_compiles_with_exact_divisions(
    compiler: ProcessPoolExecutor, dtype: str, integers: bool
) -> None:
    """What the interpreter cannot show: a GPU's own division is approximate, and flushes zeros."""
    made = compiler.submit(triton_process.compile_quantizing_for_hopper, dtype, integers)
    for ptx in made.result(WAIT_S):
        assert "div.rn.f32" in ptx
        assert not re.search(r"div\.(full|approx)|div\.rn\.ftz|add\.\w*\.?ftz", ptx)


@needs_triton
@given(st.lists(cases(), min_size=1, max_size=3))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_tensors_interpreted(interpreter: ProcessPoolExecutor, found: list[Case]) -> None:
    interpreter.submit(triton_process.check_interpreted, found).result(WAIT_S)


@needs_triton
@pytest.mark.parametrize("copies", [True, False])
def test_whole_tiles_move_16_bytes_at_a_time(compiler: ProcessPoolExecutor, copies: bool) -> None:
    made = compiler.submit(triton_process.compile_for_hopper, 16, copies, True).result(WAIT_S)
    if copies:
        assert re.search(r"\bld\.global\.v2\.b64", made["ptx"])
        assert re.search(r"\bst\.global\.v2\.b64", made["ptx"])
        assert re.search(r"\bld\.volatile\.global\.v2\.b64", made["ptx"])
        # "gpu.barrier" or "ttg.barrier", by Triton's version; its name is in locations, too.
        copied, mixed = re.split(r"^ *(?:gpu|ttg)\.barrier", made["ttgir"], flags=re.MULTILINE)
        assert "isVolatile" in mixed
        assert "isVolatile" not in copied
    else:
        assert re.search(r"\bld\.global\.v2\.b64", made["ptx"])
        assert "st.global" not in made["ptx"]


@needs_triton
def test_what_is_packed_is_read_once(compiler: ProcessPoolExecutor) -> None:
    made = compiler.submit(triton_process.compile_for_hopper, 16, True, True, False).result(WAIT_S)
    assert re.search(r"\bld\.global\.v2\.b64", made["ptx"])
    assert re.search(r"\bst\.global\.v2\.b64", made["ptx"])
    assert "ld.volatile" not in made["ptx"]
    assert not re.search(r"^ *(?:gpu|ttg)\.barrier", made["ttgir"], flags=re.MULTILINE)


@needs_triton
@pytest.mark.parametrize("alignment", [8, 4, 2, 1])
def test_every_alignment_compiles(compiler: ProcessPoolExecutor, alignment: int) -> None:
    made = compiler.submit(triton_process.compile_for_hopper, alignment, True, True)
    assert "atom.global" in made.result(WAIT_S)["ptx"]


@pytest.mark.gpu
@needs_triton
class TestOnAGpu:
    """The real kernel, on the current device."""

    def test_it_is_used(self) -> None:
        flat = torch.zeros(100, dtype=torch.uint8, device="cuda")
        assert kernel_of([DeviceCopyUnit((flat.clone(),), (flat,), ())], among=1) is not None

    def test_odd_tensors(self) -> None:
        check_case(ODD, None, "cuda")

    @given(cases())
    @settings(max_examples=25, deadline=None)
    def test_any_tensors(self, case: Case) -> None:
        if any(case.sizes):
            check_case(case, None, "cuda")

    @pytest.mark.parametrize("nbytes", [1, 1003, TENSOR_NBYTES, (64 << 20) + 5])
    def test_the_same_as_on_the_host(self, nbytes: int) -> None:
        flat = torch.randint(256, (nbytes,), dtype=torch.uint8)
        assert on_gpu(flat) == mix64(flat)

    @pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.__name__)
    def test_what_is_planted_is_seen(self, plant: Plant) -> None:
        flat = torch.cat([plants.content(1), plants.content(2)])
        before = on_gpu(flat)
        plant(Scene(flat[:TENSOR_NBYTES], flat[TENSOR_NBYTES:], plants.content(3)))
        assert on_gpu(flat) != before

    def test_more_than_2_to_31_bytes(self) -> None:
        nbytes = (1 << 31) + (1 << 20) + 3
        if torch.cuda.mem_get_info()[0] < 4 * nbytes:
            pytest.skip("needs 9 GB of free GPU memory")
        source = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        unit = DeviceCopyUnit((target,), (source,), ())
        (program,) = fuse([unit], verify=True)
        program.copy()
        found = program.fingerprint()
        assert torch.equal(source, target)
        assert found == mix64(source)
        source[-1] ^= 1
        program.copy()
        assert program.fingerprint() != found

    def test_it_waits_for_what_the_callers_stream_was_given(self) -> None:
        source = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        (program,) = fuse([DeviceCopyUnit((torch.empty_like(source),), (source,), ())], verify=True)
        for value in range(1, 6):
            for _ in range(20):
                source.fill_(0)
            source.fill_(value)
            program.copy()
            assert program.fingerprint() == mix64(source.cpu())


def on_gpu(flat: torch.Tensor) -> int:
    source = flat.cuda()
    target = torch.zeros_like(source)
    (program,) = fuse([DeviceCopyUnit((target,), (source,), ())], verify=True)
    program.copy()
    found = program.fingerprint()
    assert torch.equal(target, source)
    return found
