"""The speed of an update: by hand, over replicas of unlike work, and without rows that only fill a micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.architecture import read_architecture
from megarl.config.flops import training_flops
from megarl.config.schema import Device, DType, EngineConfig, ParallelConfig
from megarl.engine.spec import ModelSpec
from megarl.workers.megatron import speed_metrics
from tests.unit.config.folders import model_folder

ROWS = [(3, 2), (1, 4), (2, 3)]
PROMPT, RESPONSE = 4, 5  # columns


def part_of(rows: list[tuple[int, int]], filler: int | None = None) -> DataProto:
    mask = torch.zeros(len(rows), PROMPT + RESPONSE, dtype=torch.long)
    for row, (prompt, response) in zip(mask, rows, strict=True):
        row[PROMPT - prompt : PROMPT + response] = 1
    scored = mask[:, PROMPT:].bool()
    if filler is not None:
        scored[filler] = False
    return DataProto.from_dict({"attention_mask": mask, "response_mask": scored})


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    folder = model_folder(tmp_path / "model")
    return ModelSpec(
        path=str(folder),
        architecture=read_architecture(str(folder)),
        head="lm",
        dtype=DType.float32,
        parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2),
        engine=EngineConfig(),
        device=Device.cpu,
        seed=0,
    )


def test_it_is_the_work_of_all_replicas_by_the_time_of_their_devices(spec: ModelSpec) -> None:
    """Two replicas of 2 x 2 devices, one of which worked for 3 s and the other for 5."""
    replicas = [speed_metrics(spec, part_of(ROWS[:2]), 3.0, "actor", 0.5), speed_metrics(spec, part_of(ROWS[2:]), 5.0, "actor", 0.5)]
    tflops = training_flops(spec.architecture, ROWS) / 1e12 / (4 * 3.0 + 4 * 5.0)
    assert values_of(merge_metrics(replicas)) == pytest.approx({"perf/tflops/actor": tflops, "perf/mfu/actor": tflops / 0.5})


def test_what_fills_a_micro_batch_is_no_work(spec: ModelSpec) -> None:
    found = values_of(merge_metrics([speed_metrics(spec, part_of(ROWS, filler=1), 2.0, "critic", None)]))
    assert found == pytest.approx({"perf/tflops/critic": training_flops(spec.architecture, [ROWS[0], ROWS[2]]) / 1e12 / 8.0})
