"""The smallest model that fleets of the tests send."""

from __future__ import annotations

import torch
from torch import nn


def make(value: float = 0.0) -> nn.Linear:
    """A linear layer full of one value."""
    model = nn.Linear(32, 32)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    """Give every parameter one value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(module: nn.Module) -> set[float]:
    """Return all values of the module's tensors."""
    return {float(v) for t in module.state_dict().values() for v in t.reshape(-1).tolist()}
