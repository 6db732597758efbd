"""Runs a calibration in processes of its own: one per device, then one for the rollout engine.

Imports no torch itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.machine.errors import RunError
from megarl.machine.ports import hold_port
from megarl.machine.spawn import FreshContext
from megarl.rehearse.calibration.measurements import CalibrationRequest, DecodeSweep, RankMeasurements

_HOST = "127.0.0.1"
_END_S = 10.0


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
        arguments = [(request, rank, port, folder) for rank in range(request.num_ranks)]
        return _run(_measure, arguments, report)


def measure_decoding(
    request: CalibrationRequest, memory_bytes: float, report: Callable[[str], None]
) -> DecodeSweep:
    """Measure the decode steps of the rollout engine on one device, if the run generates.

    Raises:
        CalibrationError: The process failed.
    """
    if request.rollout is None:
        return DecodeSweep(problem="the run does not generate")
    if find_spec("sglang") is None:
        return DecodeSweep(problem="SGLang is not installed")
    (sweep,) = _run(_decode, [(request, request.rollout, memory_bytes)], report)
    return sweep


def _run(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], report: Callable[[str], None]
) -> list[Any]:
    """Run a function in a process for each tuple of arguments, and return what they send last.

    Before, they may send the name of each part that begins.
    """
    context = FreshContext()
    pipes: list[Connection] = []
    processes = []
    for given in arguments:
        mine, theirs = context.Pipe(duplex=False)
        # A daemon could not start the processes of an engine.
        process = context.Process(target=target, args=(theirs, *given))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)

    try:
        return _results(pipes, report)
    finally:
        for process in processes:
            process.terminate()
            process.join(_END_S)


def _results(pipes: Sequence[Connection], report: Callable[[str], None]) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}

    while open_pipes:
        for ready in wait(list(open_pipes)):
            assert isinstance(ready, Connection)
            rank = open_pipes[ready]
            try:
                message = ready.recv()
            except EOFError:
                raise CalibrationError(f"process {rank} of {len(pipes)} ended without a result") from None
            if isinstance(message, str):
                # All ranks measure the same parts, so the reports of one are enough.
                if rank == 0:
                    report(message)
            else:
                results[rank] = message
                del open_pipes[ready]

    return [results[rank] for rank in range(len(pipes))]


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
