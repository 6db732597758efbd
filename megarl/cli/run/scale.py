"""`megarl scale RUN_DIR --replicas N`: requests another number of rollout replicas from a running run."""

from __future__ import annotations

from pathlib import Path

from megarl.cli.inspect.status import is_running, last_words
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.machine.wording import counted
from megarl.plan.placement.dataflow import OffloadPlan
from megarl.plan.placement.plan import plan_placement
from megarl.tracking.run_files import CONFIG_FILE, MOST_REPLICAS, ask_for
from megarl.tracking.status import read_status


def run(run_dir: str, num_replicas: int) -> int:
    """Request the number of replicas. Raises ValueError, StatusError or ConfigError if that is impossible."""
    folder = Path(run_dir)
    if not 1 <= num_replicas <= MOST_REPLICAS:
        raise ValueError(f"--replicas {num_replicas}: must be in [1, {MOST_REPLICAS}]")
    record = read_status(folder)

    if not is_running(record):
        raise ValueError(
            f"{last_words(folder, record)}. To resume with {counted(num_replicas, 'replica')}: "
            f"rollout.num_replicas={num_replicas}"
        )

    config = load_config(PPOConfig, folder / CONFIG_FILE)
    # Engines that share devices with training are fixed by the placement.
    if OffloadPlan(plan_placement(config)).engines_move:
        raise ValueError(
            f"{folder}: with placement.strategy={config.placement.strategy.value} the engines share devices "
            "with other roles, so the number of replicas is fixed; split_collocate and stand_alone give "
            "them separate devices"
        )

    ask_for(folder, num_replicas)  # also if the status shows that number, because it is seconds old
    print(
        f"{folder}: requested {counted(num_replicas, 'replica')} instead of {len(record.run.replicas)}; the "
        f"run applies this between two steps, and new replicas receive weights before their first request. "
        f"Follow it with: megarl status {folder} --watch"
    )
    return 0
