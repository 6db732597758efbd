"""Checkpoints of real models written by Megatron's own code are read back bitwise identical, and damage to
classic ones is reported."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoints.convert.open import open_model
from megarl.engine.platform import UNUSED, without_modules
from megarl.machine.errors import CheckpointError
from megarl.machine.tensor_pickles import pickle_as_torch
from tests.ranks import RankPool
from tests.unit.checkpoints.convert.classic_side import save_classic, save_distributed
from tests.unit.checkpoints.convert.test_source import everything
from tests.unit.engine.models import save_critic, save_model
from tests.unit.engine.rank_side import LAYOUTS

# (family, layout, head, dtype, whether names are those of Transformer Engine)
CASES = [
    ("qwen2", "TP1", "lm", torch.float32, False),
    ("qwen3-tied", "TP2", "lm", torch.bfloat16, True),
    ("qwen2-tied", "TP2xPP2", "lm", torch.float32, False),
    ("llama-tied", "PP2xVPP2", "lm", torch.bfloat16, False),
    ("qwen2", "PP2xVPP2", "lm", torch.float32, True),
    ("llama2", "TP2xPP2", "value", torch.float32, True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family, _, head, *_ in CASES:
        save_model(family, root / family)
        if head == "value":
            save_critic(root / family, root / f"{family}-value")
    return root


def saved(
    rank_pool: RankPool, models: Path, folder: Path, case: tuple[str, str, str, torch.dtype, bool]
) -> Path:
    """Save `folder` as a checkpoint, and return the corresponding Hugging Face folder."""
    family, layout, head, dtype, engine_names = case
    model = models / (family if head == "lm" else f"{family}-value")
    parallel = LAYOUTS[layout]
    rank_pool.run(
        save_classic,
        world_size=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        parallel=parallel,
        model=str(model),
        folder=folder,
        head=head,
        dtype=dtype,
        engine_names=engine_names,
    )

    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_classic_checkpoint_is_the_model_bit_for_bit(
    rank_pool: RankPool, models: Path, tmp_path: Path, case: tuple[str, str, str, torch.dtype, bool]
) -> None:
    model = saved(rank_pool, models, tmp_path / "iter_0000007", case)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    source = open_model(tmp_path, companions=model)
    expected = {name: value.to(case[3]) for name, value in load_file(model / "model.safetensors").items()}
    found = everything(source)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == case[3] and torch.equal(found[name], expected[name]) for name in expected)
    assert (source.head, source.step) == (case[2], 7)
    assert source.layout.replace(" ", "") == {
        "TP1": "TP1xPP1",
        "TP2": "TP2xPP1",
        "PP2xVPP2": "TP1xPP2xVPP2",
    }.get(case[1], case[1])


@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=lambda case: "-".join(map(str, case)))
def test_a_distributed_checkpoint_by_megatron_s_writer(
    rank_pool: RankPool, models: Path, tmp_path: Path, case: tuple[str, str, str, torch.dtype, bool]
) -> None:
    family, layout, head, dtype, _ = case
    model = models / (family if head == "lm" else f"{family}-value")
    arguments = dict(
        parallel=LAYOUTS[layout], model=str(model), folder=tmp_path / "iter_0000007", head=head, dtype=dtype
    )
    world_size = LAYOUTS[layout].tensor_parallel_size * LAYOUTS[layout].pipeline_parallel_size
    rank_pool.run(save_distributed, world_size=world_size, **arguments)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    source = open_model(tmp_path, companions=model)
    expected = load_file(model / "model.safetensors")
    found = everything(source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert source.head == head


@pytest.fixture(scope="module")
def written(rank_pool: RankPool, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of a tied model in TP2xPP2."""
    folder = tmp_path_factory.mktemp("classic") / "release"
    saved(rank_pool, models, folder, CASES[2])
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "release"))


def load_with_classes(path: Path) -> Any:
    """Load a file that was written by this test, whose classes are Megatron's."""
    with without_modules(*UNUSED):
        content = torch.load(path, weights_only=False)
    pickle_as_torch()  # the tests of this process send tensors to others
    return content


def rewrite(folder: Path, rank: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / rank / "model_optim_rng.pt"
    content = load_with_classes(path)
    change(content)
    torch.save(content, path)


def flipped(folder: Path) -> None:
    path = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    data = bytearray(path.read_bytes())
    weight = load_with_classes(path)["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
    data[data.index(weight.numpy().tobytes()) + 40] ^= 1
    path.write_bytes(data)


def truncated(folder: Path) -> None:
    path = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    os.truncate(path, path.stat().st_size // 2)


def swapped(folder: Path) -> None:
    os.rename(folder / "mp_rank_00_000", folder / "other")
    os.rename(folder / "mp_rank_01_000", folder / "mp_rank_00_000")
    os.rename(folder / "other", folder / "mp_rank_01_000")


def stages_swapped(folder: Path) -> None:
    os.rename(folder / "mp_rank_00_000", folder / "other")
    os.rename(folder / "mp_rank_00_001", folder / "mp_rank_00_000")
    os.rename(folder / "other", folder / "mp_rank_00_001")


def a_stage_less(folder: Path) -> None:
    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        shutil.rmtree(folder / rank)


def a_norm_of_another(content: dict[str, Any]) -> None:
    content["model"]["decoder.layers.0.input_layernorm.weight"][3] += 1


def transposed(content: dict[str, Any]) -> None:
    content["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = content["model"][
        "decoder.layers.0.mlp.linear_fc2.weight"
    ].T.contiguous()


class Opens:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("true",)


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (
        flipped,
        r"mp_rank_01_000/model_optim_rng\.pt: decoder\.layers\.1\.mlp\.linear_fc2\.weight is not what was "
        r"written",
    ),
    (truncated, r"mp_rank_00_001/model_optim_rng\.pt: damaged"),
    (
        swapped,
        r"mp_rank_00_000/model_optim_rng\.pt: was written by rank 1, which is tensor-parallel rank 1: files were "
        r"swapped",
    ),
    (stages_swapped, r"mp_rank_00_000/model_optim_rng\.pt: has no embedding\.word_embeddings\.weight"),
    (
        lambda folder: shutil.rmtree(folder / "mp_rank_00_001"),
        r"mp_rank_00_001/model_optim_rng\.pt: the file is missing; .* 2 .* x 2",
    ),
    (
        a_stage_less,
        r"release: has the files of 2 tensor-parallel ranks x 1 stage, but mp_rank_00_000 records 2 x 2",
    ),
    (lambda folder: (folder / "mp_rank_00").mkdir(), r"mp_rank_00_000: same rank as .*mp_rank_00:"),
    (
        lambda folder: (folder / "mp_rank_00_000_001").mkdir(),
        r"mp_rank_00_000_001: not the folder of a rank .* MoE",
    ),
    (
        lambda folder: rewrite(folder, "mp_rank_00_000", lambda content: content.update(data=Opens())),
        r"mp_rank_00_000/model_optim_rng\.pt: its pickle names posix\.system, which is not on the list",
    ),
    (
        lambda folder: rewrite(folder, "mp_rank_00_001", lambda content: content.update(iteration=8)),
        r"mp_rank_00_001/model_optim_rng\.pt: has iteration 8 .*: the files are from different checkpoints",
    ),
    (
        lambda folder: rewrite(
            folder,
            "mp_rank_00_000",
            lambda content: vars(content["args"]).update(hidden_size=32, rotary_base=5.0),
        ),
        r"its args are from another model than config\.json: hidden_size is 32, but config\.json requires 64; "
        r"rotary_base is 5\.0",
    ),
    (
        lambda folder: rewrite(
            folder,
            "mp_rank_01_000",
            lambda content: content["model"].pop("decoder.layers.1.mlp.linear_fc1.weight"),
        ),
        r"mp_rank_01_000/model_optim_rng\.pt: decoder\.layers\.1\.mlp\.linear_fc1\.weight is missing",
    ),
    (
        lambda folder: rewrite(
            folder,
            "mp_rank_01_001",
            lambda content: content["model"].update({"decoder.adapter": torch.zeros(2)}),
        ),
        r"mp_rank_01_001/model_optim_rng\.pt: decoder\.adapter is not a tensor of this architecture",
    ),
    (
        lambda folder: rewrite(folder, "mp_rank_01_001", transposed),
        r"mp_rank_01_001.*: decoder\.layers\.2\.mlp\.linear_fc2\.weight has shape \(48, 64\), config\.json "
        r"requires \(64, 48\)",
    ),
    (
        lambda folder: rewrite(folder, "mp_rank_01_000", a_norm_of_another),
        r"mp_rank_01_000.*: decoder\.layers\.0\.input_layernorm\.weight differs from .* in .*mp_rank_00_000",
    ),
    (
        lambda folder: rewrite(
            folder, "mp_rank_00_001", lambda content: content["model"]["output_layer.weight"].neg_()
        ),
        r"mp_rank_00_001.*: output_layer\.weight differs from embedding\.word_embeddings\.weight in "
        r".*mp_rank_00_000",
    ),
    (
        lambda folder: rewrite(
            folder, "mp_rank_00_000", lambda content: content["model"].update({"language_model": {}})
        ),
        r"was written by Megatron's legacy models, before Megatron-Core",
    ),
    (
        lambda folder: rewrite(folder, "mp_rank_00_000", lambda content: content.pop("model")),
        r"has no 'model'.*; it has args, ",
    ),
    (
        lambda folder: torch.save([1], folder / "mp_rank_00_000" / "model_optim_rng.pt"),
        r"contains no dictionary",
    ),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_damage_is_said_in_one_line(
    folder: Path, models: Path, damage: Callable[[Path], Any], says: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=says) as raised:
        open_model(folder, companions=models / "qwen2-tied")
    assert "\n" not in str(raised.value)


def test_files_without_args_and_checksums_are_read_as_they_are(folder: Path, models: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for rank in folder.iterdir():
            rewrite(folder, rank.name, lambda content: content.pop("args"))
    finally:
        torch.serialization.set_crc32_options(True)

    assert open_model(folder, companions=models / "qwen2-tied").layout == "TP 2 x PP 2"
    a_stage_less(folder)

    with pytest.raises(
        CheckpointError, match=r"has 2 layers in 1 stage, but config\.json specifies 4: files are missing"
    ):
        open_model(folder, companions=models / "qwen2-tied")


def test_another_model_s_configuration(written: Path, models: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"args are from another model than config\.json: rotary_base is 1000000\.0"
    ):
        open_model(written, companions=models / "llama-tied")
