"""Rules for layouts of mixture-of-experts models: each broken layout has one violation with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate
from megarl.models.families import FAMILIES
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

EXPERTS = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_AHEAD = (
    "rollout.max_staleness=1",
    "placement.strategy=split_collocate",
    "algorithm.rollout_correction.level=token",
)
_EP = "actor.parallel.expert_parallel_size"
_ETP = "actor.parallel.expert_tensor_parallel_size"


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    """The actor and the reference have 2 replicas of 2 tensor-parallel ranks.

    The critic is a dense model of two stages.
    """
    values = ppo_values(tmp_path)
    values["model"]["path"] = str(model_folder(tmp_path / "experts", **EXPERTS))
    values["critic"]["model"] = {"path": str(tmp_path / "model")}
    values["actor"]["parallel"]["sequence_parallel"] = True
    values["rollout"]["engine"] = "sglang"

    return write_yaml(tmp_path / "run.yaml", values)


def violations(path: str, *overrides: str) -> list[str]:
    return [str(violation) for violation in validate(load_config(PPOConfig, path, list(overrides)))]


_GROUPS = "rollout.sglang.server_args={attn_dp_size: 2}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((_GROUPS, "rollout.tensor_parallel_size=4", "device=cuda"), None),
        (("rollout.sglang.server_args={attn_dp_size: 1}", "device=cpu"), None),
        (
            ("rollout.sglang.server_args={attn_dp_size: 3}", "rollout.tensor_parallel_size=4", "device=cuda"),
            "is 3, but must divide tensor_parallel_size 4",
        ),
        (
            ("rollout.sglang.server_args={attn_dp_size: two}", "device=cuda"),
            "is 'two', but must divide tensor_parallel_size 1",
        ),
        ((_GROUPS, "rollout.tensor_parallel_size=4", "device=cpu"), "device: is 2, but SGLang has no such"),
        (
            (_GROUPS, "rollout.tensor_parallel_size=2", "device=cuda", "engine.routing_replay=rollout"),
            "engine.routing_replay: is 2, but megarl has no test of it with routes of engines",
        ),
        (
            (
                "rollout.sglang.server_args={attn_dp_size: 2, speculative_algorithm: NGRAM}",
                "rollout.tensor_parallel_size=2",
                "device=cuda",
            ),
            "is 2, but megarl has no test of it with drafts",
        ),
    ],
)
def test_groups_with_an_attention_of_their_own(
    ppo: str, overrides: tuple[str, ...], said: str | None, tmp_path: Path
) -> None:
    tested = EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    tested.pop("shared_expert_intermediate_size")
    model = f"model.path={model_folder(tmp_path / 'tested', **tested)}"
    found = [each for each in violations(ppo, model, *overrides) if "attn_dp_size" in each]
    assert len(found) == (said is not None)
    assert all(said in each for each in found)  # type: ignore[operator]


def test_groups_are_refused_for_classes_of_sglang_without_a_test(ppo: str) -> None:
    found = violations(ppo, _GROUPS, "rollout.tensor_parallel_size=4", "device=cuda")
    assert any(
        "but megarl has no test of it with qwen2_moe in SGLang; use more engines" in each for each in found
    )


def test_good_layouts_have_none(ppo: str) -> None:
    """Experts are distributed over all four ranks of the actor, across its replicas."""
    for overrides in ([], [f"{_EP}=4"], [f"{_EP}=2", f"{_ETP}=2"], [f"{_ETP}=4"]):
        assert violations(ppo, *overrides) == []
    assert violations(ppo, "rollout.tensor_parallel_size=4", "rollout.expert_parallel_size=2") == []
    assert violations(ppo, "engine.routing_replay=rollout", *_AHEAD, "rollout.on_update=drain") == []
    assert violations(ppo, "engine.routing_replay=trainer") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["critic.experts.z_loss_coefficient=0.001"], "critic.experts.z_loss_coefficient: is 0.001, but "),
        (["critic.parallel.expert_parallel_size=2"], "critic.parallel.expert_parallel_size: is 2, but "),
        (
            ["actor.parallel.sequence_parallel=false"],
            "each of the 2 tensor-parallel ranks would send them the same tokens; use sequence_parallel=true",
        ),
        (
            [f"{_EP}=8"],
            "expert_parallel_size 8 x expert_tensor_parallel_size 1 = 8 does not divide the 4 ranks of a "
            "stage",
        ),
        (
            [f"{_EP}=2", f"{_ETP}=4"],
            "expert_parallel_size 2 x expert_tensor_parallel_size 4 = 8 does not divide the 4 ranks of a "
            "stage",
        ),
        (
            [f"{_EP}=3", "actor.parallel.data_parallel_size=3"],
            "do not divide by expert_parallel_size 3; use 2 or 4",
        ),
        (
            [f"{_ETP}=16", "actor.parallel.data_parallel_size=8"],
            "intermediate size 24, which does not divide by expert_tensor_parallel_size",
        ),
        (["rollout.engine=hf"], "rollout.engine: the engine 'hf' does not support mixture-of-experts models"),
        (
            [
                "engine.routing_replay=trainer",
                "trainer.updates_per_step=1",
                "trainer.epochs_per_batch=1",
                "algorithm.kl.where=loss",
            ],
            "trainer.epochs_per_batch: is trainer, but with one update per batch the update itself",
        ),
        (
            [
                "engine.routing_replay=trainer",
                "algorithm.rollout_correction.bypass=true",
                "algorithm.kl.where=loss",
            ],
            "algorithm.rollout_correction.bypass: is trainer, but with bypass the trainer does not compute "
            "old_log_probs",
        ),
        (
            ["engine.routing_replay=rollout", "engine.packing=false"],
            "is rollout, which requires packed rows",
        ),
        *(
            (
                [f"engine.routing_replay={replay}", "device=cuda", "model.dtype=bfloat16", option],
                "engine.routing_replay, actor.megatron.transformer.moe_router_fusion: is "
                f"{replay}, but a fused router selects experts itself and replays no routes",
            )
            for replay in ("rollout", "trainer")
            for option in (
                "actor.megatron=fused_experts",
                "actor.megatron.transformer={moe_router_fusion: true}",
            )
        ),
        (
            ["engine.routing_replay=rollout", *_AHEAD],
            "rollout.max_staleness, rollout.on_update: is rollout, but with max_staleness 1 samples "
            "continue with new weights",
        ),
        (
            ["engine.routing_replay=rollout", f"agent.environment={__file__}:Any"],
            "engine.routing_replay, agent: is rollout, but an episode consists of several requests",
        ),
        (
            ["rollout.tensor_parallel_size=2", "rollout.expert_parallel_size=4"],
            "expert_parallel_size 4 does not divide tensor_parallel_size 2, over whose ranks the experts are "
            "distributed; use 2",
        ),
    ],
)
def test_what_does_not_fit_is_said_once(ppo: str, overrides: list[str], said: str) -> None:
    (found,) = violations(ppo, *overrides)
    assert said in found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlp_only_layers": [1]}, "dense layers between its sparse ones"),
        ({"tie_word_embeddings": True}, "a tied embedding"),
    ],
)
def test_models_that_sglang_takes_for_others(
    ppo: str, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (found,) = violations(ppo, f"model.path={model_folder(tmp_path / 'other', **EXPERTS, **changes)}")
    assert found.startswith("rollout.engine: ")
    assert f"has {said}: SGLang's qwen2_moe would compute a different model" in found


def test_an_engine_of_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    (found,) = violations(
        path, "rollout.engine=sglang", "rollout.tensor_parallel_size=2", "rollout.expert_parallel_size=2"
    )
    assert found.startswith("rollout.expert_parallel_size: is 2, but ")
    assert "(qwen2) has no experts; remove it" in found


def test_experts_with_biases_in_mxfp4(ppo: str, tmp_path: Path) -> None:
    folder = tmp_path / "gpt_oss"
    folder.mkdir()
    fields = FAMILIES["gpt_oss"].example() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(fields))
    found = "\n".join(
        violations(
            ppo,
            f"model.path={folder}",
            f"{_ETP}=2",
            "device=cpu",
            "rollout.tensor_parallel_size=2",
            "rollout.expert_parallel_size=2",
        )
    )
    assert "(gpt_oss) have biases, which Megatron does not shard; use 1" in found
    assert "loads the experts of all ranks into each rank; use 1" in found
    assert f"megarl convert {folder} NEW_FOLDER --to hf" in found
    assert "has attention sinks, which SGLang's attention for CPUs lacks; use device=cuda" in found


def test_heads_of_gated_delta_nets_divide_over_ranks(ppo: str, tmp_path: Path) -> None:
    """A model with 4 key heads. Context parallelism distributes heads too."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3_next"].example()))
    found = "\n".join(
        violations(
            ppo,
            f"model.path={tmp_path}",
            "device=cpu",
            "actor.parallel.tensor_parallel_size=4",
            "actor.parallel.context_parallel_size=2",
            "rollout.tensor_parallel_size=8",
        )
    )
    assert "does not divide by tensor_parallel_size 4 x context_parallel_size 2 = 8; use 4 ranks" in found
    assert "linear_num_key_heads 4 of" in found
    assert "does not divide by tensor_parallel_size 8; use 4" in found
    assert "has gated delta nets, whose states SGLang keeps on GPUs only; use device=cuda" in found


def test_groups_of_mamba_mixers_divide_over_ranks(ppo: str, tmp_path: Path) -> None:
    """A model with 4 groups, whose heads are normalized together."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["nemotron_h"].example()))
    found = "\n".join(
        violations(
            ppo,
            f"model.path={tmp_path}",
            "device=cpu",
            "actor.parallel.tensor_parallel_size=4",
            "actor.parallel.context_parallel_size=2",
        )
    )
    assert "n_groups 4 of" in found
    assert "does not divide by tensor_parallel_size 4 x context_parallel_size 2 = 8; use 4 ranks" in found
    assert "has Mamba-2 mixers, whose kernels SGLang has for GPUs only; use device=cuda" in found


def test_no_engine_on_a_cpu_keeps_the_states_of_gated_delta_nets(ppo: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3_5"].example()))
    found = "\n".join(violations(ppo, f"model.path={tmp_path}", "rollout.engine=hf"))
    assert (
        f"rollout.engine: {tmp_path} (qwen3_5) has gated delta nets, whose states the engine 'hf' does not "
        "keep; use sglang, with device=cuda"
    ) in found


def test_experts_with_biases_need_local_layers(ppo: str, tmp_path: Path) -> None:
    """`auto` may become Transformer Engine on a GPU, where the run would end when its layers are built."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["gpt_oss"].example()))

    def found(*overrides: str) -> list[str]:
        given = violations(ppo, f"model.path={tmp_path}", "rollout.engine=sglang", *overrides)
        return [each for each in given if each.startswith("engine.layers")]

    (each,) = found("device=cuda")
    assert each.startswith("engine.layers: is auto, but the experts of ")
    assert each.endswith("(gpt_oss) have biases, which megarl supports with local layers only; use local")
    assert found("device=cuda", "engine.layers=local") == []
    assert found("device=cpu") == []
