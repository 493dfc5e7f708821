"""Fingerprints see every byte and its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import (
    _BLOCK_WORDS,
    mix64,
    table_digest,
    to_hex,
    xxh3,
    xxh3_parts,
)

Fingerprint = Callable[[torch.Tensor], int]


def host_xxh3(flat: torch.Tensor) -> int:
    return xxh3(memoryview(bytes(flat.tolist())))


both = pytest.mark.parametrize("of", [mix64, host_xxh3])


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@both
@pytest.mark.parametrize("at", [0, 7, 8, 500, 995, 1002])
def test_one_flipped_bit(of: Fingerprint, at: int) -> None:
    flat = noise(1003)
    before = of(flat)
    for bit in range(8):
        flat[at] ^= 1 << bit
        assert of(flat) != before
        flat[at] ^= 1 << bit
    assert of(flat) == before


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_two_sign_flips_do_not_cancel(of: Fingerprint, dtype: torch.dtype) -> None:
    weights = torch.randn(256, dtype=dtype)
    before = of(as_bytes(weights))
    for first, second in ((0, 1), (0, 128), (5, 200), (0, 8)):
        flipped = weights.clone()
        flipped[first] *= -1
        flipped[second] *= -1
        assert of(as_bytes(flipped)) != before


@both
@pytest.mark.parametrize("width", [1, 2, 8, 64, 512])
def test_swapped_bytes_words_and_blocks(of: Fingerprint, width: int) -> None:
    flat = noise(1024)
    before = of(flat)
    swapped = flat.clone()
    swapped[:width], swapped[width : 2 * width] = flat[width : 2 * width], flat[:width]
    assert not torch.equal(swapped, flat)
    assert of(swapped) != before


@both
def test_swapped_tensors_of_a_stream(of: Fingerprint) -> None:
    first, second = noise(64, 1), noise(64, 2)
    assert of(torch.cat([first, second])) != of(torch.cat([second, first]))
    assert table_digest([of(first), of(second)]) != table_digest([of(second), of(first)])


@both
def test_lengths_of_zeros_and_truncation(of: Fingerprint) -> None:
    zeros = {of(torch.zeros(n, dtype=torch.uint8)) for n in range(70)}
    assert len(zeros) == 70
    flat = noise(200)
    assert len({of(flat[:n]) for n in range(201)}) == 201


@given(st.binary(max_size=300), st.integers(1, 15))
def test_mix64_is_indifferent_to_alignment(content: bytes, shift: int) -> None:
    flat = torch.tensor(list(content), dtype=torch.uint8)
    moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), flat])[shift:]
    assert mix64(moved) == mix64(flat)


@pytest.mark.parametrize("words", [1, 3, 16, 1 << 20])
def test_mix64_is_indifferent_to_its_block_size(
    words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = noise(1003)
    whole = mix64(flat)
    monkeypatch.setitem(_BLOCK_WORDS, "cpu", words)
    assert mix64(flat) == whole


def test_memory_can_be_resized_after_it_was_fingerprinted() -> None:
    """Trainers offload by it. torch resizes no storage of which NumPy had a view."""
    flat = torch.zeros(64, dtype=torch.uint8)
    mix64(flat)
    flat.untyped_storage().resize_(0)
    assert flat.untyped_storage().nbytes() == 0


def test_mix64_stays_what_it_was() -> None:
    """Both sides of a wire compute it, in versions of their own: the value is a contract."""
    mask = (1 << 64) - 1

    def mixed(value: int) -> int:
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = ((value ^ (value >> shift)) * multiplier) & mask
        return value ^ (value >> 31)

    flat, golden = noise(43), 0x9E3779B97F4A7C15
    padded = bytes(flat.tolist()) + bytes(5)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, 48, 8)]
    total = sum(mixed((word + (i + 1) * golden) & mask) for i, word in enumerate(words))
    assert mix64(flat) == mixed((total + 43 * golden) & mask)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_parts_make_the_same_xxh3_as_the_whole(parts: list[bytes]) -> None:
    views = [memoryview(part) if i % 2 else part for i, part in enumerate(parts)]
    assert xxh3_parts(views) == xxh3(memoryview(b"".join(parts)))


def test_hex_has_sixteen_digits() -> None:
    assert to_hex(255) == "00000000000000ff"
