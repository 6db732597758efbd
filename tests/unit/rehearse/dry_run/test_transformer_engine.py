"""Dry runs with the Python modules of the installed Transformer Engine, of which only the compiled part is a stub."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.layers import has_transformer_engine_modules
from megarl.config.schema import DType, Layers, ParallelConfig
from megarl.config.validate import read_architectures
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import hangs
from megarl.rehearse.dry_run.record import RankRecord, RankRequest, predicted_memory
from tests.unit.plan.step_time.comparison import differences
from tests.unit.rehearse.dry_run import planted
from tests.unit.rehearse.dry_run.memory_cases import CONFIGS, beyond_bounds, cases_of, role_of
from tests.unit.rehearse.dry_run.runs import TINY, ppo, requests, save_config

pytestmark = [
    pytest.mark.usefixtures("forked_rehearsals"),
    pytest.mark.skipif(
        not has_transformer_engine_modules(),
        reason="transformer-engine is not installed (see docs/install.md)",
    ),
]

PAIR = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)
COMPARED = ("fused_layers", "local")
# Name of the change -> what the error says.
MISTAKES = {
    "an_argument_less_for_the_fused_norm": "compiled rmsnorm_fwd: missing a required argument",
    "a_number_instead_of_a_tensor_for_rope": "compiled fused_rope_forward: argument start_positions is a int",
    "an_unknown_name_for_a_fused_product": "compiled generic_gemm: got an unexpected keyword argument",
    "another_shape_of_a_gradient_buffer": "compiled generic_gemm: D has shape (64, 49), but the product has shape",
    "separate_gradients": "self_attention.linear_proj computes weight gradients separately",
    "unmarked_parameters": "decoder.layers.0.mlp.linear_fc1.weight is sharded over 2 ranks, but not marked",
    "another_optimizer": "another_optimizer.<locals>.Plain, not Transformer Engine's",
}
# Runs with the layers of another run, in a layout of the same kind. A soak test takes them too.
SAME_LAYERS = {
    "deepseek_v3_671b_fp8_grpo": "deepseek_v3_671b_grpo",
    "glm4.5_grpo": "glm4.5_air_grpo",
    "kimi_k2_1t_grpo": "deepseek_v3_671b_grpo",
    # Qwen3's layers are Llama's with norms of q and k.
    "llama3.1_8b_grpo_128k": "qwen3_8b_grpo_128k",
    "llama3_70b_ppo": "llama3.3_70b_grpo",
    "qwen2.5_32b_dapo_16k": "qwen2.5_7b_grpo",
    "qwen2.5_7b_async_grpo": "qwen2.5_7b_grpo",
    "qwen2.5_7b_ppo": "qwen2.5_7b_grpo",
    "qwen2.5_7b_ppo_split": "qwen2.5_7b_grpo",
    "qwen3_235b_a22b_grpo": "qwen3_30b_a3b_grpo",
    # In the layout of llama3.3_70b_grpo, but for its stages.
    "qwen3_32b_grpo": "qwen3_8b_grpo_128k",
    "quickstart_dpo": "quickstart_sft",
}
# Routers over 256 and 512 experts, whose routes take long to simulate. A soak test takes them.
SLOW = {"qwen3.6_35b_a3b_grpo", "qwen3_next_80b_grpo"}
# Runs of models that Transformer Engine has no layers for.
LOCAL = {"gpt_oss_120b_grpo"}
# The plan assumes that every token may belong to an image; prompts of a dry run have one each. It is therefore
# further above than docs/placements.md states for text.
WITH_IMAGES = {"qwen3_vl_8b_grpo"}
SHIPPED = {file.stem for file in CONFIGS.glob("*.yaml")}
RUNS = sorted(SHIPPED if "MEGARL_SOAK" in os.environ else SHIPPED - SAME_LAYERS.keys() - SLOW)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankRecord]]:
    folder = tmp_path_factory.mktemp("models")
    ranks = {**dict.fromkeys(COMPARED, [0, 1]), **dict.fromkeys(MISTAKES, [0])}
    asked = []

    for name, numbers in ranks.items():
        layers = Layers.local if name == "local" else Layers.transformer_engine
        asked += requests(ppo(save_config(folder / name, TINY), PAIR, layers=layers), numbers)

    records = list(rehearse_ranks(asked, 1, planted.make_ready_with_mistakes))
    return {name: [records.pop(0) for _ in numbers] for name, numbers in ranks.items()}


def test_the_layers_have_the_parameters_and_calls_of_local_ones(found: dict[str, list[RankRecord]]) -> None:
    assert hangs(found["fused_layers"]) == []
    for fused, local in zip(found["fused_layers"], found["local"], strict=True):
        assert (fused.error, local.error) == (None, None)
        assert fused.num_parameters == local.num_parameters
        assert [phase.name for phase in fused.phases] == [phase.name for phase in local.phases]
        for one, other in zip(fused.phases, local.phases, strict=True):
            assert one.flops == other.flops, one.name
            # Everything but the line.
            assert [call._replace(place="") for call in one.collectives] == [
                call._replace(place="") for call in other.collectives
            ], one.name


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_named(name: str, found: dict[str, list[RankRecord]]) -> None:
    (record,) = found[name]
    assert record.error is not None
    assert MISTAKES[name] in record.error


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RankRequest, RankRecord]]:
    """Simulate a rank of the actor of each file in configs/, with two or four layers per stage."""
    folder = tmp_path_factory.mktemp("shipped")
    asked = {}

    for run in RUNS:
        case = next(case for case in cases_of(run) if case.role == "actor")
        parallel = role_of(case.config, "actor").parallel
        stages = parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)
        model = json.loads(Path(case.config.model.path, "config.json").read_text())
        # Both kinds of layers, if there are two.
        fewer = {"num_hidden_layers": stages * model.get("full_attention_interval", 2)}
        if "first_k_dense_replace" in model:
            fewer["first_k_dense_replace"] = 1
        (folder / run).mkdir()
        if "layer_types" in model:
            model["layer_types"] = model["layer_types"][: fewer["num_hidden_layers"]]
        if "text_config" in model:
            # As many layers as take features of images, and as many of the tower as give them.
            fewer["num_hidden_layers"] = 2 * fewer["num_hidden_layers"]
            model["text_config"] |= fewer
            model["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
        else:
            model |= fewer
        (folder / run / "config.json").write_text(json.dumps(model))
        config = case.config.with_sections(model=replace(case.config.model, path=str(folder / run)))
        asked[run] = RankRequest(config, "actor", 0, max(2, parallel.pipeline_parallel_size))

    return {
        run: (asked[run], record)
        for run, record in zip(asked, rehearse_ranks(asked.values(), 1), strict=True)
    }


@pytest.mark.parametrize("run", RUNS)
def test_shipped_runs_are_built_and_trained(
    run: str, shipped: dict[str, tuple[RankRequest, RankRecord]]
) -> None:
    """Names, shapes, marks, accumulation and optimizer are checked by the dry run itself."""
    request, record = shipped[run]
    is_fused = request.config.engine.layers is Layers.transformer_engine
    # The quickstart's is float32.
    assert is_fused == (request.config.model.dtype is DType.bfloat16 and run not in LOCAL)
    assert record.error is None
    assert {"build", "score", "train", "step"} <= {phase.name for phase in record.phases}
    role = role_of(request.config, "actor")
    plan = predicted_memory(request.config, role, read_architectures(request.config)[0]["actor"], 0)
    assert beyond_bounds(record, plan, is_near=run not in WITH_IMAGES) == []


@pytest.mark.parametrize("run", RUNS)
def test_the_time_model_counts_the_same(run: str, shipped: dict[str, tuple[RankRequest, RankRecord]]) -> None:
    assert differences(*shipped[run]) == []
