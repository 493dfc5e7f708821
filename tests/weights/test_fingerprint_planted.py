"""What must not pass a fingerprint, planted, for every algorithm that the paths use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.protocol import plants
from tests.protocol.plants import TENSOR_NBYTES, Plant, Scene
from weightsync.weights.copying.copy_plan import host_view
from weightsync.weights.copying.fingerprint import mix64, table_digest, xxh3, xxh3_parts

Fingerprint = Callable[[torch.Tensor], int]


def whole_xxh3(flat: torch.Tensor) -> int:
    """Between host memories: one run that lies in one piece."""
    return xxh3(host_view(flat.data_ptr(), flat.numel()))


def parts_xxh3(flat: torch.Tensor) -> int:
    """Between host memories: a run whose tensors lie apart, with zeros between them."""
    middle = flat.numel() // 2
    views = [host_view(half.data_ptr(), half.numel()) for half in (flat[:middle], flat[middle:])]
    return xxh3_parts([views[0], bytes(64), views[1]])


def mix64_on_gpu(flat: torch.Tensor) -> int:
    return mix64(flat.cuda())


ALGORITHMS = [
    whole_xxh3,
    parts_xxh3,
    mix64,
    pytest.param(mix64_on_gpu, marks=pytest.mark.gpu),
]
every_algorithm = pytest.mark.parametrize("of", ALGORITHMS)


def stream() -> tuple[torch.Tensor, Scene]:
    """Two tensors one after another, as a run or a bucket carries them."""
    flat = torch.cat([plants.content(1), plants.content(2)])
    return flat, Scene(flat[:TENSOR_NBYTES], flat[TENSOR_NBYTES:], plants.content(3))


@every_algorithm
@pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_seen(of: Fingerprint, plant: Plant) -> None:
    flat, scene = stream()
    before = of(flat)
    assert of(flat.clone()) == before
    plant(scene)
    assert of(flat) != before


@pytest.mark.parametrize("plant", plants.INVISIBLE_TO_SUMS, ids=lambda plant: plant.__name__)
def test_a_plain_sum_would_not_have_seen_it(plant: Plant) -> None:
    flat, scene = stream()
    before = flat.view(torch.int64).sum().item()
    plant(scene)
    assert flat.view(torch.int64).sum().item() == before


@every_algorithm
@pytest.mark.parametrize("nbytes", [1, 7, 8, 64, 4096, TENSOR_NBYTES])
def test_what_ends_early_is_another_stream(of: Fingerprint, nbytes: int) -> None:
    flat, _ = stream()
    assert of(flat[:-nbytes]) != of(flat)
    ended = flat.clone()
    ended[-nbytes:] = 0
    assert len({of(ended), of(flat), of(flat[:-nbytes])}) == 3


@every_algorithm
def test_tensors_that_change_places_change_the_table(of: Fingerprint) -> None:
    """Where each has a fingerprint of its own, order is kept by the table and its digest."""
    first, second = of(plants.content(1)), of(plants.content(2))
    assert table_digest([first, second]) != table_digest([second, first])


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 1, 8, 1003, TENSOR_NBYTES, (8 << 20) + 5])
def test_mix64_is_the_same_on_cpu_and_gpu(nbytes: int) -> None:
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert mix64(flat.cuda()) == mix64(flat)
