"""Rules for speculative decoding: what a run refuses, and by what name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config, with_absolute_paths
from megarl.config.schema import PPOConfig
from megarl.config.speculation import draft_of, without_speculation
from megarl.config.validate import validate, validate_here
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

SECTION = "rollout.sglang.server_args"
EAGLE = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "DRAFT"}
SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def run(tmp_path: Path, server_args: dict[str, Any], *overrides: str, **draft: Any) -> list[str]:
    """Return the violations of a run with a draft model, whose folder has these fields in addition."""
    folder = tmp_path / "draft"
    model_folder(folder, **draft)
    values = ppo_values(tmp_path)
    given = {key: str(folder) if value == "DRAFT" else value for key, value in server_args.items()}
    values["rollout"] |= {"engine": "sglang", "sglang": {"server_args": given}}
    config = load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", values), overrides)
    return [str(each) for each in validate(config)]


@pytest.mark.parametrize(
    "server_args",
    [
        {"speculative_algorithm": None},
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 8},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "DRAFT"},
        EAGLE,
        EAGLE | dict(zip(SIZES, (3, 1, 4), strict=True)) | {"speculative_use_rejection_sampling": True},
        EAGLE | dict(zip(SIZES, (5, 4, 8), strict=True)) | {"speculative_algorithm": "EAGLE"},
    ],
)
def test_algorithms_that_are_accepted(tmp_path: Path, server_args: dict[str, Any]) -> None:
    assert run(tmp_path, server_args) == []


@pytest.mark.parametrize(
    ("server_args", "overrides", "said"),
    [
        ({"speculative_num_steps": 3}, [], "have no effect without speculative_algorithm; set it to NGRAM, "),
        ({"speculative_algorithm": "EAGLE4"}, [], "is 'EAGLE4', which megarl does not support: use NGRAM, "),
        (
            {"speculative_algorithm": "NEXTN"},
            [],
            "is 'NEXTN', which megarl does not support: the layers of model.path that predict further tokens "
            "are neither trained nor sent",
        ),
        ({"speculative_algorithm": "EAGLE"}, [], "is not set, but EAGLE needs a draft model: the layers of "),
        (EAGLE | {"speculative_draft_model_path": 3}, [], "is 3, but must be the path of a folder"),
        (
            EAGLE | {"speculative_algorithm": "NGRAM"},
            [],
            "drafts from earlier tokens, without a model; remove",
        ),
        (EAGLE | {"speculative_num_steps": 3}, [], "speculative_num_draft_tokens missing: set all three, or"),
        (EAGLE | dict.fromkeys(SIZES, 0), [], "speculative_num_steps: is 0, but must be a positive integer"),
        (
            EAGLE | dict(zip(SIZES, (3, 1, 8), strict=True)),
            [],
            "3 steps can draft 3 tokens, and one is verified with them; use speculative_num_draft_tokens 4",
        ),
        # The root, two tokens of the first step, and two for each of the two branches in the second one.
        (EAGLE | dict(zip(SIZES, (2, 2, 8), strict=True)), [], "give at most 7; use 7 or fewer"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}, [], "has no effect with NGRAM"),
        (EAGLE | {"speculative_use_rejection_sampling": True}, [], "with speculative_eagle_topk 1 only; set"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, [], "use 2 or more"),
        (
            EAGLE,
            ["rollout.engine=hf"],
            "the engine hf decodes one token at a time; use rollout.engine=sglang",
        ),
        (EAGLE, ["device=cpu"], "is EAGLE3, but on a CPU each drafted token has one successor"),
        (
            {"speculative_algorithm": "NGRAM"},
            ["device=cpu"],
            "is NGRAM, whose index of n-grams SGLang has on",
        ),
        (
            EAGLE,
            ["rollout.dtype=fp8", "algorithm.rollout_correction.level=token"],
            "SGLang would read the draft model's weights as FP8, too; use rollout.dtype=model, or NGRAM",
        ),
        (EAGLE, ["actor.lora.rank=8", "actor.lora.sync=adapter"], "use actor.lora.sync=merged, or remove it"),
        (
            {"speculative_algorithm": "NGRAM", "enable_deterministic_inference": True},
            [],
            "drafts depend on what the engine generated before",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, server_args: dict[str, Any], overrides: list[str], said: str
) -> None:
    found = [each for each in run(tmp_path, server_args, *overrides) if said in each]
    assert len(found) == 1
    assert found[0].startswith(SECTION)


@pytest.mark.parametrize(
    ("algorithm", "draft", "said"),
    [
        (
            "STANDALONE",
            {"vocab_size": 100},
            "has vocab_size 100, the policy 101, but the policy reads its tokens",
        ),
        ("EAGLE", {"hidden_size": 64}, "reads hidden states of 64, but the policy's have 48"),
        ("EAGLE3", {"target_hidden_size": 96}, "reads hidden states of 96, but the policy's have 48"),
        ("EAGLE3", {"quantization_config": {"quant_method": "awq"}}, "is quantized"),
        ("STANDALONE", {"num_attention_heads": 3}, "does not divide by tensor_parallel_size 2"),
        (
            "STANDALONE",
            {"vocab_size": None},
            "config.json: field 'vocab_size' is missing",
        ),
        ("STANDALONE", {"head_dim": "16"}, "field 'head_dim' is '16', but must be a positive integer"),
        ("STANDALONE", {"kv_lora_rank": 2.5}, "field 'kv_lora_rank' is 2.5, but must be a positive integer"),
        ("STANDALONE", {"text_config": [1]}, "field 'text_config' is [1], but must be an object"),
    ],
)
def test_draft_models_that_do_not_fit(
    tmp_path: Path, algorithm: str, draft: dict[str, Any], said: str
) -> None:
    given = EAGLE | {"speculative_algorithm": algorithm}
    sizes = ["rollout.tensor_parallel_size=2", "rollout.num_replicas=1"]
    [found] = run(tmp_path, given, *sizes, **draft)
    assert said in found
    assert found.startswith(f"{SECTION}.speculative_draft_model_path")


def test_a_cpu_drafts_chains(tmp_path: Path) -> None:
    chain = EAGLE | dict(zip(SIZES, (3, 1, 4), strict=True))
    assert run(tmp_path, chain, "device=cpu") == []
    tree = EAGLE | dict(zip(SIZES, (3, 2, 5), strict=True))
    assert len(run(tmp_path / "tree", tree, "device=cpu")) == 1


def test_rejection_sampling_needs_a_draft_with_all_tokens(tmp_path: Path) -> None:
    given = EAGLE | dict(zip(SIZES, (3, 1, 4), strict=True)) | {"speculative_use_rejection_sampling": True}
    [found] = run(tmp_path, given, draft_vocab_size=50)
    assert "proposes 50 of the 101 tokens" in found


def test_a_draft_of_another_width_than_the_policy_is_accepted_where_it_reads_none_of_it(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, EAGLE | {"speculative_algorithm": "STANDALONE"}, hidden_size=16) == []
    narrow = {"hidden_size": 16, "target_hidden_size": 48}
    assert run(tmp_path / "narrow", EAGLE, **narrow) == []


def test_a_missing_folder_is_named_with_its_remedy(tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    folder = tmp_path / "draft"
    given = EAGLE | {"speculative_draft_model_path": str(folder)}
    values["rollout"] |= {"engine": "sglang", "sglang": {"server_args": given}}
    config = load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", values))
    said = [str(each) for each in validate_here(config) if "draft" in str(each)]
    assert said == [
        f"{SECTION}.speculative_draft_model_path: there is no draft model in {str(folder)!r}: its config.json "
        f"is missing; download the model (hf download NAME --local-dir {folder})"
    ]
    assert validate(config) == []
    model_folder(folder)
    (folder / "model.safetensors").unlink()
    assert ["has no weights" in str(each) for each in validate_here(config) if "draft" in str(each)] == [True]


def test_paths_of_draft_models_are_absolute_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ppo_values(tmp_path)
    given = EAGLE | {"speculative_draft_model_path": "drafts/eagle/3"}
    values["rollout"] |= {"engine": "sglang", "sglang": {"server_args": given}}
    file = write_yaml(tmp_path / "run.yaml", values)
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(load_config(PPOConfig, file))
    assert draft_of(config.rollout) == str(tmp_path / "drafts/eagle/3")
    assert config.rollout.sglang.server_args["speculative_algorithm"] == "EAGLE3"
    assert without_speculation(config.rollout.sglang.server_args) == {}
