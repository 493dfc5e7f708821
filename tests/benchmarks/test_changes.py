"""What changes between the updates of benchmarks of deltas."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.changes import at_random, change_of, count_changes, read_step, recorded_steps
from benchmarks.plan import CHANGING, WORKLOADS
from benchmarks.rivals.parameters import (
    Parameters,
    as_bytes,
    fill_as_weights,
    make_module,
    parameters_of,
)
from benchmarks.shapes import Step, Tensor, equal, smollm2


def weights(tensors: list[Tensor]) -> dict[str, torch.Tensor]:
    made = parameters_of(make_module(tensors))
    fill_as_weights(made)
    return made


def differences(old: Parameters, new: Parameters, name: str) -> npt.NDArray[np.int16]:
    """Return the steps of a tensor's values in units of the last place."""
    before, now = (as_bytes(one[name]).view(torch.int16).numpy() for one in (old, new))
    steps: npt.NDArray[np.int16] = now - before
    return steps


def copy_of(parameters: Parameters) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in parameters.items()}


def test_random_changes_are_steps_to_neighbours_and_others_each_time() -> None:
    made = weights(equal(1 << 20, 4))
    change = at_random(0.01)
    moved = []
    for number in (1, 2):
        old = copy_of(made)
        change(made, number)
        found = np.concatenate([differences(old, made, name) for name in made])
        assert set(found) == {-1, 0, 1}
        moved.append(np.flatnonzero(found))
        values, lines = count_changes(old, made)
        assert values == len(moved[-1])
        assert values == pytest.approx(0.01 * found.size, rel=0.05)
        assert lines == pytest.approx((1 - 0.99**32) * found.size / 32, rel=0.05)
    assert len(np.intersect1d(moved[0], moved[1])) < 0.1 * len(moved[0])


def test_recorded_changes_are_those_of_the_step_in_each_layer() -> None:
    step = "1e-06/6"
    layers = [t for t in smollm2() if t.name.startswith(("model.layers.0.", "model.layers.1."))]
    made = weights(layers)
    old = copy_of(made)
    change_of(Step(recorded=step))(made, 1)
    for tensor in layers:
        recorded = read_step(step)[tensor.name.split(".", 3)[3]]
        found = differences(old, made, tensor.name)
        wanted = (recorded.now - recorded.before).view(np.int16)
        assert np.array_equal(np.sort(found[found != 0]), np.sort(wanted))
        lines = count_changes({"one": old[tensor.name]}, {"one": made[tensor.name]})[1]
        assert lines == len(np.unique(recorded.positions // 32))
    one, other = (
        np.flatnonzero(differences(old, made, f"model.layers.{n}.mlp.up_proj.weight"))
        for n in (0, 1)
    )
    assert len(np.intersect1d(one, other)) < 0.1 * len(one)


def test_the_recorded_steps_of_the_plan_exist() -> None:
    steps = {step.recorded for name in CHANGING if (step := WORKLOADS[name]().step)} - {""}
    assert steps
    assert steps <= set(recorded_steps())
