"""Run the tests of tests/gpu/test_engine.py on a CPU, over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ParallelConfig
from tests.gpu.test_engine import *  # noqa: F403
from tests.gpu.test_engine import Compared, Run, make_family
from tests.ranks import RankPool
from tests.unit.engine.models import EVERY_EXPERT, EXPERT_FAMILIES, FAMILIES
from tests.unit.engine.rank_side import start


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cpu")


# tests/unit/engine/test_parity.py has all of them, and so has a rehearsal (tests/gpu/table.py).
MODELS = [*FAMILIES, *EXPERT_FAMILIES, *EVERY_EXPERT]
FEW = ["qwen2", "qwen3-tied", "qwen3_moe", "deepseek_v3-all"]


@pytest.fixture(scope="module", params=MODELS if "MEGARL_REHEARSAL" in os.environ else FEW)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Compared]:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def run(rank_pool: RankPool) -> Run:
    return lambda function, **arguments: rank_pool.run(in_a_rank, world_size=1, work=function, **arguments)[0]


def in_a_rank(work: Callable[..., Any], **arguments: Any) -> Any:
    return work(groups=start(ParallelConfig()), **arguments)
