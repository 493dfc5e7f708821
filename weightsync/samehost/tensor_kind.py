"""The type of tensors, for modules that torch must not be loaded for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
else:

    class _TensorKind(type):
        def __instancecheck__(cls, value: object) -> bool:
            torch = sys.modules.get("torch")  # what is a tensor was made by it
            return torch is not None and isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorKind):
        """Stands for torch.Tensor in annotations and for isinstance."""


__all__ = ["Tensor"]
