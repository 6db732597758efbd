"""Each rule across sections: a broken configuration has one violation.

It names the keys, both values and a valid value.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.finding import Absence, nearest_divisors, nearest_multiples
from megarl.config.kinds import WRONG_SAMPLES
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.rules.rollout import generation_ahead
from megarl.config.rules.run import loss_metrics, validation_metrics
from megarl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionLevel,
    DPOConfig,
    DynamicSamplingConfig,
    EarlyStopConfig,
    KeepBestConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    PreferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RewardModelRunConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    SamplingConfig,
    SFTConfig,
    SFTTrainerConfig,
    TrainerConfig,
)
from megarl.config.schema.keys import Range, leaves
from megarl.config.validate import validate, validate_here
from megarl.config.versions import SGLANG
from tests.unit.config.folders import model_folder, pair_values, ppo_values, sft_values, write_yaml

_CORRECTED = "algorithm.rollout_correction.level=token"


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    return write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))


def violations(path: str, *overrides: str) -> list[str]:
    """Return all violations of a run that starts here, except that this machine has no GPU."""
    config = load_config(PPOConfig, path, list(overrides))
    found = [*validate(config), *validate_here(config, writes=True)]
    return [str(violation) for violation in found if violation.absence is not Absence.gpu]


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "1", True),
        ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "True", True),
        ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "0", False),
        ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "", False),
        ("SGLANG_FORCE_FP8_MARLIN", "yes", True),
        ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "true", True),
        ("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "1", True),
        ("SGLANG_SIMULATE_ACC_LEN", "2.5", True),
        ("SGLANG_SIMULATE_ACC_LEN", "-1", False),
        ("SGLANG_LOG_MS", "1", False),
    ],
)
def test_switches_of_sglang_that_make_samples_wrong_are_refused(
    ppo: str, name: str, value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = [each for each in violations(ppo, "rollout.engine=sglang") if name in each]
    assert len(found) == is_refused
    assert all(f"the variable {name}={value} " in each and f"unset {name}" in each for each in found)
    assert not [each for each in violations(ppo, "rollout.engine=hf") if name in each]


@pytest.mark.parametrize(
    ("name", "value", "options", "is_refused"),
    [
        ("NVTE_FLASH_ATTN", "0", "{}", True),
        ("NVTE_FLASH_ATTN", "1", "{}", False),
        ("NVTE_FLASH_ATTN", "0", "{attention_backend: fused}", False),
        ("NVTE_FUSED_ATTN", "1", "{attention_backend: flash}", True),
        ("NVTE_UNFUSED_ATTN", "", "{attention_backend: auto}", True),
        ("NVTE_UNFUSED_ATTN", "1", "{attention_backend: local}", True),
        ("NVTE_FLASH_ATTN_V3", "1", "{flash_attention_version: 2}", True),
        ("NVTE_FLASH_ATTN_V3", "0", "{flash_attention_version: 2}", False),
        ("NVTE_FLASH_ATTN_V3", "0", "{flash_attention_version: 3}", False),
        ("NVTE_FLASH_ATTN_V3", "0", "{}", False),
        ("NVTE_DEBUG", "1", "{}", False),
    ],
)
def test_switches_of_attention_that_contradict_the_options_are_refused(
    ppo: str, name: str, value: str, options: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own assertion names no key, and comes when the models are built."""
    monkeypatch.setenv(name, value)
    given = [f"actor.megatron.transformer={options}", "device=cuda", "model.dtype=bfloat16"]
    by_role = [each for each in violations(ppo, *given) if name in each]
    found = [each for each in by_role if each.startswith("actor.megatron.transformer: ")]
    assert len(found) == is_refused
    assert all(f"the environment has {name}={value}; unset {name}" in each for each in found)


@pytest.mark.parametrize(
    ("content", "backend", "said"),
    [
        (None, "deepep", "flex requires the package deep_ep (pip install sgl-deep-ep)"),
        (None, "hybridep", "flex requires the package deep_ep of DeepEP's branch hybrid-ep"),
        (None, "ncclep", None),
        ("class Buffer: pass", "deepep", None),
        ("class Buffer: pass", "hybridep", "flex requires the package deep_ep of DeepEP's branch hybrid-ep"),
        ("class HybridEPBuffer: pass", "hybridep", None),
    ],
)
def test_the_package_of_a_flexible_dispatcher_is_named(
    ppo: str,
    content: str | None,
    backend: str,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if content is not None:
        (tmp_path / "deep_ep").mkdir()
        (tmp_path / "deep_ep" / "__init__.py").write_text(content)
        monkeypatch.syspath_prepend(str(tmp_path))
    options = f"{{moe_token_dispatcher_type: flex, moe_flex_dispatcher_backend: {backend}}}"
    found = violations(ppo, f"actor.megatron.transformer={options}", "device=auto", "model.dtype=bfloat16")
    named = [each for each in found if "requires the package" in each]
    assert len(named) == (said is not None)
    assert all(said in each for each in named)  # type: ignore[operator]


def test_each_model_that_the_switches_of_attention_contradict_is_named(
    ppo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic has processes of its own, and the default."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    (found,) = violations(ppo, "actor.megatron.transformer.attention_backend=flash", "model.dtype=bfloat16")
    assert found.startswith("critic.megatron.transformer: with these options Megatron sets NVTE_FUSED_ATTN=1")


def test_megatron_sets_the_switches_of_attention() -> None:
    (folder,) = find_spec("megatron").submodule_search_locations  # pyrefly: ignore[missing-attribute]
    text = (Path(folder) / "core/models/common/language_module/language_module.py").read_text()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        assert f'check_and_set_env_variable("{name}", 1, AttnBackend.auto)' in text
    assert "for version in (2, 3, 4):" in text
    assert 'f"NVTE_FLASH_ATTN_V{version}", 0, self.config.attention_backend' in text


def test_sglang_has_the_switches() -> None:
    """Another version may have renamed them."""
    (folder,) = find_spec("sglang").submodule_search_locations  # pyrefly: ignore[missing-attribute]
    text = (Path(folder) / "srt" / "environ.py").read_text()
    assert [name for name in WRONG_SAMPLES if name not in text] == []


def test_packages_of_an_engine_that_are_not_installed_are_named(
    ppo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def without_sglang(name: str) -> str:
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_sglang)
    assert violations(ppo, "rollout.engine=hf") == []
    (problem,) = violations(ppo, "rollout.engine=sglang")
    assert problem.startswith(
        f"rollout.engine: 'sglang' requires packages that are not installed: pip install "
        f"'sglang{SGLANG['sglang']}' "
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # whose nodes have it or have not
    assert violations(ppo, "rollout.engine=sglang") == []


def test_a_good_configuration_has_none(ppo: str) -> None:
    assert violations(ppo) == []
    assert violations(ppo, "model.dtype=bfloat16", "device=cpu") == []  # bf16 on a CPU is allowed

    # 13 rows over 2 replicas: uneven is allowed
    assert violations(ppo, "trainer.prompts_per_step=13", "trainer.updates_per_step=4") == []

    # 56 + 8: all of the 64 positions, and of the 64 tokens of a micro-batch
    assert violations(ppo, "data.max_prompt_length=56") == []
    assert violations(ppo, "rollout.validation.top_p=0.9", "rollout.validation.temperature=0") == []

    # Four ranks hold the two key-value heads twice.
    assert (
        violations(
            ppo,
            "rollout.engine=sglang",
            "rollout.tensor_parallel_size=4",
            "rollout.validation.min_new_tokens=8",
        )
        == []
    )
    assert violations(ppo, "placement.strategy=hybrid", "rollout.num_replicas=4") == []
    assert violations(ppo, "rollout.max_staleness=2", _CORRECTED) == []
    # Reward functions have no device that the engines could share.
    pools = (
        "placement.strategy=custom",
        "placement.pools={models: [1], engines: [1]}",
        "placement.roles={actor: models, reference: models, critic: models, rollout: engines, reward: engines}",
    )
    assert violations(ppo, "rollout.max_staleness=2", _CORRECTED, *pools) == []

    # Padded rows of float32 have an attention in Transformer Engine, packed ones have none.
    assert (
        violations(
            ppo,
            "engine.layers=transformer_engine",
            "device=cuda",
            "model.dtype=float32",
            "engine.packing=false",
        )
        == []
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["trainer.updates_per_step=5"],
            "trainer.updates_per_step, trainer.prompts_per_step, rollout.n: prompts_per_step 12 x n 4 = 48 "
            "samples cannot be divided into "
            "updates_per_step 5 mini-batches; use updates_per_step 4 or 6 or prompts_per_step 10 or 15",
        ),
        (
            ["trainer.prompts_per_step=1", "rollout.n=1", "trainer.updates_per_step=1"],
            "actor.parallel.data_parallel_size, trainer.prompts_per_step: a mini-batch has 1 row, fewer "
            "than data_parallel_size 2, so some replicas would have no rows; use data_parallel_size 1 or "
            "less, or mini-batches of 2 rows or more",
        ),
        (
            ["engine.layers=transformer_engine", "device=cpu"],
            "engine.layers, device: transformer_engine supports CUDA only, but device is cpu; use "
            "engine.layers=auto or local",
        ),
        (
            ["engine.layers=transformer_engine", "device=cuda", "model.dtype=float32"],
            "engine.layers, model.dtype: transformer_engine has no float32 attention for packed rows; use "
            "engine.layers=auto or local, or model.dtype=bfloat16",
        ),
        (
            ["engine.flash_attention=fa4", "device=cpu"],
            "engine.flash_attention, device: fa4 supports CUDA only, but device is cpu; use "
            "engine.flash_attention=fa2",
        ),
        (
            ["engine.flash_attention=fa3", "device=cuda", "model.dtype=float32"],
            "engine.flash_attention, model.dtype: fa3 has no float32 kernels; use engine.flash_attention=fa2, "
            "or model.dtype=bfloat16",
        ),
        (
            ["engine.cp_comm_type=p2p", "device=cuda", "engine.layers=local", "engine.share_prompts=false"],
            "engine.cp_comm_type, engine.layers, device: p2p is an exchange of Transformer Engine's attention, "
            "which local layers and a CPU do not have; use engine.cp_comm_type=auto, or engine.layers=auto on "
            "CUDA",
        ),
        (
            ["engine.cp_comm_type=p2p", "device=cuda"],
            "engine.cp_comm_type, engine.share_prompts: p2p treats sequences as independent, but samples share "
            "their prompts; use engine.cp_comm_type=auto, or engine.share_prompts=false",
        ),
        (
            ["actor.recompute=selective", "actor.recompute_modules=[]"],
            "actor.recompute_modules, actor.recompute: selective recomputes nothing, because "
            "recompute_modules is empty; list a module, such as [core_attn], or use recompute=none",
        ),
        (
            ["critic.parallel.context_parallel_size=2", "engine.packing=false"],
            "critic.parallel.context_parallel_size, engine.packing: context_parallel_size 2 requires packed "
            "rows, but packing is false; use engine.packing=true, or context_parallel_size 1",
        ),
        (
            ["actor.parallel.context_parallel_size=2", "actor.micro_batch.max_tokens=11"],
            "actor.micro_batch.max_tokens, actor.parallel.context_parallel_size, data.max_prompt_length, "
            "data.max_response_length: a row "
            "may have 24 tokens (24 with the padding of the ranks' chunks), more than max_tokens 11 x "
            "context_parallel_size 2 = 22; use "
            "max_tokens 12 or more, or shorter rows",
        ),
        (
            ["critic.recompute=full", "critic.recompute_modules=[mlp]"],
            "critic.recompute_modules, critic.recompute: is [mlp], but has no effect with "
            "critic.recompute=full; set critic.recompute=selective, or remove it",
        ),
        (
            ["actor.recompute=selective", "actor.recompute_num_layers=1"],
            "actor.recompute_num_layers, actor.recompute: is 1, but has no effect with "
            "actor.recompute=selective; set actor.recompute=full, or remove it",
        ),
        (
            ["critic.recompute=full", "critic.recompute_num_layers=5"],
            "critic.recompute_num_layers, critic.parallel.pipeline_parallel_size: recompute_num_layers 5 is "
            "more than the 2 layers of a "
            "stage; use fewer, or null for all",
        ),
        (
            ["critic.parallel.tensor_parallel_size=4"],
            "num_key_value_heads 2 of {model} does not divide by tensor_parallel_size 4; use 2",
        ),
        (
            ["critic.parallel.pipeline_parallel_size=3"],
            "critic.parallel.pipeline_parallel_size: num_hidden_layers 4 of {model} does not divide by "
            "pipeline_parallel_size 3; "
            "use 2 or 4 stages, or pipeline_layout=[1, 2, 1]",
        ),
        (
            ["critic.parallel.pipeline_layout=[1,2]"],
            "critic.parallel.pipeline_layout: is [1, 2], but must have 2 numbers of at least 1 "
            "(pipeline_parallel_size 2) whose sum is the 4 layers of {model}; use pipeline_layout=[2, 2]",
        ),
        (["critic.parallel.pipeline_layout=[4]"], "is [4], but must have 2 numbers of at least 1"),
        (["critic.parallel.pipeline_layout=[4,0]"], "is [4, 0], but must have 2 numbers of at least 1"),
        (
            ["critic.parallel.virtual_pipeline_parallel_size=4"],
            "does not divide by pipeline_parallel_size 2 x virtual_pipeline_parallel_size 4 = 8; use 4 "
            "stages",
        ),
        (
            ["actor.parallel.virtual_pipeline_parallel_size=2"],
            "has no effect with actor.parallel.pipeline_parallel_size=1: it requires a pipeline; set",
        ),
        (
            ["critic.parallel.sequence_parallel=true"],
            "has no effect with critic.parallel.tensor_parallel_size=1: it splits activations over tensor-parallel",
        ),
        (
            ["data.max_prompt_length=60", "actor.micro_batch.max_tokens=68"],
            "data.max_prompt_length, data.max_response_length: 60 + 8 = 68 tokens exceed "
            "max_position_embeddings 64 of {model}; use max_response_length 4",
        ),
        (["data.max_prompt_length=64", "actor.micro_batch.max_tokens=80"], "use shorter prompts"),
        (
            ["actor.micro_batch.max_tokens=20"],
            "actor.micro_batch.max_tokens, data.max_prompt_length, data.max_response_length: a row may have "
            "24 tokens, more than "
            "max_tokens 20; use max_tokens 24 or more, or shorter rows",
        ),
        (
            ["actor.micro_batch.sequences=2"],
            "actor.micro_batch.sequences, actor.micro_batch.max_tokens: exactly one must be set, but both "
            "are set (2 and 64)",
        ),
        (
            ["reference.micro_batch.max_tokens=null"],
            "reference.micro_batch.max_tokens: exactly one must be set, but neither is set",
        ),
        (
            ["rollout.temperature=0"],
            "rollout.temperature: is 0 (greedy), but training needs samples of the policy; use 1.0",
        ),
        (
            ["rollout.validation.top_k=0"],
            "rollout.validation.top_k: is 0, but must be at least 1, or -1 for all tokens",
        ),
        (
            ["rollout.max_staleness=2"],
            "rollout.max_staleness, algorithm.rollout_correction.level: is 2, so samples come from older "
            "weights than the trained ones, and no correction is enabled; use "
            "algorithm.rollout_correction.level=token",
        ),
        (
            ["rollout.max_staleness=1", _CORRECTED, "placement.strategy=hybrid"],
            "rollout.max_staleness, placement.strategy: is 1, so the engines generate while the other roles "
            "train, but in this placement they share devices with the actor; use split_collocate or "
            "stand_alone, or max_staleness=0",
        ),
        (
            ["rollout.late=mask"],
            "rollout.late, rollout.max_staleness: is mask, but has no effect with rollout.max_staleness=0: no "
            "sample is masked; set rollout.max_staleness=1",
        ),
        (
            ["rollout.late=mask", "rollout.max_staleness=2", "rollout.on_update=drain", _CORRECTED],
            "rollout.late, rollout.on_update: is mask, but has no effect with rollout.on_update=drain: no "
            "sample is masked; set rollout.on_update=continue",
        ),
        (["rollout.max_staleness=-1"], "rollout.max_staleness: is -1"),
        (
            ["rollout.tensor_parallel_size=2"],
            "the engine 'hf' cannot shard a model, but tensor_parallel_size is 2; use 1",
        ),
        (
            ["rollout.engine=sglang", "rollout.tensor_parallel_size=8"],
            "rollout.tensor_parallel_size: num_attention_heads 4 of {model} does not divide by "
            "tensor_parallel_size 8; use 4",
        ),
        (
            ["rollout.validation.min_new_tokens=9"],
            "rollout.validation.min_new_tokens, data.max_response_length: min_new_tokens 9 is above "
            "max_response_length 8; use 8 or fewer",
        ),
        (
            ["placement.strategy=hybrid", "rollout.num_replicas=5"],
            "num_replicas 5 x tensor_parallel_size 1 = 5 devices, but in the placement 'hybrid' the engines "
            "share the actor's 4; use num_replicas 4 or fewer, a larger actor layout, or the placement "
            "split_collocate",
        ),
        (
            ["algorithm.kl.controller.kind=adaptive", "algorithm.kl.where=loss"],
            "is adaptive, but has no effect with algorithm.kl.where=loss: it adjusts the penalty in the reward",
        ),
        (
            ["algorithm.advantage.estimator=grpo", "rollout.n=1", "trainer.critic_warmup_steps=0"],
            "rollout.n, algorithm.advantage.estimator: grpo compares the samples of a prompt, but n is 1",
        ),
        (
            ["algorithm.advantage.estimator=grpo"],
            "trainer.critic_warmup_steps, algorithm.advantage.estimator: is 4, but has no effect with ",
        ),
        (
            ["trainer.critic_warmup_steps=10"],
            "critic_warmup_steps 10 leaves none of total_steps 10 to train the actor; use 9 or fewer",
        ),
        (
            ["reward.functions=[]"],
            "reward.functions, reward.model.path: there are neither functions nor a model",
        ),
        (
            ["reward.functions=[{path: nowhere.py}]"],
            "reward.functions[0].path: there is no file 'nowhere.py'",
        ),
        (["data.train_files=[]"], "data.train_files: is empty; list at least one file"),
        (["data.val_files=[nowhere.parquet]"], "data.val_files: there is no file 'nowhere.parquet'"),
        (
            ["data.val_files=[megarl]"],
            "data.val_files: 'megarl' is a folder; list each file in it, or give a folder saved by "
            "`datasets`",
        ),
        (
            ["data.val_files=[README.md]"],
            "data.val_files: 'README.md' is not a data file: its name must end in .parquet, .jsonl",
        ),
        (
            ["data.train_weights=[1, 2]"],
            "data.train_weights, data.train_files: there are 2 weights for 1 file; give one for each",
        ),
        (
            ["data.train_weights=[0]"],
            "data.train_weights: is [0.0], but every weight must be above 0; remove files",
        ),
        (
            ["data.train_weights=[1]", "data.curriculum.kind=learnability"],
            "data.train_weights, data.curriculum.kind: the weights and the curriculum would both decide how",
        ),
        (
            ["data.curriculum.sampler=examples/custom_sampler.py:1"],
            "data.curriculum.sampler: 'examples/custom_sampler.py:1' does not name a function or a class in a file; write it as",
        ),
        (
            ["data.curriculum.sampler=nowhere.py:Sampler"],
            "data.curriculum.sampler: there is no file 'nowhere.py'",
        ),
        (
            ["data.curriculum={kind: learnability, sampler: examples/custom_sampler.py:UnsolvedPrompts}"],
            "data.curriculum.kind, data.curriculum.sampler: 'examples/custom_sampler.py:UnsolvedPrompts' would "
            "replace learnability; set only one",
        ),
        (
            ["data.curriculum.epoch_share=0.5"],
            "data.curriculum.epoch_share, data.curriculum.kind: is 0.5, but has no effect with data.curriculum.kind=epochs",
        ),
        (
            ["data.curriculum={kind: learnability, epoch_share: 0}"],
            "data.curriculum.epoch_share: is 0, but must be in (0, 1]",
        ),
        (["data.train_weights=[.nan]"], "data.train_weights: is [nan], but every weight must be above 0"),
        (["data.val_files=['*.parquet']"], "patterns are not expanded, so list each file"),
        (
            ["trainer.validate_every_steps=5"],
            "trainer.validate_every_steps, data.val_files: is 5, but has no effect with data.val_files=[]; set",
        ),
        (
            ["tracking.loggers=[console,swanlab]"],
            "tracking.loggers: 'swanlab' requires a package that is not installed: pip install swanlab",
        ),
        (
            ["critic.model.path=nowhere"],
            "critic.model.path: nowhere/config.json: there is no folder 'nowhere'",
        ),
        (["actor.optim.betas=[0.9]"], "actor.optim.betas: is [0.9], but must be 2 numbers, each in [0, 1)"),
        (["critic.optim.min_lr=1"], "critic.optim.min_lr, critic.optim.lr: min_lr 1 is above lr 1e-05"),
        (
            ["critic.optim.on_nonfinite=recover"],
            "critic.optim.on_nonfinite, recovery.enabled: on_nonfinite=recover returns to a snapshot, but "
            "recovery.enabled is false, so there is none; use recovery.enabled=true, or skip or stop",
        ),
        (
            ["recovery.straggler_factor=0.5"],
            "recovery.straggler_factor: is 0.5, a multiple of a usual time that half of all measurements exceed",
        ),
        (["recovery.hang_factor=1"], "recovery.hang_factor: is 1, a multiple of a usual time"),
        (
            ["profile.steps=[3,11]"],
            "profile.steps: has 11, but the steps of the run are 1 to 10",
        ),
        (
            ["profile.steps=[3]", "profile.roles=[actr]"],
            "profile.roles: has 'actr', but the models of the run are",
        ),
        (
            ["profile.steps=[3]", "profile.ranks=[0,5]"],
            "profile.ranks: has 5, but the ranks of actor are 0 to",
        ),
        (
            ["profile.steps=[3]", "profile.ranks=[]"],
            "profile.ranks: is empty, so that no process would be profiled; name at least one",
        ),
        (["algorithm.advantage.lam=1.5"], "algorithm.advantage.lam: is 1.5, but must be in [0, 1]"),
        (["algorithm.policy_loss.clip_low=1"], "algorithm.policy_loss.clip_low: is 1, but must be in (0, 1)"),
        (
            ["algorithm.policy_loss.clip_dual=0.5"],
            "algorithm.policy_loss.clip_dual: is 0.5, but must be above 1",
        ),
        (
            ["algorithm.entropy_coefficient=.nan"],
            "algorithm.entropy_coefficient: is nan, but must be a finite number",
        ),
        (["reward.max_error_rate=2"], "reward.max_error_rate: is 2, but must be in [0, 1]"),
        (["trainer.total_steps=0"], "trainer.total_steps: is 0, but must be at least 1"),
        (["trainer.updates_per_step=0"], "trainer.updates_per_step: is 0, but must be at least 1"),
        (
            ["actor.parallel.tensor_parallel_size=0"],
            "actor.parallel.tensor_parallel_size: is 0, but must be in [1, 1024]",
        ),
        (["actor.optim.lr=0"], "actor.optim.lr: is 0, but must be in (0, 1]"),
        (["actor.optim.lr=1e30"], "actor.optim.lr: is 1e+30, but must be in (0, 1]"),
        (
            ["trainer.seed=18446744073709551616"],
            "trainer.seed: is 1.84467e+19, but the largest number allowed is 1,000,000,000",
        ),
        (["trainer.total_steps=-10000000000"], "trainer.total_steps: is -1e+10, but must be at least 1"),
        (["rollout.health_limit_s=-1e30"], "rollout.health_limit_s: is -1e+30, but must be a"),
        (
            ["algorithm.entropy_coefficient=-1e30"],
            "algorithm.entropy_coefficient: is -1e+30, but the smallest number allowed is -1,000,000,000",
        ),
        (
            ["rollout.temperature=1e-30"],
            "rollout.temperature: is 1e-30: logits divided by it exceed the resolution of bfloat16; use 0.01",
        ),
        (
            ["rollout.validation.temperature=0.001"],
            "rollout.validation.temperature: is 0.001: logits divided by it",
        ),
        (["rollout.temperature=1e9"], "rollout.temperature: is 1e+09, but must be in [0, 100]"),
        (["resharding.bucket_mb=1e300"], "resharding.bucket_mb: is 1e+300, but must be in (0, 65536]"),
        (
            ["trainer.phase_time_limit_s=1e-300"],
            "trainer.phase_time_limit_s: is 1e-300, but must be at least 1",
        ),
        (["reward.num_processes=1000000"], "reward.num_processes: is 1e+06, but must be in [1, 10000]"),
        (["placement.num_nodes=1000000"], "placement.num_nodes: is 1e+06, but must be in [1, 10000]"),
        (
            ["placement.devices_per_node=1000000"],
            "placement.devices_per_node: is 1e+06, but must be in [1, 128]",
        ),
        (["rollout.num_replicas=100000"], "rollout.num_replicas: is 100000, but must be in [1, 10000]"),
        (
            ["trainer.output_dir=/"],
            "trainer.output_dir: is '/', the root of the file system; give a separate folder for the run",
        ),
        (
            ["trainer.output_dir=/dev/null"],
            "trainer.output_dir: '/dev/null' cannot be written: /dev/null: Not a directory; give a writable",
        ),
        (["trainer.output_dir=/proc/x"], "trainer.output_dir: '/proc/x' cannot be written: /proc: "),
        (["checkpoint.dir=/proc/1"], "checkpoint.dir: '/proc/1' cannot be written: /proc/1: "),
        (["trainer.early_stop.patience=0"], "trainer.early_stop.patience: is 0, but must be at least 1"),
        (
            ["trainer.early_stop.metric=val/score/mean"],
            "trainer.validate_every_steps, trainer.early_stop.metric: trainer.early_stop compares "
            "validations, but validate_every_steps is",
        ),
    ],
)
def test_one_mistake_is_one_violation(ppo: str, overrides: list[str], said: str) -> None:
    found = violations(ppo, *overrides)
    assert len(found) == 1, found
    assert said.format(model=Path(ppo).parent / "model") in found[0]


def test_dynamic_sampling_ahead_of_training_needs_reward_functions() -> None:
    correction = RolloutCorrectionConfig(level=CorrectionLevel.token)
    ahead = PPOConfig(
        rollout=RolloutConfig(max_staleness=1),
        algorithm=AlgorithmConfig(
            dynamic_sampling=DynamicSamplingConfig(enabled=True), rollout_correction=correction
        ),
        placement=PlacementConfig(strategy=PlacementStrategy.stand_alone),
    )
    assert list(generation_ahead(ahead)) == []
    (found,) = generation_ahead(replace(ahead, reward=RewardConfig(model=RewardModelConfig(path="judge"))))
    assert str(found).startswith(
        "rollout.max_staleness, algorithm.dynamic_sampling.enabled, reward.model.path: is 1: dynamic sampling"
    )


def test_what_is_compared_must_be_a_metric_of_validation() -> None:
    early_stop = EarlyStopConfig(metric="score")
    best = KeepBestConfig(metric="val/score/mean")
    trainer = TrainerConfig(early_stop=early_stop, validate_every_steps=2)
    of_ppo = CheckpointConfig(keep_best=best)
    (found,) = validation_metrics(PPOConfig(trainer=trainer, checkpoint=of_ppo))
    assert str(found) == (
        "trainer.early_stop.metric: no validation of this run measures 'score'; the metrics are "
        "val/score/mean, val/reward/error_rate"
    )
    loss = KeepBestConfig(metric="val/loss")

    for keep_best, said in (
        (
            best,
            "checkpoint.keep_best.metric: is 'val/score/mean', but this run measures val/loss; use one, or null",
        ),
        (loss, "checkpoint.keep_best.mode: is max, but for val/loss use min"),
    ):
        sft = SFTConfig(
            trainer=SFTTrainerConfig(validate_every_steps=2), checkpoint=CheckpointConfig(keep_best=keep_best)
        )
        assert [str(each) for each in loss_metrics(sft)] == [said]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("val/best@2", None),
        ("val/pass@4", None),
        ("val/some/source/maj@4", None),  # whether the reward returns answers is not known here
        ("val/reward/exact/mean", None),
        ("val/sums/reward/error_rate", None),
        ("val/pass@8", "did you mean val/pass@4 or val/pass@2"),  # there are 4 samples of a prompt
        ("val/best@3", "did you mean val/best@4 or val/best@2"),
        ("val/score/maen", "did you mean val/score/mean?"),
        ("val/turns/mean", "did you mean "),  # without an agent
        ("critic/score/mean", "did you mean val/score/mean?"),
    ],
)
def test_compared_metrics_are_those_that_the_configuration_measures(metric: str, said: str | None) -> None:
    trainer = TrainerConfig(validate_every_steps=2)
    checkpoint = CheckpointConfig(keep_best=KeepBestConfig(metric=metric))
    rollout = RolloutConfig(validation=SamplingConfig(n=4))
    found = [
        str(each)
        for each in validation_metrics(PPOConfig(trainer=trainer, checkpoint=checkpoint, rollout=rollout))
    ]

    if said is None:
        assert found == []
        return

    (problem,) = found
    assert problem.startswith(
        f"checkpoint.keep_best.metric: no validation of this run measures {metric!r}; {said}"
    )


def test_pass_at_k_needs_a_threshold() -> None:
    trainer = TrainerConfig(validate_every_steps=2, early_stop=EarlyStopConfig(metric="val/pass@2"))
    run = PPOConfig(trainer=trainer, rollout=RolloutConfig(validation=SamplingConfig(n=2)))
    assert list(validation_metrics(run)) == []
    assert len(list(validation_metrics(replace(run, reward=RewardConfig(pass_score=None))))) == 1


def test_all_are_listed_at_once(ppo: str) -> None:
    mistakes = [
        "trainer.updates_per_step=5",
        "rollout.temperature=0",
        "critic.parallel.pipeline_parallel_size=3",
        "reward.functions=[]",
    ]
    assert (
        len(
            violations(
                ppo,
                *mistakes,
                "algorithm.advantage.gamma=2",
                "tracking.loggers=[swanlab]",
                "model.path=nowhere",
            )
        )
        == 6
    )  # no model, no layers


def test_models_of_other_vocabularies(ppo: str, tmp_path: Path) -> None:
    smaller = model_folder(tmp_path / "smaller", vocab_size=50)
    (found,) = violations(ppo, f"reference.path={smaller}")
    assert found.startswith("reference.path, model.path: the reference has vocab_size 50, the policy 101")
    (found,) = violations(ppo, f"critic.model.path={smaller}")
    assert found.startswith(
        "critic.model.path, model.path: the critic has vocab_size 50, below the policy's 101"
    )


def test_heads_that_ranks_can_neither_share_nor_hold_whole(ppo: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "heads", num_attention_heads=12, num_key_value_heads=6)
    (found,) = violations(
        ppo,
        f"model.path={model}",
        f"critic.model.path={tmp_path / 'model'}",
        "rollout.engine=sglang",
        "rollout.tensor_parallel_size=4",
    )
    assert (
        f"num_key_value_heads 6 of {model} is neither a multiple nor a divisor of tensor_parallel_size 4; "
        f"use 3 or 6, or a multiple of 6" in found
    )


def test_engines_larger_than_the_actor_whose_devices_they_share(ppo: str) -> None:
    sizes = ["rollout.engine=sglang", "rollout.tensor_parallel_size=4", "actor.parallel.data_parallel_size=1"]
    (found,) = violations(ppo, "placement.strategy=hybrid", *sizes)
    assert "share the actor's 2; use tensor_parallel_size 2 or less, a larger actor layout" in found


def test_a_role_that_is_not_needed_is_not_checked(ppo: str) -> None:
    assert violations(ppo, "algorithm.kl.where=none", "reference.path=nowhere") == []
    without_critic = ["algorithm.advantage.estimator=grpo", "trainer.critic_warmup_steps=0"]
    assert (
        violations(
            ppo, *without_critic, "critic.model.path=nowhere", "critic.parallel.tensor_parallel_size=3"
        )
        == []
    )


def test_a_model_without_weights(ppo: str, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    (found,) = violations(ppo)
    assert found.startswith("model.path: ")
    assert "has no weights in safetensors files" in found


@pytest.mark.parametrize("outside", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_leaves_the_folder(ppo: str, tmp_path: Path, outside: str) -> None:
    folder = tmp_path / "model"
    (folder / "model.safetensors").unlink()
    index = json.dumps({"weight_map": {"model.norm.weight": outside}})
    (folder / "model.safetensors.index.json").write_text(index)
    (found,) = violations(ppo)
    assert found.endswith(f"lists {outside!r}; only files in this folder are allowed")


def test_sft(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "sft.yaml", sft_values(tmp_path))
    assert validate(load_config(SFTConfig, path)) == []
    overrides = [
        "data.max_length=65",
        "actor.micro_batch.max_tokens=64",
        "actor.parallel.data_parallel_size=9",
        "data.train_files=[x]",
    ]
    config = load_config(SFTConfig, path, overrides)
    violations_found = [*validate(config), *validate_here(config)]
    assert len(violations_found) == 4
    found = " | ".join(map(str, violations_found))
    assert "data.max_length: is 65, above max_position_embeddings 64" in found
    assert "actor.micro_batch.max_tokens, data.max_length: a row may have 65 tokens" in found
    assert "actor.parallel.data_parallel_size, trainer.samples_per_step: a mini-batch has 8 rows" in found
    assert "data.train_files: there is no file 'x'" in found


@pytest.mark.parametrize("schema", [DPOConfig, RewardModelRunConfig])
def test_pairs(schema: type[PreferenceConfig], tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "pairs.yaml", pair_values(tmp_path))
    config = load_config(schema, path)
    assert validate(config) == []
    (role,) = model_roles(config)
    assert role.with_value_head is (schema is RewardModelRunConfig)

    wrong = load_config(
        schema,
        path,
        [
            "data.max_length=33",
            "actor.parallel.data_parallel_size=4",
            "checkpoint.keep_best={metric: val/score, mode: max}",
            "trainer.early_stop={metric: val/accuracy, mode: min}",
            "trainer.validate_every_steps=1",
            "data.val_files=[x]",
        ],
    )
    found = " | ".join(map(str, validate(wrong)))
    assert "a pair of answers, which stays together, may have 65 tokens, more than max_tokens 64" in found
    assert "a mini-batch has 3 pairs, fewer than data_parallel_size 4" in found
    assert "is 'val/score', but this run measures val/loss, val/accuracy, val/margin" in found
    assert "is min, but for val/accuracy use max" in found
    odd = load_config(schema, path, ["actor.micro_batch={sequences: 3, max_tokens: null}"])
    (problem,) = map(str, validate(odd))
    assert problem.startswith("actor.micro_batch.sequences: is 3, but the two rows of a pair of answers stay")
    assert problem.endswith("use 2 or 4")


def test_a_reference_of_pairs_has_the_policys_vocabulary_and_layout(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "pairs.yaml", pair_values(tmp_path))
    other = model_folder(tmp_path / "other", vocab_size=100, num_hidden_layers=3)
    config = load_config(
        DPOConfig, path, [f"reference.path={other}", "actor.parallel.pipeline_parallel_size=2"]
    )
    assert [role.name for role in model_roles(config)] == ["actor", "reference"]
    found = " | ".join(map(str, validate(config)))
    assert f"num_hidden_layers 3 of {other} does not divide by pipeline_parallel_size 2" in found
    assert "reference.path, model.path: the reference has vocab_size 100, the policy" in found


def test_nearest_values() -> None:
    assert nearest_multiples(13, 4) == [12, 16]
    assert nearest_multiples(3, 4) == [4]
    assert nearest_divisors(48, 5) == [4, 6]
    assert nearest_divisors(4, 9) == [4]


def test_a_number_without_a_range_is_so_on_purpose() -> None:
    """Any finite number is valid, or a rule limits it further."""
    numbers = {
        leaf.key
        for leaf in leaves(PPOConfig())
        if isinstance(leaf.value, int | float) and not isinstance(leaf.value, bool)
    }
    assert {leaf.key for leaf in leaves(PPOConfig()) if leaf.key in numbers and leaf.range == Range()} == {
        "algorithm.entropy_coefficient",
        "algorithm.policy_loss.covariance.low",
        "algorithm.policy_loss.covariance.high",
        "reward.model.weight",
        "reward.pass_score",
        "rollout.validation.top_k",  # -1, or 1 and above
    }


def test_every_range_is_held(ppo: str) -> None:
    """All numbers are beyond one end of their ranges at the same time, also those that are null by default.

    Each is reported with its value and its range.
    """
    config = load_config(PPOConfig, ppo, ["reward.functions=[{path: score.py}]"])
    tried = 0

    for end, step in (("at_least", -1), ("above", 0), ("at_most", 1), ("below", 0)):
        beyond = {
            leaf.key: value + step
            for leaf in leaves(config)
            if leaf.range.length is None and math.isfinite(value := getattr(leaf.range, end))
        }
        found = {str(violation) for violation in validate(changed(config, beyond))}
        ranges = {leaf.key: leaf.range for leaf in leaves(config)}
        assert {
            f"{key}: is {value:g}, but must be {ranges[key]}" for key, value in beyond.items()
        } - found == set()
        tried += len(beyond)

    assert tried > 90
    no_number = {leaf.key: math.nan for leaf in leaves(config) if isinstance(leaf.value, float)}
    found = {str(violation) for violation in validate(changed(config, no_number))}
    assert {
        key for key in no_number if not any(text.startswith(f"{key}: is nan, but must be") for text in found)
    } == set()
    assert "reward.functions[0].weight" in no_number


def changed(section: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """A section with other values, by their dotted keys."""
    new = {}
    for entry in fields(section):
        value = getattr(section, entry.name)
        key = f"{prefix}{entry.name}"
        if is_dataclass(value):
            new[entry.name] = changed(value, values, f"{key}.")
        elif isinstance(value, list):
            new[entry.name] = [
                changed(row, values, f"{key}[{n}].") if is_dataclass(row) else row
                for n, row in enumerate(value)
            ]
        elif key in values:
            new[entry.name] = values[key]

    return replace(section, **new)


@pytest.mark.parametrize(
    ("ends", "text", "inside", "outside"),
    [
        ({}, "a finite number", [-1e9, 0, 10**9], [math.inf, -math.inf, math.nan, 1.1e9, -(10**18)]),
        ({"at_least": 1}, "at least 1", [1, 2], [0.999, math.inf, math.nan]),
        ({"above": 0}, "above 0", [1e-30], [0, 1e-300, -1, math.inf]),
        ({"at_most": 3}, "at most 3", [3, -5], [3.001, -math.inf]),
        ({"below": 3}, "below 3", [2.999], [3]),
        ({"at_least": 0, "at_most": 1}, "in [0, 1]", [0, 1], [-0.001, 1.001]),
        ({"above": 0, "at_most": 1}, "in (0, 1]", [0.001, 1], [0]),
        ({"at_least": 0, "below": 1}, "in [0, 1)", [0, 0.999], [1]),
        ({"above": -0.5, "below": 1}, "in (-0.5, 1)", [-0.499, 0], [-0.5, 1, math.nan]),
    ],
)
def test_range(ends: dict[str, float], text: str, inside: list[float], outside: list[float]) -> None:
    allowed = Range(**ends)
    assert str(allowed) == text
    assert [value for value in inside if value not in allowed] == []
    assert [value for value in outside if value in allowed] == []
