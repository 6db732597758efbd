"""The calls of a real CPU run over gloo, and a dry run with the switches of such a run.

Imports neither torch nor Megatron before one of the functions is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.schema import PPOConfig
from megarl.rehearse.dry_run.record import PhaseRecord

WITH_CPU_SWITCHES = "cpu"  # the folder of a model whose dry runs use the CPU's switches


def make_ready_with_switches() -> None:
    """Prepare the process from which megarl.rehearse.dry_run.processes forks ranks."""
    from megarl.rehearse.dry_run.processes import make_ready

    make_ready()
    from megarl.rehearse.dry_run import rank

    rehearse = rank.rehearse

    def switched(request: Any, *report: Any) -> Any:
        if Path(request.config.model.path).name == WITH_CPU_SWITCHES:
            _switch()
        return rehearse(request, *report)

    rank.rehearse = switched  # type: ignore[assignment]


def _switch() -> None:
    """Switch everything that communicates and depends on the device.

    Where parameters are created, and which kernels compute, does not affect communication.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megarl.engine import data_parallel
    from megarl.engine.cpu_adaptations import adapt_products
    from megarl.engine.cpu_kernels import unless_alone

    data_parallel.overlaps = lambda parallel, on_cuda: False
    adapt_products()
    buffers.dist_reduce_scatter_func = unless_alone(buffers.dist_reduce_scatter_func)
    buffers.dist_all_gather_func = unless_alone(buffers.dist_all_gather_func)


def run_on_cpu(config: PPOConfig, num_micro_batches: int) -> list[PhaseRecord]:
    """Run the actor in a gloo rank on the batch of its dry run. Only the recorded calls are used."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megarl.config.batch_arithmetic import fullest_micro_batch
    from megarl.config.roles import model_roles
    from megarl.config.schema import Device
    from megarl.config.validate import read_architectures
    from megarl.engine import platform
    from megarl.engine.spec import spec_of
    from megarl.rehearse.dry_run import ledger as ledgers
    from megarl.rehearse.dry_run.ledger import collective_of
    from megarl.rehearse.dry_run.rank import run_phases
    from megarl.rehearse.dry_run.rows import RehearsedBatch, make_rows
    from tests import nccl_semantics

    platform.activate(Device.cpu)
    from megarl.engine import groups
    from megarl.engine.engine import MegatronEngine

    ledger = ledgers.Ledger(None)

    # A rank that is shared with other tests may still have some in progress.
    ledgers.UNSEEN += (__file__, nccl_semantics.__file__)

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            if (
                operator.namespace == "c10d"
                and (call := collective_of(operator, arguments, keywords or {})) is not None
            ):
                ledger.communicates(call[0])
            return operator(*arguments, **(keywords or {}))

    role = next(role for role in model_roles(config) if role.name == "actor")
    architecture = read_architectures(config)[0]["actor"]

    def batch_of(trains: bool) -> RehearsedBatch:
        return make_rows(fullest_micro_batch(config, role, architecture, trains=trains), num_micro_batches)

    with Watched():
        spec = spec_of(config, role, architecture, Device.cpu)
        engine = MegatronEngine(spec, groups.initialize(spec.parallel, spec.seed))
        build = ledger.end_phase("build")
        return [build, *run_phases(engine, config, role, batch_of, ledger.end_phase)]
