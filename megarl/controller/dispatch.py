"""Plan a call: which rank gets which part of the arguments, and how results are combined. Pure, without Ray.

dispatch (`plan_call`) -> execute (calls.py) -> collect (`collect`). A mode is a row of the table `RULES`; a
worker's method may also have its own `Rule`. megarl's workers receive parts that the driver has already split
under MEGATRON_MESH; a whole batch is split here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from megarl.batch.data_proto import DataProto, DataProtoFuture
from megarl.config.schema import RankCoordinate
from megarl.machine.errors import counted


class Dispatch(Enum):
    RANK_ZERO = "rank_zero"  # rank 0 only; returns its result
    ONE_TO_ALL = "one_to_all"  # the same arguments for all; returns a list of all results
    # Batches are split over replicas; results come from tp 0, the last pp stage and cp 0 of each.
    MEGATRON_MESH = "megatron_mesh"


Mesh = tuple[RankCoordinate, ...]  # the coordinates of a group's ranks, in order
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and named ones of one method call


class CallRoute(NamedTuple):
    """The ranks that run a call, and the part of the arguments that each of them receives.

    Attributes:
        ranks: The ranks that run the call.
        part_of_ranks: The part that each of `ranks` receives.
        results: The ranks whose results are kept, in order.
    """

    ranks: tuple[int, ...]
    part_of_ranks: tuple[int, ...]
    results: tuple[int, ...]


class CollectKind(Enum):
    first = "first"
    listed = "listed"
    joined = "joined"  # batches are concatenated; other results form a list


class Collect(NamedTuple):
    """How results are combined.

    Attributes:
        kind: The rule.
        num_rows: The rows of the split batch before padding. 0 if nothing was split, or the caller did.
        padding: The number of padding rows.
        presplit: Whether the caller passed parts, and gets parts.
    """

    kind: CollectKind
    num_rows: int = 0
    padding: int = 0
    presplit: bool = False


class CallPlan(NamedTuple):
    """A planned call.

    Attributes:
        parts: The arguments of each part.
        collect: How results are combined.
    """

    route: CallRoute
    parts: tuple[Arguments, ...]
    collect: Collect


# One argument, divided into parts: the value for the ranks of each part, and how results are combined if the
# argument was a batch that was split.
Arranged = tuple[tuple[Any, ...], Collect | None]


class Rule(NamedTuple):
    route: Callable[[Mesh], CallRoute]
    arrange: Callable[[Any, int], Arranged]
    collect: CollectKind


def plan_call(rule: Rule, mesh: Mesh, positional: Sequence[Any], named: Mapping[str, Any]) -> CallPlan:
    """Plan a call.

    Raises:
        ValueError: The arguments do not fit the mode: an empty batch, a list of another length, or a future.
    """
    if any(isinstance(value, DataProtoFuture) for value in (*positional, *named.values())):
        raise ValueError("a future cannot be an argument of a call: pass future.get()")
    # Divide each argument into one value per part, then regroup the values by part.
    route = rule.route(mesh)
    num_parts = max(route.part_of_ranks) + 1
    values = [rule.arrange(value, num_parts) for value in positional]
    by_name = {name: rule.arrange(value, num_parts) for name, value in named.items()}
    parts = tuple(
        (
            tuple(parts[number] for parts, _ in values),
            {name: parts[number] for name, (parts, _) in by_name.items()},
        )
        for number in range(num_parts)
    )
    # All batches of a call must be split the same way, or the results could not be combined.
    splits = list(dict.fromkeys(split for _, split in (*values, *by_name.values()) if split is not None))

    if len(splits) > 1:
        raise ValueError(
            "the batches of one call must be split the same way; here: "
            + ", ".join(
                "parts from the caller" if split.presplit else counted(split.num_rows, "row")
                for split in splits
            )
        )

    return CallPlan(route, parts, splits[0] if splits else Collect(rule.collect))


def collect(results: Sequence[Any], how: Collect) -> Any:
    """Combine the results of a call.

    Raises:
        ValueError: Padding rows cannot be distinguished from real ones in the results.
    """
    if how.kind is CollectKind.first:
        return results[0]
    if (
        how.kind is CollectKind.listed
        or how.presplit
        or not all(isinstance(result, DataProto) for result in results)
    ):
        # A list has no rows to remove, so padding rows would silently count as results.
        if how.padding:
            raise ValueError(
                f"a batch of {counted(how.num_rows, 'row')} was padded by {how.padding} to be split into "
                f"{len(results)} equal parts, but the method returns {type(results[0]).__name__}, in which "
                f"the padding rows were counted: pass a multiple of {counted(len(results), 'row')}, or "
                "split the batch yourself into a list of DataProto"
            )
        return list(results)

    joined = DataProto.concat(list(results))
    if not how.padding:
        return joined

    # A method may return several rows per input row; only a whole multiple can be unpadded.
    if len(joined) % (how.num_rows + how.padding):
        raise ValueError(
            f"{counted(how.num_rows, 'row')}, padded to {how.num_rows + how.padding}, resulted in "
            f"{counted(len(joined), 'row')}: the padding cannot be removed; pass a multiple of "
            f"{counted(len(results), 'row')}"
        )

    return unpad_dataproto(joined, how.padding * (len(joined) // (how.num_rows + how.padding)))


# ---- routes


def route_rank(rank: int) -> Callable[[Mesh], CallRoute]:
    return lambda mesh: CallRoute((rank,), (0,), (rank,))


def route_same_to_all(mesh: Mesh) -> CallRoute:
    ranks = tuple(range(len(mesh)))
    return CallRoute(ranks, (0,) * len(mesh), ranks)


def route_mesh(mesh: Mesh) -> CallRoute:
    """Send part d to every rank of replica d.

    Raises:
        ValueError: The coordinates do not form a full grid.
    """
    # A full grid has every coordinate once, so it is enough to check distinctness and the product of sizes.
    sizes = [max(coordinate[axis] for coordinate in mesh) + 1 for axis in range(4)]
    if len(set(mesh)) != len(mesh) or sizes[0] * sizes[1] * sizes[2] * sizes[3] != len(mesh):
        raise ValueError(
            f"the mesh of {counted(len(mesh), 'rank')} is not a full grid: "
            f"{[tuple(coordinate) for coordinate in mesh]}"
        )

    # One rank reports for each replica; only the last pipeline stage has the model's output.
    last_stage = sizes[2] - 1
    speaker = {
        coordinate.dp: rank for rank, coordinate in enumerate(mesh) if coordinate[1:] == (0, last_stage, 0)
    }
    return CallRoute(
        tuple(range(len(mesh))),
        tuple(coordinate.dp for coordinate in mesh),
        tuple(speaker[replica] for replica in range(sizes[0])),
    )


# ---- arguments


def arrange_same(value: Any, num_parts: int) -> Arranged:
    return (value,) * num_parts, None


def arrange_split(value: Any, num_parts: int) -> Arranged:
    """Pad and split a DataProto. A list of DataProto is already split; anything else goes to all ranks."""
    if isinstance(value, DataProto):
        padded, padding = pad_dataproto_to_divisor(value, num_parts)
        split = Collect(CollectKind.joined, num_rows=len(value), padding=padding)
        return tuple(padded.chunk(num_parts)), split

    # The driver has split the batch itself: its parts pass through, and the results stay in parts.
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, DataProto) for item in value):
        if len(value) != num_parts:
            raise ValueError(
                f"the caller split the batch into {len(value)} parts, but the group has "
                f"{counted(num_parts, 'replica')}"
            )
        return tuple(value), Collect(CollectKind.joined, presplit=True)

    return arrange_same(value, num_parts)


RULES: dict[Dispatch, Rule] = {
    Dispatch.RANK_ZERO: Rule(route_rank(0), arrange_same, CollectKind.first),
    Dispatch.ONE_TO_ALL: Rule(route_same_to_all, arrange_same, CollectKind.listed),
    Dispatch.MEGATRON_MESH: Rule(route_mesh, arrange_split, CollectKind.joined),
}


def rule_for_rank(rank: int) -> Rule:
    return Rule(route_rank(rank), arrange_same, CollectKind.first)


def pad_dataproto_to_divisor(data: DataProto, divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows, repeatedly if necessary, until the length is a multiple of `divisor`.

    Copies of real rows, unlike zeros, keep every shape and mask valid for the models.

    Returns:
        The batch, and the number of appended rows.

    Raises:
        ValueError: The batch is empty.
    """
    if len(data) == 0:
        raise ValueError(f"an empty batch cannot be padded to a multiple of {divisor}")
    pad_size = -len(data) % divisor
    if pad_size == 0:
        return data, 0

    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data
