"""The ranks of benchmarks/tuning/layouts.py.

They measure their devices, and then score and train the rows of a step in each layout.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.config.batch_arithmetic import Row
from megarl.config.roles import model_roles
from megarl.config.schema import Device, PPOConfig
from megarl.config.validate import read_architectures
from megarl.data.packing import MicroBatchPlan, plan_micro_batches
from megarl.engine import platform
from megarl.engine.spec import spec_of
from megarl.machine.ports import hold_port
from megarl.rehearse.calibration.measurements import CalibrationRequest, RankMeasurements
from megarl.rehearse.calibration.rank import measure
from megarl.rehearse.dry_run.rows import make_rows, with_loss

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine

_DEVIATION = 0.02  # of random weights
_HOST = "127.0.0.1"
_LIMIT = timedelta(minutes=20)  # of a collective, on a machine that does other work too


class PassSeconds(NamedTuple):
    """The time of the actor's phases in one step.

    Attributes:
        wall: Seconds until the slowest rank has finished.
        processor: Processor seconds of the rank that has the most.
    """

    wall: float
    processor: float


class Measured(NamedTuple):
    """The results of rank 0.

    Attributes:
        device: The measurements of its device.
        times: The times of each layout in all steps.
    """

    device: RankMeasurements
    times: list[list[PassSeconds]]


def run_layouts(
    request: CalibrationRequest, configs: Sequence[PPOConfig], rows: Sequence[Row], repeats: int, steps: int
) -> Measured:
    """Measure the devices, and run some steps of each layout in each repeat. Repeats are interleaved."""
    with tempfile.TemporaryDirectory() as folder, hold_port(_HOST) as held:
        arguments = (request, list(configs), list(rows), repeats, steps, held.getsockname()[1], folder)
        mp.spawn(_run_rank, args=arguments, nprocs=request.num_ranks)
        return pickle.loads(_results(folder).read_bytes())


def _run_rank(
    rank: int,
    request: CalibrationRequest,
    configs: Sequence[PPOConfig],
    rows: Sequence[Row],
    repeats: int,
    steps: int,
    port: int,
    folder: str,
) -> None:
    def report(what: str) -> None:
        if rank == 0:
            print(what, file=sys.stderr, flush=True)

    device = measure(request, rank, (_HOST, port), Path(folder), report)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=request.num_ranks, timeout=_LIMIT
    )
    times: list[list[PassSeconds]] = [[] for _ in configs]
    for repeat in range(repeats):
        for number, config in enumerate(configs):
            times[number] += run_steps(config, rows, steps)
            report(f"repeat {repeat + 1}: layout {number + 1} of {len(configs)}: {times[number][-1]}")

    if rank == 0:
        _results(folder).write_bytes(pickle.dumps(Measured(device, times)))
    dist.destroy_process_group()


def _results(folder: str) -> Path:
    return Path(folder, "results")


def run_steps(config: PPOConfig, rows: Sequence[Row], num_steps: int) -> list[PassSeconds]:
    """Build the actor with random weights, and time its phases in some steps, after a pass that warms it up."""
    platform.activate(Device.cpu)
    engine = _engine(config)
    whole = plan(config, rows)
    mini_batches = _mini_batches(config, rows)
    replica = config.actor.parallel.coordinate(dist.get_rank()).dp

    _score(engine, rows, plan(config, rows[: config.actor.parallel.data_parallel_size]), replica)
    found = []

    for _ in range(num_steps):
        dist.barrier()
        begin = time.perf_counter()
        processor = time.process_time()
        _score(engine, rows, whole, replica)
        for mini_batch in mini_batches:
            _train(config, engine, mini_batch, plan(config, mini_batch), replica)
            engine.step()
        seconds = torch.tensor([time.perf_counter() - begin, time.process_time() - processor])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(PassSeconds(*seconds.tolist()))
    return found


def plan(config: PPOConfig, rows: Sequence[Row]) -> MicroBatchPlan:
    """Distribute rows over replicas and micro-batches, as the driver does."""
    parallel = config.actor.parallel
    return plan_micro_batches(
        [row.tokens for row in rows],
        parallel.data_parallel_size,
        max_tokens=config.actor.micro_batch.max_tokens,
        multiple_of=parallel.micro_batch_multiple,
        context_parallel_size=parallel.context_parallel_size,
    )


def _engine(config: PPOConfig) -> MegatronEngine:
    from megarl.engine import groups
    from megarl.engine.engine import MegatronEngine

    class UntrainedEngine(MegatronEngine):
        def _load(self, folder: str) -> None:
            """Draw the weights, on whose values the time does not depend as long as they are finite."""
            for parameter in self.parameters().values():
                parameter.normal_(std=_DEVIATION)

    role = next(role for role in model_roles(config) if role.name == "actor")
    architecture = read_architectures(config)[0]["actor"]
    spec = spec_of(config, role, architecture, Device.cpu)
    return UntrainedEngine(spec, groups.initialize(spec.parallel, spec.seed))


def _mini_batches(config: PPOConfig, rows: Sequence[Row]) -> list[Sequence[Row]]:
    size = len(rows) // config.trainer.updates_per_step
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _score(engine: MegatronEngine, rows: Sequence[Row], planned: MicroBatchPlan, replica: int) -> None:
    ours = planned.ranks[replica]
    columns, _ = make_rows([rows[row] for row in ours.rows], 1)
    engine.forward(columns, ours.local_micro_batches)


def _train(
    config: PPOConfig, engine: MegatronEngine, rows: Sequence[Row], planned: MicroBatchPlan, replica: int
) -> None:
    ours = planned.ranks[replica]
    batch, _ = make_rows([rows[row] for row in ours.rows], 1)
    role = next(role for role in model_roles(config) if role.name == "actor")
    columns, loss = with_loss(config, role, batch)
    engine.forward_backward(columns, ours.local_micro_batches, loss, loss.extras)
