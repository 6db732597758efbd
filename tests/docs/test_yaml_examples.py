"""Every YAML block of the pages is valid, and a whole run fits into the memory of its GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config.load import read_config, schema_of
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import load_device
from tests.docs.pages import PAGES, ROOT, Block, blocks

# A page's model whose config.json is not shipped, or that an earlier stage of the page trains, and a larger one
# in its place.
STAND_INS = {
    "models/Qwen2.5-0.5B-Instruct": "models/Llama-3.2-1B-Instruct",
    "sft/run/huggingface": "models/Llama-3.2-1B-Instruct",
}
# A part of a run, which needs the rest of this one.
AROUND = "base: configs/qwen2.5_7b_grpo.yaml\n"

EXAMPLES = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]


def written(block: Block, folder: Path, prefix: str = "") -> str:
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    text = prefix + block.text
    for missing, shipped in STAND_INS.items():
        text = text.replace(missing, shipped)
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def is_device(block: Block) -> bool:
    return "configs/devices/" in str(yaml.safe_load(block.text).get("base"))


def is_run(block: Block) -> bool:
    sections = yaml.safe_load(block.text)
    return not is_device(block) and ("base" in sections or {"model", "data"} <= set(sections))


def named(examples: list[Block]) -> list:
    return [pytest.param(block, id=block.place) for block in examples]


@pytest.mark.parametrize("block", named([block for block in EXAMPLES if is_run(block)]))
def test_a_run_fits_into_the_memory_of_its_gpus(block: Block, tmp_path: Path):
    path = written(block, tmp_path)
    # This raises what `megarl check` prints, also for the memory that GPUs of an unknown kind have.
    config = load_for_plan(schema_of(path), path, ["device=cuda"]).config
    devices = plan_memory(config, plan_placement(config), read_architectures(config)[0])
    assert config.placement.device_memory_gb is not None
    assert 0 < max(device.peak for device in devices) <= config.placement.device_memory_gb * 2**30


@pytest.mark.parametrize(
    "block", named([block for block in EXAMPLES if not is_run(block) and not is_device(block)])
)
def test_the_keys_and_values_of_a_part_exist(block: Block, tmp_path: Path):
    is_of_sft = "max_length" in yaml.safe_load(block.text).get("data", {})
    schema, prefix = (SFTConfig, "") if is_of_sft else (PPOConfig, AROUND)
    problems = read_config(schema, written(block, tmp_path, prefix)).problems
    # A page that explains one setting leaves out what a whole run requires.
    assert [problem for problem in problems if "is required" not in problem] == []


@pytest.mark.parametrize("block", named([block for block in EXAMPLES if is_device(block)]))
def test_a_device_file_can_be_loaded(block: Block, tmp_path: Path):
    assert load_device(written(block, tmp_path)).name


def test_the_examples_are_found():
    kinds = [(is_run(block), is_device(block)) for block in EXAMPLES]
    assert kinds.count((True, False)) >= 9
    assert kinds.count((False, True)) == 1
