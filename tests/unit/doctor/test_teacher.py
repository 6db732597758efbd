"""A teacher must have the policy's tokenizer: the same token for each id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.finding import Finding, Status
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    PPOConfig,
    SourceTeacherConfig,
    TeacherConfig,
)
from megarl.doctor.agents_and_judges import judge_data_sources, judge_teacher
from megarl.doctor.inputs import findings
from megarl.models.families import read_architecture
from tests.unit.config.folders import model_folder
from tests.unit.data.chats import character_tokenizer


@pytest.fixture
def config() -> PPOConfig:
    advantage = AdvantageConfig(estimator=AdvantageEstimator.distillation)
    return PPOConfig(algorithm=AlgorithmConfig(advantage=advantage), teacher=TeacherConfig(path="teacher"))


def teacher_of(config: PPOConfig) -> ModelRole:
    return next(role for role in model_roles(config) if role.name == "teacher")


def test_an_equal_vocabulary_is_good_whatever_the_template(config: PPOConfig) -> None:
    found = judge_teacher(
        teacher_of(config), character_tokenizer(template="{{ messages }}"), character_tokenizer()
    )
    assert (found.status, found.facts["folder"]) == (Status.ok, "teacher")


def test_the_first_different_id_is_named(config: PPOConfig) -> None:
    """The teacher has one symbol more, in front of the three special tokens of both."""
    policy = character_tokenizer()
    first = policy.convert_tokens_to_ids("<|start|>")
    found = judge_teacher(teacher_of(config), character_tokenizer(vocabulary_extra="#"), policy)
    assert found.status is Status.error
    assert str(found) == (
        f"teacher.path: teacher: the tokenizer differs from the policy's in 4 of {len(policy)} ids, first in id "
        f"{first}: '#', and the policy's '<|start|>', so the teacher would score other text than the policy "
        "writes; use a teacher of the policy's model family"
    )


def test_ids_that_only_one_of_them_has(config: PPOConfig) -> None:
    longer = character_tokenizer()
    longer.add_tokens(["<|more|>"])
    for one, other in ((longer, character_tokenizer()), (character_tokenizer(), longer)):
        found = judge_teacher(teacher_of(config), one, other)
        assert found.status is Status.error
        assert "in 1 of" in found.message
        assert "no token" in found.message


def test_the_check_of_a_run_compares_the_tokenizers_of_its_folders(config: PPOConfig, tmp_path: Path) -> None:
    policy, teacher = (model_folder(tmp_path / name) for name in ("policy", "teacher"))
    run = replace(
        config,
        model=replace(config.model, path=str(policy)),
        teacher=replace(config.teacher, path=str(teacher)),
    )
    architectures = {"actor": read_architecture(str(policy)), "teacher": read_architecture(str(teacher))}

    def of_tokenizers() -> list[Finding]:
        skipped = ("data.train_files", "data.val_files", "reward.functions", "algorithm")
        found = findings(run, architectures, skipped)
        return [each for each in found if each.check == "tokenizers"]

    for folder, extra in ((policy, ""), (teacher, "")):
        character_tokenizer(vocabulary_extra=extra).save_pretrained(folder)
    assert [each.status for each in of_tokenizers()] == [Status.ok, Status.ok]
    character_tokenizer(vocabulary_extra="#").save_pretrained(teacher)
    (error,) = [each for each in of_tokenizers() if each.status is Status.error]
    assert str(error).startswith(f"teacher.path: {teacher}: the tokenizer differs")


def test_the_check_of_a_run_names_data_sources_without_a_teacher(config: PPOConfig, tmp_path: Path) -> None:
    sources = ["gsm8k", "aime", "gsm8k", "apps"]
    rows = [{"prompt": "2+2", "data_source": source, "ground_truth": "4"} for source in sources]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    math = SourceTeacherConfig(name="math", path="math", data_sources=["gsm8k"])
    run = replace(
        config,
        data=replace(config.data, train_files=[str(tmp_path / "train.parquet")]),
        teacher=TeacherConfig(),
        teachers=[math],
    )
    (error,) = judge_data_sources(run)
    assert error.status is Status.error
    assert str(error) == (
        "data.train_files: no teacher scores the samples of data_source 'aime', 'apps'; `teachers` have "
        "'gsm8k'; add it to the data_sources of one of them, or set teacher.path to a teacher of all others"
    )
    assert list(judge_data_sources(replace(run, teacher=config.teacher))) == []
    whole = replace(math, data_sources=["gsm8k", "aime", "apps"])
    assert list(judge_data_sources(replace(run, teachers=[whole]))) == []
