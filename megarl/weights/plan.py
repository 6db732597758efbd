"""Plan a transfer: which rank sends which slices of which tensors to which rank.

The plan is pure, made once, and executed in rounds. A slice is a hyperrectangle of a Hugging Face tensor in
that tensor's own shape. The slices that a target needs are split along the slices that the sources hold. Each
resulting part comes from one of the sources nearest to the target (same device, same node, anywhere), and
equally near sources send equal shares. Everything that one rank sends to another is a transfer schedule. Each
round contains the same fraction of every schedule, so that no rank sends or receives more than one message at
a time and all ranks are always busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from megarl.config.schema import Transport
from megarl.machine.errors import counted
from megarl.machine.garbage import without_collections
from megarl.weights.tensors import (
    Part,
    PeerTransfers,
    TensorSlice,
    TransferSchedule,
    WeightTransferError,
    range_slices,
)

_MAX_NAMED = 8
# IPC buffers of the transport `device`. With two, each side often waits for the other to wake up.
NUM_IPC_BUFFERS = 4
# A message of this size is still in the processor's cache when it is read soon after it was written.
MESSAGE_BYTES_ON_A_CPU = 4 * 2**20

# the slices of one rank by tensor; they do not overlap
TensorSlices = Mapping[str, Sequence[TensorSlice]]


class RankLocation(NamedTuple):
    """The node of a rank, and its device by a name that is unique in the cluster."""

    node: str
    device: str


# the location of a rank, and the slices that it holds or needs
RankSlices = tuple[RankLocation, TensorSlices]


@dataclass(frozen=True)
class TransferPlan:
    """The transfer schedule of each pair of ranks.

    Attributes:
        schedules: By (source, target), which are indices into the sequences that the plan was made from.
        num_rounds: The number of rounds of every schedule.
        first_repeated_round: The first round of the tensors that are sent again whenever they change. Those
            of earlier rounds are sent once.
    """

    schedules: Mapping[tuple[int, int], TransferSchedule]
    num_rounds: int
    first_repeated_round: int = 0

    def of_source(self, source: int) -> PeerTransfers:
        """Return what a source sends, by target, including targets on the same device."""
        return PeerTransfers(
            {target: schedule for (own, target), schedule in self.schedules.items() if own == source}
        )

    def of_target(self, target: int) -> PeerTransfers:
        """Return what a target receives, by source."""
        return PeerTransfers(
            {source: schedule for (source, own), schedule in self.schedules.items() if own == target}
        )


@without_collections()  # a plan consists of a million small tuples that stay alive
def plan_transfer(
    shapes: Mapping[str, Sequence[int]],
    sources: Sequence[RankSlices],
    targets: Sequence[RankSlices],
    message_numel: int,
    loads: Sequence[int] | None = None,
) -> TransferPlan:
    """Plan the transfer of all slices that the targets need.

    Args:
        shapes: The shapes of all tensors, in the order in which they are sent.
        sources: What the sending ranks hold.
        targets: What the receiving ranks need.
        message_numel: The maximum number of elements that a rank sends, and receives, in a round.
        loads: The number of elements that each source has to send in addition. Sources with a smaller load
            send more.

    Raises:
        WeightTransferError: A target needs elements that no source holds; the message names the tensors.
        ValueError: `message_numel` is too small for the number of ranks.
    """
    by_candidates = _needs(shapes, sources, targets)
    loads = list(loads or [0] * len(sources))
    parts: dict[tuple[int, int], list[Part]] = defaultdict(list)

    # Slices with few possible sources come first; the others can still balance the load afterwards.
    for candidates, needs in sorted(by_candidates.items(), key=lambda item: (len(item[0]), item[0])):
        volume = sum(part.tensor_slice.volume for _, part in needs)
        shares = _level(volume, [loads[source] for source in candidates])
        for source, target, part in _distributed(needs, candidates, shares):
            parts[source, target].append(part)
        for source, share in zip(candidates, shares, strict=True):
            loads[source] += share

    # All schedules follow the order of the tensors and have the same number of rounds.
    order = {name: number for number, name in enumerate(shapes)}
    volumes = {pair: sum(part.tensor_slice.volume for part in listed) for pair, listed in parts.items()}
    num_rounds = _num_rounds(volumes, message_numel)
    schedules = {
        pair: TransferSchedule(sorted(listed, key=lambda part: order[part.name]), num_rounds)
        for pair, listed in parts.items()
    }

    return TransferPlan(schedules, num_rounds)


def plan_repeated(
    shapes: Mapping[str, Sequence[int]],
    sources: Sequence[RankSlices],
    targets: Sequence[RankSlices],
    message_numel: int,
    repeated: Collection[str],
) -> TransferPlan:
    """Plan a transfer like `plan_transfer`, with the `repeated` tensors in rounds of their own at the end.

    Those are sent again whenever they change, and the others once.
    """
    once = {name: shape for name, shape in shapes.items() if name not in repeated}
    again = {name: shape for name, shape in shapes.items() if name in repeated}
    plans = [
        plan_transfer(part, _only(part, sources), _only(part, targets), message_numel)
        for part in (once, again)
    ]
    return replace(one_after_another(plans), first_repeated_round=plans[0].num_rounds)


def _only(names: Collection[str], ranks: Sequence[RankSlices]) -> list[RankSlices]:
    return [
        (place, {name: listed for name, listed in slices.items() if name in names}) for place, slices in ranks
    ]


def one_after_another(plans: Sequence[TransferPlan]) -> TransferPlan:
    """Concatenate plans: the result executes their rounds in order."""
    num_rounds = sum(plan.num_rounds for plan in plans)
    parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
    lengths: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * num_rounds)
    first = 0

    for plan in plans:
        for pair, schedule in plan.schedules.items():
            # A pair that has no part in a plan sends nothing in its rounds.
            parts[pair] += schedule.parts
            lengths[pair][first : first + plan.num_rounds] = map(schedule.length, range(plan.num_rounds))
        first += plan.num_rounds

    schedules = {
        pair: TransferSchedule(listed, bounds=list(accumulate(lengths[pair], initial=0)))
        for pair, listed in parts.items()
    }
    return TransferPlan(schedules, num_rounds)


_Need = tuple[int, Part]  # target, and the part that it needs


def _needs(
    shapes: Mapping[str, Sequence[int]], sources: Sequence[RankSlices], targets: Sequence[RankSlices]
) -> dict[tuple[int, ...], list[_Need]]:
    """Split what targets need along what sources hold.

    Layers have the same structure, so one split serves all tensors of which the same ranks hold and need the
    same slices.

    Returns:
        The needs by their possible sources, in the order of targets and tensors.
    """
    held = _by_name(sources)
    needed = _by_name(targets)
    cuts: dict[tuple, tuple[list[tuple[tuple[int, ...], int, TensorSlice]], int]] = {}
    found: list[dict[tuple[int, ...], list[_Need]]] = [defaultdict(list) for _ in targets]
    faults = [f"{name} is not a tensor of the model" for name in needed if name not in shapes]

    for name in shapes:
        key = held.get(name, ()), needed.get(name, ())
        if key not in cuts:
            made = list(_cut(*key, sources, targets))
            # Needed minus found elements; nonzero if elements are missing or held twice.
            cuts[key] = (
                made,
                sum(tensor_slice.volume for _, tensor_slice in key[1])
                - sum(tensor_slice.volume for _, _, tensor_slice in made),
            )
        cut, missing = cuts[key]
        if missing:
            faults.append(
                f"{name}: {missing} needed elements are held by no source, or by several in different slices"
            )
        for candidates, target, tensor_slice in cut:
            found[target][candidates].append((target, Part(name, tensor_slice)))

    if faults:
        raise WeightTransferError(
            f"{counted(len(faults), 'tensor')} cannot be sent: " + "; ".join(faults[:_MAX_NAMED])
        )

    # Order the needs by target, and by tensor for each target.
    merged: dict[tuple[int, ...], list[_Need]] = defaultdict(list)

    for of_target in found:
        for candidates, needs in of_target.items():
            merged[candidates] += needs

    return merged


_Of = tuple[tuple[int, TensorSlice], ...]  # rank and slice


def _by_name(ranks: Sequence[RankSlices]) -> dict[str, _Of]:
    found: dict[str, list[tuple[int, TensorSlice]]] = defaultdict(list)
    for rank, (_, slices) in enumerate(ranks):
        for name, listed in slices.items():
            found[name] += [(rank, tensor_slice) for tensor_slice in listed]
    return {name: tuple(of_ranks) for name, of_ranks in found.items()}


def _cut(
    held: _Of, needed: _Of, sources: Sequence[RankSlices], targets: Sequence[RankSlices]
) -> Iterator[tuple[tuple[int, ...], int, TensorSlice]]:
    # Ranks that hold the same slice are alternative sources of it.
    holders: dict[TensorSlice, list[int]] = defaultdict(list)
    for source, tensor_slice in held:
        holders[tensor_slice].append(source)

    pieces = list(holders.items())
    # Replicas of an engine need the same slices, and ranks of one device have the same neighbors.
    shares: dict[TensorSlice, list[tuple[int, TensorSlice]]] = {}
    nearest: dict[tuple[int, RankLocation], tuple[int, ...]] = {}

    for target, wanted in needed:
        if wanted not in shares:
            cut = ((number, wanted.intersect(piece)) for number, (piece, _) in enumerate(pieces))
            shares[wanted] = [(number, shared) for number, shared in cut if shared is not None]

        place, _ = targets[target]
        for number, shared in shares[wanted]:
            if (number, place) not in nearest:
                nearest[number, place] = _nearest(pieces[number][1], sources, place)
            yield nearest[number, place], target, shared


def _nearest(ranks: Sequence[int], sources: Sequence[RankSlices], place: RankLocation) -> tuple[int, ...]:
    """Return those of `ranks` that are on the device `place`; otherwise those on its node; otherwise all."""
    places = {rank: sources[rank][0] for rank in ranks}
    on_device = tuple(rank for rank in ranks if places[rank] == place)
    on_node = tuple(rank for rank in ranks if places[rank].node == place.node)
    return on_device or on_node or tuple(ranks)


def _level(volume: int, loads: Sequence[int]) -> list[int]:
    """Divide `volume` into integer shares that bring unequal loads as close to one level as possible."""
    rising = sorted(loads)
    level = rising[0]
    rest = volume

    # Raise the lowest loads together, until they reach the next one or the volume is used up.
    for count, (low, high) in enumerate(
        zip(rising, [*rising[1:], rising[-1] + volume], strict=True), start=1
    ):
        step = min(high - low, ceil(rest / count))
        level = low + step
        rest = rest - step * count
        if rest <= 0:
            break

    shares = [max(0, level - load) for load in loads]
    excess = sum(shares) - volume  # due to rounding up; less than one per share
    for index in [index for index, share in enumerate(shares) if share][:excess]:
        shares[index] -= 1

    return shares


def _distributed(
    needs: Sequence[_Need], candidates: Sequence[int], shares: Sequence[int]
) -> Iterator[tuple[int, int, Part]]:
    """Assign the needs in order to the candidates, each up to its share. Yields (source, target, part)."""
    taking = iter(zip(candidates, shares, strict=True))
    source, room = next(taking)

    for target, (name, tensor_slice) in needs:
        start = 0
        volume = tensor_slice.volume
        while start < volume:
            # The share of this candidate is used up; the next one continues.
            while room == 0:
                source, room = next(taking)
            stop = min(volume, start + room)
            if stop - start == volume:
                yield source, target, Part(name, tensor_slice)
            else:
                for rows in range_slices(tensor_slice.shape, start, stop):
                    yield (
                        source,
                        target,
                        Part(name, rows.relative_to((0,) * len(tensor_slice.starts), tensor_slice.starts)),
                    )
            room -= stop - start
            start = stop


def _num_rounds(volumes: Mapping[tuple[int, int], int], message_numel: int) -> int:
    """Return the fewest rounds in which no rank sends, or receives, more than `message_numel` elements."""
    of_rank: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (source, target), volume in volumes.items():
        of_rank["sends", source].append(volume)
        of_rank["receives", target].append(volume)

    num_rounds = 1
    for (does, rank), listed in of_rank.items():
        # Every pair exchanges at least one element per round, however many rounds there are.
        if message_numel < len(listed):
            raise ValueError(
                f"a message of {message_numel} elements is too small: rank {rank} {does} parts of "
                f"{counted(len(listed), 'rank')} at a time; increase resharding.bucket_mb"
            )
        # A lower bound; rounding up the volume of each pair may exceed it.
        num_rounds = max(num_rounds, ceil(sum(listed) / message_numel))
        while sum(ceil(volume / num_rounds) for volume in listed) > message_numel:
            num_rounds += 1 + num_rounds // 64

    return num_rounds


def whole_slices(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the slices of a rank that needs everything."""
    return {name: (TensorSlice.whole(shape),) for name, shape in shapes.items() if prod(shape)}


def message_bytes(transport: Transport, bucket_bytes: int, is_cuda: bool) -> int:
    """Return the message size of a transport, such that all messages in flight take two buckets.

    A message of `device` fills one IPC buffer, and all buffers together take at most two buckets. A message
    of `group` has the size of a bucket, and two are in flight. So has one in a file with patches (`folder`).
    """
    if not transport.needs.shares_devices:
        return bucket_bytes
    each = 2 * bucket_bytes // NUM_IPC_BUFFERS

    return each if is_cuda else min(each, MESSAGE_BYTES_ON_A_CPU)
