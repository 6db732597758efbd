"""`megarl check --dry-run`: output and exit status, for models that consist of a `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.main import main
from megarl.config.layers import has_transformer_engine_modules
from tests.unit.rehearse.dry_run.runs import TINY, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("COLUMNS", "160")
    return {
        "algorithm": "ppo",
        "model": {"path": save_config(tmp_path / "model", TINY)},
        "data": {"train_files": ["not-here.parquet"], "max_prompt_length": 64, "max_response_length": 64},
        "actor": {
            "parallel": {"pipeline_parallel_size": 2},
            "micro_batch": {"max_tokens": 512},
            "recompute": "full",
        },
        "critic": {"micro_batch": {"max_tokens": 512}},
        "reward": {"functions": [{"path": "not-here.py"}]},
        "trainer": {"prompts_per_step": 64},
        "device": "cuda",
    }


def write(folder: Path, values: dict[str, Any]) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "run.yaml")


def lines(out: str) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]


def test_all_ranks_are_rehearsed_and_compared(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "out.json"
    run["device"] = "auto"  # which is no GPU here
    delta = "resharding.delta=true"  # whose first weight sync sends everything
    assert (
        main(["check", "--dry-run", write(tmp_path, run), "--ranks", "all", "--json", str(written), delta])
        == 0
    )
    out = capsys.readouterr().out
    rows = lines(out)
    parameters = (64 * 128 + 64 * 64 + 3 * 64 * 96 + 128) + 256 * 64
    assert f"Rank 0 (stage 0, tensor rank 0, data rank 0): {parameters:,} parameters" in rows
    assert "train send PIPELINE_MODEL_PARALLEL_GROUP 2 bfloat16 2 0.1" in rows
    assert "Verified: the collectives of 2 ranks" in out
    layers = "transformer_engine" if has_transformer_engine_modules() else "local"
    assert f"Layers: {layers} (" in out
    assert "NCCL buffers" in out
    assert "simulated 2 of 2 ranks of the actor, no errors" in out
    document = json.loads(written.read_text())
    assert document["mistakes"] == []
    assert [rank["num_parameters"] for rank in document["ranks"]] == [parameters, parameters + 64]
    train = next(phase for phase in document["ranks"][0]["phases"] if phase["name"] == "train")
    assert train["collectives"][0]["ranks"] == [0, 1]
    assert set(train["awaits"][0]) == {"call", "num_calls"}
    assert document["ranks"][0]["plan"]["held"] == parameters * (2 + 4 + 12)

    # Each parameter is sent once, to one engine of one rank. At the peak of the weight sync, a rank has only
    # the weights and two messages.
    pushes = [
        next(phase for phase in rank["phases"] if phase["name"] == "push") for rank in document["ranks"]
    ]
    sent = [sum(call["nbytes"] for call in push["collectives"]) for push in pushes]
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 96 + 128
    assert sent == [2 * (layer + 199 * 64), 2 * (layer + 64 + 199 * 64)]
    assert f"Host memory: a rank keeps up to {max(sent) / 2**20:.2f} MiB, the last weights of the" in out
    assert {
        (call["kind"], call["group"], call["dtype"]) for push in pushes for call in push["collectives"]
    } == {("send", "weights", "bfloat16")}
    assert [push["peak"] - push["held"] for push in pushes] == [2 * each for each in sent]
    assert train["peak"] > train["held"] > parameters * (2 + 4 + 12)


def test_a_sync_in_fp8(run: dict[str, Any], tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4}
    run["model"]["path"] = save_config(tmp_path / "whole", TINY | sizes)
    run["actor"]["parallel"] = {"tensor_parallel_size": 2}
    run["rollout"] = {"engine": "sglang", "dtype": "fp8"}
    corrected = "algorithm.rollout_correction.level=token"
    assert (
        main(
            ["check", "--dry-run", write(tmp_path, run), "--ranks", "all", "--json", str(written), corrected]
        )
        == 0
    )

    ranks = json.loads(written.read_text())["ranks"]
    pushes = [next(phase for phase in rank["phases"] if phase["name"] == "push") for rank in ranks]
    calls = [call for push in pushes for call in push["collectives"]]
    # A layer has four matrices of 512 x 512 and three of 1024 x 512, with a scale for 128 x 128 elements.
    matrices = 2 * (4 * 512 * 512 + 3 * 1024 * 512)
    num_scales = matrices // 128**2
    norms = 5 * 512
    sent = [sum(call["nbytes"] for call in push["collectives"] if call["kind"] == "send") for push in pushes]
    assert sum(sent) == matrices + 4 * num_scales + 2 * (2 * 199 * 512 + norms)
    assert {call["dtype"] for call in calls if call["kind"] == "send"} == {"uint8"}

    # All ranks take the maximum of each block once, in the same order of calls.
    maxima = [call for call in calls if call["kind"] == "all_reduce"]
    assert [(call["elements"], call["ranks"]) for call in maxima] == [(num_scales, [0, 1])] * 2

    # A rank has all scales, two messages, and one matrix at a time in float32.
    for push, own in zip(pushes, sent, strict=True):
        extra = push["peak"] - push["held"] - 2 * own - 4 * num_scales
        assert 0 < extra <= 15 * 1024 * 512 / 2


def test_a_critic_that_does_not_fit(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run["placement"] = {"device_memory_gb": 0.001, "over_budget": "warn"}
    assert main(["check", "--dry-run", write(tmp_path, run), "--role", "critic"]) == 2
    out = capsys.readouterr().out
    assert "error: rank 0: 1." in out
    assert "on a device that has 1.02 MiB" in out
    assert "Simulated: ranks 0 of 1. Not verified" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--role", "reward_model"], "--role reward_model: this run has actor, reference, critic"),
        (["--ranks", "2"], "--ranks 2: the role has 2 ranks"),
        (["device=cpu"], "has device: cpu, but the dry run simulates GPUs; add device=cuda"),
        (
            ["engine.layers=transformer_engine", "model.dtype=float32", "engine.packing=false"],
            "engine.layers=transformer_engine: a dry run",
        ),
        (["actor.parallel.tensor_parallel_size=3"], "actor.parallel.tensor_parallel_size"),
    ],
)
def test_what_cannot_be_rehearsed(
    arguments: list[str], said: str, run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--dry-run", write(tmp_path, run), *arguments]) == 2
    assert said in capsys.readouterr().err
