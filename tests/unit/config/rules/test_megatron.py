"""Options of Megatron-Core: which are passed on, and what is refused of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megarl.config.kinds import OptimizerKind
from megarl.config.layers import find_transformer_engine
from megarl.config.load import load_config, plain_values, read_config
from megarl.config.megatron_fields import DTYPES, SECTIONS, find_megatron, megatron_fields
from megarl.config.megatron_options import (
    element_bytes,
    owned_fields,
    requirements,
    token_multiple,
    uncounted_options,
)
from megarl.config.roles import ROLES, ModelRole, model_roles
from megarl.config.rules.fp8 import MULTIPLE, products_fit
from megarl.config.schema import (
    DType,
    ExpertsConfig,
    MegatronConfig,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
)
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import validate
from megarl.config.values import schema_keys
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from tests.families import example_architecture
from tests.unit.config.folders import model_folder, ppo_values, write_yaml
from tests.unit.config.rules.test_experts import EXPERTS

_T = "actor.megatron.transformer"
_O = "actor.megatron.optimizer"
_D = "actor.megatron.ddp"
_ON_CUDA = ("device=cuda", "model.dtype=bfloat16")
_TWO_EXPERT_RANKS = "actor.parallel.expert_parallel_size=2"
PRESETS = sorted(file.stem for file in (CONFIGS_DIR / "megatron").glob("*.yaml"))


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    """The actor and the reference have experts, the critic is dense."""
    values = ppo_values(tmp_path)
    # Sizes that FP8 multiplies.
    sizes = {"hidden_size": 128, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    values["model"]["path"] = str(model_folder(tmp_path / "experts", **(EXPERTS | sizes)))
    values["critic"]["model"] = {"path": str(tmp_path / "model")}
    values["actor"]["parallel"]["sequence_parallel"] = True
    values["rollout"]["engine"] = "sglang"

    return write_yaml(tmp_path / "run.yaml", values)


def load(path: str, *overrides: str) -> PPOConfig:
    return load_config(PPOConfig, path, list(overrides))


def violations(path: str, *overrides: str) -> list[str]:
    return [str(violation) for violation in validate(load(path, *overrides))]


# ---- the tables of fields


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_megatron_is_in_one_table(section: str) -> None:
    """A new Megatron may add fields, and megarl must decide what to do with each."""
    owned = set(owned_fields(section))
    passed_on = set(requirements(section))
    assert owned & passed_on == set()
    assert owned | passed_on == set(megatron_fields(section))


# Fields that Megatron's configuration classes replace by others, or that set a flag of PyTorch.
_READ_AT_ONCE = {
    "disable_bf16_reduced_precision_matmul",
    "moe_deepep_num_sms",
    "moe_enable_deepep",
    "moe_hybridep_num_sms",
    "moe_router_padding_for_fp8",
}


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_every_field_that_is_passed_on_has_a_reader() -> None:
    """Megatron also has arguments of its spec builders, which megarl does not call with the configuration."""
    read = set[str]()
    assert (folder := find_megatron()) is not None
    for file in folder.rglob("*.py"):
        if not file.name.endswith(("_config.py", "layer_specs.py", "variant_module_specs.py")):
            read |= attributes_read(file.read_text(encoding="utf-8"))
    assert len(read) > 5_000
    passed_on = {name for section in SECTIONS for name in requirements(section)}
    assert sorted(passed_on - read) == sorted(_READ_AT_ONCE)


def attributes_read(source: str) -> set[str]:
    """Return the names that a source reads as attributes, also by `getattr`."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    asked = (n.args for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "getattr")
    return found | {args[1].value for args in asked if isinstance(args[1], ast.Constant)}


def test_a_reader_is_found() -> None:
    source = "config.read = getattr(config, 'asked', 0) + self.config.loaded\nsetattr(config, 'written', 1)"
    assert attributes_read(source) == {"asked", "config", "loaded"}


def test_reasons_name_keys_that_exist() -> None:
    known = {key.partition(".")[2] for key in _keys("actor")} | {"parallel", "optim"}
    for section in SECTIONS:
        for name, reason in owned_fields(section).items():
            for word in reason.split("{role}.")[1:]:
                key = word.split()[0].rstrip(",;")
                # The last parts of a key may be names of Megatron's fields.
                assert any(key == each or key.startswith("megatron.") for each in known), (name, key)


def _keys(section: str) -> list[str]:
    return [key for key in schema_keys(PPOConfig) if key.startswith(f"{section}.")]


def test_values_by_type() -> None:
    fields = megatron_fields("transformer")
    assert True in fields["moe_permute_fusion"]
    assert 1 not in fields["moe_permute_fusion"]
    assert "flash" in fields["attention_backend"]
    assert "fast" not in fields["attention_backend"]
    assert None in fields["fp8"]
    assert "e4m3" in fields["fp8"]
    assert "e5m2" not in fields["fp8"]
    assert 3 in fields["moe_z_loss_coeff"]  # an integer is a number
    assert True not in fields["moe_z_loss_coeff"]
    assert [1, 0] in fields["moe_layer_freq"]
    assert ["a"] not in fields["moe_layer_freq"]
    assert not any(value in fields["activation_func"] for value in (True, 1, "silu", ["silu"]))
    assert DTYPES["bf16"] == "bfloat16"
    assert "bf16" in megatron_fields("optimizer")["exp_avg_dtype"]


# ---- what is refused


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{_T}.moe_permute_fuson=true", "did you mean moe_permute_fusion"),
        (f"{_D}.bucket_sise=1", "did you mean bucket_size"),
        (f"{_T}.hidden_size=64", "use model.path"),
        (f"{_T}.tensor_model_parallel_size=2", "use actor.parallel.tensor_parallel_size"),
        ("critic.megatron.transformer.sequence_parallel=true", "use critic.parallel.sequence_parallel"),
        (f"{_T}.recompute_granularity=full", "use actor.recompute"),
        (f"{_T}.moe_aux_loss_coeff=0.1", "use actor.experts.aux_loss_coefficient"),
        (f"{_T}.params_dtype=bf16", "use model.dtype"),
        (f"{_T}.hidden_dropout=0.1", "fixed at 0"),
        (f"{_T}.activation_func=silu", "no file can contain"),
        (f"{_T}.tp_comm_overlap=true", "equal numbers of tokens"),
        (f"{_T}.fp8_param=true", "weight sync"),
        (f"{_D}.overlap_grad_reduce=false", "leave it out"),
        (f"{_D}.use_megatron_fsdp=true", "ZeRO 1"),
        (f"{_O}.lr=0.1", "use actor.optim.lr"),
        (f"{_O}.optimizer=sgd", "AdamW"),
        (f"{_O}.optimizer_cpu_offload=true", "offloading"),
        (f"{_T}.moe_router_fusion=1", "must be true or false"),
        (f"{_T}.attention_backend=fast", "one of flash"),
        (f"{_D}.bucket_size=large", "must be an integer"),
        (f"{_O}.exp_avg_dtype=bf16", "has no effect unless use_precision_aware_optimizer is true"),
        (f"{_T}.fp8_recipe=blockwise", "has no effect unless fp8"),
        (f"{_T}.batch_invariant_mode=true", "has no effect, because megarl does not call that part"),
        (
            f"{_T}={{fp8: e4m3, fp8_recipe: tensorwise, fp8_dot_product_attention: true}}",
            "fp8_dot_product_attention has no kernel for packed rows; remove it, or set engine.packing=false",
        ),
        ("reference.megatron.transformer={hidden_size: 3}", "reference.megatron.transformer.hidden_size"),
        (
            f"{_O}={{use_precision_aware_optimizer: true, exp_avg_dtype: fp8}}",
            "stored in float32 or bfloat16",
        ),
    ],
)
def test_refused(ppo: str, overrides: str, expected: str) -> None:
    (found,) = violations(ppo, *_ON_CUDA, overrides)
    assert found.startswith(overrides.partition("=")[0])
    assert expected in found


@pytest.mark.parametrize("given", ["", ", fp8_recipe: delayed"])
def test_scales_of_earlier_batches_are_refused(ppo: str, given: str) -> None:
    (found,) = violations(ppo, *_ON_CUDA, f"{_T}={{fp8: hybrid{given}}}")
    assert found.startswith(f"{_T}.fp8_recipe: is {'delayed' if given else 'not set, so it is delayed'}")
    assert "log-probs would depend on what ran before" in found
    assert "use blockwise (Hopper), mxfp8 (Blackwell) or tensorwise" in found
    (found,) = violations(ppo, *_ON_CUDA, f"{_T}={{fp8: hybrid, fp8_recipe: current}}")
    assert "must be one of" in found


@pytest.mark.parametrize(
    ("family", "changes", "parallel", "expected"),
    [
        ("qwen3", {}, {}, ""),
        ("qwen3", {"intermediate_size": 104}, {}, "104 columns of down_proj"),
        ("qwen3", {}, {"tensor_parallel_size": 4}, "24 columns of down_proj"),
        ("qwen3", {"head_dim": 10}, {"tensor_parallel_size": 2}, "40 columns of o_proj"),
        ("qwen3_moe", {"moe_intermediate_size": 24}, {}, "24 columns of an expert's down_proj"),
        (
            "qwen3_5_moe",
            {},
            {"tensor_parallel_size": 2},
            "200 rows of in_proj_qkv, in_proj_z, in_proj_b, in_proj_a",
        ),
        ("deepseek_v3", {}, {}, "24 rows of q_a_proj, 28 rows of kv_a_proj_with_mqa, 20 columns of kv_b"),
    ],
)
def test_sizes_that_are_not_multiplied_in_fp8_are_refused(
    family: str, changes: dict[str, int], parallel: dict[str, int], expected: str
) -> None:
    """Evidence for the number is in Transformer Engine's source."""
    architecture = example_architecture(family, **changes)
    found = refused_sizes(architecture, parallel)
    assert len(found) == bool(expected)
    assert all(expected in message for message in found)


@pytest.mark.parametrize(("size", "rows"), [(1, None), (2, None), (4, 4120), (8, 2060)])
def test_the_input_projection_of_a_gated_delta_net_counts_as_a_whole(size: int, rows: int | None) -> None:
    """Qwen3.6-27B has 16,480 rows: 2 x 16 x 128 of queries and keys, 2 x 48 x 128 of values and gates, 2 x 48."""
    architecture = read_architecture(str(CONFIGS_DIR / "models" / "Qwen3.6-27B"))
    found = refused_sizes(architecture, {"tensor_parallel_size": size})
    assert len(found) == (rows is not None)
    assert all(f"would have {rows} rows of in_proj_qkv, in_proj_z" in message for message in found)


def refused_sizes(architecture: Architecture, parallel: dict[str, int]) -> list[str]:
    """Return what the rule says about training in FP8. Without FP8 it says nothing."""
    fp8 = MegatronConfig(transformer={"fp8": "e4m3", "fp8_recipe": "blockwise"})
    config = ParallelConfig(**parallel)
    role = ModelRole(
        **vars(ROLES[0]),
        path="here",
        path_key="model.path",
        parallel=config,
        micro_batch=MicroBatchConfig(),
        optim=None,
        megatron=fp8,
    )
    assert list(products_fit(PPOConfig(), replace(role, megatron=MegatronConfig()), architecture)) == []
    return [violation.message for violation in products_fit(PPOConfig(), role, architecture)]


def test_the_multiple_is_transformer_engines() -> None:
    folder = find_transformer_engine() / "pytorch"
    assert MULTIPLE == 16
    assert "tensor.shape[-1] % 16 != 0" in (folder / "utils.py").read_text()
    assert "assert_dim_for_fp8_exec(inputmat, weight)" in (folder / "module" / "linear.py").read_text()


def test_experts_options_of_a_dense_model_are_refused(ppo: str) -> None:
    (found,) = violations(ppo, *_ON_CUDA, "critic.megatron.transformer.moe_permute_fusion=true")
    assert "dense" in found
    (found,) = violations(ppo, *_ON_CUDA, "critic.megatron.transformer.use_transformer_engine_op_fuser=true")
    assert "dense" in found
    assert violations(ppo, *_ON_CUDA, f"{_T}.moe_permute_fusion=true") == []


@pytest.mark.parametrize(
    "option",
    [f"{_T}.moe_permute_fusion=true", f"{_T}.fp8=e4m3", f"{_T}.moe_token_dispatcher_type=flex"],
)
def test_on_a_cpu_options_for_cuda_are_refused(ppo: str, option: str) -> None:
    (found,) = violations(ppo, "device=cpu", _TWO_EXPERT_RANKS, option)
    assert "requires CUDA" in found


def test_local_layers_have_no_options_of_transformer_engine(ppo: str) -> None:
    (found,) = violations(ppo, *_ON_CUDA, "engine.layers=local", f"{_T}.moe_permute_fusion=true")
    assert "engine.layers=transformer_engine" in found
    (found,) = violations(ppo, "device=cuda", "model.dtype=float32", f"{_T}.moe_permute_fusion=true")
    assert "engine.layers=transformer_engine" in found


def test_what_works_on_a_cpu_is_accepted(ppo: str) -> None:
    options = f"{_D}={{bucket_size: 1000, check_for_nan_in_grad: true}}"
    assert violations(ppo, "device=cpu", options, f"{_O}.decoupled_weight_decay=true") == []


# ---- presets


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_accepted_on_cuda(ppo: str, preset: str) -> None:
    assert violations(ppo, *_ON_CUDA, _TWO_EXPERT_RANKS, f"actor.megatron={preset}") == []


def test_presets_are_combined_and_changed(ppo: str) -> None:
    config = load(ppo, "actor.megatron=[fused_experts,fp8_blockwise]", f"{_T}.fp8=hybrid")
    assert config.actor.megatron.transformer == {
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "fp8": "hybrid",
        "fp8_recipe": "blockwise",
    }
    assert config.critic.megatron == MegatronConfig()


def test_a_preset_in_a_file(tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    values["actor"]["megatron"] = {"base": ["bf16_gradients", "mine"], "ddp": {"bucket_size": 5}}
    values["critic"]["megatron"] = "bf16_gradients"
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/mine.yaml").write_text("ddp: {bucket_size: 3, check_for_nan_in_grad: true}\n")
    path = write_yaml(tmp_path / "run.yaml", values)

    config = load(path)
    assert config.actor.megatron.ddp == {
        "grad_reduce_in_fp32": False,
        "bucket_size": 5,
        "check_for_nan_in_grad": True,
    }
    assert config.critic.megatron.ddp == {"grad_reduce_in_fp32": False}

    # A preset on the command line replaces those of the file.
    assert load(path, "actor.megatron=bf16_gradients").actor.megatron.ddp == {"grad_reduce_in_fp32": False}


def test_unknown_presets_are_named(ppo: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ppo, "actor.megatron=fused")
    (problem,) = caught.value.problems
    assert "fused_experts" in problem


def test_the_resolved_configuration_has_the_options(ppo: str) -> None:
    values = plain_values(load(ppo, "actor.megatron=fused_experts"))
    assert values["actor"]["megatron"]["transformer"] == {
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
    }


# ---- roles


def test_the_reference_computes_as_the_actor(ppo: str) -> None:
    options = ("algorithm.kl.where=loss", f"{_T}.moe_permute_fusion=true", f"{_D}.bucket_size=3")
    roles = {role.name: role for role in model_roles(load(ppo, *options))}
    assert roles["reference"].megatron == MegatronConfig(transformer={"moe_permute_fusion": True})
    assert roles["reference"].megatron_key == "actor.megatron"
    assert roles["critic"].megatron == MegatronConfig()

    own = {role.name: role for role in model_roles(load(ppo, *options, "reference.megatron.transformer={}"))}
    assert own["reference"].megatron == MegatronConfig()


# ---- sizes


def test_bytes_of_a_parameter() -> None:
    """Twelve bytes of state, eight with bfloat16 moments; gradients of four bytes or two."""
    assert element_bytes(DType.bfloat16, MegatronConfig(), OptimizerKind.adam) == (4, 4, 8, 0)
    assert element_bytes(DType.float32, MegatronConfig(), OptimizerKind.adam) == (4, 0, 8, 0)
    precise = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bfloat16"}
    assert element_bytes(DType.bfloat16, MegatronConfig(optimizer=precise), OptimizerKind.adam) == (
        4,
        4,
        4,
        0,
    )
    one = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    assert element_bytes(DType.bfloat16, MegatronConfig(optimizer=one), OptimizerKind.adam) == (4, 4, 6, 4)
    half = {"grad_reduce_in_fp32": False}
    assert element_bytes(DType.bfloat16, MegatronConfig(ddp=half), OptimizerKind.adam) == (2, 4, 8, 4)
    assert element_bytes(DType.bfloat16, MegatronConfig(ddp=half, optimizer=precise), OptimizerKind.adam) == (
        2,
        4,
        4,
        0,
    )
    assert element_bytes(DType.float32, MegatronConfig(ddp=half), OptimizerKind.adam) == (4, 0, 8, 0)


def test_multiples_of_tokens() -> None:
    assert token_multiple(MegatronConfig()) == 1
    assert token_multiple(MegatronConfig(transformer={"fp8": "e4m3"})) == 16
    assert token_multiple(MegatronConfig(transformer={"fp8": "e4m3", "fp8_recipe": "blockwise"})) == 128


def test_options_that_the_memory_plan_does_not_count() -> None:
    assert uncounted_options(MegatronConfig(transformer={"fp8": "e4m3", "fp8_recipe": "blockwise"})) == [
        "fp8"
    ]
    assert uncounted_options(MegatronConfig(ddp={"grad_reduce_in_fp32": False})) == []


def test_names_are_read_without_importing_megatron() -> None:
    """A check stays fast, and needs no torch."""
    code = (
        "import sys; from megarl.config.megatron_fields import *; "
        "[megatron_fields(section) for section in SECTIONS]; "
        "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_refused_options_are_reported_with_others(ppo: str) -> None:
    partial = read_config(PPOConfig, ppo, ["actor.megatron.transformer=3", "actor.megatron.dpp={}"])
    assert len(partial.problems) == 2


# Own keys, below the section of a role unless they begin with another one, and the Megatron fields that they set.
OWN_KEYS = {
    "transformer": {
        "engine.cp_comm_type": "cp_comm_type",
        "engine.layers": "transformer_impl",
        "engine.routing_replay": "moe_enable_routing_replay",
        "actor.experts.bias_update_rate": "moe_router_bias_update_rate",
        "actor.experts.aux_loss_coefficient": "moe_aux_loss_coeff",
        "actor.experts.z_loss_coefficient": "moe_z_loss_coeff",
        "actor.recompute": "recompute_granularity",
        "actor.recompute_modules": "recompute_modules",
        "actor.recompute_num_layers": "recompute_num_layers",
        "actor.parallel.tensor_parallel_size": "tensor_model_parallel_size",
        "actor.parallel.pipeline_parallel_size": "pipeline_model_parallel_size",
        "actor.parallel.virtual_pipeline_parallel_size": "virtual_pipeline_model_parallel_size",
        "actor.parallel.pipeline_layout": "pipeline_model_parallel_layout",
        "actor.parallel.context_parallel_size": "context_parallel_size",
        "actor.parallel.sequence_parallel": "sequence_parallel",
        "actor.parallel.expert_parallel_size": "expert_model_parallel_size",
        "actor.parallel.expert_tensor_parallel_size": "expert_tensor_parallel_size",
        "model.dtype": "params_dtype",
    },
    "optimizer": {
        "actor.optim.lr": "lr",
        "actor.optim.min_lr": "min_lr",
        "actor.optim.weight_decay": "weight_decay",
        "actor.optim.betas": "adam_beta1",
        "actor.optim.eps": "adam_eps",
        "actor.optim.clip_grad": "clip_grad",
    },
}


@pytest.mark.parametrize("section", OWN_KEYS)
def test_the_refusal_of_a_field_names_the_key_that_sets_it(section: str) -> None:
    for key, field in OWN_KEYS[section].items():
        assert f"use {key}" in owned_fields(section)[field].replace("{role}", "actor"), field


def test_every_key_of_the_settings_that_megatron_has_too_is_compared() -> None:
    """A new key of the router, the optimizer or the layout needs a row, and so does its field's refusal."""
    compared = {key for keys in OWN_KEYS.values() for key in keys}
    sections = {"actor.experts": ExpertsConfig, "actor.optim": OptimConfig, "actor.parallel": ParallelConfig}
    # What megarl computes itself has no field of Megatron.
    own = {"freeze_router", "warmup_steps", "decay", "on_nonfinite", "data_parallel_size"}
    keys = {f"{name}.{each.name}" for name, section in sections.items() for each in fields(section)}
    assert {key for key in keys if key.rpartition(".")[2] not in own} - compared == set()
