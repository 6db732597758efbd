"""The results of `megarl calibrate`."""

from __future__ import annotations

from operator import attrgetter

from rich.table import Table

from megarl.calibration.measurements import DecodeSweep, RankMeasurements
from megarl.calibration.profile import Calibration
from megarl.cli.tables.console import table
from megarl.machine.wording import counted
from megarl.step_time.device import DeviceProfile
from megarl.step_time.device_files import sourced_keys

# Units by the end of a key.
_UNITS = {
    "gb_s": "GB/s",
    "latency_us": "us",
    "layer_us": "us",
    "memory_gb": "GiB",
    "sample_ms": "ms",
}
_TFLOPS = "peak_tflops."


def profile_table(found: Calibration, base: DeviceProfile, base_name: str) -> Table:
    """Return all values of the profile, compared with those of the nearest device file."""
    drawn = table(f"Device: {found.profile.name}", "key", "value", "unit", base_name, "from")
    for key in sourced_keys(found.profile):
        value = attrgetter(key)(found.profile)
        drawn.add_row(
            key,
            _shown(value),
            _unit(key),
            _shown(attrgetter(key)(base)),
            "measured" if key in found.measured else _reason(found, key, base_name),
        )
    return drawn


def products_table(rank: RankMeasurements) -> Table:
    """Return the rates of a layer's products by their rows: few rows reach less of the peak."""
    shapes = list(dict.fromkeys((time.shape.inner, time.shape.columns) for time in rank.products))
    columns = [f"{inner:,} x {columns:,}" for inner, columns in shapes]
    drawn = table("Matrix products of a layer, TFLOP/s", "rows", *columns)
    rates = {time.shape: time.tflops for time in rank.products}

    for rows in dict.fromkeys(shape.rows for shape in rates):
        of_rows = [rate for shape, rate in rates.items() if shape.rows == rows]
        drawn.add_row(f"{rows:,}", *(f"{rate:.3g}" for rate in of_rows))
    return drawn


def decode_table(sweep: DecodeSweep) -> Table:
    """Return the decode steps by batch size."""
    drawn = table(f"Decode steps of {counted(sweep.num_layers, 'layer')}", "batch", "ms a step", "tokens/s")
    for time_of_batch in sweep.times:
        drawn.add_row(
            f"{time_of_batch.batch:,}",
            f"{1e3 * time_of_batch.seconds:.3g}",
            f"{time_of_batch.batch / time_of_batch.seconds:,.0f}",
        )
    return drawn


def _reason(found: Calibration, key: str, base_name: str) -> str:
    """Return why a value is that of the nearest device file."""
    note = next((text for start, text in found.notes.items() if key.startswith(start)), None)
    return f"{base_name}: {note}" if note else f"{base_name}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.6g}"


def _unit(key: str) -> str:
    if key.startswith(_TFLOPS):
        return "TFLOP/s"
    return next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")
