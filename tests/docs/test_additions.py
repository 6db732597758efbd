"""docs/extending.md says for thirteen changes which files one touches; those of its changes that are shown as
code are made, and work.

A change is shown as blocks of Python, each behind a line that says where it goes: "New file `F`:", "At the
end of `F`:", "In `NAME` of `F`:" (a dictionary or a class, as its last entry), "Before `LINE` in `F`:".
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.models.families import FAMILIES
from tests.fork_server import ADDRESS, WITHOUT_SGLANG

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
# The most files that each may touch, tests and pages apart.
MOST_FILES = {
    "An advantage estimator": 2,
    "A policy loss": 2,
    "A configuration key": 1,
    "A metric": 1,
    "A command": 2,
    "A rollout engine": 7,
    "A role": 5,
    "A model family": 3,  # the third one is generated
    "A weight transport": 3,  # one only defines the sides; the reference is generated
    "An optimizer": 3,
    "A layer that computes something new": 16,
}
OTHERS = {"A placement", "A logger"}
SHOWN = (
    "An advantage estimator",
    "A policy loss",
    "A configuration key",
    "A metric",
    "A command",
    "A model family",
    "An optimizer",
)
_BLOCK = re.compile(
    r"(New file|At the end of|In `(?P<name>\w+)` of|Before `(?P<line>[^`]+)` in) `(?P<file>[\w./]+)`:"
    r"\n\n```python\n(?P<code>[\s\S]*?)```"
)


class Block(NamedTuple):
    how: str
    name: str | None
    line: str | None
    file: str
    code: str


def sections() -> dict[str, str]:
    """Title -> text, of the page's changes."""
    parts = re.split(r"(?m)^## (.+)$", PAGE.read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(section: str) -> list[Block]:
    return [
        Block(found[1], found["name"], found["line"], found["file"], found["code"])
        for found in _BLOCK.finditer(section)
    ]


def apply(block: Block, root: Path) -> None:
    path = root / block.file
    if block.how == "New file":
        assert not path.exists(), f"{block.file} is there"
        path.write_text(block.code)
        return

    text = path.read_text()
    if block.how == "At the end of":
        path.write_text(f"{text.rstrip()}\n\n\n{block.code}")
        return

    lines = text.splitlines(keepends=True)
    if block.line is not None:
        (number,) = [number for number, line in enumerate(lines) if line.strip() == block.line]
    else:
        (node,) = [node for node in ast.parse(text).body if block.name in _defined(node)]
        assert node.end_lineno is not None
        # a dictionary ends with its bracket
        number = node.end_lineno - (0 if isinstance(node, ast.ClassDef) else 1)

    path.write_text("".join([*lines[:number], block.code, *lines[number:]]))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_the_page_has_every_change_and_no_more_files_than_promised() -> None:
    found = sections()
    assert set(found) == MOST_FILES.keys() | OTHERS

    for title, most in MOST_FILES.items():
        files = {path for path in re.findall(r"`(megarl/[\w/<>]+\.py)`", found[title])}
        assert len(files) <= most, (title, sorted(files))

    for text in found.values():
        new = {block.file for block in blocks(text) if block.how == "New file"}
        for path in set(re.findall(r"`((?:megarl|tests|docs|configs)/[\w./]+\.\w+)`", text)) - new:
            assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def with_additions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of megarl in which all of them were made."""
    root = tmp_path_factory.mktemp("additions")
    for folder in ("megarl", "configs", "tests", "docs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))

    for title in SHOWN:
        made = blocks(sections()[title])
        assert made, f"{title} shows no code"
        for block in made:
            apply(block, root)

    return root


# Each says what it has seen, in one process.
_USE = """
import numpy as np, torch
from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.machine.errors import ConfigError
from megarl.config.kinds import OptimizerKind
from megarl.config.load import load_config
from megarl.config.megatron_options import element_bytes, owned_fields
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, AlgorithmConfig, DType, MegatronConfig
from megarl.config.schema import PolicyLossConfig, PolicyLossKind, PPOConfig
from megarl.config.validate import validate
from megarl.cli.main import main

inputs = AdvantageInputs(
    token_level_rewards=torch.tensor([[0.0], [1.0], [1.0]]), response_mask=torch.ones(3, 1, dtype=torch.bool),
    uid=np.array(["prompt"] * 3, dtype=object),
)
print("estimator", ADVANTAGE_ESTIMATORS[AdvantageEstimator("best_of_group")](inputs, AdvantageConfig()).advantages[:, 0].tolist())

def actor_loss(kind):
    mask = torch.ones(2, 2, dtype=torch.bool)
    loss = ActorLoss(algorithm=AlgorithmConfig(policy_loss=PolicyLossConfig(kind=kind)), counts=MiniBatchCounts.of(mask))
    rows = {"response_mask": mask, "advantages": torch.tensor([[1.0, 1.0], [-2.0, -2.0]]), "old_log_probs": torch.zeros(2, 2)}
    return loss({"log_probs": torch.full((2, 2), -0.5)}, rows)

print("loss", float(actor_loss(PolicyLossKind("unclipped")).loss))
print("metric", actor_loss(PolicyLossKind("ppo_clip")).metrics["actor/log_prob_min"].value.item())
print("key", PPOConfig().data.min_prompt_length)
wrong = [str(violation) for violation in validate(load_config(PPOConfig, "configs/quickstart.yaml", ["data.min_prompt_length=-1"]))]
print("range", [text for text in wrong if "min_prompt_length" in text])
print("command", main(["hello", "you"]))
print("bytes", *element_bytes(DType.bfloat16, MegatronConfig(), OptimizerKind("sgd")))
print("momentum", owned_fields("optimizer")["sgd_momentum"])
"""


def test_what_the_page_shows_works(with_additions: Path) -> None:
    used = subprocess.run(
        [sys.executable, "-c", _USE],
        cwd=with_additions,
        env={"PYTHONPATH": str(with_additions)},
        capture_output=True,
        text=True,
    )
    assert used.returncode == 0, used.stderr
    said = dict(line.split(" ", 1) for line in used.stdout.splitlines())
    assert said["estimator"] == "[-0.6666666865348816, 0.3333333134651184, 0.3333333134651184]"
    assert float(said["loss"]) == pytest.approx(-(1.0 - 2.0) / 2 * 2.718281828**-0.5)
    assert float(said["metric"]) == -0.5
    assert said["key"] == "0"
    assert "-1" in said["range"]
    assert said["hello,"] == "you"
    assert said["command"] == "0"
    assert said["bytes"] == "4 4 4 0"  # one moment
    assert said["momentum"] == "use {role}.optim.betas"


# The tests that docs/extending.md names for a family, with the cases of the added one.
_TESTS_OF_FAMILY = (
    "tests/unit/models/test_families.py",
    "tests/unit/models/test_counts.py",
    "tests/unit/engine/test_parity.py::test_engine_gives_what_hugging_face_gives",
    "tests/unit/checkpoints/convert/test_writers.py::test_conversion_to_megatron_and_back_is_bitwise_identical",
)
# Runs tests, then pushes weights of the family into a rollout engine, and generates with both.
_TEST_AND_PUSH = """
import sys
import pytest

if pytest.main(["-q", "-p", "no:cacheprovider", "-k", "cwm", *sys.argv[2:]]):
    sys.exit(1)

import torch
from pathlib import Path
from megarl.rollout.interface import SamplingParameters
from tests.unit.rollout.models import engine_for, push, random_model

model = random_model("cwm")
engine = engine_for(model, Path(sys.argv[1]))
push(model, engine)
[sample] = engine.generate([[5, 6, 7]], SamplingParameters(max_new_tokens=6, seed=0, temperature=0.0))
tokens = [5, 6, 7]
for _ in range(6):
    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
assert sample.token_ids.tolist() == tokens[3:], (sample.token_ids, tokens)
"""


def test_the_family_that_the_page_adds_is_tested_by_its_registration(
    with_additions: Path, tmp_path: Path
) -> None:
    """Run the tests that every family has (parity, conversion, counts), and a push into an engine."""
    # The fork server of this process has imported megarl without the family.
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
    used = subprocess.run(
        [sys.executable, "-c", _TEST_AND_PUSH, str(tmp_path), *_TESTS_OF_FAMILY],
        cwd=with_additions,
        env=environment | {"PYTHONPATH": str(with_additions), WITHOUT_SGLANG: "1"},
        capture_output=True,
        text=True,
    )
    assert used.returncode == 0, used.stdout + used.stderr
    assert "cwm" not in FAMILIES
