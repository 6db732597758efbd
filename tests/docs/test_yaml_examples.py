"""Every YAML block of the pages passes `megarl check`, and what it describes fits into the memory of its GPUs.

A block that is a whole file is checked as it stands. A part of one is checked with the rest of a run: that of the
last whole file above it on its page, or of the file in its mark, such as `<!-- with: configs/quickstart_sft.yaml -->`,
or of ANY_RUN.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.load import schema_of
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import load_device
from tests.docs.pages import RECIPES, ROOT, WITH, YAML, Block, is_device, is_whole, recipe

# Models of the pages whose config.json is not shipped, or that an earlier stage of a page trains, and models of
# the same size or larger in their place.
STAND_INS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-7B-Instruct",  # it has the vocabulary of its teacher
    "Qwen/Qwen2.5-Math-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-Coder-32B-Instruct": "models/Qwen2.5-32B",
    "models/Qwen2.5-0.5B-Instruct": "models/Llama-3.2-1B-Instruct",
    "models/DeepSeek-V3.1\n": "models/DeepSeek-V3.1-BF16\n",
    "models/Qwen3-8B ": "models/Qwen3-8B-128k ",
    "sft/run/huggingface": "models/Llama-3.2-1B-Instruct",
}
ANY_RUN = "configs/qwen2.5_7b_grpo.yaml"


def write(block: Block, file: Path) -> None:
    text = block.text
    for missing, shipped in STAND_INS.items():
        text = text.replace(missing, shipped)
    file.write_text(text)


def write_reward_model(folder: Path) -> None:
    """Write the files of a reward model without weights."""
    folder.mkdir(parents=True)
    shape = json.loads((ROOT / "configs/models/Llama-3.1-8B-Instruct/config.json").read_text())
    shape |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")


def write_run(block: Block, folder: Path) -> tuple[str, list[str]]:
    """Write the run that a block is, or is a part of, and return its file and overrides."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    write(block, folder / "run.yaml")
    write_reward_model(folder / "models" / "judge")
    if is_whole(block):
        return str(folder / "run.yaml"), []

    base, *overrides = (block.mark or "").removeprefix(WITH).split() or [""]
    above = [each for each in YAML if each.page == block.page and each.line < block.line]
    files = [each for each in above if is_whole(each)]
    if base == "" and files:
        write(files[-1], folder / "page.yaml")
        base = "page.yaml"
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(f"base: {base or ANY_RUN}\n{text}")
    return str(folder / "run.yaml"), overrides


@pytest.mark.parametrize(
    "block", [block for block in YAML if not is_device(block)], ids=lambda block: block.place
)
def test_a_run_fits_into_the_memory_of_its_gpus(block: Block, tmp_path: Path) -> None:
    path, overrides = write_run(block, tmp_path)
    # This raises what `megarl check` prints, also for the memory that GPUs of an unknown kind have.
    config = load_for_plan(schema_of(path), path, ["device=cuda", *overrides]).config
    devices = plan_memory(config, plan_placement(config), read_architectures(config)[0])
    assert config.placement.device_memory_gb is not None
    assert 0 < max(device.peak for device in devices) <= config.placement.device_memory_gb * 2**30


@pytest.mark.parametrize(
    "block", [block for block in YAML if is_device(block)], ids=lambda block: block.place
)
def test_a_device_file_can_be_loaded(block: Block, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write(block, tmp_path / "run.yaml")
    assert load_device(str(tmp_path / "run.yaml")).name


@pytest.mark.parametrize("task", RECIPES)
def test_every_task_has_a_whole_file_on_its_page(task: str) -> None:
    assert is_whole(recipe(task))


def test_the_examples_are_found() -> None:
    assert sum(map(is_whole, YAML)) >= 15
    assert sum(map(is_device, YAML)) == 1
    assert len(YAML) > 60
