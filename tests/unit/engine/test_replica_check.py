"""One changed bit in one rank's copy of a weight is found, and the rank is named by the majority."""

from __future__ import annotations

import pytest
import torch

from megarl.config.schema import OptimConfig, ParallelConfig
from megarl.machine.errors import ReplicaMismatchError
from tests.ranks import RankPool
from tests.unit.engine.models import save_model
from tests.unit.engine.rank_side import ALL_LAYOUTS, EXPERT_LAYOUTS, build, start


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for family in ("qwen2", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        save_model(family, folder)
        found[family] = str(folder)
    return found


def check(parallel: ParallelConfig, folder: str, changed: str | None, rank: int) -> str:
    """Run in a rank: change a bit of the first parameter whose name contains `changed`, and compare."""
    groups = start(parallel)
    engine = build(groups, folder, optim=OptimConfig())
    from megarl.engine.weight_checks import check_replicas

    if changed is not None and groups.rank == rank:
        name = next(name for name in engine.parameters() if changed in name)
        engine.parameters()[name].view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    try:
        check_replicas(engine, f"rank {groups.rank} (node n{groups.rank})")
    except (ReplicaMismatchError, ConnectionAbortedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", "TP2+SPxDP2"), ("qwen2", "CP2xPP2"), ("qwen3_moe", "DP2xEP2")]
)
def test_equal_copies_agree(family: str, layout: str, rank_pool: RankPool, folders: dict[str, str]) -> None:
    parallel = (ALL_LAYOUTS | EXPERT_LAYOUTS)[layout]
    settings = {"parallel": parallel, "folder": folders[family], "changed": None, "rank": 0}
    assert set(rank_pool.run(check, world_size=parallel.world_size, **settings)) == {""}


def test_a_rank_that_differs_from_most_is_named(rank_pool: RankPool, folders: dict[str, str]) -> None:
    parallel = ParallelConfig(data_parallel_size=4)
    settings = {"parallel": parallel, "folder": folders["qwen2"], "changed": "linear_fc2", "rank": 2}
    told = rank_pool.run(check, world_size=4, **settings)
    message = (
        "rank 2 (node n2): decoder.layers.0.mlp.linear_fc2.weight is not bitwise equal to the copies on "
        "other ranks"
    )
    assert told[2] == f"ReplicaMismatchError: {message}"
    assert [told[rank] for rank in (0, 1, 3)] == [f"ConnectionAbortedError: {message}"] * 3


def test_norms_are_equal_on_tensor_parallel_ranks(rank_pool: RankPool, folders: dict[str, str]) -> None:
    """Two copies have no majority, so the error names both ranks. Other stages stop, too."""
    parallel = ALL_LAYOUTS["TP2xPP2"]
    settings = {"parallel": parallel, "folder": folders["qwen2"], "changed": "final_layernorm", "rank": 3}
    told = rank_pool.run(check, world_size=4, **settings)
    message = (
        "rank 2 (node n2), rank 3 (node n3): decoder.final_layernorm.weight is not bitwise equal to the "
        "copies on other ranks; the copies differ from each other, and any of them may be wrong"
    )
    assert [line.partition(": ")[0] for line in told] == [
        *["ConnectionAbortedError"] * 2,
        *["ReplicaMismatchError"] * 2,
    ]
    assert {line.partition(": ")[2] for line in told} == {message}
