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


WAITS = "the others wait without an end"


class TestVerlsNixl(VerlEngineContract):
    engine = "nixl"
    module: ClassVar[str] = "tests.verl.nixl_on_cpu"
    options: ClassVar[Mapping[str, Any]] = {"device": "cpu"}
    bound_s = 8.0
    broken: ClassVar[Mapping[str, str]] = {
        "test_layers_of_odd_sizes_and_two_dtypes": "an offset does not fit a dtype",
        "test_an_empty_tensor": "it does not arrive, and nobody says so",
        "test_tensors_that_are_not_contiguous_arrive_or_are_an_error": WAITS,
        "test_an_error_on_the_first_rank_ends_the_step": WAITS,
        "test_a_consumer_that_raises_ends_the_step": "every later step fails",
        "test_a_consumer_that_stops_ends_the_step": "every later step fails",
        "test_a_trainer_is_killed_before_it_sends": WAITS,
        "test_a_trainer_is_killed_at_its_first_tensor": WAITS,
        "test_a_trainer_is_killed_in_the_middle": WAITS,
        "test_a_worker_is_killed_before_it_receives": WAITS,
        "test_a_worker_is_killed_at_its_first_tensor": WAITS,
        "test_a_worker_is_killed_in_the_middle": WAITS,
        "test_nothing_is_left_of_steps": "a socket is left of each step",
    }
