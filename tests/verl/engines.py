"""verl's contract of checkpoint engines, with ours and with verl's. Run by test_verl.py.

What verl's engines do not keep is in `broken`: each was seen with the version of this venv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from weightsync.testing.conformance.verl import VerlEngineContract

pytestmark = pytest.mark.timeout(300)


class Ours(VerlEngineContract):
    engine = "weightsync"
    module: ClassVar[str] = "weightsync.integrations.verl"
    options: ClassVar[Mapping[str, Any]] = {"timeout_s": 8.0}


class TestOurs(Ours):
    pass


class TestOursInPlace(Ours):
    label = "weightsync, in place"
    options: ClassVar[Mapping[str, Any]] = {"timeout_s": 8.0, "apply": "in_place"}


class TestVerlsNixl(VerlEngineContract):
    engine = "nixl"
    module: ClassVar[str] = "tests.verl.nixl_on_cpu"
    options: ClassVar[Mapping[str, Any]] = {"device": "cpu"}
    bound_s = 8.0
    broken: ClassVar[Mapping[str, str]] = {}
