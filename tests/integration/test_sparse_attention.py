"""Whole runs with sparse attention: GRPO with an engine on a CPU, which has no indexers, and fine-tuning on rows
that are longer than the keys that a query sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    DType,
    ModelConfig,
    RolloutEngineKind,
    SparseAttentionConfig,
)
from tests.families import example_config, new_model
from tests.integration.tiny_run import (
    SYMBOLS,
    run_ppo,
    run_sft,
    save_inputs,
    save_policy,
    tiny_config,
    tiny_sft_config,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROW = 16  # tokens of a prompt and a response together


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


def save_sparse_policy(folder: Path, index_topk: int) -> None:
    """Write a tiny DeepSeek-V3.2 with the tokenizer of the other runs."""
    save_policy(folder, num_layers=1)
    config = example_config(
        "deepseek_v32",
        vocab_size=len(SYMBOLS),
        num_hidden_layers=2,
        index_topk=index_topk,
        num_nextn_predict_layers=0,
    )
    config.eos_token_id = 1
    config.pad_token_id = 0
    torch.manual_seed(0)
    new_model(config).save_pretrained(folder)


def indexers(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: value for name, value in tensors.items() if ".indexer." in name}


def test_grpo_trains_indexers_and_an_engine_on_a_cpu_serves_the_policy_without_them(
    inputs: Path, tmp_path: Path
) -> None:
    """The weights of the engine are compared with the actor's after the first sync."""
    save_sparse_policy(tmp_path / "policy", index_topk=ROW)
    finished = run_ppo(
        tiny_config(
            inputs,
            tmp_path / "run",
            model=ModelConfig(
                path=str(tmp_path / "policy"),
                dtype=DType.float32,
                sparse_attention=SparseAttentionConfig(indexer_loss_coefficient=0.1),
            ),
            algorithm=AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo)),
            rollout={"engine": RolloutEngineKind.sglang},
            trainer={"total_steps": 2},
        )
    )
    lines = [line for line in finished.metrics if "actor/moe/indexer_loss" in line]
    assert len(lines) == 2
    assert all(line["actor/moe/indexer_loss"] > 0 for line in lines)
    before, after = indexers(tmp_path / "policy"), indexers(finished.policy)
    assert before.keys() == after.keys()
    assert len(after) == 2 * 5
    assert all(not torch.equal(value, before[name]) for name, value in after.items() if "wq_b" in name)


def test_fine_tuning_on_rows_longer_than_the_selected_keys_keeps_indexers(
    inputs: Path, tmp_path: Path
) -> None:
    save_sparse_policy(tmp_path / "policy", index_topk=2)
    finished = run_sft(
        tiny_sft_config(
            inputs,
            tmp_path / "run",
            model=ModelConfig(path=str(tmp_path / "policy"), dtype=DType.float32),
            trainer={"total_steps": 2},
        )
    )
    assert [line["step"] for line in finished.metrics if "sft/loss" in line][-1] == 2
    before, after = indexers(tmp_path / "policy"), indexers(finished.policy)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
