"""Runs a calibration in processes of its own: one per device, then one for the rollout engine.

Imports no torch itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.config.schema import PPOConfig, RolloutConfig
from megarl.machine.errors import RunError
from megarl.machine.ports import hold_port
from megarl.machine.spawn import FreshContext, run_calls
from megarl.rehearse.calibration.measurements import CalibrationRequest, DecodeSweep, RankMeasurements

_HOST = "127.0.0.1"


class CalibrationError(RunError):
    """A process of the calibration failed. Its traceback is in its standard error."""

    hint = ("the standard error of the process, above, shows the cause",)


def measure_devices(
    request: CalibrationRequest, folder: Path, report: Callable[[str], None]
) -> list[RankMeasurements]:
    """Measure all devices of this machine at the same time, and return the results in the order of ranks.

    Args:
        folder: The folder in which the speed of storage is measured.
        report: Called with the name of each part that begins.

    Raises:
        CalibrationError: A process failed.
    """
    with hold_port(_HOST) as held:
        port = held.getsockname()[1]
        return _run(_measure, [(request, rank, port, folder) for rank in range(request.num_ranks)], report)


def measure_decoding(
    request: CalibrationRequest, memory_bytes: float, report: Callable[[str], None]
) -> DecodeSweep:
    """Measure the decode steps of the rollout engine on one device, if the run generates.

    Raises:
        CalibrationError: The process failed.
    """
    if not isinstance(request.config, PPOConfig):
        return DecodeSweep(problem="the run does not generate")
    if find_spec("sglang") is None:
        return DecodeSweep(problem="SGLang is not installed")
    (sweep,) = _run(_decode, [(request, request.config.rollout, memory_bytes)], report)
    return sweep


def _run(
    target: Callable[..., None], calls: Sequence[tuple[Any, ...]], report: Callable[[str], None]
) -> list[Any]:
    """Run all calls at the same time, and return their results in order."""
    results: dict[int, Any] = {}
    try:
        # A daemon could not start the processes of an engine.
        for number, message in run_calls(FreshContext(), target, calls, len(calls)):
            if not isinstance(message, str):
                results[number] = message
            # All ranks measure the same parts, so the reports of one are enough.
            elif number == 0:
                report(message)
    except EOFError as error:
        raise CalibrationError(f"process {error.args[0]} of {len(calls)} ended without a result") from None
    return [results[number] for number in range(len(calls))]


def _measure(connection: Connection, request: CalibrationRequest, rank: int, port: int, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from megarl.rehearse.calibration.rank import measure

    connection.send(measure(request, rank, (_HOST, port), folder, connection.send))


def _decode(
    connection: Connection, request: CalibrationRequest, rollout: RolloutConfig, memory_bytes: float
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    connection.send("decode steps of SGLang")
    from megarl.rehearse.calibration.decoding import decode_sweep

    connection.send(decode_sweep(request, rollout, memory_bytes))
