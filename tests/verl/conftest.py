"""Tests against the real verl, collected by `make test-verl` alone, which sets a variable."""

from __future__ import annotations

import os

OPT_IN = "WEIGHTSYNC_TEST_VERL"

collect_ignore_glob = [] if os.environ.get(OPT_IN) else ["test_*.py"]
