"""Ranks of the first, second and last stage of Llama 3 70B on 128 devices.

The layout has sequence parallelism and virtual stages. Instead of 80 layers there are 8, one for each virtual
stage, which is enough for each kind of call and of memory: 80 take a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.roles import model_roles
from megarl.config.schema import ParallelConfig, PPOConfig, Recompute
from megarl.models.families import read_architecture
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import distinct_ranks, hangs
from megarl.rehearse.dry_run.record import PhaseRecord, RankRecord, predicted_memory
from tests.unit.plan.step_time.comparison import EXACT, differences
from tests.unit.rehearse.dry_run.memory_cases import beyond_bounds
from tests.unit.rehearse.dry_run.runs import EIGHT_LAYERS_OF_70B, ppo, requests, save_config

PARALLEL = ParallelConfig(
    tensor_parallel_size=8,
    pipeline_parallel_size=4,
    virtual_pipeline_parallel_size=2,
    data_parallel_size=4,
    sequence_parallel=True,
)

pytestmark = pytest.mark.usefixtures("forked_rehearsals")
HIDDEN = 8192
LAYERS = 2
CHUNKS = 2
MICRO_BATCHES = 4
TOKENS = 8192
# Queries and output 8192 x 8192, keys and values 8192 x 1024, three matrices of 8192 x 28672; sharded by
# eight.
# Two norms.
LAYER = (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 8 + 2 * 8192
VOCABULARY = 129024 // 8 * 8192
PARAMETERS = {0: LAYERS * LAYER + VOCABULARY, 1: LAYERS * LAYER, 3: LAYERS * LAYER + VOCABULARY + 8192}
STATE = 2 + 4 + 12 // 4  # bytes per parameter: weight, gradient, a fourth of moments and master
WHOLE = TOKENS * HIDDEN * 2  # bytes of a micro-batch's hidden states


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    model = save_config(tmp_path_factory.mktemp("llama") / "model", EIGHT_LAYERS_OF_70B)
    return ppo(model, PARALLEL, prompt=1024, response=3072, max_tokens=TOKENS, recompute=Recompute.full)


@pytest.fixture(scope="module")
def records(config: PPOConfig) -> dict[int, RankRecord]:
    """Return the records by stage."""
    return {
        record.pipeline_rank: record
        for record in rehearse_ranks(requests(config, distinct_ranks(PARALLEL)), 2)
    }


def test_the_time_model_counts_the_same(config: PPOConfig, records: dict[int, RankRecord]) -> None:
    ranks = [record.rank for record in records.values()]
    for request, record in zip(requests(config, ranks), records.values(), strict=True):
        assert differences(request, record, EXACT) == []


def phase_of(record: RankRecord, name: str) -> PhaseRecord:
    return next(phase for phase in record.phases if phase.name == name)


def sizes(phase: PhaseRecord, kind: str, group: str, dtype: str) -> list[int]:
    found = [
        call
        for call in phase.collectives
        if (call.kind, call.dtype) == (kind, dtype) and call.group.startswith(group)
    ]
    return [call.nbytes for call in found]


def test_no_mistake_is_found(records: dict[int, RankRecord]) -> None:
    assert sorted(records) == [0, 1, 3]
    assert {record.error for record in records.values()} == {None}
    # Messages between the first two stages, which are adjacent.
    assert hangs(list(records.values())) == []


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_and_held_memory(stage: int, records: dict[int, RankRecord]) -> None:
    """The device also holds rotary frequencies, buffer padding and the optimizer's flag: below a millionth."""
    record = records[stage]
    assert record.num_parameters == PARAMETERS[stage]
    assert phase_of(record, "build").held == pytest.approx(STATE * PARAMETERS[stage], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_and_parameters_over_replicas(stage: int, records: dict[int, RankRecord]) -> None:
    """There is one buffer per virtual stage.

    The first is split into buckets that overlap with the computation.
    """
    reduced = sizes(phase_of(records[stage], "train"), "reduce_scatter", "DATA", "float32")
    gathered = sizes(phase_of(records[stage], "step"), "all_gather", "DATA", "bfloat16")
    assert len(reduced) == len(gathered) >= CHUNKS
    assert sum(reduced) == pytest.approx(4 * PARAMETERS[stage], rel=1e-6)
    assert sum(gathered) == pytest.approx(2 * PARAMETERS[stage], rel=1e-6)


def test_hidden_states_over_tensor_ranks(records: dict[int, RankRecord]) -> None:
    """Each layer gathers before attention and MLP and scatters afterwards (sequence parallelism).

    This happens twice (recompute), and in reverse in backward, where the gathered input is gathered once more
    for the gradient of the weight. A middle stage has only layers.
    """
    train = phase_of(records[1], "train")
    gathered, scattered = (
        sizes(train, kind, "TENSOR", "bfloat16") for kind in ("all_gather", "reduce_scatter")
    )
    assert gathered == [WHOLE] * (MICRO_BATCHES * LAYERS * (2 + 2 + 2 + 2))
    assert scattered == [WHOLE] * (MICRO_BATCHES * LAYERS * (2 + 2 + 2))


def test_hidden_states_between_stages(records: dict[int, RankRecord]) -> None:
    """Each rank sends its eighth of the tokens.

    The first stage sends from both of its virtual stages, and sends gradients from the second, around to the
    last stage.
    """
    train = phase_of(records[0], "train")
    assert sizes(train, "send", "PIPELINE", "bfloat16") == [WHOLE // 8] * (MICRO_BATCHES * (2 + 1))
    assert sizes(train, "recv", "PIPELINE", "bfloat16") == [WHOLE // 8] * (MICRO_BATCHES * (2 + 1))


def test_log_probs_over_the_vocabulary(records: dict[int, RankRecord]) -> None:
    """6,144 response tokens in chunks of 1,024: the maximum logit, then four sums."""
    assert (
        sum(sizes(phase_of(records[3], "score"), "all_reduce", "TENSOR", "float32"))
        == MICRO_BATCHES * 6144 * (1 + 4) * 4
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_layer_waits_for_the_device(stage: int, records: dict[int, RankRecord]) -> None:
    """Virtual stages exchange the shapes of their messages.

    Each micro-batch has a copy for what arrives and for what is sent, in forward and backward, and a
    synchronization of each exchange; the warm-up needs two more. The last stage reads its metrics once.
    """
    for phase in ("score", "train"):
        waits = phase_of(records[stage], phase).host_syncs
        others = [wait for wait in waits if "p2p_communication.py" not in wait.place]
        assert all("metrics.py" in wait.place for wait in others)
        assert sum(wait.times for wait in others) <= 1
        assert 0 < sum(wait.times for wait in waits) <= MICRO_BATCHES * CHUNKS * (4 + 2) + 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_plan_of_memory_is_near_and_never_below(
    stage: int, records: dict[int, RankRecord], config: PPOConfig
) -> None:
    (role,) = [role for role in model_roles(config) if role.name == "actor"]
    plan = predicted_memory(config, role, read_architecture(Path(config.model.path)), records[stage].rank)
    assert beyond_bounds(records[stage], plan) == []
