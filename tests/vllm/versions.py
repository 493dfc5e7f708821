"""Tests that not every vLLM can run: they are skipped by name, and the reason says why."""

from __future__ import annotations

import pytest
import vllm
from packaging.version import Version


def since(version: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test of a vLLM before `version`."""
    return pytest.mark.skipif(
        Version(vllm.__version__) < Version(version), reason=f"vLLM {vllm.__version__}: {reason}"
    )


FLOAT_SINKS = since("0.31", "its kernel of a CPU computes attention sinks in bfloat16 alone")
CONVOLUTION = since("0.32", "its kernel of a CPU for LFM2's convolution computes in no float32")
