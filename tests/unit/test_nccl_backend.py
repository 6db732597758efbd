"""All of torch.distributed that Megatron calls works over the emulation of NCCL as its backend, and gives
what it gives over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_communicator import num_live_communicators
from tests.nccl_semantics import BACKEND, register
from tests.ranks import RankPool


def collectives(group: dist.ProcessGroup) -> dict[str, Any]:
    """In a rank of a group of global ranks 0, 1, 3: what each function gives; tensors as lists."""
    rank = dist.get_rank(group)
    mine = torch.arange(6.0) * (dist.get_rank() + 0.1)
    results: dict[str, Any] = {}

    def filled(size: int) -> Tensor:
        return torch.full((size,), float("nan"))

    def into(output: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        function(*arguments, group=group, **options)
        results[f"{len(results)} {function.__name__}"] = listed(output)

    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        into(copy := mine.clone(), dist.all_reduce, copy, operation)
    into(copy := mine.clone(), dist.broadcast, copy, 3)
    copy = mine.clone()
    into(copy if rank == 2 else None, dist.reduce, copy, 3)
    into(parts := [filled(6) for _ in range(3)], dist.all_gather, parts, mine)
    into(whole := filled(18), dist.all_gather_into_tensor, whole, mine)
    into(part := filled(2), dist.reduce_scatter, part, list(mine.clone().chunk(3)))
    into(part := filled(2), dist.reduce_scatter_tensor, part, mine.clone())
    into(gathered := [filled(6) for _ in range(3)] if rank == 2 else None, dist.gather, mine, gathered, 3)
    into(part := filled(2), dist.scatter, part, list(mine.chunk(3)) if rank == 2 else None, 3)
    into(part := filled(6), dist.all_to_all_single, part, mine)
    into(part := filled(3 * (rank + 1)), dist.all_to_all_single, part, mine, [rank + 1] * 3, [1, 2, 3])
    objects: list[Any]
    into(objects := [None] * 3, dist.all_gather_object, objects, {"rank": rank})
    into(objects := [f"rank {rank}", rank], dist.broadcast_object_list, objects, 3)
    into(None, dist.barrier)

    return results


def listed(value: Any) -> Any:
    return (
        [listed(each) for each in value]
        if isinstance(value, list)
        else value.tolist()
        if isinstance(value, Tensor)
        else value
    )


def coalesced_collectives(group: dist.ProcessGroup) -> list[Any]:
    """In a rank: gathered and scattered parts, as Megatron's optimizer exchanges parameters and gradients."""
    results = []
    for function, size in ((dist.all_gather_into_tensor, 9), (dist.reduce_scatter_tensor, 1)):
        inputs = [torch.arange(3.0) + dist.get_rank(), torch.arange(3.0) * dist.get_rank()]
        outputs = [torch.zeros(size) for _ in inputs]
        with dist._coalescing_manager(group, async_ops=True) as coalesced:
            for output, each in zip(outputs, inputs, strict=True):
                function(output, each, group=group, async_op=True)
        coalesced.wait()
        results.append(listed(outputs))

    return results


def transfers(group: dist.ProcessGroup) -> list[Any]:
    """Exchange tensors with both neighbors at once, and pass one along the line of ranks. Runs in a rank."""
    rank = dist.get_rank(group)
    mine = torch.arange(2.0) + dist.get_rank()
    neighbors = [dist.get_global_rank(group, (rank + step) % 3) for step in (1, -1)]
    received = [torch.empty(2) for _ in neighbors]
    batch = [
        dist.P2POp(dist.irecv, tensor, neighbor, group)
        for tensor, neighbor in zip(received, neighbors, strict=True)
    ]
    batch += [dist.P2POp(dist.isend, mine, neighbor, group) for neighbor in neighbors]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    line = torch.zeros(1)
    if rank > 0:
        dist.recv(line, neighbors[1], group)
    if rank < 2:
        dist.send(line + rank + 1, neighbors[0], group)

    return listed([*received, line])


def all_functions(backend: str) -> dict[str, Any]:
    register()
    assert num_live_communicators() == 0  # those of an earlier call went with its default group
    group = dist.new_group([0, 1, 3], backend=backend)
    if dist.get_rank() == 2:
        return {}
    assert dist.get_backend(group) == backend

    return {**collectives(group), "coalesced": coalesced_collectives(group), "transfers": transfers(group)}


def test_all_functions_give_what_they_give_over_gloo(rank_pool: RankPool) -> None:
    over_gloo = rank_pool.run(all_functions, world_size=4, backend="gloo")
    for _ in range(2):
        assert rank_pool.run(all_functions, world_size=4, backend=BACKEND) == over_gloo
    assert over_gloo[3]["transfers"] == [[0.0, 1.0], [1.0, 2.0], [3.0]]
    assert [len(results) for results in over_gloo] == [17, 17, 0, 17]
