"""Test the transfer plan of SGLang's own models: recorded in one call, it equals the plan recorded tensor by
tensor."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megarl.models.families import FAMILIES
from tests import fork_server
from tests.families import DENSE_FAMILIES, SPARSE_FAMILIES
from tests.unit.rollout.models import manifest_of, random_model

MODELS = {
    **{
        f"{family}-tied": (family, True, FAMILIES[family].class_prefix + FAMILIES[family].lm_class)
        for family in DENSE_FAMILIES
        if FAMILIES[family].sglang_class
    },
    "qwen2-untied": ("qwen2", False, "Qwen2ForCausalLM"),
    # SGLang's classes of these models tie no embedding.
    **{
        family: (family, False, FAMILIES[family].class_prefix + FAMILIES[family].lm_class)
        for family in SPARSE_FAMILIES
        if FAMILIES[family].sglang_class
    },
}
# SGLang has one class for both families.
OWN_NAMES = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}
PROGRAM = Path(__file__).with_name("plans_of_models.py")


def save(folder: Path, family: str, tied: bool, architecture: str) -> int:
    """Save the inputs of the ranks, and return the number of tensors."""
    model = random_model(family, tied=tied)
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    manifest = manifest_of(model)
    (folder / "manifest.json").write_text(json.dumps({name: meta.shape for name, meta in manifest.items()}))

    return len(manifest)


def plans(num_ranks: int, folders: list[Path], rendezvous: Path) -> list[list[dict[str, Any]]]:
    """Return the results of each rank."""
    command = [*fork_server.PYTHON, "--sglang", str(PROGRAM)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), f"file://{rendezvous}", *map(str, folders)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks

    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in printed]


# A process has one layout for all models. SGLang's class of gpt-oss cannot distribute experts over ranks.
WITH_WHOLE_EXPERTS = ["gpt_oss"]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, list(MODELS)),
        (2, [name for name in MODELS if name not in WITH_WHOLE_EXPERTS]),
        (2, WITH_WHOLE_EXPERTS),
    ],
    ids=["1", "2", "2 with whole experts"],
)
def test_one_call_records_the_plan_of_every_family(
    forked_processes: None, tmp_path: Path, num_ranks: int, names: list[str]
) -> None:
    """Experts are distributed over the ranks."""
    folders = [tmp_path / name for name in names]
    models = [MODELS[name] for name in names]
    counts = []
    for folder, (family, tied, architecture) in zip(folders, models, strict=True):
        counts.append(save(folder, family, tied, architecture))

    of_ranks = plans(num_ranks, folders, tmp_path / "rendezvous")
    for results in of_ranks:
        for result, count, (*_, architecture) in zip(results, counts, models, strict=True):
            assert result["model"] == OWN_NAMES.get(architecture, architecture)
            # Of these, the loader copies two at once, so that one alone is not followed.
            assert all(".q_a_proj." in name or ".kv_a_proj_" in name for name in result["differing"]), result
            assert result["is_the_same_backwards"], result
            assert result["num_calls"] == 1
            assert result["num_calls_one_by_one"] == 1 + count
            assert result["not_followed"] == {}
            assert result["num_parts"] >= count / num_ranks

    # A rank may zero what another one has, such as a bias that must be added once.
    for results in zip(*of_ranks, strict=True):
        assert set.intersection(*(set(result["unreached"]) for result in results)) == set()
