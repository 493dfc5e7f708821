"""Silent corruptions of bytes, each applied to `uint8[nbytes]` in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightsync.tensors import as_bytes

PAGE = 4096
TENSOR_NBYTES = 4 * PAGE
WORDS = TENSOR_NBYTES // 8


@dataclass(frozen=True)
class Scene:
    """Two neighbouring tensors of `TENSOR_NBYTES` each as sent, and the former bytes."""

    first: torch.Tensor
    second: torch.Tensor
    stale: torch.Tensor


Plant = Callable[[Scene], None]


def content(seed: int) -> torch.Tensor:
    """Float32 weights as `uint8[TENSOR_NBYTES]`: no two words of them are alike."""
    generator = torch.Generator().manual_seed(seed)
    return as_bytes(torch.randn(TENSOR_NBYTES // 4, generator=generator)).clone()


def flipped_bit(scene: Scene) -> None:
    scene.first[PAGE + 77] ^= 4


def cancelling_signs(scene: Scene) -> None:
    """Two sign bits, each the highest of its 8-byte word: sum, xor and count of words stay."""
    for word in (3, WORDS - 2):
        scene.first[8 * word + 7] ^= 0x80


def swapped_words(scene: Scene) -> None:
    words = scene.first.view(torch.int64)
    words[[5, 6]] = words[[6, 5]]


def swapped_blocks(scene: Scene) -> None:
    blocks = scene.first.view(-1, PAGE)
    blocks[[0, 2]] = blocks[[2, 0]]


def swapped_tensors(scene: Scene) -> None:
    kept = scene.first.clone()
    scene.first.copy_(scene.second)
    scene.second.copy_(kept)


def truncated(scene: Scene) -> None:
    """Zero the last word, which did not arrive."""
    scene.first[-8:] = 0


def zeros(scene: Scene) -> None:
    scene.first.zero_()


def stale_page(scene: Scene) -> None:
    scene.first[PAGE : 2 * PAGE] = scene.stale[PAGE : 2 * PAGE]


PLANTS: tuple[Plant, ...] = (
    flipped_bit,
    cancelling_signs,
    swapped_words,
    swapped_blocks,
    swapped_tensors,
    truncated,
    zeros,
    stale_page,
)
INVISIBLE_TO_SUMS: tuple[Plant, ...] = (
    cancelling_signs,
    swapped_words,
    swapped_blocks,
    swapped_tensors,
)
