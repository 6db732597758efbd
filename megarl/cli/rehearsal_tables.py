"""What a rehearsed rank did, as tables: memory by phase beside the plan, collectives, and where the host would wait. Imports no torch."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from megarl.rehearsal.prediction import UNEVEN, PredictedMemory
from megarl.rehearsal.record import RankRecord

_MOST_PLACES = 12  # of a rank where the host waits


def memory_table(record: RankRecord, predicted: PredictedMemory, device_gb: float | None, num_micro_batches: int) -> Table:
    context = f"context rank {record.context_rank}, " if record.context_rank else ""
    place = f"stage {record.pipeline_rank}, tensor rank {record.tensor_rank}, {context}data rank {record.data_rank}"
    title = f"Rank {record.rank} ({place}): {record.num_parameters:,} parameters"
    table = _table(title, "phase", "held GiB", "peak GiB", "plan's peak", "collectives", "waits", "TFLOP")
    for phase in record.phases:
        planned = predicted.peaks.get(phase.name)
        table.add_row(
            phase.name,
            f"{phase.held / 2**30:,.2f}",
            f"{phase.peak / 2**30:,.2f}",
            "" if planned is None else f"{planned / 2**30:,.2f}",
            f"{len(phase.collectives):,}",
            f"{sum(wait.times for wait in phase.waits):,}",
            f"{phase.flops / 1e12:,.1f}",
        )
    size = "its size is not given (placement.device_memory_gb)" if device_gb is None else f"the device has {device_gb:g} GiB for them"
    uneven = "; uneven: one expert has twice its share of the tokens" if any(phase.name.endswith(UNEVEN) for phase in record.phases) else ""
    table.caption = f"of tensors, with {num_micro_batches} micro-batches a pass; {size}{uneven}"
    return table


def collectives_table(record: RankRecord) -> Table:
    table = _table(f"Collectives of rank {record.rank}", "phase", "kind", "group", "ranks", "type", "calls", "MiB")
    for phase in record.phases:
        calls: Counter[tuple[str, str, str, str]] = Counter()
        nbytes: Counter[tuple[str, str, str, str]] = Counter()
        for call in phase.collectives:
            key = (call.kind, call.group, str(len(call.ranks)), call.dtype)
            calls[key] += 1
            nbytes[key] += call.nbytes
        for key, count in calls.items():
            table.add_row(phase.name, *key, f"{count:,}", f"{nbytes[key] / 2**20:,.1f}")
    table.caption = "MiB: of the larger side of one rank, all calls together"
    return table


def waits_table(record: RankRecord) -> Table:
    """The places where most waits are."""
    table = _table(f"Where the host of rank {record.rank} waits for its device", "phase", "kind", "times", "at")
    waits = sorted(((wait.times, phase.name, wait) for phase in record.phases for wait in phase.waits), reverse=True)
    for count, phase, wait in waits[:_MOST_PLACES]:
        table.add_row(phase, wait.kind, f"{count:,}", wait.place)
    if len(waits) > _MOST_PLACES:
        rest = sum(count for count, _, _ in waits[_MOST_PLACES:])
        table.caption = f"and {rest:,} times at {len(waits) - _MOST_PLACES} other places"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
