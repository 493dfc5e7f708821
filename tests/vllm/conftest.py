"""Tests against a real vLLM, collected by `make test-vllm` alone, which sets a variable.

They take minutes, and packages of several gigabytes.
"""

from __future__ import annotations

import os

OPT_IN = "WEIGHTSYNC_TEST_VLLM"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]

if os.environ.get(OPT_IN):
    # Before vLLM is imported: it reads most of these once.
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        TORCH_COMPILE_DISABLE="1",
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
