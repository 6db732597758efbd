"""Test the profiler traces of a run on two ranks: the chosen step has one for each rank, and no other has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import ActorConfig, MicroBatchConfig, OptimConfig, ParallelConfig, ProfileConfig
from tests.integration.tiny_run import run_sft, save_inputs, tiny_sft_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_a_chosen_step_has_a_trace_of_each_rank(tmp_path: Path) -> None:
    save_inputs(inputs := tmp_path / "inputs", num_layers=2)
    config = tiny_sft_config(
        inputs,
        tmp_path / "run",
        actor=ActorConfig(
            parallel=ParallelConfig(data_parallel_size=2),
            micro_batch=MicroBatchConfig(max_tokens=32),
            optim=OptimConfig(lr=1e-2),
        ),
        trainer={"total_steps": 3},
        profile=ProfileConfig(steps=[2], ranks=[0, 1]),
    )
    run_sft(config)

    folder = tmp_path / "run" / "profile"
    assert [path.name for path in folder.iterdir()] == ["step_00000002"]
    files = sorted((folder / "step_00000002").iterdir())
    assert [path.name for path in files] == ["actor_rank_00000.json", "actor_rank_00001.json"]
    for path in files:
        found = [event for event in events(path) if event.get("ph") == "X"]
        names = {event["name"] for event in found}
        # Megatron's phases, those of the worker, and a matrix product.
        assert {"forward-compute", "backward-compute", "forward-backward", "all-grads-sync"} <= names
        assert {"optimizer-inner-step", "aten::mm"} <= names
        assert {"actor: forward and backward", "actor: optimizer step"} <= names

        # One step was profiled, with its only update.
        (update,) = [event for event in found if event["name"] == "actor: forward and backward"]
        end = update["ts"] + update["dur"]
        inside = [event for event in found if event["name"] == "forward-compute" and event["ts"] < end]
        assert all(update["ts"] <= event["ts"] for event in inside)
