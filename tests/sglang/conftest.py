"""Tests against the real SGLang, collected by `make test-sglang` alone."""

from __future__ import annotations

import os

OPT_IN = "WEIGHTSYNC_TEST_SGLANG"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]
