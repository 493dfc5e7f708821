"""A cluster of two nodes on this machine. Run by test_ray.py, in namespaces of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray
from ray.cluster_utils import Cluster

import weightsync as ws
from tests.e2e.models import digests, fill, make
from tests.ray.actors import Rollout
from tests.ray.sandbox import OBJECT_STORE_NBYTES
from weightsync.errors import ConnectError
from weightsync.ray import RayActorTransport
from weightsync.transports.ray_actor import actor_name
from weightsync.wire.messages import StatusRequest

WAIT_S = 60.0
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_NBYTES}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made: Any = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "resources": {"first": 1}, "include_dashboard": False},
        shutdown_at_exit=False,
    )
    try:
        ray.init(address=made.address)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def held(handles: list[Any]) -> list[Any]:
    return [ray.get(handle.held.remote(), timeout=WAIT_S) for handle in handles]


def test_actors_on_two_nodes_until_one_node_is_gone(cluster: Any) -> None:
    second = cluster.add_node(**NODE, resources={"second": 1})
    here, there = (
        Rollout.options(resources={node: 1}).remote("everything", seed)
        for seed, node in enumerate(("first", "second"))
    )
    places = [ray.get(handle.where.remote(), timeout=WAIT_S) for handle in (here, there)]
    assert len(set(places)) == 2
    nodes = {node["NodeManagerAddress"] for node in cast(Any, ray).nodes()}
    assert RayActorTransport(there).local_address in nodes
    model = make("everything")
    with ws.connect(model, to=[here, there]) as sender:
        for seed in (1, 2, 3):
            fill(model, seed)
            report = sender.send_weights()
            assert held([here, there]) == [(report.version, digests(model))] * 2
        fill(model, 4)
        cluster.remove_node(second)
        with pytest.raises(ConnectError) as caught:
            sender.send_weights()
        notes: list[str] = getattr(caught.value, "__notes__", [])
        assert actor_name(there) in "".join([str(caught.value), *notes])
        assert held([here])[0][0] == 3
    with ws.connect(model, to=here) as sender:
        report = sender.send_weights()
    assert held([here]) == [(report.version, digests(model))]


def test_a_cluster_that_was_left_is_not_started_again(cluster: Any) -> None:
    handle = Rollout.remote("plain")
    transport = RayActorTransport(handle)
    transport.call(StatusRequest(), timeout_s=WAIT_S)
    ray.shutdown()
    assert transport.local_address is None
    with pytest.raises(ConnectError, match="shut down"):
        transport.call(StatusRequest(), timeout_s=WAIT_S)
    assert not ray.is_initialized()
