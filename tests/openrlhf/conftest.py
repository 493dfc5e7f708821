"""Tests against the real OpenRLHF, collected by `make test-openrlhf` alone."""

from __future__ import annotations

import os
import sys

from tests.vllm.variables import ON_A_CPU

OPT_IN = "WEIGHTSYNC_TEST_OPENRLHF"

EXTENSIONS = f"{sys.prefix}/torch_extensions"
"""Where compiled.py puts DeepSpeed's."""

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]

if os.environ.get(OPT_IN):
    from tests.openrlhf.on_cpu import pretend

    pretend()  # before OpenRLHF is imported
    os.environ.update(ON_A_CPU, TORCH_EXTENSIONS_DIR=EXTENSIONS)
