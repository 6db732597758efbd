"""A dry run with a CPU run's switches makes that run's calls over gloo, one by one; and what CUDA's switches change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.config.schema import ParallelConfig
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import hangs
from megarl.rehearse.dry_run.record import Collective, PhaseRecord, RankRecord
from tests.ranks import RankPool
from tests.unit.engine.models import save_model
from tests.unit.rehearse.dry_run.cpu_side import WITH_CPU_SWITCHES, make_ready_with_switches, run_on_cpu
from tests.unit.rehearse.dry_run.runs import ppo, requests

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

LAYOUTS = {
    "TP2+SPxPP2": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True),
    "PP2xVPP2xCP2": ParallelConfig(
        pipeline_parallel_size=2, virtual_pipeline_parallel_size=2, context_parallel_size=2
    ),
}
# The layers of each stage.
MICRO_BATCHES = 2
LAYERS = 2
RANKS = [0, 3]  # one per stage, with different ranks in its groups
PHASES = ("build", "score", "train", "step", "offload", "restore")

Rehearsed = dict[tuple[str, str], dict[int, RankRecord]]  # by layout and folder of the model; by rank


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name in (WITH_CPU_SWITCHES, "cuda"):
        save_model("qwen2", folder / name)
    return {name: str(folder / name) for name in (WITH_CPU_SWITCHES, "cuda")}


@pytest.fixture(scope="module")
def rehearsed(models: dict[str, str]) -> Rehearsed:
    """Simulate all ranks of one layout on CUDA, which must not hang."""
    ranks = {(layout, name): RANKS for layout in LAYOUTS for name in models} | {
        ("PP2xVPP2xCP2", "cuda"): [0, 1, 2, 3]
    }
    asked = [
        request
        for (layout, name), some in ranks.items()
        for request in requests(ppo(models[name], LAYOUTS[layout]), some)
    ]

    # One rank at a time, so that records arrive in request order.
    records = list(rehearse_ranks(asked, 1, make_ready_with_switches))
    assert {record.error for record in records} == {None}
    return {each: {rank: records.pop(0) for rank in some} for each, some in ranks.items()}


def calls(phases: Iterator[PhaseRecord] | tuple[PhaseRecord, ...], name: str) -> list[Collective]:
    """Return the calls without the bytes of pickled objects, whose number ranks exchange first."""
    found = next(phase for phase in phases if phase.name == name).collectives
    return [call._replace(batch=None) for call in found if call.dtype != "uint8"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rehearsal_makes_the_calls_of_a_real_run(
    layout: str, models: dict[str, str], rehearsed: Rehearsed, rank_pool: RankPool
) -> None:
    """The calls have the same kind, group, dtype, size and source line, and the same order."""
    config = ppo(models[WITH_CPU_SWITCHES], LAYOUTS[layout])
    real = rank_pool.run(run_on_cpu, world_size=4, config=config, num_micro_batches=MICRO_BATCHES)

    for rank, record in rehearsed[layout, WITH_CPU_SWITCHES].items():
        phases = real[rank]
        assert [phase.name for phase in phases] == [phase.name for phase in record.phases] == list(PHASES)
        for name in PHASES:
            assert calls(phases, name) == calls(record.phases, name), f"rank {rank}, {name}"
        assert len(calls(phases, "train")) > 20


def beside_those_of(one: list[Collective], other: list[Collective]) -> list[Collective] | None:
    """Return the calls of `other` in addition to those of `one`, if it has those in order; otherwise None."""
    left = list(one)
    beside = []

    for call in other:
        # From other lines, because the linear layer is another.
        if left and call._replace(place="") == left[0]._replace(place=""):
            left.pop(0)
        else:
            beside.append(call)

    return None if left else beside


def short(calls: list[Collective] | None) -> list[tuple[str, str, int]]:
    assert calls is not None, "calls are missing, or in another order"
    return [(call.kind, call.group, len(call.ranks)) for call in calls]


def test_cuda_gathers_the_input_of_a_layer_again_and_calls_in_groups_of_one(rehearsed: Rehearsed) -> None:
    """This happens with sequence parallelism, once for each of the two column-parallel layers (QKV; gate and up)."""
    gathers = [("all_gather", "TENSOR_MODEL_PARALLEL_GROUP", 2)] * (MICRO_BATCHES * LAYERS * 2)
    alone = "DATA_PARALLEL_GROUP_WITH_CP"
    changed = {"train": [*gathers, ("reduce_scatter", alone, 1)], "step": [("all_gather", alone, 1)]}

    for rank, on_cpu in rehearsed["TP2+SPxPP2", WITH_CPU_SWITCHES].items():
        on_cuda = rehearsed["TP2+SPxPP2", "cuda"][rank]
        assert [phase.name for phase in on_cuda.phases] == list(PHASES)
        for name in PHASES:
            beside = beside_those_of(calls(on_cpu.phases, name), calls(on_cuda.phases, name))
            assert short(beside) == changed.get(name, []), f"rank {rank}, {name}"


def test_cuda_reduces_gradients_within_the_second_pass_and_gathers_parameters_until_the_next(
    rehearsed: Rehearsed,
) -> None:
    """Gradients of the second virtual stage are ready before the first one's are computed.

    The first pass is as on a CPU.
    """
    for rank, on_cpu in rehearsed["PP2xVPP2xCP2", WITH_CPU_SWITCHES].items():
        on_cuda = rehearsed["PP2xVPP2xCP2", "cuda"][rank]
        assert [phase.name for phase in on_cuda.phases] == [*PHASES[:4], "train again", *PHASES[4:]]
        for name in PHASES:
            assert calls(on_cpu.phases, name) == calls(on_cuda.phases, name), f"rank {rank}, {name}"
        first, second = (calls(on_cuda.phases, name) for name in ("train", "train again"))
        assert sorted(first) == sorted(second)
        places = [
            [number for number, call in enumerate(each) if is_of_gradients(call)] for each in (first, second)
        ]
        assert places[0] == [len(first) - 2, len(first) - 1]
        assert places[1][0] < places[0][0]
        assert awaited_late(on_cpu) == set()
        assert awaited_late(on_cuda) == {"all_gather", "reduce_scatter"}


def is_of_gradients(call: Collective) -> bool:
    """Return whether a call reduces gradients. Others are for keys and values with context parallelism."""
    return call.kind == "reduce_scatter" and call.group.startswith("DATA")


def awaited_late(record: RankRecord) -> set[str]:
    """Return the kinds of calls between equal ranks that overlapped with other calls before they were awaited."""
    made = [call for phase in record.phases for call in phase.collectives]
    late = [
        made[each.call] for phase in record.phases for each in phase.awaits if each.num_calls > each.call + 1
    ]
    return {call.kind for call in late if call.group.startswith("DATA")}


def test_nobody_hangs(rehearsed: Rehearsed) -> None:
    for which, records in rehearsed.items():
        assert hangs(list(records.values())) == [], which
