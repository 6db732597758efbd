"""What every run has around its trainer: the output folder, Ray and the pools, the monitor, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from megarl.cli.check import print_run
from megarl.config.load import dump_config
from megarl.config.schema import Device, PPOConfig, SFTConfig
from megarl.controller.cluster import num_cluster_gpus, shutdown, start_ray
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.placement.plan import PlacementPlan
from megarl.tracking.loggers import METRICS_FILE, Tracker
from megarl.tracking.progress import ProgressBar
from megarl.tracking.timeline import Timeline
from megarl.trainers.monitor import Monitor, Watched

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Session:
    output_dir: Path
    device: Device  # resolved: cpu or cuda
    pools: ResourcePoolManager
    console: Console


@contextmanager
def open_session(config: PPOConfig | SFTConfig, plan: PlacementPlan) -> Iterator[Session]:
    """Makes the run's folder with the resolved `config.yaml`, starts or joins Ray, and reserves the pools of `plan`.

    However the block ends, the processes are ended with it. Raises ValueError for a folder that holds another run, and
    InsufficientResourcesError where the cluster cannot hold the pools.
    """
    output_dir = Path(config.trainer.output_dir)
    if (output_dir / METRICS_FILE).exists():
        raise ValueError(
            f"trainer.output_dir={str(output_dir)!r} holds the metrics of another run; remove the folder or give a new one, "
            "so that two runs are not mixed"
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    dump_config(config, output_dir / "config.yaml")
    console = Console()
    print_run(config, console)
    console.print(f"starting Ray for {plan.num_processes} processes", style="dim")
    start_ray(num_cpus=plan.num_cpus, num_gpus=torch.cuda.device_count() if config.device is not Device.cpu else 0)
    try:
        device = _resolve(config.device)
        pools = ResourcePoolManager(
            plan.process_on_nodes, plan.role_pools, device is Device.cuda, plan.devices_per_process, plan.colocate_counts
        )
        pools.create_resource_pool()
        yield Session(output_dir=output_dir, device=device, pools=pools, console=console)
    finally:
        shutdown()


def _resolve(device: Device) -> Device:
    if device is not Device.auto:
        return device
    return Device.cuda if num_cluster_gpus() else Device.cpu


class Filtered(Protocol):
    num_filtered: int

    def __len__(self) -> int: ...


def report_filtered(console: Console, data_sets: Mapping[str, Filtered]) -> None:
    """What `overlong=filter` left out, if anything."""
    for name, data_set in data_sets.items():
        if data_set.num_filtered:
            total = len(data_set) + data_set.num_filtered
            console.print(
                f"{name}: left out {data_set.num_filtered:,} of {total:,} rows, longer than the configuration allows", style="yellow"
            )


def open_monitor(session: Session, config: PPOConfig | SFTConfig, title: str, groups: Sequence[Watched]) -> Monitor:
    progress = ProgressBar(title, config.trainer.total_steps, session.console)
    # Where the bar is live, it says what the console's lines would.
    names = [name for name in config.tracking.loggers if name != "console" or not session.console.is_terminal]
    return Monitor(groups, Tracker(names, session.output_dir), Timeline(session.output_dir), progress)


def write_summary(output_dir: Path, summary: Mapping[str, Any]) -> None:
    """`summary.json`, all of it or nothing."""
    partial = output_dir / f".{SUMMARY_FILE}.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, output_dir / SUMMARY_FILE)
