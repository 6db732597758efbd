"""Which rank gets which part of a call's arguments, and what becomes of the results: pure plans, no Ray.

dispatch (`plan_call`) -> execute (group.py) -> collect (`collect`). A mode is a row of the table `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from megarl.batch.data_proto import DataProto
from megarl.batch.padding import pad_dataproto_to_divisor, unpad_dataproto
from megarl.controller.mesh import MeshCoordinate


class Dispatch(Enum):
    RANK_ZERO = "rank_zero"  # rank 0 alone; its result
    ONE_TO_ALL = "one_to_all"  # the same arguments to all; a list of all results
    ALL_TO_ALL = "all_to_all"  # every argument is a list with one value per rank; a list of all results
    DATA_PARALLEL = "data_parallel"  # batches are split over all ranks; results are joined
    MEGATRON_MESH = "megatron_mesh"  # batches are split over replicas; joined from tp 0, last pp stage, cp 0 of each


class Route(NamedTuple):
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
    """`num_rows`: of the batch that was split, before padding; None when nothing was split here (or by the caller)."""

    kind: CollectKind
    num_rows: int | None = None
    padding: int = 0
    presplit: bool = False  # the caller gave the parts, and gets parts


class Forwarded(NamedTuple):
    """A result that stays in the object store: references to what `collect` would be given."""

    references: tuple[Any, ...]
    collect: Collect


class Slot(NamedTuple):
    """How one argument is rebuilt from the `num_values` values that travel for it; `collect` None: it is the one value."""

    num_values: int = 1
    collect: Collect | None = None
    refuse_batch: bool = False  # the method expects its share of a batch, so a whole one must not arrive


class ArgumentLayout(NamedTuple):
    positional: tuple[Slot, ...]
    named: tuple[tuple[str, Slot], ...]


class Arranged(NamedTuple):
    """One argument, cut: `parts[p]` are the values that travel to the ranks of part p."""

    parts: tuple[tuple[Any, ...], ...]
    slot: Slot = Slot()
    split: Collect | None = None


class CallPlan(NamedTuple):
    """`values[p]`: what travels to the ranks of part p; `layout` says how to read it."""

    route: Route
    layout: ArgumentLayout
    values: tuple[tuple[Any, ...], ...]
    collect: Collect


class Rule(NamedTuple):
    route: Callable[[int, Sequence[MeshCoordinate]], Route]
    arrange: Callable[[Any, int], Arranged]
    collect: CollectKind
    needs_mesh: bool = False


def plan_call(
    rule: Rule, world_size: int, mesh: Sequence[MeshCoordinate], arguments: Sequence[Any], named_arguments: Mapping[str, Any]
) -> CallPlan:
    """Raises ValueError for arguments that the mode cannot take."""
    route = rule.route(world_size, mesh)
    arranged = [rule.arrange(value, route.num_parts) for value in (*arguments, *named_arguments.values())]
    slots = [argument.slot for argument in arranged]
    return CallPlan(
        route=route,
        layout=ArgumentLayout(tuple(slots[: len(arguments)]), tuple(zip(named_arguments, slots[len(arguments) :], strict=True))),
        values=tuple(tuple(value for argument in arranged for value in argument.parts[part]) for part in range(route.num_parts)),
        collect=_one_split([argument.split for argument in arranged if argument.split is not None], rule.collect),
    )


def rebuild_arguments(layout: ArgumentLayout, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """In the worker: the call's arguments from the values that travelled. Raises ValueError for a whole batch where a part belongs."""
    remaining = iter(values)

    def rebuild(slot: Slot) -> Any:
        taken = [next(remaining) for _ in range(slot.num_values)]
        value = taken[0] if slot.collect is None else collect(taken, slot.collect)
        if slot.refuse_batch and isinstance(value, DataProto):
            raise ValueError(
                "a future that holds a whole batch was given to a method that takes a share of it: "
                "pass future.get(), which the group can split"
            )
        return value

    return [rebuild(slot) for slot in layout.positional], {name: rebuild(slot) for name, slot in layout.named}


def collect(results: Sequence[Any], how: Collect) -> Any:
    """Raises ValueError when padding rows cannot be told from real ones in the results."""
    if how.kind is CollectKind.first:
        return results[0]
    if how.kind is CollectKind.listed or how.presplit or not all(isinstance(result, DataProto) for result in results):
        if how.padding:
            raise ValueError(
                f"a batch of {how.num_rows} rows was padded by {how.padding} to be split into {len(results)} equal parts, but the method "
                f"returns {type(results[0]).__name__}, in which the extra rows were counted: give it a multiple of {len(results)} rows, "
                "or split it yourself into a list of DataProto"
            )
        return list(results)
    joined = DataProto.concat(list(results))
    if not how.padding:
        return joined
    assert how.num_rows is not None
    if len(joined) % (how.num_rows + how.padding):
        raise ValueError(
            f"{how.num_rows} rows, padded to {how.num_rows + how.padding}, came back as {len(joined)}: the padding cannot be taken off; "
            f"give the method a multiple of {len(results)} rows"
        )
    return unpad_dataproto(joined, how.padding * (len(joined) // (how.num_rows + how.padding)))


def _one_split(splits: Sequence[Collect], kind: CollectKind) -> Collect:
    if not splits:
        return Collect(kind)
    if len(set(splits)) > 1:
        raise ValueError(
            "the batches of one call must be split alike; here: "
            + ", ".join(f"{split.num_rows} rows {'split by the caller' if split.presplit else ''}".strip() for split in splits)
        )
    return splits[0]


# ---- routes


def route_rank(rank: int) -> Route:
    return Route((rank,), (0,), (rank,))


def route_rank_zero(world_size: int, mesh: Sequence[MeshCoordinate]) -> Route:
    return route_rank(0)


def route_same_to_all(world_size: int, mesh: Sequence[MeshCoordinate]) -> Route:
    ranks = tuple(range(world_size))
    return Route(ranks, (0,) * world_size, ranks)


def route_one_part_each(world_size: int, mesh: Sequence[MeshCoordinate]) -> Route:
    ranks = tuple(range(world_size))
    return Route(ranks, ranks, ranks)


def route_mesh(world_size: int, mesh: Sequence[MeshCoordinate]) -> Route:
    """Part d to every rank of replica d. Raises ValueError when the coordinates are not one full grid."""
    assert len(mesh) == world_size
    sizes = [max(coordinate[axis] for coordinate in mesh) + 1 for axis in range(4)]
    if len(set(mesh)) != world_size or sizes[0] * sizes[1] * sizes[2] * sizes[3] != world_size:
        raise ValueError(f"the mesh of {world_size} ranks is not a full grid: {[tuple(coordinate) for coordinate in mesh]}")
    last_stage = sizes[2] - 1
    speaker = {coordinate.dp: rank for rank, coordinate in enumerate(mesh) if coordinate[1:] == (0, last_stage, 0)}
    return Route(
        tuple(range(world_size)),
        tuple(coordinate.dp for coordinate in mesh),
        tuple(speaker[replica] for replica in range(sizes[0])),
    )


# ---- arguments


def arrange_same(value: Any, num_parts: int) -> Arranged:
    if isinstance(value, Forwarded):
        return Arranged((value.references,) * num_parts, Slot(len(value.references), value.collect))
    return Arranged(((value,),) * num_parts)


def arrange_one_each(value: Any, num_parts: int) -> Arranged:
    if isinstance(value, Forwarded) and value.collect.kind is not CollectKind.first:
        value = value.references
    if not isinstance(value, (list, tuple)) or len(value) != num_parts:
        found = f"{len(value)} values" if isinstance(value, (list, tuple)) else type(value).__name__
        raise ValueError(f"ALL_TO_ALL takes a list with one value for each of the {num_parts} ranks, not {found}")
    return Arranged(tuple((item,) for item in value))


def arrange_split(value: Any, num_parts: int) -> Arranged:
    """A DataProto is padded and cut; a list of DataProto is cut already; anything else goes to all."""
    if isinstance(value, Forwarded):
        return _arrange_forwarded(value, num_parts)
    if isinstance(value, DataProto):
        padded, padding = pad_dataproto_to_divisor(value, num_parts)
        parts = tuple((part,) for part in padded.chunk(num_parts))
        return Arranged(parts, split=Collect(CollectKind.joined, num_rows=len(value), padding=padding))
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, DataProto) for item in value):
        if len(value) != num_parts:
            raise ValueError(f"the batch was split by the caller into {len(value)} parts, the group has {num_parts} replicas")
        return Arranged(tuple((item,) for item in value), split=Collect(CollectKind.joined, presplit=True))
    return Arranged(((value,),) * num_parts)


def _arrange_forwarded(value: Forwarded, num_parts: int) -> Arranged:
    """The parts of a split batch go one to one; a single result goes to all."""
    if value.collect.kind is CollectKind.first:
        return Arranged((value.references,) * num_parts, Slot(refuse_batch=True))
    if value.collect.kind is CollectKind.joined and len(value.references) == num_parts:
        return Arranged(tuple((reference,) for reference in value.references), split=value.collect)
    content = "parts" if value.collect.kind is CollectKind.joined else "results"
    raise ValueError(
        f"a future of {len(value.references)} {content} cannot be handed part by part to a group of {num_parts} replicas: "
        "pass future.get(), which the group can split"
    )


RULES: dict[Dispatch, Rule] = {
    Dispatch.RANK_ZERO: Rule(route_rank_zero, arrange_same, CollectKind.first),
    Dispatch.ONE_TO_ALL: Rule(route_same_to_all, arrange_same, CollectKind.listed),
    Dispatch.ALL_TO_ALL: Rule(route_one_part_each, arrange_one_each, CollectKind.listed),
    Dispatch.DATA_PARALLEL: Rule(route_one_part_each, arrange_split, CollectKind.joined),
    Dispatch.MEGATRON_MESH: Rule(route_mesh, arrange_split, CollectKind.joined, needs_mesh=True),
}
