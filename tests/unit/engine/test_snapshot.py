"""A snapshot restores the state when it began, also while the model trains on, and has the planned size. The
snapshots of all ranks restore it in another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megarl.checkpoints.snapshot_file import SnapshotSlices, open_snapshot
from megarl.config.roles import model_roles
from megarl.config.schema import ActorConfig, DType, ModelConfig, ParallelConfig, SFTConfig
from megarl.machine.errors import CheckpointError
from megarl.models.architecture import LoRA
from megarl.models.families import read_architecture
from megarl.plan.placement.model_state import rank_snapshot_bytes, stage_of
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import (
    Settings,
    Steps,
    contents,
    draws,
    open_engine,
    same,
    save_whole,
    stored_tensors,
    train,
)
from tests.unit.engine.models import save_model
from tests.unit.engine.rank_side import ALL_LAYOUTS, EXPERT_LAYOUTS, LAYOUTS, Tensors


class Restored(NamedTuple):
    """What a rank computes after a snapshot, and again after it was loaded."""

    first: tuple[Tensors, Steps]
    again: tuple[Tensors, Steps]
    nbytes: int
    refusal: str


def restore(settings: Settings) -> Restored:
    """Snapshot after two steps, train, load the snapshot, and train again."""
    from megarl.engine.offload import StatePart
    from megarl.engine.snapshot import PendingSnapshot, load_snapshot
    from megarl.machine.memory_files import MemoryFiles

    files = MemoryFiles()
    path = files.path("rank")
    engine = open_engine(settings)
    train(engine, 2)

    # The state may be offloaded, and stays so.
    engine.offload(StatePart.optimizer)
    PendingSnapshot(path, 2, engine).wait()
    assert files.complete()["rank"].step == 2
    engine.restore(StatePart.optimizer)
    first = (draws(), train(engine, 2, first=2))
    load_snapshot(engine, path)
    again = (draws(), train(engine, 2, first=2))

    # One damaged byte is noticed.
    header = files.complete()["rank"]
    files.write("rank", 1024, bytes([files.read("rank", 1024, 1)[0] ^ 1]))
    try:
        load_snapshot(engine, path)
        refusal = ""
    except CheckpointError as error:
        refusal = str(error)
    return Restored(first, again, header.nbytes, refusal)


SAVING = LoRA(rank=4, alpha=4, modules_to_save=("embed_tokens", "lm_head"))


@pytest.mark.parametrize(
    ("layout", "dtype", "lora"),
    [
        ("TP2", torch.float32, None),
        ("PP2xVPP2", torch.bfloat16, None),
        ("DP2", torch.bfloat16, None),
        ("TP2", torch.bfloat16, SAVING),
    ],
)
def test_it_restores_the_state_and_has_the_planned_size(
    layout: str, dtype: torch.dtype, lora: LoRA | None, rank_pool: RankPool, tmp_path: Path
) -> None:
    save_model("qwen2", tmp_path / "model")
    parallel = LAYOUTS[layout]
    settings = Settings(parallel, str(tmp_path / "model"), dtype=dtype, lora=lora)
    ranks = rank_pool.run(restore, world_size=parallel.world_size, settings=settings)

    name = DType(str(dtype).removeprefix("torch."))
    (role,) = model_roles(
        SFTConfig(model=ModelConfig(path=settings.folder, dtype=name), actor=ActorConfig(parallel=parallel))
    )
    architecture = replace(read_architecture(settings.folder), lora=lora)
    for rank, found in enumerate(ranks):
        (first_draws, first), (draws_again, again) = found.first, found.again
        assert same([first_draws], [draws_again])
        assert same([first.state], [again.state])
        assert first.losses == again.losses
        assert "its checksum differs" in found.refusal
        planned = rank_snapshot_bytes(role, architecture, name, stage_of(parallel, rank))

        # The index and the random states do not depend on the size of the model. Next to adapters, the
        # padding of the vocabulary is planned but not stored.
        padding = 0 if lora is None else 2 * 57 * 64 * (2 + 12)
        assert planned - padding <= found.nbytes <= planned + 2**17


def snapshot_and_save(settings: Settings, folder: Path) -> Steps:
    """Run in a rank: write the same state as a snapshot and as a checkpoint, and train on."""
    import torch.distributed as dist

    from megarl.engine.snapshot import PendingSnapshot

    engine = open_engine(settings)
    train(engine, 2)
    (path := folder / f"rank-{dist.get_rank()}").touch()
    PendingSnapshot(str(path), 2, engine).wait()
    save_whole(engine, settings, folder / "before")
    steps = train(engine, 1, first=2)
    save_whole(engine, settings, folder / "next before")
    return steps


def reshard_and_save(settings: Settings, folder: Path) -> Steps:
    """Run in a rank of another layout: load the snapshots over other weights, save them, and train on."""
    from megarl.engine.snapshot import load_resharded, wanted_tensors

    engine = open_engine(settings)
    train(engine, 1, first=90)
    indexes = {str(path): open_snapshot(str(path)).index for path in sorted(folder.glob("rank-*"))}
    load_resharded(engine, SnapshotSlices(indexes).sources(wanted_tensors(engine), near=()))
    save_whole(engine, settings, folder / "after")
    steps = train(engine, 1, first=2)
    save_whole(engine, settings, folder / "next after")
    return steps


# Models without biases of keys: their gradient is zero up to rounding, which Adam amplifies.
RESHARDED = {
    "TP2xDP2 to TP2": (
        "llama2",
        ParallelConfig(tensor_parallel_size=2, data_parallel_size=2),
        LAYOUTS["TP2"],
    ),
    "DP2 to one rank": ("llama2", LAYOUTS["DP2"], LAYOUTS["TP1"]),
    "PP2xDP2 to TP2": ("llama2", ALL_LAYOUTS["PP2xDP2"], LAYOUTS["TP2"]),
    "experts, DP2xEP2 to PP2": ("qwen3_moe", EXPERT_LAYOUTS["DP2xEP2"], EXPERT_LAYOUTS["PP2"]),
}


@pytest.mark.parametrize("case", RESHARDED)
def test_ranks_with_another_layout_continue_from_it(case: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """All tensors are bitwise those of the checkpoint, and the next step equals that of the first layout."""
    (model, before, after) = RESHARDED[case]
    save_model(model, tmp_path / "model")

    def run(function: Callable[..., Steps], parallel: ParallelConfig) -> list[Steps]:
        settings = Settings(parallel, str(tmp_path / "model"))
        return rank_pool.run(function, world_size=parallel.world_size, settings=settings, folder=tmp_path)

    undisturbed = run(snapshot_and_save, before)[0]
    resharded = run(reshard_and_save, after)[0]
    saved = stored_tensors(tmp_path / "before")
    loaded = stored_tensors(tmp_path / "after")
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name

    # The next step.
    assert resharded.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert resharded.statistics[0] == pytest.approx(undisturbed.statistics[0], rel=1e-5)
    stepped = stored_tensors(tmp_path / "next after")
    for name, tensor in stored_tensors(tmp_path / "next before").items():
        assert torch.dist(stepped[name], tensor) <= 1e-5 * tensor.norm(), name


def staged_copies() -> list[str]:
    """Run in a rank: copy tensors of all sizes around those of the buffers, and return those that differ."""
    from megarl.config.schema import Device
    from megarl.engine import platform
    from megarl.engine.snapshot import Staging

    platform.activate(Device.cpu)
    staging = Staging(nbytes=64, least=16)
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for shape in ((0,), (1,), (), (3,), (16,), (17,), (64,), (5, 13), (128,), (2, 3, 43)):
            # Part of a larger tensor, as shards are.
            whole = torch.randint(0, 100, (torch.Size(shape).numel() + 3,), generator=generator).to(dtype)
            source = whole[2 : 2 + torch.Size(shape).numel()].view(shape)
            target = torch.zeros(shape, dtype=dtype)
            staging.copy(source, target)
            if not torch.equal(source, target):
                wrong.append(f"{dtype} {shape}")
    return wrong


def test_buffers_that_are_emptied_in_turn_copy_every_byte(rank_pool: RankPool) -> None:
    assert rank_pool.run(staged_copies, world_size=1) == [[]]


class Copied(NamedTuple):
    """The contents of snapshots of one state.

    Attributes:
        directly: Of a copy without staging.
        staged: Of one through buffers.
        moved: Of one during which the whole state was offloaded.
        num_direct: The tensors of the last one that were copied before.
        num_tensors: All its tensors.
    """

    directly: list[bytes]
    staged: list[bytes]
    moved: list[bytes]
    num_direct: int
    num_tensors: int


def copy_three_times(settings: Settings, folder: Path) -> Copied:
    """Run in a rank."""
    import torch.distributed as dist

    from megarl.engine.offload import StatePart
    from megarl.engine.snapshot import PendingSnapshot, Staging

    engine = open_engine(settings)
    train(engine, 2)
    staging = Staging(nbytes=4096, least=64)
    copies = 0

    class Offloading(Staging):
        """Staging after whose third copy the state is offloaded, as between two tensors of a long snapshot."""

        def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
            nonlocal copies
            super().copy(source, target)
            copies += 1
            if copies == 3:
                engine.offload(StatePart.optimizer, StatePart.gradients, StatePart.parameters)

    found = []
    for number, way in enumerate((None, staging, Offloading(nbytes=4096, least=64))):
        (path := folder / f"{number}-{dist.get_rank()}").touch()
        pending = PendingSnapshot(str(path), 2, engine, way)
        pending.wait()
        with pending.stands_still():
            found.append(contents(str(path)))
    return Copied(*found, copies, len(found[0]) - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_continues_from_what_is_offloaded(
    dtype: torch.dtype, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Through buffers or directly, on the device or offloaded: the bytes are the same."""
    save_model("qwen2", tmp_path / "model")
    settings = Settings(ParallelConfig(), str(tmp_path / "model"), dtype=dtype)
    (rank,) = rank_pool.run(copy_three_times, world_size=1, settings=settings, folder=tmp_path)
    assert rank.staged == rank.directly
    assert rank.moved == rank.directly
    assert rank.num_direct == 3 < rank.num_tensors
