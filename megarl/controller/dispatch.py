"""Plans a call: which rank gets which part of the arguments, and what becomes of the results. Pure, no Ray.

dispatch (`plan_call`) -> execute (actors.py) -> collect (`collect`). A mode is a row of the table `RULES`; a
worker's method may also have a `Rule` of its own. megarl's workers give MEGATRON_MESH the parts that the
driver has cut; a whole batch is cut here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from megarl.batch.data_proto import DataProto
from megarl.batch.future import DataProtoFuture
from megarl.batch.padding import pad_dataproto_to_divisor, unpad_dataproto


class Dispatch(Enum):
    RANK_ZERO = "rank_zero"  # rank 0 alone; its result
    ONE_TO_ALL = "one_to_all"  # the same arguments to all; a list of all results
    # batches are split over replicas; joined from tp 0, last pp stage, cp 0 of each
    MEGATRON_MESH = "megatron_mesh"


class MeshCoordinate(NamedTuple):
    """Where a rank stands in its role's parallel layout. Ranks with the same `dp` form one replica and work
    on the same rows."""

    dp: int
    tp: int = 0
    pp: int = 0
    cp: int = 0


Mesh = tuple[MeshCoordinate, ...]  # of the ranks of a group, in order


class CallRoute(NamedTuple):
    """`ranks[i]` gets part `parts[i]`; the results of the ranks `results` are kept, in that order."""

    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return max(self.parts) + 1


class CollectKind(Enum):
    first = "first"
    listed = "listed"
    joined = "joined"  # batches are concatenated; anything else is a list


class Collect(NamedTuple):
    """`num_rows`: of the batch that was split, before padding; None when nothing was split here (or by the
    caller)."""

    kind: CollectKind
    num_rows: int | None = None
    padding: int = 0
    presplit: bool = False  # the caller gave the parts, and gets parts


class Arguments(NamedTuple):
    """What one method call gets."""

    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return (*self.positional, *self.named.values())


class CallPlan(NamedTuple):
    """`parts[p]`: what the ranks of part p get."""

    route: CallRoute
    parts: tuple[Arguments, ...]
    collect: Collect


class Arranged(NamedTuple):
    """One argument, as the ranks of each part get it. `split`: how its results come together, where it was a
    batch that was cut."""

    parts: tuple[Any, ...]
    split: Collect | None = None


class Rule(NamedTuple):
    route: Callable[[Mesh], CallRoute]
    arrange: Callable[[Any, int], Arranged]
    collect: CollectKind


def plan_call(rule: Rule, mesh: Mesh, positional: Sequence[Any], named: Mapping[str, Any]) -> CallPlan:
    """Raises ValueError for arguments that do not fit the mode: an empty batch, a list of another length, a
    future."""
    if any(isinstance(value, DataProtoFuture) for value in (*positional, *named.values())):
        raise ValueError("a future cannot be an argument of a call: give future.get()")
    # Arrange each argument into one value per part, then regroup the values by part.
    route = rule.route(mesh)
    values = [rule.arrange(value, route.num_parts) for value in positional]
    by_name = {name: rule.arrange(value, route.num_parts) for name, value in named.items()}
    parts = tuple(
        Arguments(
            tuple(value.parts[part] for value in values),
            {name: value.parts[part] for name, value in by_name.items()},
        )
        for part in range(route.num_parts)
    )
    # All batches of a call must be split alike, or the results could not be joined in one way.
    splits = list(
        dict.fromkeys(value.split for value in (*values, *by_name.values()) if value.split is not None)
    )

    if len(splits) > 1:
        raise ValueError(
            "the batches of one call must be split alike; here: "
            + ", ".join(
                "parts of the caller's" if split.presplit else f"{split.num_rows} rows" for split in splits
            )
        )

    return CallPlan(route, parts, splits[0] if splits else Collect(rule.collect))


def collect(results: Sequence[Any], how: Collect) -> Any:
    """Raises ValueError when padding rows cannot be told from real ones in the results."""
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
                f"a batch of {how.num_rows} rows was padded by {how.padding} to be split into "
                f"{len(results)} equal parts, but the method "
                f"returns {type(results[0]).__name__}, in which the extra rows were counted: give it a "
                f"multiple of {len(results)} rows, "
                "or split it yourself into a list of DataProto"
            )
        return list(results)

    joined = DataProto.concat(list(results))
    if not how.padding:
        return joined
    assert how.num_rows is not None

    # A method may return several rows for each row; only a whole multiple can be unpadded.
    if len(joined) % (how.num_rows + how.padding):
        raise ValueError(
            f"{how.num_rows} rows, padded to {how.num_rows + how.padding}, came back as {len(joined)}: the "
            f"padding cannot be taken off; "
            f"give the method a multiple of {len(results)} rows"
        )

    return unpad_dataproto(joined, how.padding * (len(joined) // (how.num_rows + how.padding)))


# ---- routes


def route_rank(rank: int) -> Callable[[Mesh], CallRoute]:
    return lambda mesh: CallRoute((rank,), (0,), (rank,))


def route_same_to_all(mesh: Mesh) -> CallRoute:
    ranks = tuple(range(len(mesh)))
    return CallRoute(ranks, (0,) * len(mesh), ranks)


def route_mesh(mesh: Mesh) -> CallRoute:
    """Part d to every rank of replica d. Raises ValueError when the coordinates are not one full grid."""
    # A full grid has every coordinate once, so distinct coordinates and the product of the sizes decide.
    sizes = [max(coordinate[axis] for coordinate in mesh) + 1 for axis in range(4)]
    if len(set(mesh)) != len(mesh) or sizes[0] * sizes[1] * sizes[2] * sizes[3] != len(mesh):
        raise ValueError(
            f"the mesh of {len(mesh)} ranks is not a full grid: {[tuple(coordinate) for coordinate in mesh]}"
        )

    # One rank speaks for each replica; only the last pipeline stage has the model's output.
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
    return Arranged((value,) * num_parts)


def arrange_split(value: Any, num_parts: int) -> Arranged:
    """A DataProto is padded and cut; a list of DataProto is cut already; anything else goes to all."""
    if isinstance(value, DataProto):
        padded, padding = pad_dataproto_to_divisor(value, num_parts)
        return Arranged(
            tuple(padded.chunk(num_parts)), Collect(CollectKind.joined, num_rows=len(value), padding=padding)
        )

    # The driver has cut the batch itself: its parts pass through, and the results stay in parts.
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, DataProto) for item in value):
        if len(value) != num_parts:
            raise ValueError(
                f"the batch was split by the caller into {len(value)} parts, the group has {num_parts} "
                f"replicas"
            )
        return Arranged(tuple(value), Collect(CollectKind.joined, presplit=True))

    return arrange_same(value, num_parts)


RULES: dict[Dispatch, Rule] = {
    Dispatch.RANK_ZERO: Rule(route_rank(0), arrange_same, CollectKind.first),
    Dispatch.ONE_TO_ALL: Rule(route_same_to_all, arrange_same, CollectKind.listed),
    Dispatch.MEGATRON_MESH: Rule(route_mesh, arrange_split, CollectKind.joined),
}


def rule_for_rank(rank: int) -> Rule:
    return Rule(route_rank(rank), arrange_same, CollectKind.first)
