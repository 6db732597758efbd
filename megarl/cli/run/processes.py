"""The Ray processes of a run, on the pools of its placement."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console

from megarl.cli.run.context import RunContext
from megarl.cli.tables.console import print_line
from megarl.cli.tables.run import BFLOAT16_ON_A_CPU
from megarl.config.load import is_on_cuda
from megarl.config.schema import Device, DType
from megarl.controller.cluster import (
    await_ended_daemon,
    daemons_last_words,
    log_folder,
    node_addresses,
    num_cluster_gpus,
    shutdown,
    start_ray,
)
from megarl.controller.environment import Where, describe
from megarl.controller.errors import RayEndedError
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.machine.errors import RunError
from megarl.machine.files import write_whole
from megarl.machine.wording import counted
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import joins_weight_groups

ENVIRONMENT_FILE = "environment.txt"  # file in `trainer.output_dir`


def refuse_launched_ranks(command: str) -> None:
    """Raise ValueError if torchrun or a similar launcher has started this process.

    Otherwise each of its ranks would be a driver.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" not in os.environ and int(size) == 1:
        return
    raise ValueError(
        f"this process was started by torchrun or a similar launcher as one of {size} (WORLD_SIZE), but "
        f"`megarl {command}` starts its own processes. On one machine, run `megarl {command}` directly; on "
        f"several, run torchrun --nproc-per-node 1 -m megarl launch CONFIG key=value ... on each "
        f"(docs/launch.md)"
    )


@contextmanager
def ray_processes(context: RunContext, console: Console) -> Generator[tuple[Device, ResourcePoolManager]]:
    """Start or join Ray, and reserve the pools. Everything that was started ends with the block.

    Yields the device of the run, which is cpu or cuda, and the pools.

    Raises:
        InsufficientResourcesError: The cluster does not have the resources of the pools.
        RayEndedError: The block raised a RunError because a daemon of the run's own Ray has ended.
    """
    config = context.config
    plan = plan_placement(context.config)
    # Remember the user's environment before Ray starts.
    given = dict(os.environ)
    console.print(f"starting Ray for {counted(plan.num_processes, 'process')}", style="dim")
    start_ray(
        num_cpus=plan.num_cpus, num_gpus=torch.cuda.device_count() if config.device is not Device.cpu else 0
    )

    try:
        context.log_folder = log_folder()
        context.nodes = node_addresses()
        device = config.device
        # The cluster may have GPUs although the driver's machine has none.
        if device is Device.auto:
            device = Device.cuda if num_cluster_gpus() else Device.cpu
        pools = ResourcePoolManager.of_plan(plan, device is Device.cuda)
        joins_engines = joins_weight_groups(config, plan)
        environment = _environment(
            device,
            given,
            [where for where in Where if joins_engines or where is not Where.weight_group_workers],
        )
        if context.output_dir is not None:
            write_whole(context.output_dir / ENVIRONMENT_FILE, environment)
        if context.verbose:
            print_line(console, environment)
        # Only now is it known that the device is CPU.
        if device is Device.cpu and config.model.dtype is DType.bfloat16 and is_on_cuda(config.device):
            print_line(console, f"warning: {BFLOAT16_ON_A_CPU}", style="yellow")
        pools.create_resource_pool()
        yield device, pools
    except RunError as error:
        # An error of ranks or engines that Ray has taken with it does not name the cause.
        if not isinstance(error, RayEndedError) and (daemon := await_ended_daemon()):
            raise RayEndedError(daemon, daemons_last_words()) from error
        raise
    finally:
        shutdown()


def _environment(device: Device, given: Mapping[str, str], places: Sequence[Where]) -> str:
    """Return the environment variables of the run's processes, one per line."""
    rows = describe(device is Device.cuda, places, given)
    return "".join(f"{name}={value}  # {source}\n" for name, value, source in rows)
