"""`megarl tune [CONFIG] --calibrate FILE`: measures this machine, and writes its device file.

This module does not import torch: the processes that measure do.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import psutil
from rich.table import Table

from megarl.cli.tables.console import output_console, print_line, progress_line, table
from megarl.config.load import is_on_cuda, read_config
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import divided_findings
from megarl.doctor.devices import probe
from megarl.doctor.run_inputs import find_inputs
from megarl.machine.errors import ConfigError, counted
from megarl.machine.processors import has_gpu, usable_cores
from megarl.plan.step_time.device import (
    DeviceProfile,
    dump_device,
    load_device,
    shipped_devices,
    sourced_keys,
)
from megarl.rehearse.calibration.measurements import (
    CalibrationRequest,
    DecodeSweep,
    RankMeasurements,
)
from megarl.rehearse.calibration.processes import measure_decoding, measure_devices
from megarl.rehearse.calibration.profile import Calibration, calibrate, describes

_CPU = "cpu"
_CPU_CONFIG = "configs/quickstart.yaml"
_CUDA_CONFIG = "configs/qwen2.5_7b_grpo.yaml"
# Ranks on a CPU: at least two for collectives, and no more than a small run has.
_CPU_RANKS = (2, 8)

# Units by the end of a key.
_UNITS = {
    "gb_s": "GB/s",
    "latency_us": "us",
    "layer_us": "us",
    "memory_gb": "GiB",
    "sample_ms": "ms",
}
_TFLOPS = "peak_tflops."


def run(
    config_path: str | None, overrides: Sequence[str], device_file: str, device: str | None = None
) -> None:
    """Measure this machine, write the device file, and print all values.

    Args:
        config_path: The run whose shapes and dtype are measured. None: a shipped one for this machine.
        device_file: The file to write.
        device: The name or the path of the nearest device file. None: by the name of the device.

    Raises:
        ConfigError: The configuration or the device file has errors, or the output has no folder, or is a
            file of another kind.
        ValueError: The run's device does not exist here, or no device file describes it.
    """
    file = Path(device_file)
    if not file.absolute().parent.is_dir():
        raise ConfigError("--calibrate", [f"there is no folder {str(file.absolute().parent)!r}; create it"])
    if file.exists():
        load_device(device_file)  # so that no other file, such as the run's, is overwritten
    path = config_path or (_CUDA_CONFIG if has_gpu() else _CPU_CONFIG)
    config = _checked(path, overrides)

    is_cuda = is_on_cuda(config.device)
    names = [gpu.name for gpu in probe().gpus] if is_cuda else []
    if is_cuda and not names:
        raise ValueError(f"{path} runs on GPUs, but there is none here; add device=cpu to measure the CPU")
    base_name = device or _nearest(names)
    base = load_device(base_name)

    num_ranks = len(names) if is_cuda else min(max(_CPU_RANKS[0], usable_cores()), _CPU_RANKS[1])
    with tempfile.TemporaryDirectory(prefix="megarl-calibrate-") as folder:
        request = _request(config, is_cuda, num_ranks, folder)
        loading = f"calibrate: loading torch and Megatron-Core in {counted(num_ranks, 'process')}"
        with progress_line(loading) as show:

            def report(part: str) -> None:
                show(f"calibrate: {part}")

            ranks = measure_devices(request, file.absolute().parent, report)
            decoding = measure_decoding(request, ranks[0].memory_bytes, report)

    found = calibrate(
        base,
        base_name,
        ranks,
        decoding,
        is_cuda=is_cuda,
        dtype=request.dtype,
        host_memory_bytes=psutil.virtual_memory().total,
        date=datetime.date.today().isoformat(),
    )
    dump_device(found.profile, file)

    console = output_console()
    console.print(products_table(ranks[0]))
    if decoding.problem is None:
        console.print(decode_table(decoding))
    console.print(profile_table(found, base, base_name))
    measured = f"{len(found.measured)} of {len(found.profile.sources)} values measured"
    print_line(console, f"{device_file}: {measured}")


def _checked(path: str, overrides: Sequence[str]) -> RunConfig:
    """Load the run. Of its inputs only the `config.json` of its model is needed."""
    loaded = find_inputs(read_config(RunConfig, path, overrides))
    errors, _ = divided_findings(loaded, starts_elsewhere=True)
    return loaded.required(errors)


def _nearest(gpus: Sequence[str]) -> str:
    """Return the name of the shipped device file that describes this machine."""
    if not gpus:
        return _CPU
    known = shipped_devices()
    found = next((name for name in known if describes(load_device(name), gpus[0])), None)
    if found is None:
        raise ValueError(
            f"no device file describes the GPU {gpus[0]}; give the nearest one as --device NAME, one of "
            f"{', '.join(name for name in known if name != _CPU)}"
        )
    return found


def _request(config: RunConfig, is_cuda: bool, num_ranks: int, folder: str) -> CalibrationRequest:
    architectures, _ = read_architectures(config)
    return CalibrationRequest(
        config=config,
        architecture=architectures[model_roles(config)[0].name].base,
        is_cuda=is_cuda,
        num_ranks=num_ranks,
        folder=folder,
    )


def profile_table(found: Calibration, base: DeviceProfile, base_name: str) -> Table:
    """Return all values of the profile, compared with those of the nearest device file."""
    return table(
        f"Device: {found.profile.name}",
        ("key", "value", "unit", base_name, "from"),
        [
            (
                key,
                _shown(attrgetter(key)(found.profile)),
                _unit(key),
                _shown(attrgetter(key)(base)),
                "measured" if key in found.measured else _reason(found, key, base_name),
            )
            for key in sourced_keys(found.profile)
        ],
    )


def products_table(rank: RankMeasurements) -> Table:
    """Return the rates of a layer's products by their rows: few rows reach less of the peak."""
    columns = dict.fromkeys(f"{time.shape.inner:,} x {time.shape.columns:,}" for time in rank.products)
    rates = {time.shape: time.tflops for time in rank.products}
    by_rows: dict[float, list[str]] = {}
    for shape, rate in rates.items():
        by_rows.setdefault(shape.rows, []).append(f"{rate:.3g}")

    return table(
        "Matrix products of a layer, TFLOP/s",
        ("rows", *columns),
        [(f"{number:,}", *of_rows) for number, of_rows in by_rows.items()],
    )


def decode_table(sweep: DecodeSweep) -> Table:
    """Return the decode steps by batch size."""
    return table(
        f"Decode steps of {counted(sweep.num_layers, 'layer')}",
        ("batch", "ms a step", "tokens/s"),
        [
            (f"{time.batch:,}", f"{1e3 * time.seconds:.3g}", f"{time.batch / time.seconds:,.0f}")
            for time in sweep.times
        ],
    )


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
