"""verl's own manager and workers with our engine, on real Ray actors. Run by test_verl.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.ray.sandbox import start
from tests.verl.workers import Replica, Rollout, Trainer, digests

WAIT_S = 120.0
TIMEOUT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start(cpus=8)
    yield
    ray.shutdown()


class Deployment:
    """Trainer ranks, rollout replicas and verl's manager over them."""

    def __init__(self, trainers: int, replicas: int, workers: int = 1, **options: Any) -> None:
        self.pools: list[Any] = []
        self.config = CheckpointEngineConfig(
            backend="weightsync",
            update_weights_bucket_megabytes=1,
            custom_backend_module="weightsync.integrations.verl",
            engine_kwargs={"weightsync": {"timeout_s": TIMEOUT_S, **options}},
        )
        self.rollout_config = RolloutConfig(
            name="vllm", tensor_model_parallel_size=workers, checkpoint_engine=self.config
        )
        self.workers_per_replica = workers
        self.actor = self._group(Trainer, trainers, config=self.config)
        self.rollout = self._rollout(replicas)
        self.replicas = self._replicas(self.rollout)
        self.manager = CheckpointEngineManager(self.config, self.actor, self.replicas)

    def _group(self, kind: Any, size: int, **arguments: Any) -> Any:
        pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
        self.pools.append(pool)
        made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
        return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")

    def _rollout(self, replicas: int) -> Any:
        size = replicas * self.workers_per_replica
        return self._group(Rollout, size, rollout_config=self.rollout_config, model_config=None)

    def _replicas(self, group: Any) -> list[Any]:
        made = []
        for rank in range(group.world_size // self.workers_per_replica):
            replica = Replica(rank, self.rollout_config, None)
            first = rank * self.workers_per_replica
            replica.workers = group.workers[first : first + self.workers_per_replica]
            made.append(replica)
        return made

    def step(self, step: int) -> Any:
        self.actor.train(step)
        return self.manager.update_weights(global_steps=step)

    def held(self) -> list[Any]:
        found: list[Any] = self.rollout.held()
        return found

    def close(self) -> None:
        ray.get(self.actor.execute_checkpoint_engine(["close"] * self.actor.world_size))
        for worker in [*self.actor.workers, *self.rollout.workers]:
            ray.kill(worker)
        for pool in self.pools:
            for group in pool.get_placement_groups(device_name="cpu"):
                ray.util.remove_placement_group(group)


@pytest.fixture
def deployed(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    trainers, replicas, workers, options = request.param
    made = Deployment(trainers, replicas, workers, **options)
    yield made
    made.close()


SHAPES = [
    pytest.param((2, 2, 1, {}), id="two-replicas"),
    pytest.param((2, 1, 2, {"apply": "in_place"}), id="two-workers-in-place"),
    pytest.param((1, 1, 1, {"apply": "staged", "packed": True}), id="one-of-each-staged"),
    pytest.param((2, 1, 1, {"transfer_backend": "tcp"}), id="as-between-hosts"),
]


@pytest.mark.parametrize("deployed", SHAPES, indirect=True)
def test_several_steps_arrive_bit_for_bit(deployed: Deployment) -> None:
    for step in (1, 2, 3, 4):
        metrics = deployed.step(step)
        assert metrics["sync/version"] == step
        assert metrics["sync/seconds"] > 0
        for held, steps in deployed.held():
            assert held == digests(step)
            assert steps == list(range(1, step + 1))


ONE = [pytest.param((1, 1, 1, {}), id="one-of-each")]


@pytest.mark.parametrize("deployed", ONE, indirect=True)
def test_an_adapter_that_fails_is_an_error_and_the_next_step_is_whole(
    deployed: Deployment,
) -> None:
    deployed.step(1)
    deployed.rollout.plant(fails_at="1.weight")
    began = time.monotonic()
    with pytest.raises(Exception, match=r"planted: the adapter fails|did not take all weights"):
        deployed.step(2)
    assert time.monotonic() - began < 2 * TIMEOUT_S
    deployed.rollout.plant()
    deployed.step(3)
    assert deployed.held() == [(digests(3), [1, 3])]


@pytest.mark.parametrize("deployed", [SHAPES[0], SHAPES[1]], indirect=True)
def test_a_trainer_that_fails_leaves_the_workers_unharmed(deployed: Deployment) -> None:
    deployed.step(1)
    deployed.actor.train(2, fails_at="2.weight")
    began = time.monotonic()
    with pytest.raises(Exception, match="planted: the trainer fails"):
        deployed.manager.update_weights(global_steps=2)
    assert time.monotonic() - began < 2 * TIMEOUT_S
    deployed.step(3)
    for held, steps in deployed.held():
        assert held == digests(3)
        assert steps == [1, 3]


@pytest.mark.parametrize("deployed", ONE, indirect=True)
def test_other_tensors_are_an_error_once_and_then_what_is_sent(deployed: Deployment) -> None:
    deployed.step(1)
    deployed.step(2)
    deployed.actor.train(3, lacks="1.bias")
    with pytest.raises(Exception, match="the source diverges from its manifest"):
        deployed.manager.update_weights(global_steps=3)
    for step in (4, 5):
        deployed.actor.train(step, lacks="1.bias")
        deployed.manager.update_weights(global_steps=step)
        wanted = digests(step)
        del wanted["1.bias"]
        assert deployed.held() == [(wanted, [1, 2, *range(4, step + 1)])]


@pytest.mark.parametrize("deployed", [SHAPES[0]], indirect=True)
def test_a_worker_that_dies_in_the_middle_is_replaced(deployed: Deployment) -> None:
    deployed.step(1)
    deployed.rollout.plant(dies_at="1.weight")
    began = time.monotonic()
    with pytest.raises(ray.exceptions.RayError):
        deployed.step(2)
    assert time.monotonic() - began < 2 * TIMEOUT_S
    former = deployed.rollout
    deployed.rollout = deployed._rollout(2)
    deployed.manager.remove_replicas(deployed.manager.replicas)
    deployed.manager.add_replicas(deployed._replicas(deployed.rollout))
    for step in (3, 4):
        deployed.step(step)
        for held, steps in deployed.held():
            assert held == digests(step)
            assert steps == list(range(3, step + 1))
    for worker in former.workers:
        ray.kill(worker)


@pytest.mark.parametrize("deployed", [SHAPES[0]], indirect=True)
def test_verls_naive_engine_gives_the_same_tensors(deployed: Deployment) -> None:
    deployed.step(1)
    (naive, *_) = deployed.actor.held_by_naive()
    assert [held for held, _ in deployed.held()] == [naive, naive]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
