"""Stand-ins for what megatron-core calls of a GPU; as a program, runs another one with them."""

from __future__ import annotations

import runpy
import sys
import warnings

import torch


def pretend() -> None:
    """Put the stand-ins into this process. Idempotent."""
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # a device all the same
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment, misc]


if __name__ == "__main__":
    pretend()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
