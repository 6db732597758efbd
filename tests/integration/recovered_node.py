"""Lose nodes with ranks of a trained model, in a simulated cluster with one spare node.

Ray has one cluster per process, so this is a separate program: `python -m tests.integration.recovered_node`
prints as JSON what happened after the loss of the first node, which the spare one replaces, and of the second,
after which a run with three replicas continues with two.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megarl.cli.run import session, train
from megarl.config.load import dump_config, load_config
from megarl.config.schema import (
    CheckpointConfig,
    OptimConfig,
    ParallelConfig,
    PlacementConfig,
    RecoveryConfig,
    SFTConfig,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.environment import daemon_settings
from megarl.roles.models import Actor
from tests.integration.lost_nodes import NOTICED_SOON
from tests.integration.run_outcome import Outcome
from tests.integration.started_cluster import started_cluster
from tests.integration.tiny_run import (
    Finished,
    WatchedMonitor,
    run_sft,
    save_inputs,
    tiny_sft_config,
)

STEPS = 5
LOST_AT = 3


def config(folder: Path, name: str, num_replicas: int = 2, **recovery: Any) -> SFTConfig:
    return tiny_sft_config(
        folder,
        folder / name,
        actor={
            "parallel": ParallelConfig(data_parallel_size=num_replicas),
            "optim": OptimConfig(lr=1e-3),
        },
        placement=PlacementConfig(num_nodes=num_replicas, devices_per_node=1),
        recovery=RecoveryConfig(enabled=True, **recovery),
        checkpoint=CheckpointConfig(asynchronous=False),
        trainer={"total_steps": STEPS},
    )


def main() -> None:
    os.environ.update({**daemon_settings(), **NOTICED_SOON})
    cluster, others = started_cluster({"num_cpus": 3}, {"num_cpus": 3}, {"num_cpus": 3})
    os.environ["RAY_ADDRESS"] = cluster.address
    start_ray(num_cpus=9)

    def look(step: int | None, phase: str, actor: Actor) -> None:
        # Two of the three nodes have a rank, so at least one that is not the head has.
        if (step, phase) == (LOST_AT, "step") and len(others) == 2:
            nodes = actor.group.processes.pool.node_ids()
            lost = next(node for node in others if node.node_id in nodes)
            others.remove(lost)
            cluster.remove_node(lost, allow_graceful=False)

    def lose_another(step: int | None, phase: str) -> None:
        if (step, phase) == (STEPS, "step") and len(others) == 2:
            cluster.remove_node(others.pop(), allow_graceful=False)

    with tempfile.TemporaryDirectory() as name:
        save_inputs(folder := Path(name))
        finished = run_sft(config(folder, "undisturbed"))
        undisturbed = Outcome(finished)
        recovered = run_sft(config(folder, "recovered"), look_at_phase=look)
        line = recovered.metrics[LOST_AT - 1]
        result = {
            "num_recoveries": line["recovery/num_recoveries"],
            "step_s": line["timing_s/step"],
            "difference": Outcome(recovered).difference(undisturbed),
        }
        shutdown()
        others.append(cluster.add_node(num_cpus=3))
        result["fewer"] = with_fewer_replicas(
            config(folder, "fewer", num_replicas=3, allow_fewer_replicas=True), finished, lose_another
        )
    print(json.dumps(result))
    cluster.shutdown()


def with_fewer_replicas(
    config: SFTConfig, undisturbed: Finished, look: Callable[[int | None, str], None]
) -> dict[str, Any]:
    """Run the command, and compare its metrics and weights with those of the undisturbed run."""
    WatchedMonitor.look = staticmethod(look)
    session.Monitor = WatchedMonitor  # type: ignore[misc]
    folder = Path(config.trainer.output_dir)
    with_export = replace(config, checkpoint=replace(config.checkpoint, save_hf=True))
    dump_config(with_export, file := folder.with_suffix(".yaml"))
    status = train.run(str(file), [])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "status": status,
        "num_replicas": load_config(SFTConfig, folder / "config.yaml").actor.parallel.data_parallel_size,
        "steps": [line["step"] for line in lines],
        "metrics": max(
            abs(line[name] / other[name] - 1)
            for line, other in zip(lines, undisturbed.metrics, strict=True)
            for name in ("sft/loss", "sft/grad_norm", "val/loss")
            if name in other
        ),
        "weights": _distance(Finished(folder, lines).policy, undisturbed.policy),
    }


def _distance(policy: Path, other: Path) -> float:
    """Return the largest difference between two models, relative to the norm of the tensor.

    The gradient of the keys' biases is zero up to rounding, which Adam amplifies.
    """
    one, two = (load_file(folder / "model.safetensors") for folder in (policy, other))
    return max(
        float(torch.dist(one[name], two[name]) / two[name].norm())
        for name in two
        if not name.endswith("k_proj.bias")
    )


if __name__ == "__main__":
    main()
