"""Which rank sends which boxes of which tensors to which rank: a pure plan, made once, that both ends work through in rounds.

A box is a rectangle of a Hugging Face tensor in that tensor's own shape. What a target needs is cut along what the sources hold;
each piece comes from one of the sources nearest to the target (same device, same node, anywhere), and of sources that are equally
near each sends the same share. Everything that one rank sends to another is a stream; in each round goes the same fraction of every
stream, so that no rank sends or receives more than one message's worth at a time and all of them work all of the time.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from megarl.config.schema import Transport
from megarl.weights.tensors import Rectangle, WeightTransferError, range_rectangles

_MAX_NAMED = 8
_LARGE = 2**18  # elements of a part that travels by itself, which takes less than to copy it
NUM_SLOTS = 4  # of the carrier `device`: with two, each side often waits for the other to wake
MESSAGE_BYTES_ON_A_CPU = 4 * 2**20  # what is read soon after it was written comes out of the processor's cache

Boxes = Mapping[str, Sequence[Rectangle]]  # of one rank, by tensor: each element is in one of them


class Part(NamedTuple):
    """A box of the tensor `name`, or as much of one as goes in one message. Its elements travel in row-major order."""

    name: str
    box: Rectangle


class RankPlace(NamedTuple):
    """Where a rank is. `device`: its name in the whole cluster."""

    node: str
    device: str


@dataclass(frozen=True)
class RankBoxes:
    """What one rank holds, or needs."""

    place: RankPlace
    boxes: Boxes


class Stream:
    """What one rank sends to another, in order, over all rounds: the same fraction in each, or in round n the elements from bounds[n]
    to bounds[n + 1], where `bounds` are given."""

    def __init__(self, parts: Sequence[Part], num_rounds: int = 1, bounds: Sequence[int] | None = None) -> None:
        assert bounds is None or len(bounds) == num_rounds + 1
        self.parts = tuple(parts)
        self.num_rounds = num_rounds
        self.bounds = bounds
        self._ends = list(accumulate(part.box.volume for part in parts))
        self._messages: dict[int, tuple[Part, ...]] = {}  # every push asks again

    @property
    def numel(self) -> int:
        return self._ends[-1]

    def length(self, number: int) -> int:
        """Elements of the message of round `number`."""
        start, stop = self._span(number)
        return stop - start

    def message(self, number: int) -> tuple[Part, ...]:
        """What goes in round `number`."""
        if number not in self._messages:
            self._messages[number] = tuple(self._parts_between(*self._span(number)))
        return self._messages[number]

    def _parts_between(self, start: int, stop: int) -> Iterator[Part]:
        index = bisect_right(self._ends, start)
        while start < stop:
            (name, box), end = self.parts[index], self._ends[index]
            first = end - box.volume
            if start == first and stop >= end:
                yield self.parts[index]
            else:
                for rows in range_rectangles(box.shape, start - first, min(stop, end) - first):
                    yield Part(name, rows.relative_to((0,) * len(box.starts), box.starts))
            start, index = end, index + 1

    def segments(self, number: int) -> Iterator[list[Part]]:
        """The message of a round as it travels: large parts each alone, what is small and neighbours together."""
        small: list[Part] = []
        for part in self.message(number):
            if part.box.volume < _LARGE:
                small.append(part)
                continue
            if small:
                yield small
                small = []
            yield [part]
        if small:
            yield small

    def _span(self, number: int) -> tuple[int, int]:
        if self.bounds is not None:
            return self.bounds[number], self.bounds[number + 1]
        return self.numel * number // self.num_rounds, self.numel * (number + 1) // self.num_rounds


Streams = Mapping[int, Stream]  # by the rank on the other end


@dataclass(frozen=True)
class TransferPlan:
    """`streams`: by (source, target), numbers in the sequences that the plan was made from."""

    streams: Mapping[tuple[int, int], Stream]
    num_rounds: int

    def of_source(self, source: int) -> dict[int, Stream]:
        """By target."""
        return {target: stream for (own, target), stream in sorted(self.streams.items()) if own == source}

    def of_target(self, target: int) -> dict[int, Stream]:
        """By source."""
        return {source: stream for (source, own), stream in sorted(self.streams.items()) if own == target}

    def sent(self, source: int) -> int:
        """Elements over all rounds, to targets on its own device too."""
        return sum(stream.numel for stream in self.of_source(source).values())

    def received(self, target: int) -> int:
        return sum(stream.numel for stream in self.of_target(target).values())

    def __str__(self) -> str:
        lines = [f"{self.num_rounds} rounds"]
        for (source, target), stream in sorted(self.streams.items()):
            lines.append(f"{source} -> {target}: {stream.numel} elements in {len(stream.parts)} boxes")
            lines += [f"  {part.name} {part.box}" for part in stream.parts]
        return "\n".join(lines)


def plan_transfer(
    shapes: Mapping[str, Sequence[int]],
    sources: Sequence[RankBoxes],
    targets: Sequence[RankBoxes],
    message_numel: int,
    loads: Sequence[int] | None = None,
) -> TransferPlan:
    """`shapes`: of all tensors, in the order in which they are to be sent. `message_numel`: elements that a rank sends, and
    receives, in a round at most. `loads`: elements that each source has to send besides; who has fewer of them sends more.

    Raises WeightTransferError that names the tensors of which a target needs elements that no source holds, ValueError where
    `message_numel` is too few for the number of ranks.
    """
    with _without_collections():
        return _plan(shapes, sources, targets, message_numel, list(loads or [0] * len(sources)))


@contextmanager
def _without_collections() -> Iterator[None]:
    """A plan is a million small tuples that stay: to look for garbage among them takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(
    shapes: Mapping[str, Sequence[int]], sources: Sequence[RankBoxes], targets: Sequence[RankBoxes], message_numel: int, loads: list[int]
) -> TransferPlan:
    by_candidates = _cells(shapes, sources, targets)
    parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for candidates, cells in sorted(by_candidates.items(), key=lambda item: (len(item[0]), item[0])):
        volume = sum(part.box.volume for _, part in cells)
        shares = _level(volume, [loads[source] for source in candidates])
        for source, target, part in _dealt(cells, candidates, shares):
            parts[source, target].append(part)
        for source, share in zip(candidates, shares, strict=True):
            loads[source] += share
    order = {name: number for number, name in enumerate(shapes)}
    volumes = {pair: sum(part.box.volume for part in listed) for pair, listed in parts.items()}
    num_rounds = _num_rounds(volumes, message_numel)
    streams = {pair: Stream(sorted(listed, key=lambda part: order[part.name]), num_rounds) for pair, listed in parts.items()}
    return TransferPlan(streams, num_rounds)


def one_after_another(plans: Sequence[TransferPlan]) -> TransferPlan:
    """All that the plans send, in their order: each round is one of theirs."""
    num_rounds = sum(plan.num_rounds for plan in plans)
    parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
    lengths: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * num_rounds)
    first = 0
    for plan in plans:
        for pair, stream in plan.streams.items():
            parts[pair] += stream.parts
            lengths[pair][first : first + plan.num_rounds] = map(stream.length, range(plan.num_rounds))
        first += plan.num_rounds
    streams = {pair: Stream(listed, num_rounds, list(accumulate(lengths[pair], initial=0))) for pair, listed in parts.items()}
    return TransferPlan(streams, num_rounds)


_Cell = tuple[int, Part]  # target, what it needs of one holder


def _cells(
    shapes: Mapping[str, Sequence[int]], sources: Sequence[RankBoxes], targets: Sequence[RankBoxes]
) -> dict[tuple[int, ...], list[_Cell]]:
    """What targets need, cut along what sources hold: by the sources that it can come from, in the order of targets and tensors.

    Layers look alike: a cut is made once for all tensors of which the same ranks hold and need the same boxes.
    """
    held, needed = _by_name(sources), _by_name(targets)
    cuts: dict[tuple, tuple[list[tuple[tuple[int, ...], int, Rectangle]], int]] = {}
    found: list[dict[tuple[int, ...], list[_Cell]]] = [defaultdict(list) for _ in targets]
    faults = [f"{name} is not a tensor of the model" for name in needed if name not in shapes]
    for name in shapes:
        key = held.get(name, ()), needed.get(name, ())
        if key not in cuts:
            made = list(_cut(*key, sources, targets))
            cuts[key] = made, sum(box.volume for _, box in key[1]) - sum(box.volume for _, _, box in made)
        cut, missing = cuts[key]
        if missing:
            faults.append(f"{name}: {missing} elements that are needed are held by nobody, or twice with other cuts")
        for candidates, target, box in cut:
            found[target][candidates].append((target, Part(name, box)))
    if faults:
        raise WeightTransferError(f"{len(faults)} tensors cannot be sent: " + "; ".join(faults[:_MAX_NAMED]))
    merged: dict[tuple[int, ...], list[_Cell]] = defaultdict(list)
    for of_target in found:
        for candidates, cells in of_target.items():
            merged[candidates] += cells
    return merged


_Of = tuple[tuple[int, Rectangle], ...]  # rank and box


def _by_name(ranks: Sequence[RankBoxes]) -> dict[str, _Of]:
    found: dict[str, list[tuple[int, Rectangle]]] = defaultdict(list)
    for rank, each in enumerate(ranks):
        for name, boxes in each.boxes.items():
            found[name] += [(rank, box) for box in boxes]
    return {name: tuple(listed) for name, listed in found.items()}


def _cut(
    held: _Of, needed: _Of, sources: Sequence[RankBoxes], targets: Sequence[RankBoxes]
) -> Iterator[tuple[tuple[int, ...], int, Rectangle]]:
    holders: dict[Rectangle, list[int]] = defaultdict(list)
    for source, box in held:
        holders[box].append(source)
    for target, wanted in needed:
        for box, ranks in holders.items():
            if (shared := wanted.intersect(box)) is not None:
                yield _nearest(ranks, sources, targets[target]), target, shared


def _nearest(ranks: Sequence[int], sources: Sequence[RankBoxes], target: RankBoxes) -> tuple[int, ...]:
    for is_near in (
        lambda source: source.place == target.place,
        lambda source: source.place.node == target.place.node,
        lambda source: True,
    ):
        if near := tuple(rank for rank in ranks if is_near(sources[rank])):
            return near
    raise AssertionError("a box without a holder")


def _level(volume: int, loads: Sequence[int]) -> list[int]:
    """`volume` in shares, whole numbers, that bring unequal loads as near to one level as they can."""
    rising = sorted(loads)
    level, rest = rising[0], volume
    for count, (low, high) in enumerate(zip(rising, [*rising[1:], rising[-1] + volume], strict=True), start=1):
        step = min(high - low, ceil(rest / count))
        level, rest = low + step, rest - step * count
        if rest <= 0:
            break
    shares = [max(0, level - load) for load in loads]
    excess = sum(shares) - volume  # of rounding up, less than one for each share
    for index in [index for index, share in enumerate(shares) if share][:excess]:
        shares[index] -= 1
    return shares


def _dealt(cells: Sequence[_Cell], candidates: Sequence[int], shares: Sequence[int]) -> Iterator[tuple[int, int, Part]]:
    """Source, target, part: the cells in their order, the first share of them from the first candidate, and so on."""
    taking = iter(zip(candidates, shares, strict=True))
    source, room = next(taking)
    for target, (name, box) in cells:
        start, volume = 0, box.volume
        while start < volume:
            while room == 0:
                source, room = next(taking)
            stop = min(volume, start + room)
            if stop - start == volume:
                yield source, target, Part(name, box)
            else:
                for rows in range_rectangles(box.shape, start, stop):
                    yield source, target, Part(name, rows.relative_to((0,) * len(box.starts), box.starts))
            room -= stop - start
            start = stop


def _num_rounds(volumes: Mapping[tuple[int, int], int], message_numel: int) -> int:
    """The fewest in which no rank sends, or receives, more than `message_numel` elements."""
    of_rank: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (source, target), volume in volumes.items():
        of_rank["sends", source].append(volume)
        of_rank["receives", target].append(volume)
    num_rounds = 1
    for (does, rank), listed in of_rank.items():
        if message_numel < len(listed):
            raise ValueError(
                f"a message of {message_numel} elements is too small: rank {rank} {does} parts of {len(listed)} ranks at a time; "
                "give a larger resharding.bucket_mb"
            )
        num_rounds = max(num_rounds, ceil(sum(listed) / message_numel))
        while sum(ceil(volume / num_rounds) for volume in listed) > message_numel:
            num_rounds += 1 + num_rounds // 64
    return num_rounds


def numel_of(boxes: Boxes) -> int:
    return sum(box.volume for listed in boxes.values() for box in listed)


def whole_boxes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Rectangle, ...]]:
    """Of a rank that needs everything."""
    return {name: (Rectangle.whole(shape),) for name, shape in shapes.items() if prod(shape)}


def message_bytes(transport: Transport, bucket_bytes: int, is_cuda: bool) -> int:
    """How much goes in one message of a carrier: so much that the messages under way take two buckets.

    `device`: of one slot, of which all hold two buckets at most. `group`: of one bucket, and two are under way.
    """
    if transport is Transport.group:
        return bucket_bytes
    assert transport is Transport.device, transport
    each = 2 * bucket_bytes // NUM_SLOTS
    return each if is_cuda else min(each, MESSAGE_BYTES_ON_A_CPU)
