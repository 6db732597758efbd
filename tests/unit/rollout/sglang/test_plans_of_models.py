"""Test the transfer plan of SGLang's own models: recorded in one call, it equals the plan recorded tensor by
tensor."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RolloutConfig, SGLangConfig
from megarl.models.config_reader import BLOCK_FP8
from megarl.models.families import FAMILIES, read_architecture
from megarl.models.family import SGLangStages
from megarl.models.fp8 import quantized_tensors, scale_name, scale_shape
from megarl.weights.sync.forecast import engine_slices, rollout_slices, stage_slices
from tests import fork_server
from tests.families import DENSE_FAMILIES, SPARSE_FAMILIES, example_config, new_model
from tests.unit.rollout.models import manifest_of, random_model

MODELS = {
    **{
        f"{family}-tied": (family, True, FAMILIES[family].class_prefix + FAMILIES[family].lm_class)
        for family in DENSE_FAMILIES
        if FAMILIES[family].sglang_class
    },
    "qwen2-untied": ("qwen2", False, "Qwen2ForCausalLM"),
    # SGLang's classes of these models tie no embedding.
    **{
        family: (family, False, FAMILIES[family].class_prefix + FAMILIES[family].lm_class)
        for family in SPARSE_FAMILIES
        if FAMILIES[family].sglang_class
    },
}
# SGLang has one class for both families.
OWN_NAMES = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}
PROGRAM = Path(__file__).with_name("plans_of_models.py")


# The families with tensors that SGLang derives from weights.
DERIVED = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5-tied", "qwen3_5_text-tied", "qwen3_5_moe", "qwen3_5_moe_text"),
        {"gemma_weight"},
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), {"w_kc", "w_vc"}
    ),
}


def save(folder: Path, family: str, tied: bool, architecture: str) -> int:
    """Save the inputs of the ranks, and return the number of tensors."""
    model = random_model(family, tied=tied)
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    if family == "nemotron_h":
        write_pattern(folder / "config.json")
    manifest = manifest_of(model)
    (folder / "manifest.json").write_text(json.dumps({name: meta.shape for name, meta in manifest.items()}))

    return len(manifest)


def write_pattern(file: Path) -> None:
    """Name the layers as published folders do. SGLang's class refuses the names of transformers v5."""
    fields = json.loads(file.read_text())
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    pattern = "".join(letters[kind] for kind in fields.pop("layers_block_type"))
    fields.pop("mtp_layers_block_type", None)
    file.write_text(json.dumps(fields | {"hybrid_override_pattern": pattern}))


def plans(
    num_ranks: int, folders: list[Path], rendezvous: Path, num_stages: int = 1, num_groups: int = 1
) -> list[list[dict[str, Any]]]:
    """Return the results of each rank."""
    command = [*fork_server.PYTHON, "--sglang", str(PROGRAM)]
    processes = [
        subprocess.Popen(
            [
                *command,
                str(rank),
                str(num_ranks),
                str(num_stages),
                str(num_groups),
                f"file://{rendezvous}",
                *map(str, folders),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks

    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in printed]


# A process has one layout for all models. SGLang's class of gpt-oss cannot distribute experts over ranks.
WITH_WHOLE_EXPERTS = ["gpt_oss"]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, list(MODELS)),
        (2, [name for name in MODELS if name not in WITH_WHOLE_EXPERTS]),
        (2, WITH_WHOLE_EXPERTS),
    ],
    ids=["1", "2", "2 with whole experts"],
)
def test_one_call_records_the_plan_of_every_family(
    forked_processes: None, tmp_path: Path, num_ranks: int, names: list[str]
) -> None:
    """Experts are distributed over the ranks."""
    folders = [tmp_path / name for name in names]
    models = [MODELS[name] for name in names]
    counts = []
    for folder, (family, tied, architecture) in zip(folders, models, strict=True):
        counts.append(save(folder, family, tied, architecture))

    of_ranks = plans(num_ranks, folders, tmp_path / "rendezvous")
    for results in of_ranks:
        for result, count, (*_, architecture) in zip(results, counts, models, strict=True):
            assert result["model"] == OWN_NAMES.get(architecture, architecture)
            # Of these, the loader copies two at once, so that one alone is not followed.
            assert all(".q_a_proj." in name or ".kv_a_proj_" in name for name in result["differing"]), result
            assert result["is_the_same_backwards"], result
            assert result["num_calls"] == 1
            assert result["num_calls_one_by_one"] == 1 + count
            assert result["not_followed"] == {}
            assert result["num_parts"] >= count / num_ranks

    # A push gives what SGLang's own load gives, also in tensors that SGLang derives from weights. All of these
    # are found without a value.
    for results in of_ranks:
        for result, name in zip(results, names, strict=True):
            assert result["stale"] == result["stale_by_value"] == [], result
            assert set(result["derived_by_value"]) <= set(result["derived"]), result
            assert {name.rpartition(".")[2] for name in result["derived_by_value"]} == DERIVED.get(
                name, set()
            )

    # A rank may zero what another one has, such as a bias that must be added once.
    for results in zip(*of_ranks, strict=True):
        assert set.intersection(*(set(result["unreached"]) for result in results)) == set()


# Sizes of whole blocks, as SGLang requires of fused layers.
IN_FP8 = {
    "qwen3": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    "qwen3_moe": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    "deepseek_v3": {"q_lora_rank": 128},
    "deepseek_v32": {"q_lora_rank": 128},
    "minimax_m2": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
}
WITH_CACHE_SCALES = {
    "deepseek_v3",
    "deepseek_v32",
    "minimax_m2",
}  # SGLang gives the quantization to the attention of these only


def save_in_fp8(folder: Path, family: str) -> int:
    """Save the inputs of the ranks for a model in FP8, and return the number of tensors."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128}
    config = example_config(family, **sizes, **IN_FP8[family], tie_word_embeddings=False)
    config.architectures = [FAMILIES[family].class_prefix + FAMILIES[family].lm_class]
    config.save_pretrained(folder)
    shapes = {name: meta.shape for name, meta in manifest_of(new_model(config)).items()}
    quantized = quantized_tensors(read_architecture(str(folder)))
    assert quantized.keys() <= shapes.keys()
    shapes |= {scale_name(name): scale_shape(shape) for name, shape in quantized.items()}
    (folder / "manifest.json").write_text(json.dumps(shapes))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": BLOCK_FP8}))

    return len(shapes)


def test_a_push_of_fp8_gives_what_sglangs_own_load_gives(forked_processes: None, tmp_path: Path) -> None:
    """SGLang's loader has set the scales of the cache before megarl's guard fills them."""
    counts = [save_in_fp8(tmp_path / family, family) for family in IN_FP8]
    (results,) = plans(1, [tmp_path / family for family in IN_FP8], tmp_path / "rendezvous")
    for result, family, count in zip(results, IN_FP8, counts, strict=True):
        assert result["not_followed"] == {}, result
        assert len(result["held"]) == count
        assert result["stale"] == result["stale_by_value"] == [], result
        assert set(result["derived_by_value"]) <= set(result["derived"]), result
        assert {name.rpartition(".")[2] for name in result["derived_by_value"]} == DERIVED.get(family, set())
        assert set(result["cache_scales"]) == ({1.0} if family in WITH_CACHE_SCALES else set()), family


# With stages, SGLang's classes differ in what each one has of the embedding and of the output layer.
IN_STAGES = {
    name: model
    for name, model in {**MODELS, "llama-untied": ("llama", False, "LlamaForCausalLM")}.items()
    if (stages := FAMILIES[model[0]].sglang_stages) is SGLangStages.ties
    or (stages is not None and not model[1])
}


def test_each_stage_has_the_tensors_that_the_forecast_expects(forked_processes: None, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in IN_STAGES]
    for folder, model in zip(folders, IN_STAGES.values(), strict=True):
        save(folder, *model)

    of_ranks = plans(2, folders, tmp_path / "rendezvous", num_stages=2)
    for number, folder in enumerate(folders):
        architecture = read_architecture(str(folder))
        expected = stage_slices(architecture, engine_slices(architecture, 1), 2)
        for rank, results in enumerate(of_ranks):
            assert results[number]["held"] == sorted(expected[rank]), folder.name
            assert results[number]["unreached"] == []
            assert results[number]["not_followed"] == {}


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [(2, ["deepseek_v3", "glm_moe_dsa", "qwen3_moe", "glm4_moe"]), (4, ["deepseek_v3", "qwen3_moe"])],
    ids=["2", "4"],
)
def test_groups_with_an_attention_of_their_own_need_what_the_forecast_expects(
    forked_processes: None, tmp_path: Path, num_ranks: int, names: list[str]
) -> None:
    """Each of two groups has all heads and the input embedding; all ranks share experts and output layer."""
    folders = [tmp_path / name for name in names]
    for folder, name in zip(folders, names, strict=True):
        save(folder, *MODELS[name])

    rollout = RolloutConfig(
        tensor_parallel_size=num_ranks,
        expert_parallel_size=2,
        sglang=SGLangConfig(server_args={"attn_dp_size": 2}),
    )
    of_ranks = plans(num_ranks, folders, tmp_path / "rendezvous", num_groups=2)
    for number, folder in enumerate(folders):
        expected = rollout_slices(read_architecture(str(folder)), rollout)
        for rank, results in enumerate(of_ranks):
            result = results[number]
            assert result["not_followed"] == {}
            assert result["stale"] == result["stale_by_value"] == [], result
            found = {name: parts for name, parts in result["slices"].items() if parts}
            assert found == {
                name: sorted([*part.starts, *part.stops] for part in parts)
                for name, parts in expected[rank].items()
            }, (folder.name, rank)


def sglang_source(file: str) -> str:
    (folder,) = find_spec("sglang").submodule_search_locations  # pyrefly: ignore[missing-attribute]
    return (Path(folder) / "srt" / file).read_text()


def test_families_without_stages_have_none_in_sglang() -> None:
    """Others without stages have gated delta nets or images, for which megarl has no test in stages, or the
    embedding on every stage."""
    for module in ("olmo2.py", "gemma3_causal.py", "hunyuan_v3.py"):
        assert "pp_proxy_tensors" not in sglang_source(f"models/{module}")
    only_stage = "assert self.pp_group.is_first_rank and self.pp_group.is_last_rank"
    assert only_stage in sglang_source("models/qwen3_next.py")


def test_why_stages_forward_requests_at_once_and_do_not_generate_during_a_sync() -> None:
    loop = sglang_source("managers/scheduler_pp_mixin.py")
    loop = loop[loop.index("def event_loop_pp(") : loop.index("def event_loop_pp_disagg_prefill(")]
    assert loop.index("self.ingest_requests()") < loop.index("self._pp_send_pyobj_to_next_stage(")
    assert "_engine_paused" not in loop
