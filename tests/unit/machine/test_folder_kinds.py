"""A folder of the wrong kind is named for what it is, with the folder that was meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.machine.folder_kinds import (
    instead_of_checkpoint,
    instead_of_data,
    instead_of_model,
    instead_of_run,
    is_run,
    model_called,
    no_run,
)

MODEL = {"config.json": '{"architectures": ["Qwen3ForCausalLM"]}', "model.safetensors": ""}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with a finished run."""
    monkeypatch.chdir(tmp_path)
    run = {"config.yaml": "", "metrics.jsonl": "", "checkpoints/latest": "step_00000004"}
    step = {"checkpoint.json": "{}", "config.yaml": "", "actor/manifest.json": "{}"}
    write(tmp_path / "outputs/grpo/run", run)
    write(tmp_path / "outputs/grpo/run/huggingface", MODEL)
    write(tmp_path / "outputs/grpo/run/checkpoints/step_00000004", step)
    return tmp_path


RUN = "give outputs/grpo/run"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("outputs/grpo", RUN),
        ("outputs", RUN),
        ("outputs/grpo/run/checkpoints", f"this is the folder of a run's checkpoints; {RUN}"),
        ("outputs/grpo/run/checkpoints/step_00000004", f"this is a checkpoint of a run; {RUN}"),
        ("outputs/grpo/run/checkpoints/step_00000004/actor", f"this is a Megatron checkpoint; {RUN}"),
        ("outputs/grpo/run/huggingface", f"this is a language model (Qwen3ForCausalLM); {RUN}"),
        ("outputs/grpo/run/metrics.jsonl", RUN),
    ],
)
def test_the_run_that_was_meant_is_named(given: str, said: str, here: Path) -> None:
    assert instead_of_run(Path(given)) == said
    assert no_run(Path(given)).endswith(f"; {said}")


def test_a_folder_without_a_run_near_it(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    assert (
        no_run(other / "nowhere")
        == f"{other}/nowhere: there is no such folder; give a run's trainer.output_dir"
    )
    assert no_run(write(other / "notes", {"a.txt": ""})).endswith("; give a run's trainer.output_dir")
    for name in ("a", "b", "c", "d"):
        write(other / "runs" / name, {"metrics.jsonl": ""})
    a, b, c = (other / "runs" / name for name in ("a", "b", "c"))
    assert no_run(other / "runs").endswith(f"; give {a} or {b} or {c} or another of 4")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.yaml": ""}, False),
        ({"config.yaml": "", "train.py": "", "model.safetensors": ""}, False),
        ({"config.yaml": "", "plan.txt": ""}, True),  # it has just started
        ({"config.yaml": "", "checkpoints/step_00000004/checkpoint.json": "{}"}, True),
        ({"config.yaml": "", "checkpoint.json": "{}", "metrics.jsonl": ""}, False),
        ({"plan.txt": ""}, False),
        ({"metrics.jsonl": ""}, True),
        ({"failure.txt": ""}, True),
    ],
    ids=str,
)
def test_a_run_has_more_than_a_configuration(
    files: Mapping[str, str], expected: bool, tmp_path: Path
) -> None:
    assert is_run(write(tmp_path / "given", files)) is expected


def test_a_configuration_of_another_program_is_no_run(tmp_path: Path, here: Path) -> None:
    folder = write(tmp_path / "other", {"config.yaml": "a: 1"})
    assert no_run(folder).startswith(
        f"{folder}: no run has written here (a config.yaml, but no metrics.jsonl, plan.txt or checkpoints); "
    )
    with_model = write(tmp_path / "model", {"config.yaml": "", **MODEL})
    assert instead_of_data(with_model) == "this is a language model (Qwen3ForCausalLM), not data"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("outputs/grpo/run", "this is the folder of a run; give outputs/grpo/run/huggingface"),
        ("outputs", "give outputs/grpo/run/huggingface"),
        (
            "outputs/grpo/run/checkpoints",
            "this is the folder of a run's checkpoints; write its model to a folder with "
            "`megarl convert outputs/grpo/run/checkpoints FOLDER`, and give that",
        ),
    ],
)
def test_the_model_of_a_run_is_named(given: str, said: str, here: Path) -> None:
    assert instead_of_model(Path(given)) == said


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {
                "adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen3-8B"}',
                "adapter_model.safetensors": "",
            },
            "this is a LoRA adapter of Qwen/Qwen3-8B; give its base model, and start from the adapter with "
            "actor.lora.path=given",
        ),
        ({"tokenizer.json": "{}"}, "this is a tokenizer without a model; give the folder of the model"),
        (
            {"latest_checkpointed_iteration.txt": "7"},
            "this is a Megatron checkpoint; write its model to a folder",
        ),
        ({"mp_rank_00/model_optim_rng.pt": ""}, "this is a Megatron checkpoint; write its model to a folder"),
        ({"train.parquet": ""}, "this is a folder of data files; data belongs to data.train_files"),
        (
            {"config.yaml": "", "checkpoints/latest": ""},
            "this is the folder of a run; write its model to a folder",
        ),
        ({"notes.txt": ""}, ""),
        (
            {"snapshots/1a2b/config.json": "{}", "snapshots/1a2b/model.safetensors": "", "refs/main": "1a2b"},
            "give given/snapshots/1a2b",
        ),
    ],
    ids=str,
)
def test_what_is_no_model_is_named(
    files: Mapping[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "given", files)
    found = instead_of_model(Path("given"))
    assert found.startswith(said)
    assert found == "" or said != ""


def test_the_checkpoints_of_a_run_are_named(here: Path) -> None:
    said = "give outputs/grpo/run/checkpoints"
    assert instead_of_checkpoint(Path("outputs/grpo")) == said
    assert instead_of_checkpoint(Path("outputs/grpo/run")) == f"this is the folder of a run; {said}"
    in_model = instead_of_checkpoint(Path("outputs/grpo/run/huggingface"))
    assert in_model == f"this is a language model (Qwen3ForCausalLM); {said}"


def test_what_is_no_data_is_named(here: Path) -> None:
    write(here / "data", {"a.jsonl": "", "b.parquet": ""})
    assert instead_of_data(Path("data")) == "list the files in it, such as data/b.parquet or data/a.jsonl"
    model = instead_of_data(Path("outputs/grpo/run/huggingface"))
    assert model == "this is a language model (Qwen3ForCausalLM), not data"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["Qwen2ForSequenceClassification"], "a reward model (Qwen2ForSequenceClassification)"),
        (["LlamaForTokenClassification"], "a critic (LlamaForTokenClassification)"),
        (["Qwen3VLForConditionalGeneration"], "a language model (Qwen3VLForConditionalGeneration)"),
        (["BertModel"], "a model (BertModel)"),
        ([], "a model"),
        (7, "a model"),
    ],
)
def test_a_model_is_called_by_its_class(names: object, said: str) -> None:
    assert model_called({"architectures": names}) == said
