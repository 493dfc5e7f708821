"""Which optimizers step now, found out without a risk to the process."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest
import torch

from weightsync.runtime import optimizer_steps


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there nothing is collected in the call")
@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_frames_are_made(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    found: list[bool] = []

    def frames() -> dict[int, FrameType]:
        found.append(gc.isenabled())
        raise RuntimeError("no frames")

    monkeypatch.setattr(sys, "_current_frames", frames)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    running = {(0, id(optimizer)): (optimizer, frames.__code__)}
    monkeypatch.setattr(optimizer_steps, "_running", running)
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(RuntimeError, match="no frames"):
            optimizer_steps.StepWindow()
        assert (found, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_an_optimizer_of_many_steps_is_kept_once() -> None:
    """A window may be open for as long as a trainer sends nothing."""
    optimizer_steps.install()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    window = optimizer_steps.StepWindow()
    for _ in range(3):
        optimizer.step()
    assert window.close() == [optimizer]
