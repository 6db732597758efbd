"""`megarl convert`: the commands as they are typed, what they print, and their exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoints.object_storage import ObjectStorage
from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.cli.main import main
from tests.unit.weights.models import random_model, save

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "checkpoint_convert" / "convert.py"


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model("qwen2", tied=True), tmp_path_factory.mktemp("models") / "hf")


def test_there_and_back_and_compared(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back, rounded = (str(tmp_path / name) for name in ("there", "back", "rounded"))
    sizes = [
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "2",
        "--virtual-pipeline-parallel-size",
        "2",
    ]
    assert main(["convert", "hf-to-megatron", "--input", str(hugging_face), "--output", there, *sizes]) == 0
    assert (
        main(["convert", "megatron-to-hf", "--input", there, "--output", back, "--max-shard-size", "50KB"])
        == 0
    )
    assert len(list(Path(back).glob("model-*-of-00003.safetensors"))) == 3
    said = capsys.readouterr().out
    assert "26,880 parameters" in said
    assert "in 4 files" in said
    assert "GB/s" in said
    assert main(["convert", "verify", str(hugging_face), back]) == 0
    assert main(["convert", "verify", there, back]) == 0
    assert capsys.readouterr().out.count("identical: ") == 2
    assert (
        main(["convert", "hf-to-megatron", "--input", back, "--output", rounded, "--dtype", "bfloat16"]) == 0
    )
    assert main(["convert", "verify", back, rounded]) == 0
    assert "identical except for rounding (float32 and bfloat16" in capsys.readouterr().out


def test_a_folder_in_fp8(hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8, back, plain = (str(tmp_path / name) for name in ("fp8", "back", "plain"))
    to_fp8 = ["convert", "megatron-to-hf", "--input", str(hugging_face), "--output", fp8, "--dtype", "fp8"]
    assert main(to_fp8) == 0
    assert main(["convert", "inspect", fp8]) == 0
    said = capsys.readouterr().out
    assert "1 safetensors file, in block-scaled FP8" in said
    assert "bfloat16" in said
    assert main(["convert", "hf-to-megatron", "--input", fp8, "--output", back]) == 0
    assert main(["convert", "megatron-to-hf", "--input", back, "--output", plain]) == 0
    assert main(["convert", "verify", fp8, plain]) == 0
    assert "identical: " in capsys.readouterr().out
    assert main(["convert", fp8, str(tmp_path / "x"), "--to", "megatron", "--dtype", "fp8"]) == 2
    assert "--dtype fp8 and --max-shard-size require --to hf" in capsys.readouterr().err


def test_a_checkpoint_in_object_storage(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    folder.prepare()
    actor = folder.begin(5) / "actor"
    assert main(["convert", "hf-to-megatron", "--input", str(hugging_face), "--output", str(actor)]) == 0
    folder.seal(5, {"roles": ["actor"], "versions": {}})
    url = f"file://{tmp_path}/storage"
    ObjectStorage(url).upload(folder.commit(5))

    back = tmp_path / "out" / "back"
    assert main(["convert", "megatron-to-hf", "--input", url, "--output", str(back)]) == 0
    assert main(["convert", "verify", f"{url}/step_00000005", str(hugging_face)]) == 0
    assert "identical: " in capsys.readouterr().out
    assert [path.name for path in back.parent.iterdir()] == ["back"]  # nothing of the download is left
    assert main(["convert", "inspect", f"{url}/step_00000006"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "storage/step_00000006: is not a complete checkpoint: it has no upload.json" in line


def test_models_that_are_not_the_same(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(random_model("qwen2", tied=True, seed=1), tmp_path / "other")
    assert main(["convert", "verify", str(hugging_face), str(other)]) == 1
    assert "different: " in capsys.readouterr().out


def test_what_is_in_a_folder(hugging_face: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "inspect", str(hugging_face)]) == 0
    said = capsys.readouterr().out
    assert "Qwen2ForCausalLM" in said
    assert "model.layers.3.post_attention_layernorm.weight" in said
    assert main(["convert", "inspect", "--json", str(hugging_face)]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == 26880


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hf-to-megatron", "--input", "{hf}", "--output", "{hf}"], r"hf: already exists and is not empty"),
        (
            ["hf-to-megatron", "--input", "{tmp}/none", "--output", "{tmp}/new"],
            r"none: there is no such folder",
        ),
        (
            ["hf-to-megatron", "--input", "{hf}", "--output", "{tmp}/new", "--tensor-parallel-size", "3"],
            r"4 key-value heads cannot be sharded",
        ),
        (
            [
                "hf-to-megatron",
                "--input",
                "{hf}",
                "--output",
                "{tmp}/new",
                "--virtual-pipeline-parallel-size",
                "3",
            ],
            r"not a multiple of pip",
        ),
        (
            ["megatron-to-hf", "--input", "{tmp}", "--output", "{tmp}/new"],
            r"contains nothing, which is not a model",
        ),
        (
            ["megatron-to-hf", "--input", "{hf}", "--role", "critic", "--output", "{tmp}/new"],
            r"role 'critic' was requested",
        ),
        (["verify", "{hf}", "{tmp}/none"], r"none: there is no such folder"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    arguments: list[str], says: str, hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *(each.format(hf=hugging_face, tmp=tmp_path) for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megarl convert")
    assert says in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["hf-to-megatron", "--input", "x", "--output", "y", "--tensor-parallel-size", "0"],
        ["hf-to-megatron", "--input", "x", "--output", "y", "--dtype", "int8"],
        ["megatron-to-hf", "--input", "x", "--output", "y", "--max-shard-size", "5 apples"],
        ["megatron-to-hf", "--input", "x", "--output", "y", "--max-shard-size", "0"],
    ],
)
def test_a_wrong_command_line(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *arguments])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{hf}"], "give TARGET, a new or empty folder on this machine, or --inspect"),
        (["{hf}", "--verify"], "--verify compares two models; give TARGET too"),
        (["{hf}", "x", "--inspect"], "TARGET does not apply to --inspect; remove it"),
        (["{hf}", "--inspect", "--dtype", "float16"], "--dtype does not apply to --inspect; remove it"),
        (["{hf}", "x", "--json"], "--json requires --inspect"),
        (["{hf}", "x", "--base", "{hf}"], "has no adapters; convert it without --base"),
        (["{hf}", "x", "--to", "hf", "--tensor-parallel-size", "2"], "a layout requires --to megatron"),
        (["{hf}", "x", "--max-shard-size", "5MB"], "--max-shard-size require --to hf"),
        (["hf-to-megatron", "--input", "{hf}"], "--output is required"),
    ],
)
def test_options_that_do_not_fit_together(
    arguments: list[str], says: str, hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *(each.format(hf=hugging_face, tmp=tmp_path) for each in arguments)]) == 2
    assert says in capsys.readouterr().err


def test_the_direction_follows_from_the_source(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    assert main(["convert", str(hugging_face), "--tensor-parallel-size", "2", megatron]) == 0
    assert main(["convert", megatron, "--dtype", "bfloat16", back]) == 0
    assert (Path(back) / "model.safetensors").is_file()
    capsys.readouterr()
    assert main(["convert", megatron, "--inspect", "--json"]) == 0
    assert "Megatron" in json.loads(capsys.readouterr().out)["format"]
    assert main(["convert", "--verify", megatron, back]) == 0
    assert "identical except for rounding" in capsys.readouterr().out


def test_the_script_is_the_same_command(hugging_face: Path, tmp_path: Path) -> None:
    """The script runs from another folder, and without the package on the path."""
    command = [sys.executable, SCRIPT, "inspect", "--json", hugging_face]
    output = subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True).stdout
    assert json.loads(output)["family"] == "qwen2"


def test_an_interrupt(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the first bytes are written."""
    save = torch.save
    once = threading.Lock()

    def interrupted(value: object, file: Any) -> None:
        save(value, file)
        if once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch, "save", interrupted)
    assert (
        main(["convert", "hf-to-megatron", "--input", str(hugging_face), "--output", str(tmp_path / "new")])
        == 130
    )
    assert capsys.readouterr().err == "megarl convert: interrupted\n"
    assert not list(tmp_path.iterdir())
