"""Compare predicted with measured times of training layouts on this machine's CPU.

    python -m benchmarks.tuning.layouts [--ranks 2] [--repeats 3] [--cpu-time] [--json FILE]

Random valid layouts of a small model are measured in one run: the actor scores and trains the rows of a step on
the real engine, over gloo, with one process per rank. Their times are predicted from a device file that is
measured first. The repeats of all layouts are interleaved, so that other load on the machine slows all of them.

On a busy machine, ranks wait for a core most of the time. `--cpu-time` compares the processor seconds of the rank
that has the most with the predicted time without the bubble of a pipeline, in which a rank waits.

The output is the Spearman correlation between predicted and measured times, with a limit of 0.8, and the regret:
how much slower the layout is that is predicted to be the fastest than the one that is, with a limit of 10 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import correlation, median
from typing import Any, NamedTuple

import psutil
from transformers import Qwen2Config

from benchmarks.history.rows import at_least, at_most, record
from benchmarks.tuning.layout_ranks import PassSeconds, run_layouts
from megarl.cli.tables.console import output_console, table
from megarl.config.batch_arithmetic import Row
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import DType, ParallelConfig, PPOConfig
from megarl.config.validate import read_architectures, validate
from megarl.plan.step_time.device import DeviceProfile, PhaseTime, load_device
from megarl.plan.step_time.lengths import measured_lengths
from megarl.plan.step_time.role_time import role_times
from megarl.rehearse.calibration.measurements import (
    CalibrationRequest,
    DecodeSweep,
    RankMeasurements,
)
from megarl.rehearse.calibration.profile import calibrate

LEAST_CORRELATION = 0.8
MOST_REGRET = 0.1
NUM_LAYOUTS = 24
NUM_ROWS = 16
STEPS_PER_REPEAT = 2
SIZES = (1, 2, 4)  # of each axis
PROMPT = 16
RESPONSE = 48
MAX_TOKENS = (64, 128, 256, 512)
RECOMPUTE = ("none", "selective", "full")
SEED = 0
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


class Layout(NamedTuple):
    """A layout of the actor.

    Attributes:
        sizes: Tensor, pipeline, data and context parallel size.
        sequence_parallel: Whether tensor-parallel ranks divide sequences between products.
        max_tokens: The tokens of a micro-batch per rank.
        recompute: What is recomputed.
    """

    sizes: tuple[int, int, int, int]
    sequence_parallel: bool
    max_tokens: int
    recompute: str

    def __str__(self) -> str:
        tp, pp, dp, cp = self.sizes
        sequence = "+SP" if self.sequence_parallel else ""
        return (
            f"TP{tp}{sequence} PP{pp} DP{dp} CP{cp}, {self.max_tokens:,} tokens, recompute {self.recompute}"
        )


class Comparison(NamedTuple):
    """The times of one layout, in seconds."""

    layout: Layout
    predicted: PhaseTime
    measured: float


def layouts(num_ranks: int, folder: str) -> Iterator[tuple[Layout, PPOConfig]]:
    """Yield all valid layouts of at most `num_ranks` ranks that use all of them, in a random order."""
    sizes = [each for each in itertools.product(SIZES, SIZES, SIZES, SIZES) if _product(each) == num_ranks]
    drawn = [
        Layout(*each)
        for each in itertools.product(sizes, (False, True), MAX_TOKENS, RECOMPUTE)
        if each[0][0] > 1 or not each[1]
    ]
    random.Random(SEED).shuffle(drawn)
    for layout in drawn:
        config = configuration(layout, folder)
        if not validate(config):
            yield layout, config


def configuration(layout: Layout, folder: str) -> PPOConfig:
    """Return a run with two mini-batches per step, so that scoring is a pass of its own."""
    tensor, pipeline, data, context = layout.sizes
    values: dict[str, Any] = {
        "algorithm": "reinforce_pp",
        "model": {"path": folder, "dtype": "float32"},
        "data": {
            "train_files": ["rows.parquet"],
            "max_prompt_length": PROMPT,
            "max_response_length": RESPONSE,
        },
        "actor": {
            "parallel": {
                "tensor_parallel_size": tensor,
                "pipeline_parallel_size": pipeline,
                "data_parallel_size": data,
                "context_parallel_size": context,
                "sequence_parallel": layout.sequence_parallel,
            },
            "micro_batch": {"max_tokens": layout.max_tokens},
            "recompute": layout.recompute,
        },
        "rollout": {"n": 1},
        "reward": {"functions": [{"path": "reward.py"}]},
        "trainer": {"prompts_per_step": NUM_ROWS, "updates_per_step": 2},
        "device": "cpu",
    }
    return load_config(PPOConfig, values)


def predict(config: PPOConfig, device: DeviceProfile) -> PhaseTime:
    """Return the predicted time of the actor's phases in a step."""
    role = next(role for role in model_roles(config) if role.name == "actor")
    lengths = measured_lengths(PROMPT, [RESPONSE])
    times = role_times(config, role, read_architectures(config)[0]["actor"], device, lengths)
    return times["old_log_prob"].plus(times["update_actor"])


def calibration_request(config: PPOConfig, num_ranks: int, folder: str) -> CalibrationRequest:
    """Return the request to measure this machine for as many ranks as the layouts have."""
    # The products of a layer on one rank.
    whole = config.with_sections(actor=replace(config.actor, parallel=ParallelConfig()))
    return CalibrationRequest(
        config=whole,
        architecture=read_architectures(config)[0]["actor"],
        is_cuda=False,
        num_ranks=num_ranks,
        folder=folder,
    )


def calibrated(measured: RankMeasurements, num_ranks: int) -> DeviceProfile:
    """Return the profile of a machine whose ranks all have the same measurements."""
    return calibrate(
        load_device("cpu"),
        "cpu",
        [measured] * num_ranks,
        DecodeSweep(problem="nothing is generated"),
        is_cuda=False,
        dtype=DType.float32,
        host_memory_bytes=psutil.virtual_memory().total,
        date="",
    ).profile


def compare(
    layout: Layout, predicted: PhaseTime, times: Sequence[PassSeconds], *, cpu_time: bool
) -> Comparison:
    """Return the median of the steps with the prediction, in processor or in wall seconds."""
    if not cpu_time:
        return Comparison(layout, predicted, median(each.wall for each in times))
    busy = {name: seconds for name, seconds in predicted.parts.items() if name != "bubble"}
    return Comparison(layout, PhaseTime.of(**busy), median(each.processor for each in times))


def regret(found: Sequence[Comparison]) -> float:
    """Return how much slower the predicted best is than the measured best, as a share."""
    chosen = min(found, key=lambda each: each.predicted.seconds)
    return chosen.measured / min(each.measured for each in found) - 1


def spearman(found: Sequence[Comparison]) -> float:
    return correlation(
        [each.predicted.seconds for each in found], [each.measured for each in found], method="ranked"
    )


def _product(sizes: Sequence[int]) -> int:
    tensor, pipeline, data, context = sizes
    return tensor * pipeline * data * context


def print_comparison(found: Sequence[Comparison]) -> None:
    rows = [
        (
            f"{each.measured:.2f}",
            f"{each.predicted.seconds:.2f}",
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in _largest(each.predicted.parts)),
            str(each.layout),
        )
        for each in sorted(found, key=lambda each: each.measured)
    ]
    columns = ("measured", "predicted", "largest parts", "layout")
    output_console().print(table("Seconds of scoring and training", columns, rows))


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])[:3]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write all times")
    options = parser.parse_args()
    # A rank on a CPU is a device with one core.
    os.environ["OMP_NUM_THREADS"] = "1"

    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**MODEL, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        chosen = list(itertools.islice(layouts(options.ranks, folder), NUM_LAYOUTS))
        configs = [config for _, config in chosen]
        request = calibration_request(configs[0], options.ranks, folder)
        rows = [Row(PROMPT, RESPONSE, number) for number in range(NUM_ROWS)]
        measured = run_layouts(request, configs, rows, options.repeats, STEPS_PER_REPEAT)
        device = calibrated(measured.device, options.ranks)
        found = [
            compare(layout, predict(config, device), times, cpu_time=options.cpu_time)
            for (layout, config), times in zip(chosen, measured.times, strict=True)
        ]

    if options.json:
        _write(Path(options.json), device, found, measured.times)
    print_comparison(found)
    print(f"Spearman correlation {spearman(found):.2f}, limit {LEAST_CORRELATION}")
    print(f"regret of the predicted best {regret(found):.1%}, limit {MOST_REGRET:.0%}")
    record(
        "benchmarks.tuning.layouts",
        ratios={
            "rank correlation": at_least(spearman(found), LEAST_CORRELATION),
            "regret": at_most(regret(found), MOST_REGRET),
        },
    )
    return 0 if spearman(found) >= LEAST_CORRELATION and regret(found) <= MOST_REGRET else 1


def _write(
    path: Path, device: DeviceProfile, found: Sequence[Comparison], times: Sequence[Sequence[PassSeconds]]
) -> None:
    rows: list[Mapping[str, object]] = [
        {
            "layout": str(each.layout),
            "predicted": dict(each.predicted.parts),
            "measured": measured,
        }
        for each, measured in zip(found, times, strict=True)
    ]
    path.write_text(json.dumps({"device": str(device), "layouts": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
