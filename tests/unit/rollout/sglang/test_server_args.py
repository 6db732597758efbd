"""The arguments that SGLang is started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.schema import RolloutEngineKind
from megarl.rollout.sglang.server_args import build_server_args, context_length, refuse_unknown_server_args, vocab_size
from megarl.rollout.sglang.spec import SGLangSpec


def spec(folder: Path, **changes: Any) -> SGLangSpec:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 97, "eos_token_id": 3}))
    settings = dict(path=folder, dtype=torch.bfloat16, device=torch.device("cpu"), max_concurrency=4)
    return SGLangSpec(**(settings | changes))


def test_on_the_cpu(tmp_path: Path) -> None:
    arguments = build_server_args(spec(tmp_path, tensor_parallel_size=2))
    assert arguments["model_path"] == str(tmp_path)
    assert (arguments["device"], arguments["dtype"], arguments["tp_size"]) == ("cpu", "bfloat16", 2)
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["enable_deterministic_inference"]
    assert arguments["skip_tokenizer_init"]
    assert arguments["max_running_requests"] == 4
    assert arguments["context_length"] > 64  # SGLang keeps a token of it for itself
    assert arguments["max_total_tokens"] > 4 * 64
    assert json.loads(arguments["json_model_override_args"]) == {"eos_token_id": [3]}


def test_on_cuda(tmp_path: Path) -> None:
    arguments = build_server_args(spec(tmp_path, device=torch.device("cuda", 1), release_memory=True, with_tokenizer=True))
    assert arguments["device"] == "cuda"
    assert arguments["enable_memory_saver"]
    assert not arguments["enable_deterministic_inference"]
    assert not arguments["skip_tokenizer_init"]
    assert not {"attention_backend", "max_total_tokens", "mem_fraction_static"} & arguments.keys()  # SGLang's own choice


def test_the_users_arguments_win_over_defaults(tmp_path: Path) -> None:
    arguments = build_server_args(spec(tmp_path, server_args={"attention_backend": "intel_amx", "schedule_policy": "lpm"}))
    assert arguments["attention_backend"] == "intel_amx"
    assert arguments["schedule_policy"] == "lpm"


def test_the_text_part_of_a_models_config_counts(tmp_path: Path) -> None:
    made = spec(tmp_path)
    text = {"max_position_embeddings": 32, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vocab_size": 5}))
    assert (context_length(made), vocab_size(made)) == (32, 11)


def test_arguments_that_megarl_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size is set by megarl; set rollout\.tensor_parallel_size"):
        build_server_args(spec(tmp_path, server_args={"tp_size": 2}))
    with pytest.raises(ConfigError, match="api_key is set by megarl, and it has no other value"):
        refuse_unknown_server_args({"api_key": "x"})


def test_unknown_arguments_are_refused_with_what_was_meant() -> None:
    refuse_unknown_server_args({})
    refuse_unknown_server_args({"schedule_policy": "lpm", "chunked_prefill_size": 64, RolloutEngineKind.sglang.needs.memory_arg: 0.8})
    with pytest.raises(ConfigError, match="did you mean schedule_policy") as error:
        refuse_unknown_server_args({"schedule_polisy": "lpm", "qqqqqqqq": 1, "chunked_prefill_size": 64})
    assert len(error.value.problems) == 2
