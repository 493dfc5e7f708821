"""Ray itself, several actors, and a cluster of several nodes; and what needs no cluster."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.ray import sandbox
from weightsync import ray as weightsync_ray
from weightsync.errors import ConfigError
from weightsync.ray import WeightSyncActor
from weightsync.wire.messages import ALL_CALLS

HERE = Path(__file__).parent
WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # as where it is not installed
import weightsync
from weightsync.errors import install_hint
try:
    weightsync.ray
except AttributeError as exc:
    assert install_hint("ray") in str(exc), exc
    print("told")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_real_actors() -> None:
    """Senders to actors, the contract of transports, and engines; all on one node of Ray."""
    passed = {"one_host.py": 13, "transport_contract.py": 70, "engines.py": 3}
    files = [HERE / file for file in passed]
    assert sandbox.run_pytest(*files, timeout_s=560) >= sum(passed.values())


@pytest.mark.slow
def test_on_two_nodes() -> None:
    assert sandbox.run_pytest(HERE / "cluster.py", timeout_s=280) == 2


def test_a_missing_extra_names_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "told\n"


def test_plain_ray_remote_is_refused_and_the_right_way_is_named() -> None:
    class Rollout(WeightSyncActor):
        pass

    remote: Any = ray.remote
    for decorate in (remote, remote(num_cpus=1), remote(concurrency_groups={"io": 2})):
        with pytest.raises(ConfigError, match=r"Rollout is .* write @ws\.ray\.remote\(…\)"):
            decorate(Rollout)


def test_a_subclass_of_a_decorated_class_needs_its_own_decoration() -> None:
    class Base(WeightSyncActor):
        pass

    class Derived(Base):
        pass

    weightsync_ray.remote(Base)
    with pytest.raises(ConfigError, match=r"Derived is decorated with ray\.remote"):
        ray.remote(Derived)


@pytest.mark.parametrize("wrong", [int, "Rollout", 3])
def test_only_weight_sync_actors_can_be_decorated(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"WeightSyncActor"):
        weightsync_ray.remote(num_cpus=1)(wrong)


def test_options_go_by_name() -> None:
    with pytest.raises(ConfigError, match="by name"):
        weightsync_ray.remote(WeightSyncActor, num_cpus=1)
    with pytest.raises(ConfigError, match="by name"):
        weightsync_ray.remote(3)  # type: ignore[arg-type]


def test_plain_classes_keep_plain_verbs_and_async_ones_get_async_ones() -> None:
    class Plain(WeightSyncActor):
        pass

    class WithLoop(WeightSyncActor):
        def pause(self) -> str:
            return "its own"

        async def generate(self) -> None: ...

    weightsync_ray.remote(Plain)
    weightsync_ray.remote(WithLoop)
    is_async = inspect.iscoroutinefunction
    assert not any(is_async(getattr(Plain, verb)) for verb in weightsync_ray.VERBS)
    others = [verb for verb in weightsync_ray.VERBS if verb != "pause"]
    assert all(is_async(getattr(WithLoop, verb)) for verb in others)
    assert WithLoop().pause() == "its own"
    assert not any(is_async(getattr(WeightSyncActor, verb)) for verb in weightsync_ray.VERBS)


def test_every_call_is_a_verb() -> None:
    assert {verb for verb in vars(WeightSyncActor) if not verb.startswith("_")} == {
        *ALL_CALLS,
        "weightsync_handle",
    }
