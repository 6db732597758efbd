"""Compare the memory that a whole run frees between phases with the plan: `python -m tests.soak.memory`.

The script runs PPO on real Ray and real Megatron in hybrid and in fully_collocate, with a model whose state
is large compared with the rest of a process. Before the third step, every phase is begun once, as in the step
itself, and the resident memory of the actor's and the critic's process is read. The difference between two
phases is compared with that of parameters, gradients and optimizer state in `plan_memory`. Exits with status
1 if one deviates by more than 10 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from benchmarks.placement import save_model
from megarl.config.schema import ParallelConfig, PlacementStrategy, PPOConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.futures import gather
from megarl.controller.worker import Worker
from megarl.models.families import read_architecture
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.plan import plan_placement
from megarl.roles.start import PPORoles
from tests.integration.test_placements import config
from tests.integration.tiny_run import run_ppo

TOLERANCE = 0.1
PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")
MODELS = ("actor", "critic")  # first roles of the measured processes
LOOK_AT_STEP = 3  # the optimizer has its moments, and every role was offloaded once


def predicted_bytes(config: PPOConfig) -> dict[str, dict[str, int]]:
    """Return phase -> process (its first role) -> bytes of parameters, gradients and optimizer state."""
    architecture = read_architecture(config.model.path)
    plan = plan_placement(config)
    device = plan_memory(config, plan, dict.fromkeys(("actor", "reference", "critic"), architecture))[0]
    found: dict[str, dict[str, int]] = {}

    for phase in PHASES:
        found[phase] = {}
        for group in plan.groups:
            if group.roles[0] in MODELS:
                usages = [device.phases[phase].get(role, Usage()) for role in group.roles]
                found[phase][group.roles[0]] = sum(
                    usage.parameters + usage.gradients + usage.optimizer for usage in usages
                )

    return found


class Gauge:
    """Measured memory: phase -> process -> resident bytes."""

    def __init__(self) -> None:
        self.resident: dict[str, dict[str, float]] = {}

    def __call__(self, step: int, roles: PPORoles) -> None:
        if step != LOOK_AT_STEP:
            return
        assert roles.critic
        groups = {"actor": roles.actor.group, "critic": roles.critic.group}

        for phase in PHASES:
            if phase == "gen":
                roles.weights.bring_in()
            else:
                gather(*roles.schedule.before(phase))
            self.resident[phase] = {
                name: max(group.call(Worker.resident_memory_gb)) * 1e9 for name, group in groups.items()
            }


def compare(
    strategy: PlacementStrategy, predicted: dict[str, dict[str, int]], resident: dict[str, dict[str, float]]
) -> float:
    """Print a row per process and phase. Returns the largest deviation."""
    worst = 0.0
    for process in predicted["gen"]:
        least = min(PHASES, key=lambda phase: predicted[phase][process])
        for phase in PHASES:
            plan = predicted[phase][process] - predicted[least][process]
            # As little as in the phase with the least; in hybrid, the critic has its own devices and is never
            # offloaded.
            if plan == 0:
                continue
            measured = resident[phase][process] - resident[least][process]
            deviation = abs(measured - plan) / plan
            worst = max(worst, deviation)
            print(
                f"| {strategy.value} | {process} | {phase} over {least} | {plan / 1e6:.0f} | "
                f"{measured / 1e6:.0f} | {deviation:.1%} |",
                flush=True,
            )

    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    print("| placement | process | phase | planned MB | measured MB | off by |\n|---|---|---|---|---|---|")
    worst = 0.0

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder, arguments.hidden, arguments.layers)
        start_ray(num_cpus=12, object_store_mb=256)
        try:
            for strategy in (PlacementStrategy.hybrid, PlacementStrategy.fully_collocate):
                settings = config(folder, folder / strategy.value, strategy)
                settings = dataclasses.replace(
                    settings,
                    rollout=dataclasses.replace(settings.rollout, num_replicas=1),
                    actor=dataclasses.replace(settings.actor, parallel=ParallelConfig()),
                    trainer=dataclasses.replace(settings.trainer, total_steps=LOOK_AT_STEP),
                )
                gauge = Gauge()
                run_ppo(settings, gauge)
                worst = max(worst, compare(strategy, predicted_bytes(settings), gauge.resident))
        finally:
            shutdown()

    print(f"\nat most {worst:.1%} off; allowed {TOLERANCE:.0%}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
