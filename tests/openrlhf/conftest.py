"""Tests against the real OpenRLHF, collected by `make test-openrlhf` alone."""

from __future__ import annotations

import os
import sys

OPT_IN = "WEIGHTSYNC_TEST_OPENRLHF"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]

if os.environ.get(OPT_IN):
    from tests.openrlhf.on_cpu import pretend

    pretend()  # before OpenRLHF is imported
    # And these before vLLM is: it reads most of them once.
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        TORCH_COMPILE_DISABLE="1",
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING",
        # DeepSpeed compiles its optimizer for minutes, once.
        TORCH_EXTENSIONS_DIR=f"{sys.prefix}/torch_extensions",
    )
