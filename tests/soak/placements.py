"""Run the same PPO run in every placement with one engine: `python -m tests.soak.placements --engine sglang`.

The run is five steps of a tiny model on real Ray and real Megatron, in float32. The script prints the largest
relative difference of any metric and any weight from split_collocate, and exits with status 1 if one is above
1e-5. With SGLang each run takes about a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.config.schema import PlacementStrategy, RolloutEngineKind
from megarl.controller.cluster import shutdown, start_ray
from tests.integration.test_placements import NOT_COMPARED, STEPS, config
from tests.integration.tiny_run import Finished, run_ppo, save_inputs

TOLERANCE = 1e-5
ABSOLUTE = 1e-9  # below it, two numbers are both zero up to rounding


def difference(value: float, other: float) -> float:
    return 0.0 if abs(value - other) <= ABSOLUTE else abs(value - other) / max(abs(value), abs(other))


def of_metrics(run: Finished, expected: Finished) -> tuple[float, str]:
    """Return the largest difference, and its metric."""
    worst = (0.0, "all the same")
    for line, other in zip(run.metrics, expected.metrics, strict=True):
        names = [name for name in other if not name.startswith(NOT_COMPARED)]
        assert set(names) == {name for name in line if not name.startswith(NOT_COMPARED)}
        worst = max([worst, *((difference(line[name], other[name]), name) for name in names)])

    return worst


def of_weights(run: Finished, expected: Finished) -> float:
    """Return the largest element difference, relative to the norm of each tensor."""
    weights, others = (load_file(each.policy / "model.safetensors") for each in (run, expected))
    assert weights.keys() == others.keys()
    return max(float(torch.dist(weights[name], others[name]) / others[name].norm()) for name in others)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=[each.value for each in RolloutEngineKind], default="sglang")
    parser.add_argument("--placement", nargs="*", default=[each.value for each in PlacementStrategy])
    arguments = parser.parse_args()
    strategies = [
        PlacementStrategy(name) for name in dict.fromkeys(["split_collocate", *arguments.placement])
    ]
    worst = 0.0

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs = []
        save_inputs(folder)
        start_ray(num_cpus=12, object_store_mb=256)
        try:
            for strategy in strategies:
                settings = config(
                    folder, folder / strategy.value, strategy, RolloutEngineKind(arguments.engine)
                )
                settings = dataclasses.replace(
                    settings, rollout=dataclasses.replace(settings.rollout, num_replicas=1)
                )
                runs.append(run_ppo(settings))
                (metrics, name), weights = of_metrics(runs[-1], runs[0]), of_weights(runs[-1], runs[0])
                worst = max(worst, metrics, weights)
                print(
                    f"{strategy.value}: {STEPS} steps, metrics differ by {metrics:.1e} ({name}), weights by "
                    f"{weights:.1e}",
                    flush=True,
                )
        finally:
            shutdown()

    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
