"""The results of a dry run as tables.

They show memory by phase compared with the plan, collectives, and host-device synchronizations. This module
does not import torch.
"""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from megarl.cli.tables.console import table
from megarl.machine.wording import counted
from megarl.rehearsal.prediction import SHARED, UNEVEN, PredictedMemory
from megarl.rehearsal.record import RankRecord

_MOST_PLACES = 12  # limit of listed synchronizations of a rank
_WORST_CASES = {
    SHARED: "two rows share a prompt, so that context-parallel ranks gather keys and values",
    UNEVEN: "one expert has twice its share of the tokens",
}


def memory_table(
    record: RankRecord, predicted: PredictedMemory, device_gb: float | None, num_micro_batches: int
) -> Table:
    context = f"context rank {record.context_rank}, " if record.context_rank else ""
    place = (
        f"stage {record.pipeline_rank}, tensor rank {record.tensor_rank}, {context}data rank "
        f"{record.data_rank}"
    )
    title = f"Rank {record.rank} ({place}): {record.num_parameters:,} parameters"
    drawn = table(title, "phase", "after GiB", "peak GiB", "planned peak", "collectives", "syncs", "TFLOP")

    for phase in record.phases:
        planned = predicted.peaks.get(phase.name)
        drawn.add_row(
            phase.name,
            f"{phase.held / 2**30:,.2f}",
            f"{phase.peak / 2**30:,.2f}",
            "" if planned is None else f"{planned / 2**30:,.2f}",
            f"{len(phase.collectives):,}",
            f"{sum(wait.times for wait in phase.host_syncs):,}",
            f"{phase.flops / 1e12:,.1f}",
        )

    size = (
        "device memory is not set (placement.device_memory_gb)"
        if device_gb is None
        else f"device memory for tensors: {device_gb:g} GiB"
    )
    explained = "".join(
        f"; {suffix.removeprefix(', ')}: {meaning}"
        for suffix, meaning in _WORST_CASES.items()
        if any(phase.name.endswith(suffix) for phase in record.phases)
    )
    drawn.caption = f"tensor memory, {counted(num_micro_batches, 'micro-batch')} per pass; {size}{explained}"

    return drawn


def collectives_table(record: RankRecord) -> Table:
    columns = ("phase", "kind", "group", "ranks", "type", "calls", "MiB")
    drawn = table(f"Collectives of rank {record.rank}", *columns, wraps="group")

    for phase in record.phases:
        # Sum the calls of the same kind, group and type.
        calls: Counter[tuple[str, str, str, str]] = Counter()
        nbytes: Counter[tuple[str, str, str, str]] = Counter()
        for call in phase.collectives:
            key = (call.kind, call.group, str(len(call.ranks)), call.dtype)
            calls[key] += 1
            nbytes[key] += call.nbytes
        for key, count in calls.items():
            drawn.add_row(phase.name, *key, f"{count:,}", f"{nbytes[key] / 2**20:,.1f}")

    drawn.caption = "MiB: the larger of input and output of one rank, summed over all calls"
    return drawn


def waits_table(record: RankRecord) -> Table:
    """Return the locations with the most host-device synchronizations."""
    drawn = table(f"Host-device synchronizations of rank {record.rank}", "phase", "kind", "times", "location")
    waits = sorted(
        ((wait.times, phase.name, wait) for phase in record.phases for wait in phase.host_syncs), reverse=True
    )
    for count, phase, wait in waits[:_MOST_PLACES]:
        drawn.add_row(phase, wait.kind, f"{count:,}", wait.place)

    if len(waits) > _MOST_PLACES:
        rest = sum(count for count, _, _ in waits[_MOST_PLACES:])
        drawn.caption = f"and {rest:,} times at {counted(len(waits) - _MOST_PLACES, 'other location')}"

    return drawn
