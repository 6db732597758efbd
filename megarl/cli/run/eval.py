"""`megarl eval MODEL`: samples from a model on a data file, and scores the samples without a trainer.

The scores are those of a run's validation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from megarl.algorithms.metrics import Estimate
from megarl.cli.run.context import run_context_of
from megarl.cli.run.evaluation_config import evaluation_config
from megarl.cli.run.named_model import NamedModel, find_model, hugging_face_folder
from megarl.cli.run.session import ray_processes, read_models
from megarl.cli.run.train import check_reward_chats, prompt_reader, token_rules
from megarl.cli.tables.console import output_console, print_line
from megarl.config.finding import Status
from megarl.config.load import dump_config
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import PPOConfig
from megarl.config.validation_metrics import RewardKeys, source_metrics
from megarl.data.chat_clock import chat_time, reads_clock, set_chat_time
from megarl.data.prompts import PromptDataset
from megarl.doctor.reward_functions import choose_truths, judge_rewards
from megarl.machine.errors import ConfigError, counted
from megarl.machine.files import write_whole
from megarl.rewards.role import Reward
from megarl.roles.start import start_evaluation
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.driver.rollout_weights import FolderWeights
from megarl.tracking.progress import ProgressBar
from megarl.trainers.checkpoint import CONFIG_FILE
from megarl.trainers.evaluation import (
    PARTIAL_FILE,
    SAMPLES_FILE,
    Evaluation,
    ScoredSample,
    SourceComparison,
    SourceResult,
    by_data_source,
    check_same_prompts,
    compare,
    prompt_values,
    read_chat_time,
    read_samples,
    results_of,
    sample_lines,
)

RESULTS_FILE = "results.json"


def run(**options: Any) -> None:
    """Print a table or JSON, and write `results.json`, `samples.jsonl` and `config.yaml`.

    Raises:
        ValueError: The model, data or configuration is invalid. Raised before any process is started.
    """
    if options.pop("of_ground_truth", False):
        raise ValueError("--ground-truth requires --rows")
    parsed = argparse.Namespace(**options)
    model = find_model(Path(parsed.model), parsed.step)
    config = evaluation_config(model, parsed)
    architectures, tokenizer = read_models(config)
    if parsed.against is not None:  # otherwise prompts that contain the date would differ
        set_chat_time(tokenizer, read_chat_time(Path(parsed.against) / RESULTS_FILE))
    data = prompt_reader(config, tokenizer)(config.data.val_files)
    if REWARD_MODEL in architectures:
        check_reward_chats(config, architectures[REWARD_MODEL], {"data": data}, chat_time(tokenizer))
    # Check the reward functions and the other evaluation before hours of sampling.
    keys = _try_reward(config)
    others = _others(parsed.against, data)
    output = Path(config.trainer.output_dir)
    _claim(output)
    console = output_console(stderr=True)
    start_s = time.monotonic()
    lacking = [] if others is None else _not_compared(config, keys, others)
    _announce(console, config, model, len(data), lacking)
    dtype = getattr(torch, config.model.dtype.value)

    with (
        run_context_of(config) as context,
        hugging_face_folder(model, dtype, output) as folder,
        ray_processes(context, Console(quiet=True)) as processes,
    ):
        rules = token_rules(config, tokenizer)
        rollout, reward = start_evaluation(config, architectures, FolderWeights(folder), rules, *processes)
        samples = _samples(config, data, rollout, reward, output / PARTIAL_FILE, console)

    # Compute the metrics, and compare them with those of the other evaluation.
    results = results_of(samples, config.reward.pass_score)
    comparisons = None if others is None else compare(samples, others, config.reward.pass_score)
    write_whole(output / SAMPLES_FILE, sample_lines(samples))
    (output / PARTIAL_FILE).unlink()
    dump_config(config, output / CONFIG_FILE)
    report = _report(model, config, parsed.against, results, comparisons, time.monotonic() - start_s)
    if reads_clock(tokenizer):
        report["chat_time"] = data.identity.chat_time

    # Written last, because it marks the folder as complete.
    write_whole(output / RESULTS_FILE, json.dumps(report, indent=2) + "\n")
    if parsed.json:
        print(json.dumps(report, indent=2))
    else:
        _print(output, results, comparisons, parsed.against)


def _try_reward(config: PPOConfig) -> Mapping[str, RewardKeys]:
    """Return the additional keys of the reward functions by data source.

    Raises ConfigError if the functions cannot be used.
    """
    if not config.reward.functions:
        return {}
    rows, _ = choose_truths(config.data, ["data.train_files"], most=1)
    results, keys = judge_rewards(config.reward, rows)
    if problems := [str(found) for found in results if found.status is Status.error]:
        raise ConfigError("the reward", problems)

    return keys


def _not_compared(
    config: PPOConfig, keys: Mapping[str, RewardKeys], others: Sequence[ScoredSample]
) -> list[str]:
    """Return the metrics that only one of the two evaluations will have.

    Only data sources whose reward was tried are compared.
    """
    theirs = by_data_source(others)
    lacking: set[str] = set()

    # Collect the metrics that only one of the two evaluations has.
    for source in keys.keys() & theirs.keys():
        lacking |= (
            set(source_metrics(config, keys[source]))
            ^ prompt_values(theirs[source], config.reward.pass_score).keys()
        )

    return sorted(lacking)


def _announce(
    console: Console, config: PPOConfig, model: NamedModel, num_prompts: int, not_compared: Sequence[str]
) -> None:
    """Print what is sampled, and the metrics that only one of the two evaluations has."""
    if not_compared:
        print_line(console, f"not compared, because only one evaluation has it: {', '.join(not_compared)}")

    what = (
        f"{counted(num_prompts, 'prompt')} x {counted(config.rollout.validation.n, 'sample')} from "
        f"{model.source.folder}"
    )
    print_line(console, f"{what}, engine {config.rollout.engine.name}")
    print_line(console, f"scored by: {' + '.join(scored_by(config))}")


def scored_by(config: PPOConfig) -> list[str]:
    """Describe all that scores a sample, with its weight unless that is 1."""
    reward = config.reward
    scorers = [(f"function {each.file}:{each.name}", each.weight) for each in reward.functions]
    scorers += [(f"judge {each.name} ({each.served_by})", each.weight) for each in reward.judges]
    if reward.model.path is not None:
        scorers.append((f"reward model {reward.model.path}", reward.model.weight))
    agent = config.agent
    if agent.environment.path is not None or agent.has_program:
        scorers.append(("rewards of the episode's turns", 1.0))

    return [name if weight == 1 else f"{weight:g} x {name}" for name, weight in scorers]


def _claim(output: Path) -> None:
    """Create the output folder. Raises ConfigError if it contains results or is not writable."""
    if (output / RESULTS_FILE).exists():
        raise ConfigError(
            "--output",
            [f"{output} contains the results of another evaluation; give another folder, or remove it"],
        )

    if (partial := output / PARTIAL_FILE).exists():
        what = (
            f"{partial} contains the samples of an unfinished evaluation, which `megarl eval CONFIG --rows` "
            "can read"
        )
        raise ConfigError("--output", [f"{what}; give another folder, or remove the file"])

    try:
        output.mkdir(parents=True, exist_ok=True)
        # Test that the folder is writable before the engines are started.
        tempfile.TemporaryDirectory(dir=output).cleanup()
    except OSError as error:
        raise ConfigError(
            "--output", [f"{output} cannot be written ({error.strerror}); give a writable folder"]
        ) from error


def _others(against: str | None, data: PromptDataset) -> list[ScoredSample] | None:
    """Return the samples of another evaluation of the same prompts."""
    if against is None:
        return None
    file = Path(against) / SAMPLES_FILE
    others = read_samples(file)
    check_same_prompts(
        file, others, {str(row): (data[row].data_source, data[row].messages) for row in range(len(data))}
    )

    return others


def _samples(
    config: PPOConfig,
    data: PromptDataset,
    rollout: Rollout,
    reward: Reward,
    partial: Path,
    console: Console,
) -> list[ScoredSample]:
    """Generate and score all samples.

    Each batch is appended to `partial`, so that a killed evaluation keeps its samples.
    """
    evaluation = Evaluation(
        data, config.rollout.validation, config.trainer.prompts_per_step, pass_score=config.reward.pass_score
    )
    samples: list[ScoredSample] = []

    start_s = time.monotonic()

    with ProgressBar("prompts", len(data), console) as bar:
        for batch in evaluation.samples(rollout, reward):
            samples += batch
            # Open the file for each batch, so that its samples are flushed before the next one starts.
            with partial.open("a", encoding="utf-8") as file:
                file.write(sample_lines(batch))

            score = f"score {fmean(sample.score for sample in samples):.3g}"
            num_done = len(samples) // config.rollout.validation.n
            bar.show(num_done, score)
            # A log has no bar, so each batch gets a line.
            if not console.is_terminal:
                left_s = (time.monotonic() - start_s) / num_done * (len(data) - num_done)
                done = f"{num_done:,} of {counted(len(data), 'prompt')}"
                print_line(console, f"{done}, {score}, {left_s:.0f} s left")

    return samples


def _report(
    model: NamedModel,
    config: PPOConfig,
    against: str | None,
    results: Mapping[str, SourceResult],
    comparisons: Mapping[str, SourceComparison] | None,
    seconds: float,
) -> dict[str, Any]:
    report = {
        "model": str(model.source.folder),
        "step": model.source.step,
        "data": config.data.val_files,
        "sampling": {
            **asdict(config.rollout.validation),
            "max_tokens": config.data.max_response_length,
            "seed": config.trainer.seed,
        },
        "scored_by": scored_by(config),
        "seconds": round(seconds, 1),
        "results": {source: result.as_json() for source, result in results.items()},
    }
    if comparisons is not None:
        report["against"] = against
        report["differences"] = {source: comparison.as_json() for source, comparison in comparisons.items()}
        report["not_compared"] = {
            source: {"only_here": comparison.only_here, "only_there": comparison.only_there}
            for source, comparison in comparisons.items()
        }

    return report


def _print(
    output: Path,
    results: Mapping[str, SourceResult],
    comparisons: Mapping[str, SourceComparison] | None,
    against: str | None,
) -> None:
    console = output_console()
    for source, result in results.items():
        comparison = None if comparisons is None else comparisons[source]
        print_result(source, result, comparison, console)
        if comparison is not None and comparison.only_there:
            print_line(console, f"only in {against}: {', '.join(comparison.only_there)}")

    print_line(console, f"{output}: {RESULTS_FILE}, {SAMPLES_FILE}")


def print_result(
    source: str, result: SourceResult, comparison: SourceComparison | None, console: Console
) -> None:
    """Print the table of one data source.

    Args:
        comparison: The differences from the evaluation of `--against`; None if it lacks the data source.
    """
    size = (
        f"{counted(result.num_prompts, 'prompt')}, {counted(result.num_samples, 'sample')} of "
        f"{result.mean_tokens:.1f} tokens on average"
    )
    print_line(console, f"{source}: {size}, {result.truncated:.1%} truncated")
    numbers = ["value", "standard error"]
    numbers += [] if comparison is None else ["difference", "its standard error"]
    table = Table("metric", *(Column(each, justify="right") for each in numbers))

    for name, estimate in result.metrics.items():
        cells = [f"{estimate.value:.4f}", _error(estimate)]
        if comparison is not None:
            difference = comparison.differences.get(name)
            cells += (
                ["only here", "-"] if difference is None else [f"{difference.value:+.4f}", _error(difference)]
            )
        table.add_row(name, *cells)

    console.print(table)


def _error(estimate: Estimate) -> str:
    return "-" if estimate.standard_error is None else f"{estimate.standard_error:.4f}"
