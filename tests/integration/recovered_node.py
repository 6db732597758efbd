"""Lose a node with a rank of a trained model, in a simulated cluster with a spare node.

Ray has one cluster per process, so this is a separate program: `python -m tests.integration.recovered_node`
prints as JSON how many recoveries the run had, how long the lost step took, and what differs from a run that
lost nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

from megarl.config.schema import CheckpointConfig, ParallelConfig, PlacementConfig, RecoveryConfig, SFTConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.environment import daemon_settings
from megarl.roles.models import Actor
from tests.integration.lost_nodes import NOTICED_SOON
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import run_sft, save_inputs, tiny_sft_config

STEPS = 5
LOST_AT = 3


def config(folder: Path, name: str) -> SFTConfig:
    return tiny_sft_config(
        folder,
        folder / name,
        actor={"parallel": ParallelConfig(data_parallel_size=2)},
        placement=PlacementConfig(num_nodes=2, devices_per_node=1),
        recovery=RecoveryConfig(enabled=True),
        checkpoint=CheckpointConfig(asynchronous=False),
        trainer={"total_steps": STEPS},
    )


def main() -> None:
    os.environ.update({**daemon_settings(), **NOTICED_SOON})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    others = [cluster.add_node(num_cpus=3) for _ in range(2)]
    os.environ["RAY_ADDRESS"] = cluster.address
    start_ray(num_cpus=9)

    def look(step: int | None, phase: str, actor: Actor) -> None:
        # Two of the three nodes have a rank, so at least one that is not the head has.
        if (step, phase) == (LOST_AT, "step") and len(others) == 2:
            nodes = actor.group.processes.pool.node_ids()
            lost = next(node for node in others if node.node_id in nodes)
            others.remove(lost)
            cluster.remove_node(lost, allow_graceful=False)

    with tempfile.TemporaryDirectory() as name:
        save_inputs(folder := Path(name))
        undisturbed = Outcome(run_sft(config(folder, "undisturbed")))
        recovered = run_sft(config(folder, "recovered"), look_at_phase=look)
        line = recovered.metrics[LOST_AT - 1]
        result = {
            "num_recoveries": line["recovery/num_recoveries"],
            "step_s": line["timing_s/step"],
            "difference": Outcome(recovered).difference(undisturbed),
        }
    print(json.dumps(result))
    shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
