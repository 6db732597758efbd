"""Pools: what fits where, and the errors if it does not."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import resource_pool
from megarl.controller.node_resources import NodeResources, fits, match
from megarl.controller.resource_pool import (
    InsufficientResourcesError,
    RayResourcePool,
    ResourcePoolManager,
    check_fits,
    node_demands,
)


def node(cpus: float, gpus: float = 0) -> NodeResources:
    return NodeResources("10.0.0.1", {"CPU": cpus, "GPU": gpus})


@pytest.mark.parametrize(
    ("demands", "nodes", "expected"),
    [
        ([(4, 4), (4, 4)], [(8, 8)], True),
        ([(8, 8)], [(4, 4), (4, 4)], False),  # one node must hold it
        ([(2, 2), (6, 6), (8, 8)], [(8, 8), (8, 8)], True),  # needs the large ones first
        ([(5, 5), (5, 5)], [(8, 8)], False),
        ([(4, 0)], [(8, 0)], True),
        ([(4, 4)], [(2, 8)], False),  # enough devices, but not enough CPUs
    ],
)
def test_fitting_pools_on_nodes(demands: list, nodes: list, expected: bool) -> None:
    assert (
        fits(
            [{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus, gpus in demands],
            [node(*sizes) for sizes in nodes],
        )
        is expected
    )


def test_bad_arguments_are_refused() -> None:
    for counts in ([], [0], [2, -1]):
        with pytest.raises(ValueError, match="must be at least 1"):
            RayResourcePool(counts)

    with pytest.raises(ValueError, match=r"'actor' is mapped to pool 'train'; the pools are \['main'\]"):
        ResourcePoolManager({"main": [1]}, {"actor": "train"})
    with pytest.raises(ValueError, match="role 'critic' has no pool"):
        ResourcePoolManager({"main": [1]}, {"actor": "main"}).get_resource_pool("critic")


def test_what_can_never_fit_is_refused_at_once(ray_cluster: None) -> None:
    with pytest.raises(InsufficientResourcesError) as caught:
        RayResourcePool([2, 13], use_gpu=False, name="train").bundles()
    text = str(caught.value)
    assert "pool 'train': 0 GPU, 13 CPU on one node" in text
    assert "node 127.0.0.1: 0 GPU, 12 CPU" in text
    with pytest.raises(InsufficientResourcesError, match="pool 'gpus': 1 GPU, 1 CPU"):
        RayResourcePool([1], use_gpu=True, name="gpus").bundles()
    together = ResourcePoolManager({"a": [9], "b": [4]}, {}, use_gpu=False)
    with pytest.raises(InsufficientResourcesError, match="pool 'b': 0 GPU, 4 CPU"):
        together.create_resource_pool()
    check_fits([together.resource_pools["a"]])


def test_gpus_of_each_process() -> None:
    pools = ResourcePoolManager(
        {"engines": [2], "reward": [1], "actor": [4]},
        {},
        gpus_per_process={"engines": 4, "reward": 0},
        max_colocate_counts={"actor": 2},
    ).resource_pools
    assert {name: pool.resources_per_process() for name, pool in pools.items()} == {
        "engines": {"CPU": 1, "GPU": 4},
        "reward": {"CPU": 1},
        "actor": {"CPU": 2, "GPU": 1},  # a CPU for each of two processes that share the GPU
    }


def test_parts_stand_on_the_bundles_of_the_whole(ray_cluster: None) -> None:
    whole = RayResourcePool([2], use_gpu=False, name="engines")
    parts = whole.split()
    assert [part.bundles()[0].placement_group_bundle_index for part in parts] == [0, 1]
    assert [part.local_ranks for part in parts] == [[0], [0]]
    assert parts[1].bundles()[0].placement_group == whole.bundles()[1].placement_group
    with pytest.raises(ValueError, match="release the whole pool"):
        parts[0].release()
    whole.release()


def test_a_part_has_several_bundles_in_the_order_of_the_whole() -> None:
    whole = RayResourcePool([3, 2], use_gpu=False, name="critic", max_colocate_count=2)
    part = whole.part([1, 2, 3])
    assert (part.process_on_nodes, part.world_size, part.max_colocate_count, part.name) == (
        (2, 1),
        3,
        2,
        "critic",
    )
    assert part.local_ranks == [0, 1, 0]


def test_a_pool_waits_for_devices_in_use_and_then_names_their_holder(ray_cluster: None) -> None:
    holder = ResourcePoolManager({"held": [12]}, {"actor": "held"}, use_gpu=False)
    holder.create_resource_pool()
    pool = holder.get_resource_pool("actor")
    assert [bundle.placement_group_bundle_index for bundle in pool.bundles()] == list(range(12))
    assert pool.local_ranks == list(range(12))
    late = RayResourcePool([2], use_gpu=False, name="late", wait_limit_s=0.5)

    with pytest.raises(
        InsufficientResourcesError,
        match=r"still not free after 0.5 s(.|\n)*pool 'late'(.|\n)*node 127.0.0.1: 0 GPU, 0 CPU",
    ):
        late.bundles()

    holder.release()
    late.wait_limit_s = 10
    assert len(late.bundles()) == 2
    late.release()


def test_pools_that_name_a_node_of_the_plan_are_on_one_node_together() -> None:
    pools = [
        RayResourcePool([2, 1], name="actor", max_colocate_count=2, nodes=[0, 2]),
        RayResourcePool([1], name="critic", nodes=[2]),
        RayResourcePool([1], use_gpu=False, name="reward", nodes=[2]),
        RayResourcePool([3], name="elsewhere"),
    ]
    demands = node_demands(pools)
    assert demands == [{"CPU": 4, "GPU": 2}, {"CPU": 2 + 1 + 1, "GPU": 2}, {"CPU": 3, "GPU": 3}]

    # The largest first, on the node where it leaves least: 3 of 3, then 2 of 2, then 2 of 4.
    assert match(demands, [node(8, 4), node(8, 2), node(8, 3)]) == [1, 0, 2]
    assert match(demands, [node(8, 3), node(8, 3)]) is None
    small = [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert match(small, [node(8, 2), node(8, 2)]) == [0, 0]
    assert match(small, [node(8, 2), node(8, 2)], apart=True) == [0, 1]
    assert match(small, [node(8, 2)], apart=True) is None


def test_a_pool_is_reserved_on_the_node_that_it_is_pinned_to(ray_cluster: None) -> None:
    pools = ResourcePoolManager(
        {"a": [2], "b": [1]}, {"actor": "a"}, use_gpu=False, nodes={"a": [0], "b": [0]}
    )
    pools.create_resource_pool()
    assert len(pools.get_resource_pool("actor").bundles()) == 2
    pools.release()
    lost = RayResourcePool([1], use_gpu=False, name="lost", wait_limit_s=0.5, nodes=[0])
    lost.pin(["0f" * 28])
    with pytest.raises(InsufficientResourcesError, match="pool 'lost': 0 GPU, 1 CPU on node 0 of the plan"):
        lost.bundles()


IN_USE = "in use"


class Reservation:
    """Placement group that is reserved or not, whatever else is."""

    def __init__(self, node_id: str, is_ready: bool) -> None:
        self.node_id = node_id
        self._is_ready = is_ready

    def wait(self, timeout: float) -> bool:
        return self._is_ready


def use_cluster(
    monkeypatch: pytest.MonkeyPatch,
    free: list[NodeResources],
    is_ready: Mapping[str, bool],
    removed: list[str],
) -> None:
    """Let pools see a cluster that has lost node `a` and has these others.

    Args:
        free: What is free on each of the others. Nothing runs there, except on the one named IN_USE.
        is_ready: Whether something can be reserved, by node.
        removed: Gets the nodes of reservations that are removed.
    """
    gone = [{"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": False}]
    replaced: dict[str, Any] = {
        "ray": SimpleNamespace(nodes=lambda: gone),
        "free_nodes": lambda: list(free),
        "living_nodes": lambda: list(free),
        "unused": lambda nodes: [node for node in nodes if node in free and node.identity != IN_USE],
        "_group_on_node": lambda share, count, node_id: Reservation(node_id, is_ready[node_id]),
        "remove_placement_group": lambda group: removed.append(group.node_id),
        "placement_group_table": lambda group: {"bundles_to_node_id": [group.node_id]},
        "check_fits": lambda pools: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(resource_pool, name, value)


def test_a_pool_that_cannot_reserve_its_new_node_stays_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools of a run may choose the same free node. The one that comes late tries again."""
    removed: list[str] = []
    free = [NodeResources("10.0.0.2", {"CPU": 1}, "b")]
    use_cluster(monkeypatch, free, is_ready={"a": True, "b": False, "c": True}, removed=removed)
    pool = RayResourcePool([1], use_gpu=False, wait_limit_s=0)
    pool.pin(["a"])
    pool.bundles()
    assert pool.move_from_lost_nodes() == pool.move_from_lost_nodes() == {0: "10.0.0.1"}
    assert removed == ["b", "b"]
    assert pool.node_ids() == ["a"]

    free[:] = [NodeResources("10.0.0.3", {"CPU": 1}, "c")]
    assert pool.move_from_lost_nodes() == {}
    assert removed == ["b", "b", "a"]
    assert pool.node_ids() == ["c"]


def test_ranks_take_the_places_on_other_nodes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the reward process moves first, and prefers an unused node."""
    free = [NodeResources("10.0.0.2", {"CPU": 2}, "b"), NodeResources("10.0.0.3", {"CPU": 1}, IN_USE)]
    use_cluster(monkeypatch, free, is_ready=dict.fromkeys(["a", "b", IN_USE], True), removed=[])
    manager = ResourcePoolManager(
        {"actor": [2], "reward": [1], "environment": [1]},
        {},
        use_gpu=False,
        nodes=dict.fromkeys(["actor", "reward", "environment"], [0]),
    )
    actor, reward, environment = manager.resource_pools.values()
    for pool in (actor, reward, environment):
        pool.pin(["a"])
        pool.bundles()

    assert reward.move_from_lost_nodes() == {}
    assert reward.node_ids() == [IN_USE]
    free[1] = free[1].without({"CPU": 1})
    assert environment.move_from_lost_nodes() == {0: "10.0.0.1"}
    assert actor.move_from_lost_nodes() == {}
    assert actor.node_ids() == ["b", "b"]
