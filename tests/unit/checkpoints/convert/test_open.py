"""All folders that may contain a model, and the errors for folders that do not."""

import json
from pathlib import Path

import pytest

from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import item_checksums, write_manifest
from megarl.machine.errors import CheckpointError
from tests.unit.checkpoints.convert.test_source import stacked, write
from tests.unit.checkpoints.test_role_folder import DESCRIPTION
from tests.unit.weights.models import random_model, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run's checkpoints; step 5 has a critic too."""
    root = tmp_path_factory.mktemp("checkpoints")
    model = random_model("llama")

    for step, roles in ((5, ["actor", "critic"]), (10, ["reference"])):
        folder = root / f"step_{step:08d}"
        folder.mkdir()
        for role in roles:
            save(model, write(stacked(model.state_dict(), "llama", False), folder / role) / "huggingface")
            (folder / role / "huggingface" / "model.safetensors").unlink()
            names = [path.name for path in (folder / role).iterdir()]
            write_manifest(folder / role, DESCRIPTION, item_checksums(folder / role, names))
        (folder / "checkpoint.json").write_text(
            json.dumps({"format": 1, "step": step, "roles": roles, "files": {}})
        )

    (root / "latest").write_text("step_00000010\n")
    save(model, root / "hf")
    return root


def test_a_run_s_checkpoints(folders: Path) -> None:
    step = folders / "step_00000005"
    assert open_model(folders).folder == folders / "step_00000010" / "reference"
    assert open_model(step).folder == step / "actor"
    assert open_model(step).step == DESCRIPTION.step
    assert open_model(step, role="critic").folder == step / "critic"
    assert open_model(step / "critic").companions == step / "critic" / "huggingface"


def test_a_hugging_face_folder(folders: Path) -> None:
    assert open_model(folders / "hf").kind == "Hugging Face"
    exported = folders / "step_00000005" / "huggingface"  # with checkpoint.save_hf
    exported.symlink_to(folders / "hf")
    assert open_model(exported).kind == "Hugging Face"


def test_a_run_that_was_killed_before_it_wrote_latest(tmp_path: Path, folders: Path) -> None:
    for name in ("step_00000005", "step_00000010"):
        (tmp_path / name).symlink_to(folders / name)
    (tmp_path / ".step_00000020.partial").mkdir()
    assert open_model(tmp_path).folder.parent.name == "step_00000010"


def test_a_folder_of_megatron_s_own_programs_needs_a_configuration(tmp_path: Path, folders: Path) -> None:
    model = random_model("llama")
    plain = write(stacked(model.state_dict(), "llama", False), tmp_path / "run" / "iter_0000020")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(CheckpointError, match=r"does not specify its model.*pass --config HF_DIR"):
        open_model(tmp_path / "run")
    assert open_model(plain, companions=folders / "hf").folder == plain
    source = open_model(tmp_path / "run", companions=folders / "hf")
    assert (source.folder, source.companions) == (plain, folders / "hf")
    (tmp_path / "run" / "config.json").write_bytes((folders / "hf" / "config.json").read_bytes())
    assert open_model(plain).companions == tmp_path / "run"


@pytest.mark.parametrize(
    ("files", "role", "says"),
    [
        (None, None, r"there is no such folder"),
        ({}, None, r"contains nothing, which is not a model; give a Hugging Face folder"),
        (
            {"notes.txt": "", "weights.bin": ""},
            None,
            r"contains notes\.txt, weights\.bin, which is not a model",
        ),
        (
            {"latest": "step_00000030"},
            None,
            r"latest: names 'step_00000030', which is not a complete checkpoint in .*; complete ones: none",
        ),
        ({"latest": "../other"}, None, r"latest: names '\.\./other', which is not a complete checkpoint"),
        (
            {"checkpoint.json": '{"format": 1, "step": 5, "files": {}, "roles": ["actor"]}'},
            None,
            r"actor: is missing; the checkpoint is damaged",
        ),
        (
            {"checkpoint.json": '{"format": 1, "step": 5, "files": {}, "roles": ["actor"]}'},
            "critic",
            r"has no role 'critic'; choose one of actor",
        ),
        (
            {"checkpoint.json": '{"format": 1, "step": 5, "files": {}, "roles": ["reward", "critic"]}'},
            None,
            r"no role 'actor'; choose one of reward, critic",
        ),
        (
            {"checkpoint.json": '{"format": 2}'},
            None,
            r"checkpoint\.json: has format 2, but this version reads 1",
        ),
        (
            {"checkpoint.json": '{"format": 1, "step": 5, "files": {}, "roles": 3}'},
            None,
            r"checkpoint\.json: roles is 3, not a list of folder names",
        ),
        ({"checkpoint.json": "{"}, None, r"checkpoint\.json: not JSON"),
        (
            {
                "checkpoint.json": '{"format": 1, "step": 5, "files": {}, "roles": ["actor"]}',
                "actor/.metadata": "",
            },
            None,
            r"actor/manifest\.json: is missing",
        ),
        ({"config.json": "{}"}, "actor", r"role 'actor' was requested, but this is not a run's checkpoint"),
        ({"manifest.json": "{}"}, None, r"\.metadata: the file is missing"),
        ({"latest_checkpointed_iteration.txt": "7"}, None, r"names iter_0000007, which is not in"),
        (
            {"latest_checkpointed_iteration.txt": "../x"},
            None,
            r"contains '\.\./x', which is neither the number",
        ),
    ],
)
def test_a_folder_without_a_model(
    tmp_path: Path, files: dict[str, str] | None, role: str | None, says: str
) -> None:
    folder = tmp_path / "folder"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)

    with pytest.raises(CheckpointError, match=says) as raised:
        open_model(folder, role)
    assert "\n" not in str(raised.value)
