"""Test `megarl eval` of a run's checkpoints and models: it finds the same results as the run's own
validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from megarl.algorithms.metrics import mean_over_prompts
from megarl.cli.main import main
from megarl.cli.run import eval as evaluation
from megarl.cli.run.context import RunContext
from megarl.cli.run.named_model import find_model
from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    Device,
    KeepBestConfig,
    KLConfig,
    KLWhere,
    RewardConfig,
    RewardFunctionConfig,
    SamplingConfig,
)
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.tracking.progress import ProgressBar
from tests.integration.tiny_run import Finished, placed_pools, run_ppo, save_inputs, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

# Scores that differ for all kinds of responses, so that no two are equal by chance.
REWARD = """
import zlib
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32((ground_truth + solution_str).encode()) % 1000 / 1000
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    (folder / "hash.py").write_text(REWARD)
    (folder / "broken.py").write_text("def compute_score(")
    return folder


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run without a critic or a reference. Validation has two samples per prompt, and its last batch is
    smaller."""
    config = tiny_config(
        inputs,
        tmp_path_factory.mktemp("run"),
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
        ),
        reward=RewardConfig(functions=[RewardFunctionConfig(path=str(inputs / "hash.py"))], num_processes=1),
        rollout={"validation": SamplingConfig(n=2, temperature=0.8)},
        trainer={"total_steps": 2, "prompts_per_step": 3, "validate_every_steps": 1},
        checkpoint={"every_steps": 1, "keep_best": KeepBestConfig(metric="val/score/mean")},
    )
    dump_config(config, Path(config.trainer.output_dir) / "config.yaml")  # as the command does
    return run_ppo(config)


@pytest.fixture(autouse=True)
def on_the_ray_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the current Ray cluster instead of starting one per command."""

    @contextmanager
    def ray_processes(context: RunContext, console: Console) -> Iterator[tuple[Device, ResourcePoolManager]]:
        with placed_pools(context.config) as pools:
            yield Device.cpu, pools

    monkeypatch.setattr(evaluation, "ray_processes", ray_processes)


def values(output: Path) -> dict[str, float]:
    """Return the values under the names of a run's metrics."""
    report = json.loads((output / "results.json").read_text())
    return {
        f"val/count/{name}": estimate["value"]
        for name, estimate in report["results"]["count"]["metrics"].items()
    }


def of_count(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith("val/count/")}


def test_a_checkpoint_has_the_score_that_validation_found(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluate the last checkpoint, then the previous one, with a table and a comparison with the last."""
    run_dir = finished.output_dir
    assert main(["eval", str(run_dir), "--json"]) == 0
    last = run_dir / "evaluations" / "step-2-validation"
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((last / "results.json").read_text())
    assert report["step"] == 2

    # A logger of the run need not be installed where the run is evaluated.
    assert (
        main(["eval", str(run_dir), "--step", "1", "--against", str(last), "tracking.loggers=[swanlab]"]) == 0
    )
    said = capsys.readouterr()
    first = run_dir / "evaluations" / "step-1-validation"
    assert [values(output) for output in (first, last)] == [of_count(line) for line in finished.metrics[1:]]
    assert values(first) != values(last)
    of_mean = json.loads((first / "results.json").read_text())["differences"]["count"]["score/mean"]
    assert of_mean["value"] == pytest.approx(
        values(first)["val/count/score/mean"] - values(last)["val/count/score/mean"]
    )
    assert f"{of_mean['value']:+.4f}" in said.out
    assert "count: 8 prompts, 16 samples of" in said.out
    assert "6 of 8 prompts, score" in said.err
    assert not list(run_dir.rglob(".model-*"))  # the converted model is deleted
    better = max((1, 2), key=lambda step: finished.metrics[step]["val/score/mean"])
    best = find_model(run_dir, "best")
    assert (best.source.step, best.run_dir) == (better, run_dir)


def test_a_model_of_no_run_is_sampled_alike(
    finished: Finished,
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluate the trained model as a Hugging Face folder, with the run's configuration as options, on the
    run's rows in the tutorial's format. Its samples are kept even while the evaluation is incomplete."""
    output = tmp_path / "results"
    kept = []
    rows = pq.read_table(inputs / "validation.parquet").to_pylist()
    lines = [
        {
            "prompt": row["prompt"][0]["content"],
            "data_source": "count",
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in rows
    ]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show = ProgressBar.show

    def look(progress: ProgressBar, num_done: int, text: str) -> None:
        kept.append(len((output / "samples.partial.jsonl").read_text().splitlines()))
        show(progress, num_done, text)

    monkeypatch.setattr(ProgressBar, "show", look)
    options = ["--n", "2", "--temperature", "0.8", "--max-tokens", "8", "--output", str(output)]
    data = ["--data", str(tmp_path / "validation.jsonl"), "--reward", f"{inputs / 'hash.py'}:compute_score"]
    overrides = [
        "model.dtype=float32",
        "device=cpu",
        "trainer.prompts_per_step=3",
        "data.max_prompt_length=8",
    ]
    assert main(["eval", str(finished.policy), *data, *options, *overrides]) == 0
    assert values(output) == of_count(finished.metrics[2])
    assert kept == [6, 12, 16]
    assert {path.name for path in output.iterdir()} == {"samples.jsonl", "results.json", "config.yaml"}
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert [sample["uid"] for sample in samples] == [str(row) for row in range(8) for _ in range(2)]
    means = [
        (first["score"] + second["score"]) / 2
        for first, second in zip(samples[::2], samples[1::2], strict=True)
    ]
    report = json.loads((output / "results.json").read_text())
    assert report["results"]["count"]["metrics"]["score/mean"] == mean_over_prompts(means)._asdict()

    capsys.readouterr()

    # which reads them
    assert main(["score", str(finished.output_dir / "config.yaml"), str(output / "samples.jsonl")]) == 0
    assert f"mean {values(output)['val/count/score/mean']:.4g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{run}", "--step", "7"],
            "has no step '7'; give --step latest, or the number of one of step_00000001, step_00000002",
        ),
        (["{policy}"], "data.val_files: is empty; give the evaluation data with --data FILE"),
        (["{policy}", "--step", "1"], "is not the folder of a run, so --step 1 does not apply"),
        (["{run}/nowhere"], "there is no such folder"),
        (["{inputs}"], ": is not a model; this is a folder of data files; give"),
        (["{run}", "--data", "{inputs}/nowhere.parquet"], "there is no file"),
        (["{policy}", "--data", "{inputs}/validation.parquet"], "reward.functions, reward.model.path"),
        (["{run}", "--reward", "{inputs}/broken.py"], "reward.functions: "),
        (["{run}", "--n", "0"], "rollout.validation.n: is 0"),
        (["{run}", "--n", "2", "--temperature", "0"], "2 greedy samples of a prompt are identical"),
        (["{run}", "--max-tokens", "100"], "exceed max_position_embeddings 64"),
        (["{run}", "--against", "{inputs}"], "cannot be read"),
        (["{run}", "--output", "{inputs}/reward.py"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    finished: Finished,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delattr(evaluation, "start_evaluation")
    places = {"run": finished.output_dir, "policy": finished.policy, "inputs": inputs}
    assert main(["eval", *(argument.format(**places) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_results_are_never_mixed(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert main(["eval", str(finished.output_dir), "--output", str(tmp_path)]) == 2
    assert "contains the results of another evaluation" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    (tmp_path / "results.json").rename(tmp_path / "samples.partial.jsonl")
    assert main(["eval", str(finished.output_dir), "--output", str(tmp_path)]) == 2
    assert "contains the samples of an unfinished evaluation" in capsys.readouterr().err
