"""Adapters from PEFT's folder through a sharded checkpoint and back, and merged into their base: bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoints.convert.hugging_face import (
    merged_source,
    open_adapter_folder,
    open_hugging_face,
    with_merged_adapter,
    write_peft,
)
from megarl.checkpoints.convert.open import open_model
from megarl.cli.main import main
from megarl.cli.run.named_model import NamedModel, find_model, hugging_face_folder
from megarl.config.schema import ParallelConfig
from megarl.machine.errors import CheckpointError
from megarl.models.families import REWARD_CLASS
from megarl.weights.peft_folder import (
    CONFIG_FILE,
    adapter_tensors,
    read_lora,
    write_adapter,
    write_config,
)
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import Settings, train_and_save
from tests.unit.engine.lora_cases import Adapted, adapters_of, merged_weights, save_adapted
from tests.unit.engine.models import load_lm

SAVED = ("embed_tokens", "lm_head")
LAYOUTS = {
    "qwen2": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "qwen2_moe": ParallelConfig(data_parallel_size=2, expert_parallel_size=2),
    "deepseek_v3": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2),
}


@pytest.mark.parametrize(
    ("family", "saved"),
    [("qwen2", ()), ("qwen2", SAVED), ("qwen2_moe", SAVED[1:]), ("deepseek_v3", SAVED)],
)
def test_a_peft_folder_comes_back_from_a_checkpoint(
    family: str, saved: tuple[str, ...], rank_pool: RankPool, tmp_path: Path
) -> None:
    case = save_adapted(family, tmp_path, modules_to_save=saved)
    settings = Settings(LAYOUTS[family], case.base, lora=case.lora, lora_path=case.adapter)
    folder = tmp_path / "actor"
    rank_pool.run(train_and_save, world_size=2, settings=settings, folder=folder, num_steps=0, num_after=0)

    # A run writes these files next to the weights.
    companions = folder / "huggingface"
    companions.mkdir()
    shutil.copyfile(Path(case.base) / "config.json", companions / "config.json")
    write_config(companions, case.architecture(), case.base)

    assert open_model(folder).kind == "Megatron torch_dist of adapters"
    written = tmp_path / "again"
    assert main(["convert", "megatron-to-hf", "--input", str(folder), "--output", str(written)]) == 0
    again = case._replace(adapter=str(written))
    stored = adapters_of(case)
    assert adapters_of(again).keys() == stored.keys()
    assert all(torch.equal(adapters_of(again)[name], value) for name, value in stored.items())
    assert (written / CONFIG_FILE).read_text() == (Path(case.adapter) / CONFIG_FILE).read_text()

    check_merged(case, merged_by_command(case, folder, tmp_path / "merged"))

    # `megarl generate` and `megarl eval` get the merged model, or a line that says what is missing.
    with hugging_face_folder(find_model(folder), torch.float32) as merged:
        check_merged(case, merged)
    Path(case.base).rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"has adapters only, and their base model .*MERGED_DIR --base"
    ) as error:
        find_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("value_class", "task"), [(None, "TOKEN_CLS"), (REWARD_CLASS, "SEQ_CLS")])
def test_the_adapter_of_a_value_head_names_its_task(
    value_class: str | None, task: str, tmp_path: Path
) -> None:
    """PEFT loads the class of the task: that of a critic, or that of a reward model with one label."""
    case = save_adapted("qwen2", tmp_path)
    shapes = adapter_tensors(case.architecture(), "value")
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    (folder := tmp_path / "value").mkdir()
    write_adapter(folder, tensors, case.architecture(), case.base, "value", value_class)
    assert json.loads((folder / CONFIG_FILE).read_text())["task_type"] == task
    write_peft(open_adapter_folder(folder, Path(case.base)), tmp_path / "again")
    assert (tmp_path / "again" / CONFIG_FILE).read_text() == (folder / CONFIG_FILE).read_text()

    # PEFT writes null for a base model without a name.
    config = json.loads((folder / CONFIG_FILE).read_text()) | {"base_model_name_or_path": None}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    write_peft(open_adapter_folder(folder, Path(case.base)), tmp_path / "named")
    assert (tmp_path / "named" / CONFIG_FILE).read_text() == (tmp_path / "again" / CONFIG_FILE).read_text()


def merged_by_command(case: Adapted, adapter: Path | str, folder: Path) -> Path:
    paths = ["--input", str(adapter), "--base", case.base, "--output", str(folder)]
    assert main(["convert", "merge-adapter", *paths]) == 0
    return folder


def check_merged(case: Adapted, folder: Path) -> None:
    import peft

    written = load_file(folder / "model.safetensors")
    expected = merged_weights(case)
    if case.architecture().experts is None:
        state = (
            peft.PeftModel.from_pretrained(load_lm(Path(case.base)), case.adapter)
            .merge_and_unload()
            .state_dict()
        )
        expected = {name: state[name] for name in expected}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


def test_a_peft_folder_is_merged_and_another_model_is_refused(tmp_path: Path) -> None:
    case = save_adapted("qwen3-tied", tmp_path / "one", ("q_proj", "mlp.gate_proj"))
    adapter = open_adapter_folder(Path(case.adapter), Path(case.base))
    check_merged(case, merged_by_command(case, case.adapter, tmp_path / "merged"))

    other = save_adapted("qwen2", tmp_path / "other")
    with pytest.raises(CheckpointError, match="which is another model"):
        merged_source(adapter, open_hugging_face(Path(other.base)))
    with pytest.raises(CheckpointError, match="is not an adapter of"):
        open_adapter_folder(Path(case.adapter), Path(other.base))
    with pytest.raises(CheckpointError, match="pass --config HF_DIR, the folder of its base model"):
        open_model(Path(case.adapter))


def test_a_model_with_adapters_is_merged_into_its_base_before_it_generates(tmp_path: Path) -> None:
    case = save_adapted("qwen3-tied", tmp_path, ("q_proj", "mlp.gate_proj"))
    adapter = open_adapter_folder(Path(case.adapter), Path(case.base))
    model = NamedModel(source=with_merged_adapter(adapter))
    assert model.source.folder == adapter.folder
    with hugging_face_folder(model, torch.float32) as merged:
        check_merged(case, merged)

    base = open_hugging_face(Path(case.base))
    assert with_merged_adapter(base) is base


def test_an_adapter_is_found_with_the_base_model_that_it_names(tmp_path: Path) -> None:
    case = save_adapted("qwen3-tied", tmp_path, ("q_proj", "mlp.gate_proj"))
    file = Path(case.adapter) / "adapter_config.json"
    fields = json.loads(file.read_text())

    def name_base(name: str | None) -> None:
        file.write_text(json.dumps(fields | {"base_model_name_or_path": name}))

    name_base(case.base)
    model = find_model(Path(case.adapter))
    assert (model.source.folder, model.source.companions) == (Path(case.adapter), Path(case.base))
    with hugging_face_folder(model, torch.float32) as merged:
        check_merged(case, merged)

    for name in (None, "Qwen/Qwen3-0.6B", str(tmp_path)):
        name_base(name)
        with pytest.raises(
            ValueError, match=r"is not on this machine; run `megarl convert .* MERGED_DIR --base"
        ):
            find_model(Path(case.adapter))


def test_peft_writes_and_reads_the_same_folder(tmp_path: Path) -> None:
    """Names, shapes and values of PEFT's own folder, which the library also writes and reads."""
    import peft

    case = save_adapted("qwen2", tmp_path, modules_to_save=SAVED)
    model = peft.PeftModel.from_pretrained(load_lm(Path(case.base)), case.adapter)
    model.save_pretrained(tmp_path / "by_peft")
    again = case._replace(adapter=str(tmp_path / "by_peft"))
    stored = adapters_of(case)
    assert adapters_of(again).keys() == stored.keys()
    assert all(torch.equal(adapters_of(again)[name], value) for name, value in stored.items())

    source = open_adapter_folder(tmp_path / "by_peft", Path(case.base))
    assert (
        source.architecture.lora == open_adapter_folder(Path(case.adapter), Path(case.base)).architecture.lora
    )
    check_merged(case, merged_by_command(case, again.adapter, tmp_path / "merged"))


def test_options_that_change_what_an_adapter_computes_are_refused(tmp_path: Path) -> None:
    case = save_adapted("qwen2", tmp_path)
    config = Path(case.adapter) / CONFIG_FILE
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(CheckpointError, match="only plain LoRA is supported, but use_dora is True"):
        open_adapter_folder(Path(case.adapter), Path(case.base))
    saved = json.loads(config.read_text()) | {"use_dora": False, "modules_to_save": ["norm", "lm_head"]}
    config.write_text(json.dumps(saved))
    with pytest.raises(CheckpointError, match="but modules_to_save has norm"):
        open_adapter_folder(Path(case.adapter), Path(case.base))


def changed(case: Adapted, **fields: object) -> Path:
    """Change fields of a case's adapter_config.json, and return the folder."""
    folder = Path(case.adapter)
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "mica"),
        ("init_lora_weights", "eva"),
        ("loftq_config", {"loftq_bits": 4}),
        ("lora_ga_config", {"direction": "ArB2r"}),
        ("velora_config", {"rank": 1}),
        ("monteclora_config", {}),
        ("use_bdlora", {"nblocks": 2}),
        ("layers_pattern", "layers"),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("ensure_weight_tying", True),
        ("kasa_config", {"beta": 1}),
        ("an_option_of_tomorrow", None),
        ("r", 0),
        ("lora_alpha", "16"),
        ("target_modules", ["q_proj", 3]),
    ],
)
def test_an_option_that_is_not_known_to_be_neutral_is_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    folder = changed(case := save_adapted("qwen2", tmp_path), **{name: value})
    with pytest.raises(CheckpointError, match=f"only plain LoRA is supported, but .*{name}"):
        open_adapter_folder(folder, Path(case.base))


def by_peft(base: str, folder: Path, **options: object) -> Adapted:
    """Let PEFT create, change and save an adapter of a model."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, **options)
    torch.manual_seed(3)
    model = peft.get_peft_model(load_lm(Path(base)), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return Adapted(base=base, adapter=str(folder), lora=read_lora(folder))


@pytest.mark.parametrize("initialization", [True, False, "gaussian", "orthogonal"])
def test_every_accepted_initialization_merges_like_peft(tmp_path: Path, initialization: object) -> None:
    base = save_adapted("qwen2", tmp_path).base
    targets = ["q_proj", "v_proj", "down_proj"]
    case = by_peft(base, tmp_path / "by_peft", target_modules=targets, init_lora_weights=initialization)
    check_merged(case, merged_by_command(case, case.adapter, tmp_path / "merged"))

    # Null is read like false.
    if initialization is False:
        changed(case, init_lora_weights=None)
        check_merged(case, merged_by_command(case, case.adapter, tmp_path / "null"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3-tied"])
def test_full_paths_of_projections(tmp_path: Path, family: str) -> None:
    """PEFT names the projections of a small model by their paths."""
    base = save_adapted(family, tmp_path).base
    case = by_peft(base, tmp_path / "by_peft", target_modules="all-linear")
    names = json.loads((Path(case.adapter) / CONFIG_FILE).read_text())["target_modules"]
    layers = len({name for name, _ in load_lm(Path(base)).named_modules() if name.endswith("q_proj")})
    paths = [f"model.layers.{layer}.{_block(name)}.{name}" for layer in range(layers) for name in names]
    changed(case, target_modules=paths)
    case = case._replace(lora=read_lora(Path(case.adapter)))
    check_merged(case, merged_by_command(case, case.adapter, tmp_path / "merged"))


def _block(projection: str) -> str:
    return "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"


def test_a_path_of_one_layer_is_refused_if_the_others_have_no_adapter(tmp_path: Path) -> None:
    base = save_adapted("qwen2", tmp_path).base
    targets = ["model.layers.0.mlp.down_proj"]
    case = by_peft(base, tmp_path / "by_peft", target_modules=targets)
    with pytest.raises(
        CheckpointError, match=r"it differs in \d+ tensors?, such as model\.layers\.1\.mlp\.down_proj"
    ):
        open_adapter_folder(Path(case.adapter), Path(base))
