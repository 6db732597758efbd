"""Where the processes of a run come from: Ray, with the pools of the run's placement, or torchrun, which has started them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from megarl.cli.run_context import RunContext
from megarl.config.schema import Device, SFTConfig
from megarl.controller.environment import Where, describe
from megarl.placement.plan import plan_placement

if TYPE_CHECKING:
    from megarl.controller.ranks import Ranks
    from megarl.controller.resource_pool import ResourcePoolManager


@dataclass(frozen=True, kw_only=True)
class RayProcesses:
    device: Device  # resolved: cpu or cuda
    pools: ResourcePoolManager


@contextmanager
def ray_processes(context: RunContext, console: Console) -> Iterator[RayProcesses]:
    """Starts or joins Ray, and reserves the pools; however the block ends, what was started ends with it.

    Raises InsufficientResourcesError where the cluster cannot hold the pools.
    """
    from megarl.controller.cluster import (  # here, for a run under torchrun needs no Ray
        log_folder,
        node_addresses,
        num_cluster_gpus,
        shutdown,
        start_ray,
    )
    from megarl.controller.resource_pool import ResourcePoolManager

    config, plan, given = context.config, plan_placement(context.config), dict(os.environ)
    console.print(f"starting Ray for {plan.num_processes} processes", style="dim")
    start_ray(num_cpus=plan.num_cpus, num_gpus=torch.cuda.device_count() if config.device is not Device.cpu else 0)
    try:
        context.log_folder, context.nodes = log_folder(), node_addresses()
        device = _resolve(config.device, num_cluster_gpus())
        pools = ResourcePoolManager.of_plan(plan, device is Device.cuda)
        _print_environment(device, list(Where), given, console)
        pools.create_resource_pool()
        yield RayProcesses(device=device, pools=pools)
    finally:
        shutdown()


@dataclass(frozen=True, kw_only=True)
class TorchrunProcesses:
    device: Device  # resolved: cpu or cuda
    ranks: Ranks


@contextmanager
def torchrun_processes(ranks: Ranks, config: SFTConfig, console: Console) -> Iterator[TorchrunProcesses]:
    device = _resolve(config.device, torch.cuda.device_count())
    _print_environment(device, [where for where in Where if where is not Where.daemons], ranks.given, console)
    yield TorchrunProcesses(device=device, ranks=ranks)


def _resolve(device: Device, num_gpus: int) -> Device:
    if device is not Device.auto:
        return device
    return Device.cuda if num_gpus else Device.cpu


def _print_environment(device: Device, places: list[Where], given: Mapping[str, str], console: Console) -> None:
    table = Table(title="Environment of the processes", title_justify="left")
    for column in ("variable", "value", "set by"):
        table.add_column(column, overflow="fold")
    for row in describe(device is Device.cuda, places, given):
        table.add_row(*row)
    console.print(table)
