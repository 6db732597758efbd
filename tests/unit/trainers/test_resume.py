"""Test the selection of checkpoints, with small synthetic ones that are read and refused as real ones would
be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megarl.checkpoints.object_storage import ObjectStorage
from megarl.checkpoints.role_folder import Description, Layout, item_checksums, write_manifest
from megarl.checkpoints.run_folder import CheckpointFolder, file_checksum
from megarl.checkpoints.torch_dist import TORCH_DIST
from megarl.config.load import dump_config, load_config
from megarl.config.schema import CheckpointConfig, Device, LoRAConfig, OptimConfig, PPOConfig
from megarl.machine.errors import CheckpointError, ConfigError
from megarl.models.families import read_architecture
from megarl.trainers.resume import checkpoint_folder, find_resume
from megarl.weights.peft_folder import write_config
from tests.families import example_fields
from tests.unit.config.folders import ARCHITECTURE, model_folder, ppo_values, write_yaml

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MANIFEST: dict[str, Any] = {
    "format": 1,
    "head": "lm",
    "dtype": "bfloat16",
    "layout": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "virtual_pipeline_parallel_size": None,
        "data_parallel_size": 1,
    },
    "tensors": {},
    "objects": {},
    "files": {},
}


NOTHING: dict[str, Any] = {}


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    values = ppo_values(tmp_path)
    values["trainer"]["output_dir"] = str(tmp_path / "run")
    return load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", values))


def save(
    config: PPOConfig,
    step: int,
    folder: CheckpointFolder | None = None,
    *,
    state: Any = NOTHING,
    **architecture: Any,
) -> Path:
    folder = folder or checkpoint_folder(config)
    folder.prepare()
    partial = folder.begin(step)

    for role in ("actor", "critic"):
        model_folder(partial / role / "huggingface", **architecture)
        (partial / role / "manifest.json").write_text(json.dumps({**MANIFEST, "step": step}))

    (partial / "trainer.json").write_text(
        json.dumps({"step": step, "trainer": "ppo", "seconds": 1.0, "data": {}} | state)
    )
    dump_config(config, partial / "config.yaml")
    folder.seal(step, {"roles": ["actor", "critic"], "versions": {}})

    return folder.commit(step)


def write_models(checkpoint: Path, step: int) -> None:
    """Write files as PyTorch does, so that every byte can be compared."""
    layout = Layout(**MANIFEST["layout"])
    for folder in (checkpoint / "actor", checkpoint / "critic"):
        dcp.save(
            {"weight": torch.full((2,), step)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True
        )
        (folder / "metadata.json").write_text(json.dumps(TORCH_DIST))
        torch.save({}, folder / "common.pt")
        checksums = item_checksums(folder, [path.name for path in folder.iterdir()])
        write_manifest(folder, Description(head="lm", dtype="bfloat16", layout=layout, step=step), checksums)


def resuming(config: PPOConfig, resume: str | Path) -> PPOConfig:
    return replace(config, checkpoint=CheckpointConfig(resume=str(resume)))


def test_auto_finds_the_latest_or_starts_from_the_beginning(config: PPOConfig) -> None:
    assert find_resume(config) is None
    save(config, 2)
    path = save(config, 4)
    found = find_resume(config)
    assert found is not None
    assert (found.checkpoint, found.step, found.is_own, found.differences) == (path, 4, True, [])


def test_a_model_of_another_step_is_refused_and_no_such_checkpoint_is_offered(config: PPOConfig) -> None:
    """Each folder is complete according to its own checksums."""
    older, mixed, latest = (save(config, step) for step in (2, 4, 6))
    for checkpoint, step in ((older, 2), (mixed, 4), (latest, 6)):
        write_models(checkpoint, step)
    for checkpoint in (mixed, latest):
        shutil.copytree(older / "critic", checkpoint / "critic", dirs_exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        find_resume(config)
    said = str(caught.value)
    assert said.startswith(f"{latest / 'critic'}: is of step 2, but it is in the checkpoint of step 6: ")
    assert "\n" not in said
    assert f"Older complete checkpoints: {older};" in said


def test_a_path_is_a_checkpoint_or_a_folder_of_them(config: PPOConfig, tmp_path: Path) -> None:
    other = CheckpointFolder(tmp_path / "other")
    save(config, 2, other)
    latest = save(config, 4, other)

    for path, step in ((tmp_path / "other", 4), (latest, 4), (tmp_path / "other" / "step_00000002", 2)):
        found = find_resume(resuming(config, path))
        assert found is not None
        assert (found.step, found.is_own) == (step, False)

    save(config, 6)
    with pytest.raises(ConfigError, match="has checkpoints of this run; resume from those with auto"):
        find_resume(resuming(config, latest))
    own = find_resume(resuming(config, checkpoint_folder(config).path / "step_00000006"))
    assert own is not None
    assert own.is_own
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        find_resume(resuming(config, latest / "actor"))


def test_disable_does_not_mix_two_runs(config: PPOConfig) -> None:
    assert find_resume(resuming(config, "disable")) is None
    save(config, 2)
    with pytest.raises(ConfigError, match="has checkpoints of a run"):
        find_resume(resuming(config, "disable"))


def test_harmless_changes_are_listed(config: PPOConfig) -> None:
    save(config, 2)
    actor = replace(config.actor, optim=OptimConfig(lr=1e-4))
    found = find_resume(replace(config, actor=actor))
    assert found is not None
    assert [(change.key, change.before, change.now) for change in found.differences] == [
        ("actor.optim.lr", 1e-6, 1e-4)
    ]


def test_another_number_of_threads_is_listed(config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of CPU results depend on it."""
    save(config, 2, state={"threads": "64 cores"})
    for setting, now in (("3", ["3"]), ("64 cores", [])):
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
        found = find_resume(config)
        assert found is not None
        assert [change.now for change in found.differences] == now

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    on_gpus = find_resume(replace(config, device=Device.cuda))
    assert on_gpus is not None
    assert [change.key for change in on_gpus.differences] == ["device"]


def test_every_reason_against_it_is_listed_at_once(config: PPOConfig) -> None:
    path = save(config, 4, hidden_size=ARCHITECTURE["hidden_size"] * 2)
    changed = replace(config, trainer=replace(config.trainer, total_steps=3, prompts_per_step=24))
    with pytest.raises(ConfigError) as caught:
        find_resume(changed)
    assert caught.value.source.startswith(str(path))
    said = "\n".join(caught.value.problems)
    assert "trainer.prompts_per_step: is 24, but the checkpoint was written with 12" in said
    assert "trainer.total_steps: is 3, but the checkpoint is of step 4" in said
    assert "actor: hidden_size is 48, but the checkpoint's model has 96" in said
    assert "critic: hidden_size is 48" in said


@pytest.mark.parametrize(
    ("family", "field", "original", "saved"),
    [
        ("deepseek_v3", "num_nextn_predict_layers", 1, 0),
        ("glm4_moe", "num_nextn_predict_layers", 1, 0),
        ("gpt_oss", "quantization_config", {"quant_method": "mxfp4"}, None),
    ],
)
def test_what_only_the_original_folder_has_does_not_prevent_a_resume(
    config: PPOConfig, family: str, field: str, original: Any, saved: Any
) -> None:
    """A checkpoint has neither the layers that predict further tokens nor packed experts."""
    fields = ARCHITECTURE | example_fields(family)
    Path(config.model.path, "config.json").write_text(json.dumps(fields | {field: original}))
    path = save(config, 2, **fields | {field: saved})
    found = find_resume(config)
    assert found is not None
    assert (found.checkpoint, found.differences) == (path, [])


@pytest.mark.parametrize(
    ("had", "has", "said"),
    [
        (None, {"rank": 8}, "actor.lora.rank: the checkpoint trained weights, but this run trains adapters"),
        ({"rank": 8}, {}, "actor.lora.rank: the checkpoint trained adapters, but this run trains weights"),
        ({"rank": 8}, {"rank": 4}, "actor.lora.rank: is 4, but the checkpoint's adapters have 8"),
        (
            {"rank": 8},
            {"rank": 8, "alpha": 8.0},
            "actor.lora.alpha: is 8, but the checkpoint's adapters have 32",
        ),
        (
            {"rank": 8, "targets": ["q_proj"]},
            {"rank": 8},
            "actor.lora.targets: the checkpoint has adapters at q_proj; use actor.lora.targets=[q_proj]",
        ),
        (
            {"rank": 8, "modules_to_save": ["lm_head"]},
            {"rank": 8},
            "actor.lora.modules_to_save: the checkpoint trained lm_head; use actor.lora.modules_to_save=[lm_head]",
        ),
        (
            {"rank": 8},
            {"rank": 8, "modules_to_save": ["lm_head"]},
            "the checkpoint trained adapters only; use actor.lora.modules_to_save=[]",
        ),
        ({"rank": 8}, {"rank": 8}, None),
        ({"rank": 8, "targets": ["q_proj"]}, {"rank": 8, "targets": ["self_attn.q_proj"]}, None),
    ],
)
def test_adapters_continue_only_as_they_are(
    config: PPOConfig, had: dict[str, Any] | None, has: dict[str, Any], said: str | None
) -> None:
    path = save(config, 4)
    if had is not None:
        adapters = replace(config.actor, lora=LoRAConfig(**had)).adapters
        companions = path / "actor" / "huggingface"
        write_config(companions, replace(read_architecture(str(companions)), lora=adapters), "base")

    resumed = replace(config, actor=replace(config.actor, lora=LoRAConfig(**has)))
    if said is None:
        assert find_resume(resumed) is not None
        return
    with pytest.raises(ConfigError) as caught:
        find_resume(resumed)
    assert [problem for problem in caught.value.problems if said in problem]


def test_another_trainers_checkpoint_is_refused(config: PPOConfig) -> None:
    save(config, 4, state={"trainer": "sft"})
    with pytest.raises(ConfigError, match="written by sft, but this is ppo"):
        find_resume(config)


def test_a_state_of_another_step_is_refused(config: PPOConfig) -> None:
    path = save(config, 4, state={"step": 2})
    with pytest.raises(
        CheckpointError,
        match=f"{path / 'trainer.json'}: is of step 2, but it is in the checkpoint of step 4",
    ):
        find_resume(config)


def resealed(path: Path, name: str, content: str) -> None:
    """Reseal the folder with a file that matches its checksum but that no run would write."""
    (path / name).write_text(content)
    description = json.loads((path / "checkpoint.json").read_text())
    description["files"][name] = {"nbytes": len(content), "checksum": file_checksum(path / name)}
    (path / "checkpoint.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trainer.json", "[]", "is a list, not a mapping"),
        ("trainer.json", "[" * 100_000, r"cannot be read \(it is nested too deep\)"),
        ("trainer.json", '{"trainer": "ppo", "data": {}, "seconds": 1}', "has no step"),
        ("trainer.json", '{"step": 4, "data": {}}', "has no trainer and no seconds"),
        ("config.yaml", "- 1", r"cannot be read \(it is a list, not a mapping of keys\)"),
        ("config.yaml", "", r"cannot be read \(it is empty, not a mapping of keys\)"),
        ("config.yaml", "a: [", r"cannot be read \("),
        ("config.yaml", "a: " + "[" * 2_000, r"cannot be read \(it is nested too deep\)"),
        ("config.yaml", "a: &a {b: *a}", r"cannot be read \(it is nested too deep\)"),
        ("config.yaml", "a: !!bool x", r"cannot be read \(a value does not fit its tag \(KeyError: 'x'\)\)"),
    ],
)
def test_a_file_that_no_run_writes_is_one_line(config: PPOConfig, name: str, content: str, said: str) -> None:
    resealed(path := save(config, 4), name, content)
    with pytest.raises(CheckpointError, match=f"{path / name}: {said}") as caught:
        find_resume(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: (path / "actor" / "manifest.json").unlink(),
            "actor/manifest.json: the file is missing",
        ),
        (lambda path: (path / "config.yaml").unlink(), "config.yaml: is missing"),
        (
            lambda path: (path / "trainer.json").write_text(" " * len((path / "trainer.json").read_text())),
            "trainer.json: its content",
        ),
    ],
)
def test_damage_is_named_and_no_older_one_is_taken(
    config: PPOConfig, damage: Callable[[Path], object], said: str
) -> None:
    damage(save(config, 4))
    with pytest.raises(CheckpointError, match=f"{said}.*There is no older complete checkpoint") as caught:
        find_resume(config)
    assert "\n" not in str(caught.value)


def test_a_run_without_its_folder_resumes_from_the_uploaded_copy(config: PPOConfig, tmp_path: Path) -> None:
    """On a new machine, `auto` downloads the latest copy. It prefers a checkpoint that is there."""
    url = f"file://{tmp_path}/storage"
    config = replace(config, checkpoint=replace(config.checkpoint, upload=url))
    assert find_resume(config) is None
    ObjectStorage(url).upload(save(config, 4))
    shutil.rmtree(checkpoint_folder(config).path)

    found = find_resume(config)
    assert found is not None
    assert (found.step, found.is_own) == (4, True)
    assert found.checkpoint == checkpoint_folder(config).path / "step_00000004"
    save(config, 2)
    found = find_resume(config)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("upload", [None, "stor", "other"])
def test_another_run_starts_from_a_url(upload: str | None, config: PPOConfig, tmp_path: Path) -> None:
    """A URL that only begins like `checkpoint.upload` is another run's."""
    url = f"file://{tmp_path}/storage"
    own = None if upload is None else f"file://{tmp_path}/{upload}"
    ObjectStorage(url).upload(save(config, 4))
    trainer = replace(config.trainer, output_dir=str(tmp_path / "second"))
    second = replace(
        config, trainer=trainer, checkpoint=CheckpointConfig(resume=f"{url}/step_00000004", upload=own)
    )
    found = find_resume(second)
    assert found is not None
    assert (found.step, found.is_own) == (4, False)
    assert found.checkpoint == tmp_path / "second" / "checkpoints" / "downloaded" / "step_00000004"
