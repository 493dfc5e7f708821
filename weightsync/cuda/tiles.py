"""The tables that the fused kernel executes, and its interface; importable without Triton."""

from __future__ import annotations

from typing import Protocol

import torch

FIELDS = 8
"""Columns of a tile: source and target address, bytes read, bytes stored, words mixed, position of
the first word, index of the sum, unused."""
TILE_WORDS = 8192
"""Words of one tile, the work of one program: 64 KiB, thousands of programs for a bucket."""

Tiles = dict[int, torch.Tensor]
"""Tables of tiles (`int64[tiles, FIELDS]`), by the alignment of source and target in bytes.

They hold addresses and keep no memory alive."""


class Kernel(Protocol):
    """The interface of the module `triton_kernels`."""

    def launch(
        self, tiles: Tiles, sums: torch.Tensor | None, *, copies: bool, reads_back: bool = True
    ) -> None:
        """Enqueue the work of all tiles; see `triton_kernels.launch`."""
