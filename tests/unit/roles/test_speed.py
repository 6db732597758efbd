"""Test the speed metrics of an update against numbers worked out by hand, with unequal replicas and with
padding rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import merge_metrics, values_of
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Device, DType, EngineConfig, ParallelConfig
from megarl.engine.spec import ModelSpec
from megarl.models.counts import training_flops
from megarl.models.families import read_architecture
from megarl.roles.megatron_worker import MICRO_BATCHES, speed_metrics
from tests.unit.config.folders import model_folder

ROWS = [(3, 2), (1, 4), (2, 3)]


def part_of(rows: list[tuple[int, int]], filler: int | None = None) -> DataProto:
    prompts, responses = (
        RaggedTensor.constant(1, torch.tensor(lengths), torch.int32) for lengths in zip(*rows, strict=True)
    )
    scored = RaggedTensor.of_rows(
        [np.full(response, row != filler) for row, (_, response) in enumerate(rows)], torch.bool
    )
    micro_batches = [[row] for row in range(len(rows))]
    tensors = {"prompts": prompts, "responses": responses, "response_mask": scored}

    return DataProto.from_dict(tensors, meta_info={MICRO_BATCHES: micro_batches})


def speed(spec: ModelSpec, part: DataProto) -> dict[str, float]:
    """Return the metrics of an update that took 2 seconds."""
    return values_of(merge_metrics([speed_metrics(spec, part, 2.0, "actor", None)]))


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
    replicas = [
        speed_metrics(spec, part_of(ROWS[:2]), 3.0, "actor", 0.5),
        speed_metrics(spec, part_of(ROWS[2:]), 5.0, "actor", 0.5),
    ]
    tflops = training_flops(spec.architecture, ROWS) / 1e12 / (4 * 3.0 + 4 * 5.0)
    tokens = sum(map(sum, ROWS)) / (4 * 3.0 + 4 * 5.0)
    assert values_of(merge_metrics(replicas)) == pytest.approx(
        {
            "perf/tflops/actor": tflops,
            "perf/mfu/actor": tflops / 0.5,
            "perf/tokens_per_s/actor": tokens,
            "perf/computed_tokens_per_s/actor": tokens,
        }
    )


def test_a_prompt_that_rows_share_is_computed_once(spec: ModelSpec) -> None:
    """Rows 0 and 1 share a prompt and a micro-batch; row 2 has the same prompt in another micro-batch."""
    rows = [(3, 5), (3, 2), (3, 4)]
    part = part_of(rows)
    part.meta_info = {MICRO_BATCHES: [[0, 1], [2]]}
    flops = training_flops(spec.architecture, rows) - training_flops(spec.architecture, [(3, 0)])
    expected = {"tflops": flops / 1e12, "tokens_per_s": 8 + 5 + 7, "computed_tokens_per_s": 8 + 2 + 7}
    assert speed(spec, part) == pytest.approx(
        {f"perf/{key}/actor": value / 8.0 for key, value in expected.items()}
    )
    apart = speed(replace(spec, engine=EngineConfig(share_prompts=False)), part)
    assert (
        apart["perf/computed_tokens_per_s/actor"]
        == apart["perf/tokens_per_s/actor"]
        == pytest.approx(20 / 8.0)
    )


def test_a_prompt_is_counted_with_a_row_that_is(spec: ModelSpec) -> None:
    """Row 0 comes first with the prompt of rows 1 and 2, and has no token that the loss reads."""
    part = part_of([(3, 5), (3, 2), (3, 4)], filler=0)
    part.meta_info = {MICRO_BATCHES: [[0, 1, 2]]}
    found = speed(spec, part)
    flops = training_flops(spec.architecture, [(3, 2), (3, 4)]) - training_flops(spec.architecture, [(3, 0)])
    expected = {"tflops": flops / 1e12, "tokens_per_s": 5 + 7, "computed_tokens_per_s": 5 + 4}
    assert found == pytest.approx({f"perf/{key}/actor": value / 8.0 for key, value in expected.items()})


def test_filler_rows_count_as_no_work(spec: ModelSpec) -> None:
    found = values_of(merge_metrics([speed_metrics(spec, part_of(ROWS, filler=1), 2.0, "critic", None)]))
    rows = [ROWS[0], ROWS[2]]
    assert found["perf/tflops/critic"] == pytest.approx(training_flops(spec.architecture, rows) / 1e12 / 8.0)
    assert found["perf/tokens_per_s/critic"] == pytest.approx(sum(map(sum, rows)) / 8.0)
