"""Tests against a real vLLM, collected by `make test-vllm` alone, which sets a variable.

They take minutes, and packages of several gigabytes.
"""

from __future__ import annotations

import os

from tests.vllm.variables import ON_A_CPU

OPT_IN = "WEIGHTSYNC_TEST_VLLM"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]

if os.environ.get(OPT_IN):
    os.environ.update(ON_A_CPU)
