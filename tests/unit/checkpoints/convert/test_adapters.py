"""Adapters from PEFT's folder through a sharded checkpoint and back, and merged into their base: bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoints.convert.adapters import merged_source, open_adapter_folder, write_peft
from megarl.checkpoints.convert.hugging_face import open_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.cli.main import main
from megarl.config.schema import ParallelConfig
from megarl.machine.errors import CheckpointError
from megarl.models.families import REWARD_CLASS
from megarl.weights.peft_folder import CONFIG_FILE, adapter_tensors, write_adapter, write_config
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import Settings, train_and_save
from tests.unit.engine.lora_cases import Adapted, adapters_of, merged_weights, save_adapted
from tests.unit.engine.models import load_lm

SAVED = ("embed_tokens", "lm_head")
LAYOUTS = {
    "qwen2": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "qwen2_moe": ParallelConfig(data_parallel_size=2, expert_parallel_size=2),
    "deepseek_v3": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2),
}


@pytest.mark.parametrize(
    ("family", "saved"),
    [("qwen2", ()), ("qwen2", SAVED), ("qwen2_moe", SAVED[1:]), ("deepseek_v3", SAVED)],
)
def test_a_peft_folder_comes_back_from_a_checkpoint(
    family: str, saved: tuple[str, ...], rank_pool: RankPool, tmp_path: Path
) -> None:
    case = save_adapted(family, tmp_path, modules_to_save=saved)
    settings = Settings(LAYOUTS[family], case.base, lora=case.lora, lora_path=case.adapter)
    folder = tmp_path / "actor"
    rank_pool.run(train_and_save, world_size=2, settings=settings, folder=folder, num_steps=0, num_after=0)

    # A run writes these files next to the weights.
    companions = folder / "huggingface"
    companions.mkdir()
    shutil.copyfile(Path(case.base) / "config.json", companions / "config.json")
    write_config(companions, case.architecture(), case.base)

    assert open_model(folder).kind == "Megatron torch_dist of adapters"
    written = tmp_path / "again"
    assert main(["convert", "megatron-to-hf", "--input", str(folder), "--output", str(written)]) == 0
    again = case._replace(adapter=str(written))
    stored = adapters_of(case)
    assert adapters_of(again).keys() == stored.keys()
    assert all(torch.equal(adapters_of(again)[name], value) for name, value in stored.items())
    assert (written / CONFIG_FILE).read_text() == (Path(case.adapter) / CONFIG_FILE).read_text()

    check_merged(case, merged_by_command(case, folder, tmp_path / "merged"))


@pytest.mark.parametrize(("value_class", "task"), [(None, "TOKEN_CLS"), (REWARD_CLASS, "SEQ_CLS")])
def test_the_adapter_of_a_value_head_names_its_task(
    value_class: str | None, task: str, tmp_path: Path
) -> None:
    """PEFT loads the class of the task: that of a critic, or that of a reward model with one label."""
    case = save_adapted("qwen2", tmp_path)
    shapes = adapter_tensors(case.architecture(), "value")
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    (folder := tmp_path / "value").mkdir()
    write_adapter(folder, tensors, case.architecture(), case.base, "value", value_class)
    assert json.loads((folder / CONFIG_FILE).read_text())["task_type"] == task
    write_peft(open_adapter_folder(folder, Path(case.base)), tmp_path / "again")
    assert (tmp_path / "again" / CONFIG_FILE).read_text() == (folder / CONFIG_FILE).read_text()

    # PEFT writes null for a base model without a name.
    config = json.loads((folder / CONFIG_FILE).read_text()) | {"base_model_name_or_path": None}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    write_peft(open_adapter_folder(folder, Path(case.base)), tmp_path / "named")
    assert (tmp_path / "named" / CONFIG_FILE).read_text() == (tmp_path / "again" / CONFIG_FILE).read_text()


def merged_by_command(case: Adapted, adapter: Path | str, folder: Path) -> Path:
    paths = ["--input", str(adapter), "--base", case.base, "--output", str(folder)]
    assert main(["convert", "merge-adapter", *paths]) == 0
    return folder


def check_merged(case: Adapted, folder: Path) -> None:
    import peft

    written = load_file(folder / "model.safetensors")
    expected = merged_weights(case)
    if case.architecture().experts is None:
        state = (
            peft.PeftModel.from_pretrained(load_lm(Path(case.base)), case.adapter)
            .merge_and_unload()
            .state_dict()
        )
        expected = {name: state[name] for name in expected}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


def test_a_peft_folder_is_merged_and_another_model_is_refused(tmp_path: Path) -> None:
    case = save_adapted("qwen3-tied", tmp_path / "one", ("q_proj", "mlp.gate_proj"))
    adapter = open_adapter_folder(Path(case.adapter), Path(case.base))
    check_merged(case, merged_by_command(case, case.adapter, tmp_path / "merged"))

    other = save_adapted("qwen2", tmp_path / "other")
    with pytest.raises(CheckpointError, match="which is another model"):
        merged_source(adapter, open_hugging_face(Path(other.base)))
    with pytest.raises(CheckpointError, match="is not an adapter of"):
        open_adapter_folder(Path(case.adapter), Path(other.base))
    with pytest.raises(CheckpointError, match="pass --config HF_DIR, the folder of its base model"):
        open_model(Path(case.adapter))


def test_peft_writes_and_reads_the_same_folder(tmp_path: Path) -> None:
    """Names, shapes and values of PEFT's own folder, which the library also writes and reads."""
    import peft

    case = save_adapted("qwen2", tmp_path, modules_to_save=SAVED)
    model = peft.PeftModel.from_pretrained(load_lm(Path(case.base)), case.adapter)
    model.save_pretrained(tmp_path / "by_peft")
    again = case._replace(adapter=str(tmp_path / "by_peft"))
    stored = adapters_of(case)
    assert adapters_of(again).keys() == stored.keys()
    assert all(torch.equal(adapters_of(again)[name], value) for name, value in stored.items())

    source = open_adapter_folder(tmp_path / "by_peft", Path(case.base))
    assert (
        source.architecture.lora == open_adapter_folder(Path(case.adapter), Path(case.base)).architecture.lora
    )
    check_merged(case, merged_by_command(case, again.adapter, tmp_path / "merged"))


def test_options_that_change_what_an_adapter_computes_are_refused(tmp_path: Path) -> None:
    case = save_adapted("qwen2", tmp_path)
    config = Path(case.adapter) / CONFIG_FILE
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(CheckpointError, match="only plain LoRA is supported, but use_dora is True"):
        open_adapter_folder(Path(case.adapter), Path(case.base))
    saved = json.loads(config.read_text()) | {"use_dora": False, "modules_to_save": ["norm", "lm_head"]}
    config.write_text(json.dumps(saved))
    with pytest.raises(CheckpointError, match="but modules_to_save has norm"):
        open_adapter_folder(Path(case.adapter), Path(case.base))
