"""A checkpoint restores the state when the save began, in any layout, or raises an error that names the fault."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM

from megarl.checkpoints.torch_dist import read_index
from megarl.config.schema import ExpertsConfig, ParallelConfig
from megarl.engine.checkpoint import why_missing
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import (
    Saved,
    Settings,
    draws_around_a_load,
    failing_saves,
    load_and_train,
    load_by_megatron,
    load_damaged,
    refused_load,
    same,
    save_what_is_offloaded,
    stored_tensors,
    train_and_save,
)
from tests.unit.engine.models import FAMILIES, save_critic, save_model
from tests.unit.engine.rank_side import EXPERT_LAYOUTS, LAYOUTS

STEPS = 2
AFTER = 2


SAVED = (
    "qwen2",
    "qwen2-tied",
    "qwen3-tied",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_vl-tied",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for family in SAVED:
        save_model(family, folder / family)
    save_critic(folder / "qwen2-tied", folder / "critic")

    return {name: str(folder / name) for name in (*SAVED, "critic")}


def saved(rank_pool: RankPool, settings: Settings, folder: Path, steps: int = STEPS) -> list[Saved]:
    return rank_pool.run(
        train_and_save,
        world_size=settings.parallel.world_size,
        settings=settings,
        folder=folder,
        num_steps=steps,
        num_after=AFTER,
    )


def loaded(
    rank_pool: RankPool, settings: Settings, folder: Path, steps: int = STEPS, again: Path | None = None
) -> list[Saved]:
    return rank_pool.run(
        load_and_train,
        world_size=settings.parallel.world_size,
        settings=settings,
        folder=folder,
        num_steps=steps,
        num_after=AFTER,
        again=again,
    )


SAME_LAYOUT = [
    ("TP2", "qwen2", "lm", torch.float32, 2),
    ("PP2xVPP2", "qwen2-tied", "lm", torch.bfloat16, 2),
    ("DP2xEP2", "glm4_moe", "lm", torch.bfloat16, 2),
    ("TP2xPP2", "critic", "value", torch.float32, 2),
    ("TP1", "qwen2-tied", "lm", torch.float32, 0),
]


@pytest.mark.parametrize(("layout", "model", "head", "dtype", "steps"), SAME_LAYOUT)
def test_in_the_same_layout_it_goes_on_to_the_bit(
    layout: str,
    model: str,
    head: str,
    dtype: torch.dtype,
    steps: int,
    rank_pool: RankPool,
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    """Covers a save before the first step, when Adam has no moments yet.

    What is saved is the state before `after`.
    """
    routers = ExpertsConfig(bias_update_rate=0.01)  # selection biases are part of the state
    settings = Settings({**LAYOUTS, **EXPERT_LAYOUTS}[layout], folders[model], head, dtype, routers)
    before = saved(rank_pool, settings, tmp_path / "actor", steps)
    after = loaded(rank_pool, settings, tmp_path / "actor", steps)

    for one, other in zip(before, after, strict=True):
        assert one.after.losses == other.after.losses
        assert one.after.statistics == other.after.statistics

    for part in ("at_save", "draws"):
        assert same([getattr(rank, part) for rank in before], [getattr(rank, part) for rank in after])
    assert same([rank.after.state for rank in before], [rank.after.state for rank in after])
    assert not same([rank.at_save for rank in before], [rank.after.state for rank in before])


RESHAPED = [
    ParallelConfig(pipeline_parallel_size=2),
    ParallelConfig(context_parallel_size=2),
    ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2),
    ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_layout=[1, 3]),
]
RESHAPED_EXPERTS = [
    ParallelConfig(data_parallel_size=4, expert_parallel_size=4),
    ParallelConfig(),
    EXPERT_LAYOUTS["PP2"],
]
RESHAPED_MODELS = [
    ("qwen2-tied", "lm", torch.bfloat16, "TP2", RESHAPED),
    ("qwen2", "lm", torch.float32, "TP2", RESHAPED),
    # Its head, which is on the last stage, is all that differs.
    ("critic", "value", torch.float32, "TP2", RESHAPED[-2:]),
    ("qwen3_moe", "lm", torch.float32, "TP2+SPxEP2", RESHAPED_EXPERTS),
    ("qwen2_moe", "lm", torch.float32, "TP2+SPxEP2", [EXPERT_LAYOUTS["TP2+SPxETP2"]]),
    ("gpt_oss", "lm", torch.float32, "TP2+SPxEP2", [EXPERT_LAYOUTS["DP2xEP2"]]),
    ("deepseek_v3", "lm", torch.float32, "TP2+SPxEP2", [EXPERT_LAYOUTS["DP2xEP2"]]),
    ("qwen3_next", "lm", torch.float32, "TP2+SPxEP2", [EXPERT_LAYOUTS["DP2xEP2"]]),
    ("qwen3_vl-tied", "lm", torch.float32, "DP2", [ParallelConfig(pipeline_parallel_size=2)]),
]


@pytest.mark.parametrize(("model", "head", "dtype", "first", "others"), RESHAPED_MODELS)
def test_in_another_layout_the_next_steps_agree(
    model: str,
    head: str,
    dtype: torch.dtype,
    first: str,
    others: list[ParallelConfig],
    rank_pool: RankPool,
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    """Load a checkpoint of the first layout in each other one.

    Saving there again is bitwise identical, and so is continuing in the first, which is done once.

    The routers of one model are frozen: they have no moments.
    """
    routers = ExpertsConfig(freeze_router=model == "qwen2_moe")
    source = Settings({**LAYOUTS, **EXPERT_LAYOUTS}[first], folders[model], head, dtype, routers)
    want = saved(rank_pool, source, tmp_path / "source")
    stored = stored_tensors(tmp_path / "source")
    assert {name.split(".")[2] for name in stored if name.startswith("optimizer.")} == {
        "param",
        "exp_avg",
        "exp_avg_sq",
    }
    has_experts = first in EXPERT_LAYOUTS
    of_routers = {name.startswith("optimizer.") for name in stored if name.endswith("router.weight")}
    assert of_routers == ({False} if routers.freeze_router else {False, True} if has_experts else set())

    for number, parallel in enumerate(others):
        again = tmp_path / str(number)
        got = loaded(
            rank_pool,
            Settings(parallel, folders[model], head, dtype, routers),
            tmp_path / "source",
            again=again,
        )
        assert same([stored_tensors(again)], [stored]), parallel
        for rank in got:
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert rank.after.losses == pytest.approx(want[0].after.losses, rel=tolerance), parallel
            assert [lr for _, lr in rank.after.statistics] == [lr for _, lr in want[0].after.statistics]

    back = loaded(rank_pool, source, again)
    assert [rank.after.losses for rank in back] == [rank.after.losses for rank in want]
    assert same([rank.after.state for rank in back], [rank.after.state for rank in want])

    if has_experts:
        other = Settings(
            ParallelConfig(),
            folders[model],
            head,
            dtype,
            ExpertsConfig(freeze_router=not routers.freeze_router),
        )
        (said,) = rank_pool.run(refused_load, world_size=1, settings=other, folder=tmp_path / "source")
        assert said.endswith(
            f"it {'was frozen in that run' if routers.freeze_router else 'is frozen in this run'} (experts.freeze_router)"
        )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "optimizer.state.exp_avg_sq.layers.0.router",
            "kept exp_avg, momentum_buffer of this parameter, and this one ",
        ),
        ("optimizer.state.exp_avg.layers.1.router", "it was frozen in that run (experts.freeze_router)"),
        ("layers.7.weight", "the checkpoint has another architecture"),
    ],
)
def test_what_a_checkpoint_lacks_is_explained(key: str, said: str) -> None:
    """Another optimizer keeps other values of the same parameter. A frozen one has none."""
    states = ("exp_avg", "momentum_buffer")
    stored = [
        "layers.0.router",
        "layers.1.router",
        *(f"optimizer.state.{each}.layers.0.router" for each in states),
    ]
    assert said in why_missing(stored, key)


def test_a_vocabulary_that_is_padded_to_another_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """300 rows are padded to 384 with TP1 and 512 with TP2."""
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES["qwen2"])
    config.vocab_size = 300
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    one, two = (Settings(LAYOUTS[layout], str(tmp_path / "model")) for layout in ("TP1", "TP2"))
    want = saved(rank_pool, one, tmp_path / "384")
    got = loaded(rank_pool, two, tmp_path / "384", again=tmp_path / "512")
    assert got[0].after.losses == pytest.approx(want[0].after.losses, rel=1e-5)
    small = stored_tensors(tmp_path / "384")
    large = stored_tensors(tmp_path / "512")
    keys = [key for key in small if small[key].shape != large[key].shape]
    assert len(keys) == 2 * 4  # embedding and output layer: weights, masters, moments

    for key in keys:
        assert torch.equal(large[key][:384], small[key])
        assert not large[key][300:].any()

    back = loaded(rank_pool, one, tmp_path / "512")
    assert same([back[0].after.state], [want[0].after.state])


def test_offloaded_state_is_saved_and_stays_offloaded(
    rank_pool: RankPool, folders: dict[str, str], tmp_path: Path
) -> None:
    """Offloaded state is saved like other state, and stays offloaded after a save and after a load."""
    for layout, dtype in (("DP2", torch.bfloat16), ("TP1", torch.float32)):
        settings = Settings(LAYOUTS[layout], folders["qwen2"], dtype=dtype)
        plain = tmp_path / f"{layout} plain"
        moved = tmp_path / f"{layout} moved"
        results = rank_pool.run(
            save_what_is_offloaded,
            world_size=settings.parallel.world_size,
            settings=settings,
            plain=plain,
            moved=moved,
        )
        assert results == [["gradients", "optimizer", "parameters"]] * settings.parallel.world_size
        assert same([stored_tensors(plain)], [stored_tensors(moved)])


def test_megatron_loads_it_by_itself(rank_pool: RankPool, folders: dict[str, str], tmp_path: Path) -> None:
    """Uses Megatron's own sharded state dicts of the model and its distributed optimizer, in another layout."""
    saved(rank_pool, Settings(LAYOUTS["DP2"], folders["qwen2-tied"]), tmp_path / "actor")
    stored = stored_tensors(tmp_path / "actor")
    settings = Settings(LAYOUTS["PP2xVPP2"], folders["qwen2-tied"])
    ranks = rank_pool.run(load_by_megatron, world_size=2, settings=settings, folder=tmp_path / "actor")
    found: dict[str, int] = {}

    for rank in ranks:
        for key, start, tensor in rank:
            place = tuple(slice(first, first + size) for first, size in zip(start, tensor.shape, strict=True))
            assert torch.equal(stored[key][place], tensor), key
            found[key] = found.get(key, 0) + tensor.numel()

    assert found.keys() == stored.keys()
    assert all(found[key] >= stored[key].numel() for key in stored)


def test_another_layout_keeps_its_random_numbers(
    rank_pool: RankPool, folders: dict[str, str], tmp_path: Path
) -> None:
    saved(rank_pool, Settings(LAYOUTS["TP1"], folders["qwen2"]), tmp_path / "actor")
    for layout, kept in (("TP1", False), ("DP2", True)):
        settings = Settings(LAYOUTS[layout], folders["qwen2"])
        ranks = rank_pool.run(
            draws_around_a_load,
            world_size=settings.parallel.world_size,
            settings=settings,
            folder=tmp_path / "actor",
        )
        assert ranks == [kept] * len(ranks)


def damage(folder: Path, kind: str) -> None:
    first = folder / "__0_0.distcp"
    second = folder / "__1_0.distcp"
    index = read_index(folder)
    chunk = index.tensors["decoder.layers.mlp.linear_fc2.weight"].chunks[-1]

    if kind == "a flipped bit":
        content = bytearray((folder / chunk.file).read_bytes())
        content[chunk.position + chunk.nbytes // 2] ^= 1
        (folder / chunk.file).write_bytes(content)
    elif kind == "a truncated file":
        os.truncate(second, second.stat().st_size - 1000)
    elif kind == "a missing file":
        second.unlink()
    elif kind == "swapped files":
        first.rename(folder / "other")
        second.rename(first)
        (folder / "other").rename(second)
    elif kind == "code in an object":
        torch.save({"step_counts": Code()}, folder / "common.pt")
        manifest = json.loads((folder / "manifest.json").read_text())
        content = (folder / "common.pt").read_bytes()
        manifest["files"]["common.pt"] = {
            "nbytes": len(content),
            "checksum": xxhash.xxh3_64_hexdigest(content),
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
    else:
        (folder / "manifest.json").unlink()


class Code:
    def __reduce__(self) -> tuple:
        return (os.system, ("true",))


DAMAGE = {
    "a flipped bit": "__1_0.distcp: decoder.layers.mlp.linear_fc2.weight at bytes",
    "a truncated file": "__1_0.distcp: truncated: it has",
    "a missing file": "__1_0.distcp: the file is missing; it contains output_layer.weight",
    "swapped files": "__0_0.distcp: truncated: it has",
    "code in an object": "common.pt: its pickle names posix.system",
    "no manifest": "manifest.json: the file is missing",
}


def test_damage_is_found_before_anything_is_loaded(
    rank_pool: RankPool, folders: dict[str, str], tmp_path: Path
) -> None:
    """Every rank has the same line, which names the file and, if there is one, the tensor.

    The engine is unchanged.
    """
    settings = Settings(LAYOUTS["TP2"], folders["qwen2"])
    saved(rank_pool, settings, tmp_path / "good")

    for kind in DAMAGE:
        shutil.copytree(tmp_path / "good", tmp_path / kind)
        damage(tmp_path / kind, kind)

    damaged = [tmp_path / kind for kind in DAMAGE]
    ranks = rank_pool.run(
        load_damaged, world_size=2, settings=settings, folders=damaged, good=tmp_path / "good"
    )
    assert ranks[0] == ranks[1]

    for (kind, said), (line, untouched) in zip(DAMAGE.items(), ranks[0], strict=True):
        assert untouched, kind
        assert line.startswith(f"{tmp_path / kind}/{said}"), line
        assert "\n" not in line


def test_a_checkpoint_of_something_else(rank_pool: RankPool, folders: dict[str, str], tmp_path: Path) -> None:
    saved(rank_pool, Settings(LAYOUTS["TP1"], folders["qwen2"]), tmp_path / "actor")
    others = [
        Settings(LAYOUTS["TP1"], folders["qwen3-tied"]),
        Settings(LAYOUTS["TP1"], folders["critic"], "value"),
        Settings(LAYOUTS["TP1"], folders["qwen2"], dtype=torch.bfloat16),
    ]
    lines = [
        rank_pool.run(refused_load, world_size=1, settings=settings, folder=tmp_path / "actor")[0]
        for settings in others
    ]
    actor = tmp_path / "actor"
    assert lines == [
        f"{actor}: decoder.layers.self_attention.linear_proj.weight has shape (4, 64, 64), but this model needs "
        f"(4, 64, 128)",
        f"{actor}: output_layer.weight has shape (256, 64), but this model needs (1, 64)",
        f"{actor}: embedding.word_embeddings.weight is torch.float32, but this run uses torch.bfloat16: set "
        f"model.dtype",
    ]


def test_a_save_that_fails(rank_pool: RankPool, folders: dict[str, str], tmp_path: Path) -> None:
    """Covers a full disk (/dev/full) on one of two ranks or at the very end, and folders that cannot be created."""
    settings = Settings(LAYOUTS["DP2"], folders["qwen2"])
    ranks = rank_pool.run(failing_saves, world_size=2, settings=settings, folder=tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [
        f"{tmp_path}/items/__1_0.distcp: cannot be written: No space left on device",
        f"{tmp_path}/index: cannot be written: No space left on device",
        f"{tmp_path}/file: cannot be written: File exists",
        f"{tmp_path}/gone/actor: cannot be written: No such file or directory",
    ]
