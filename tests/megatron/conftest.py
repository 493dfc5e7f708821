"""Tests against the real megatron-core, collected by `make test-megatron` alone."""

from __future__ import annotations

import os

OPT_IN = "WEIGHTSYNC_TEST_MEGATRON"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]
