"""Tests against the real SkyRL, collected by `make test-skyrl` alone."""

from __future__ import annotations

import os

OPT_IN = "WEIGHTSYNC_TEST_SKYRL"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]
