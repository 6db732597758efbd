"""Test that docs/algorithms describes every preset, estimator and loss, with a paper, real keys and metrics."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

from megarl.config.kinds import AdvantageEstimator, Aggregation, PolicyLossKind
from megarl.config.schema import SCHEMAS, DPOLossKind, KLEstimator
from megarl.config.schema.keys import leaves
from megarl.config.shipped import CONFIGS_DIR
from tests.docs.pages import ROOT
from tests.metric_names import unknown_metrics

FOLDER = ROOT / "docs" / "algorithms"
PAGES = sorted(FOLDER.glob("*.md"))
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
PRESETS = sorted(file.stem for file in (CONFIGS_DIR / "algorithm").glob("*.yaml"))
PAPER = "https://arxiv.org/abs/"


def rows(text: str, name: str) -> list[str]:
    """Return the table rows whose first cell names `name`."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if f"`{name}`" in line.split("|")[1]]


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_has_a_page_with_its_file_and_its_paper(preset: str) -> None:
    (row,) = rows(INDEX.split("## Presets", 1)[1].split("\n## ", 1)[0], preset)
    (link,) = re.findall(r"\]\(([\w./]+\.md)", row)
    page = (FOLDER / link).read_text(encoding="utf-8")
    assert preset in page

    if not preset.startswith("async_"):
        assert f"(../../configs/algorithm/{preset}.yaml)" in page
        assert f"algorithm={preset} " in page
        assert PAPER in page


@pytest.mark.parametrize("kind", [*AdvantageEstimator, *PolicyLossKind], ids=repr)
def test_each_estimator_and_loss_has_a_page_and_a_paper(kind: AdvantageEstimator | PolicyLossKind) -> None:
    heading = "## Advantage estimators" if isinstance(kind, AdvantageEstimator) else "## Policy losses"
    (row,) = rows(INDEX.split(heading, 1)[1].split("\n## ", 1)[0], kind.value)
    assert PAPER in row
    (link,) = re.findall(r"\]\((\w+\.md)", row)
    assert f"`{kind.value}`" in (FOLDER / link).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "names"),
    [("index.md", KLEstimator), ("index.md", Aggregation), ("supervised.md", DPOLossKind)],
)
def test_each_choice_has_a_row(page: str, names: type[Enum]) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    assert [name.value for name in names if not rows(text, name.value)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_and_metrics_exist(page: Path) -> None:
    words = re.findall(r"`([a-z_]+[./][\w./@<>*-]+)`", page.read_text(encoding="utf-8"))
    known = {leaf.key for schema in SCHEMAS.values() for leaf in leaves(schema())}
    sections = {key.rpartition(".")[0] for key in known}
    roots = tuple(f"{key.partition('.')[0]}." for key in known)
    keys = {word.removesuffix(".*") for word in words if word.startswith(roots) and "/" not in word}
    assert sorted(keys - known - sections - {"algorithm.rollout_correction", "actor", "critic"}) == []

    groups = (
        "actor/",
        "critic/",
        "reward/",
        "groups/",
        "dynamic_sampling/",
        "rollout/",
        "rollout_correction/",
    )
    metrics = [
        word for word in words if word.startswith((*groups, "response_length/", "sft/", "dpo/", "val/"))
    ]
    assert unknown_metrics([metric for metric in metrics if "*" not in metric]) == []
