"""Measure the size of the page of `megarl report`, and how long a browser takes to open it.

    python -m benchmarks.report [--steps 500] [--samples 5000] [--tokens 128]

The benchmark creates the folder of a run of that many steps: 80 metrics, samples of 50 steps with tokens as
frequent as words, and a timeline of 17 spans per step. It writes the page, opens it in Chromium (`apt-get
install chromium chromium-driver`), and prints the seconds until the curves are shown, and from there to the
table of samples. The targets are 20 MB and 3 s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.cli.main import main as megarl
from megarl.config.load import dump_config
from megarl.config.schema import AlgorithmConfig, CorrectionLevel, PPOConfig, RolloutCorrectionConfig
from megarl.tracking.run_files import CONFIG_FILE, GENERATIONS_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE
from megarl.tracking.samples import (
    LATE,
    OF_EPISODES,
    SCHEMA,
    SampleTable,
    SampleWriter,
    list_column,
    sample_files,
)
from megarl.tracking.timeline import Span, Timeline

SAMPLES_PER_PROMPT = 8
NUM_FILES = 50
VOCABULARY = 50_000
HIGHEST_WEIGHT = 1.002
CONFIG = PPOConfig(
    algorithm=AlgorithmConfig(
        rollout_correction=RolloutCorrectionConfig(level=CorrectionLevel.token, high=HIGHEST_WEIGHT)
    )
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LARGEST_MB = 20
LONGEST_S = 3


def make_run(
    folder: Path, num_steps: int, num_samples: int, num_tokens: int, num_files: int = NUM_FILES, seed: int = 0
) -> None:
    """Write the folder of a run.

    Args:
        num_samples: Samples in all files together, with `num_tokens` each.
    """
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    dump_config(CONFIG, folder / CONFIG_FILE)
    names = [
        "critic/score/mean",
        "val/score/mean",
        "actor/entropy",
        *(f"{group}/metric_{i}" for group in ("actor", "critic") for i in range(38)),
    ]
    curves = generator.normal(size=(num_steps, len(names))).cumsum(axis=0) / np.sqrt(num_steps)

    with (folder / METRICS_FILE).open("w") as lines:
        for step in range(num_steps):
            lines.write(
                json.dumps(
                    {
                        "step": step + 1,
                        **dict(zip(names, curves[step].tolist(), strict=True)),
                        "timing_s/step": 60.0,
                    }
                )
                + "\n"
            )

    row = {
        "uid": "7",
        "data_source": "words",
        "response": "x",
        "ground_truth": "y",
        "extra_info": {},
        "score": 0.0,
    }
    (folder / GENERATIONS_FILE).write_text(
        "".join(
            json.dumps({"step": step, **row}) + "\n" for step in range(0, num_steps, 100) for _ in range(8)
        )
    )
    (folder / SUMMARY_FILE).write_text(
        json.dumps(
            {"validation": {"before": 0.25, "after": 0.75}, "steps": num_steps, "seconds": 60 * num_steps}
        )
    )
    _timeline(folder, num_steps)
    vocabulary = [
        " " + LETTERS[number % 26] * (number % 3) + LETTERS[number // 26 % 26] + str(number)
        for number in range(VOCABULARY)
    ]
    writer = SampleWriter(folder)
    steps = np.unique(np.linspace(1, num_steps, num_files).round().astype(int)).tolist()

    for step in steps:
        writer.write(
            step,
            lambda step=step: _samples(step, num_samples // len(steps), num_tokens, vocabulary, generator),
            2**40,
        )

    writer.close()


def _timeline(folder: Path, num_steps: int) -> None:
    timeline = Timeline(folder)
    for step in range(1, num_steps + 1):
        spans = [Span("driver", "driver", 0, "step", 60.0 * step, 60.0 * step + 59)]
        for rank in range(8):
            for number, name in enumerate(("log_probs", "update")):
                spans.append(
                    Span(
                        "actor",
                        "actor",
                        rank,
                        name,
                        60.0 * step + 20 * number + 10,
                        60.0 * step + 20 * number + 28 + rank / 10,
                    )
                )
        timeline.add(spans, step)

    timeline.write()


def _samples(
    step: int, num_samples: int, num_tokens: int, vocabulary: list[str], generator: np.random.Generator
) -> SampleTable:
    lengths = [num_tokens] * num_samples
    total = num_samples * num_tokens
    ids = np.minimum(generator.zipf(1.3, total), VOCABULARY - 1).astype(
        np.int32
    )  # frequencies like those of words
    own = -generator.exponential(0.7, total) * (generator.random(total) < 0.6)
    gaps = generator.normal(0, 0.005, total)
    advantages = np.repeat(generator.normal(size=num_samples), num_tokens)
    # Token-level truncated importance sampling; the last token of each response is too old.
    weights = np.minimum(np.exp(gaps), HIGHEST_WEIGHT)
    excluded = np.where(np.arange(total) % num_tokens == num_tokens - 1, LATE, 0)
    shares = np.abs(advantages) * weights * (excluded == 0)
    prompts = [
        f"<|user|>question {step}.{number // SAMPLES_PER_PROMPT}: {'what is it? ' * 30}<|assistant|>"
        for number in range(num_samples)
    ]
    columns = {
        "step": [step] * num_samples,
        "uid": [f"{step}-{number // SAMPLES_PER_PROMPT}" for number in range(num_samples)],
        "data_source": ["words"] * num_samples,
        "prompt": prompts,
        "prompt_ids": list_column([1] * num_samples, np.zeros(num_samples, np.int32), pa.int32()),
        "response": [
            "".join(vocabulary[number] for number in row)
            for row in ids.reshape(num_samples, num_tokens).tolist()
        ],
        "response_ids": list_column(lengths, ids, pa.int32()),
        "ground_truth": ["42"] * num_samples,
        "score": (generator.random(num_samples) < 0.5).astype(float),
        "score_parts": list_column([1] * num_samples, np.zeros(num_samples, np.float32), pa.float32()),
        "reward_numbers": ["{}"] * num_samples,
        "advantage": advantages[::num_tokens].astype(np.float32),
        "advantages": list_column(lengths, advantages.astype(np.float32), pa.float32()),
        "log_probs": list_column(lengths, (own + gaps).astype(np.float32), pa.float32()),
        "rollout_log_probs": list_column(lengths, own.astype(np.float32), pa.float32()),
        "rollout_weights": list_column(lengths, weights.astype(np.float32), pa.float32()),
        "excluded": list_column(lengths, excluded.astype(np.int8), pa.int8()),
        "loss_share": list_column(lengths, (shares / shares.sum()).astype(np.float32), pa.float32()),
        "weight_version": [step] * num_samples,
        "prompt_length": [1] * num_samples,
        "response_length": lengths,
        "finish_reason": ["stop"] * num_samples,
        **dict.fromkeys(OF_EPISODES, pa.nulls(num_samples)),
    }
    rows = pa.table(
        {name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()}, SCHEMA
    )

    return SampleTable(
        rows, {number: vocabulary[number] for number in np.unique(ids).tolist()}, ["compute_score"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("steps", 500), ("samples", 5000), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        make_run(folder, given.steps, given.samples, given.tokens)
        nbytes = sum(path.stat().st_size for path in sample_files(folder).values())
        print(
            f"samples on the disk: {nbytes / 1e6:.1f} MB, {nbytes / given.samples / given.tokens:.1f} bytes "
            f"a token"
        )
        start_s = time.perf_counter()
        if status := megarl(["report", str(folder)]):
            return status
        page = folder / REPORT_FILE
        size_mb = page.stat().st_size / 1e6
        print(
            f"written in {time.perf_counter() - start_s:.1f} s; {size_mb:.1f} MB, target below {LARGEST_MB}"
        )
        opened_s = _open(page)

    return 0 if size_mb < LARGEST_MB and opened_s < LONGEST_S else 1


def _open(page: Path) -> float:
    from docs.generate.browser import browser, wait_for

    with browser() as chromium:
        start_s = time.perf_counter()
        chromium.get(f"{page.as_uri()}#curves")
        wait_for(chromium, "curves")
        opened_s = time.perf_counter() - start_s
        chromium.execute_script("location.hash = 'samples'")
        wait_for(chromium, "samples")
        print(
            f"opened in {opened_s:.2f} s, target below {LONGEST_S}; the samples in "
            f"{time.perf_counter() - start_s - opened_s:.2f} s more"
        )

    return opened_s


if __name__ == "__main__":
    raise SystemExit(main())
