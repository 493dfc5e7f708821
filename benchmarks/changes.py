"""What steps of training change: recorded changes, and changes to the parameters of a benchmark."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.rivals.parameters import Parameters, as_bytes
from benchmarks.shapes import Step

RECORDED = Path(__file__).with_name("recorded_steps.npz")
EMBEDDING_SHARES = {"1e-06": 0.0125, "1e-05": 0.028, "5e-05": 0.079}
"""Share of the embedding's values that changed in a step, by learning rate (docs/deltas.md)."""
VALUES_OF_LINE = 32
"""Values of two bytes in one of the lines that weightsync's deltas consist of."""
_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")
Change = Callable[[Parameters, int], None]
"""Changes bf16 parameters as step number N of training does."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The values of a tensor that a recorded step changed: positions, bits before and after."""

    positions: npt.NDArray[np.int64]
    before: npt.NDArray[np.uint16]
    now: npt.NDArray[np.uint16]


def recorded_steps(path: Path = RECORDED) -> list[str]:
    """Return the names of the recorded steps: learning rate and number, as `1e-06/6`."""
    with np.load(path) as file:
        return sorted({key.rpartition("/model.")[0] for key in file})


def read_step(name: str, path: Path = RECORDED) -> dict[str, Recorded]:
    """Return what a recorded step changed, by the names of the tensors in their layer."""
    found = {}
    with np.load(path) as file:
        for key in file:
            step, _, array = key.rpartition("/model.")
            if step == name and array.endswith("/gaps"):
                key = key.removesuffix("/gaps")  # noqa: PLW2901 # the tensor's
                found[array.split(".", 2)[2].removesuffix("/gaps")] = Recorded(
                    positions=np.cumsum(file[f"{key}/gaps"], dtype=np.int64),
                    before=file[f"{key}/before"],
                    now=file[f"{key}/now"],
                )
    return found


def change_of(step: Step) -> Change:
    """Return the function that changes parameters as `step` says."""
    return as_recorded(step.recorded) if step.recorded else at_random(step.share)


def at_random(share: float) -> Change:
    """Return a function that moves a share of all values to a neighbour, up or down."""

    def change(parameters: Parameters, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        for tensor in parameters.values():
            _move(tensor, share, random)

    return change


def as_recorded(name: str) -> Change:
    """Return a function that changes every layer as a recorded step changed one.

    The rows, and the lines of each row, are shuffled anew for each tensor and step: repeated
    positions would be coded in few bytes. The embedding changes at random, by the share that was
    recorded.
    """
    layer = read_step(name)
    share = EMBEDDING_SHARES[name.partition("/")[0]]

    def change(parameters: Parameters, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        order = np.random.default_rng(number)
        for full_name, tensor in parameters.items():
            in_layer = _LAYER.fullmatch(full_name)
            if in_layer is not None:
                found = layer[in_layer[1]]
                places = torch.from_numpy(_shuffled(found.positions, tensor.shape, order))
                _add(tensor, places, (found.now - found.before).view(np.int16))
            elif "embed" in full_name:
                _move(tensor, share, random)

    return change


def _shuffled(
    positions: npt.NDArray[np.int64], shape: torch.Size, order: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return positions in a matrix whose rows, and the lines of each row, have another order."""
    if len(shape) < 2 or shape[1] % VALUES_OF_LINE:
        return positions
    rows, places = np.divmod(positions, shape[1])
    lines, places = np.divmod(places, VALUES_OF_LINE)
    rows = order.permutation(shape[0])[rows]
    lines = order.permutation(shape[1] // VALUES_OF_LINE)[lines]
    shuffled: npt.NDArray[np.int64] = rows * shape[1] + lines * VALUES_OF_LINE + places
    return shuffled


def _move(tensor: torch.Tensor, share: float, random: torch.Generator) -> None:
    count = round(share * tensor.numel())
    places = torch.randint(tensor.numel(), (count,), generator=random)
    steps = torch.randint(2, (count,), generator=random, dtype=torch.int16) * 2 - 1
    _add(tensor, places, steps.numpy())


def _add(tensor: torch.Tensor, places: torch.Tensor, steps: npt.NDArray[np.int16]) -> None:
    """Add steps to the bits of a tensor of two bytes a value."""
    as_bytes(tensor).view(torch.int16)[places] += torch.from_numpy(steps)


def count_changes(old: Parameters, new: Parameters) -> tuple[int, int]:
    """Return how many values of two bytes differ, and in how many lines of 64 bytes."""
    values = lines = 0
    for name, tensor in new.items():
        before, now = (as_bytes(one).view(torch.int16).numpy() for one in (old[name], tensor))
        places = np.flatnonzero(before != now)
        values += len(places)
        lines += len(np.unique(places // VALUES_OF_LINE))
    return values, lines
