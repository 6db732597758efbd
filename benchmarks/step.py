"""Compare a whole GRPO step with TRL's GRPOTrainer on the same work.

    python -m benchmarks.step              # the best of eight settings on each side, then three alternating repeats: 40 minutes
    python -m benchmarks.step --quick      # one setting and one repeat of each, and only the ratios: 4 minutes
    python -m benchmarks.step --engine sglang

The work is a Qwen2 of 6.4 million parameters in float32, 32 prompts of 50 to 70 tokens, 8 samples of at most
62 tokens each, KL of 0.001 in the loss (k3), one update, no gradient checkpointing, and the loss
`sequence_mean_token_mean`, which TRL calls `grpo`. There is one warm-up step before the steps that count.

Each side uses the same two cores in the way that is faster for it, with the micro-batch that is fastest
there: one process with two threads, or two data-parallel processes with one thread each. The second is two
ranks and two engines in megarl, and torchrun with DistributedDataParallel in TRL.

The output is the seconds of a step in wall time and processor time, and their parts; on a busy machine, the
ratio of processor times counts. The target is 1.5, with the hf engine, in wall time. TRL is installed into
its own environment in a cache folder, on top of this one: the same torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import mean
from string import ascii_lowercase
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.generation import PROMPTS, RESPONSE_TOKENS, SAMPLES, model_config
from benchmarks.history.rows import at_least, record
from megarl.machine.errors import counted

TRL = "trl==1.16.0"
PROMPT_LETTERS = (48, 68)
VOCABULARY = model_config().vocab_size
CORES = 2
STEPS = 2
REPEATS = 3
TARGET = 1.5
_SIZES = {"megarl": (1024, 2048, 4096, 8192), "TRL": (8, 16, 32, 64)}  # of a micro-batch
_UNITS = {"megarl": "tokens", "TRL": "rows"}
Setting = tuple[int, int]  # the number of processes, which share the cores, and the size of a micro-batch
QUICK: Mapping[str, Setting] = {"megarl": (1, 4096), "TRL": (1, 32)}
_TEMPLATE = (
    "{% for message in messages %}<user>{{ message.content }}{% endfor %}{% if "
    "add_generation_prompt %}<model>{% endif %}"
)
_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("7") / 62
"""
_PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


class Step(NamedTuple):
    """Seconds of one step.

    Attributes:
        parts: Wall time by phase.
    """

    wall: float
    cpu: float
    parts: Mapping[str, float]


def save_inputs(folder: Path) -> None:
    """Write `policy/` and `train.parquet`."""
    torch.manual_seed(0)
    words = ["<pad>", "<end>", "<user>", "<model>", *ascii_lowercase]
    words += [f"<{number}>" for number in range(VOCABULARY - len(words))]  # which only the model generates
    vocabulary = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
    )
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z0-9]+>|."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        pad_token="<pad>",
        unk_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<model>"],
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder / "policy")
    config = model_config(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    Qwen2ForCausalLM(config).float().save_pretrained(folder / "policy")
    generator = torch.Generator().manual_seed(1)
    rows = []

    for number in range(PROMPTS * (STEPS + 2)):
        length = int(torch.randint(*PROMPT_LETTERS, (), generator=generator))
        content = "".join(
            ascii_lowercase[letter]
            for letter in torch.randint(0, 26, (length,), generator=generator).tolist()
        )
        row = {
            "prompt": [{"role": "user", "content": content}],
            "data_source": "words",
            "extra_info": {"index": number},
        }
        rows.append({**row, "reward_model": {"style": "rule", "ground_truth": "7"}})

    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(_REWARD)


# ---- megarl


def megarl_steps(inputs: Path, setting: Setting, engine: str) -> list[Step]:
    processes, max_tokens = setting
    micro_batch = {"max_tokens": max_tokens}
    config: dict[str, Any] = {
        "kind": "ppo",
        "algorithm": "grpo",
        "model": {"path": str(inputs / "policy"), "dtype": "float32"},
        "data": {
            "train_files": [str(inputs / "train.parquet")],
            "max_prompt_length": 80,
            "max_response_length": RESPONSE_TOKENS,
        },
        "actor": {
            "micro_batch": micro_batch,
            "optim": {"lr": 1e-6},
            "parallel": {"data_parallel_size": processes},
        },
        "reference": {"micro_batch": micro_batch},
        "rollout": {
            "n": SAMPLES,
            "engine": engine,
            "num_replicas": processes,
            "max_concurrency": PROMPTS * SAMPLES,
        },
        "reward": {"functions": [{"path": str(inputs / "reward.py")}], "num_processes": 1},
        "trainer": {"total_steps": STEPS + 1, "prompts_per_step": PROMPTS, "validate_before": False},
        "checkpoint": {"at_end": False, "save_hf": False},
        "tracking": {"loggers": ["jsonl"], "samples_every_steps": 0},
        "device": "cpu",
    }

    with tempfile.TemporaryDirectory() as folder:
        config["trainer"]["output_dir"] = f"{folder}/run"
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(config))
        lines = Path(folder, "run", "metrics.jsonl")
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "megarl", "train", str(file)],
                stdout=output,
                stderr=output,
                env=os.environ | _threads(processes),
            )
            cpu_s = _cpu_at_lines(process, lines)
        if process.returncode:
            raise RuntimeError(
                f"megarl train ended with status {process.returncode}: {log.read_text(errors='replace')}"
            )
        metrics = [json.loads(line) for line in lines.read_text().splitlines()]

    return [
        Step(
            line["timing_s/step"],
            after - before,
            {name: line.get(f"timing_s/{name}", 0.0) for name in _PHASES},
        )
        for line, before, after in zip(metrics[1:], cpu_s, cpu_s[1:], strict=False)
    ]


def _threads(processes: int) -> dict[str, str]:
    """Return the variable that divides the cores between this number of processes."""
    return {"OMP_NUM_THREADS": str(CORES // processes)}


def _cpu_at_lines(process: subprocess.Popen[bytes], file: Path) -> list[float]:
    """Return the processor seconds of a process and its children when each line of the file appeared."""
    used: dict[int, float] = {}
    at_lines: list[float] = []
    root = psutil.Process(process.pid)

    while process.poll() is None:
        try:
            for each in (root, *root.children(recursive=True)):
                times = each.cpu_times()
                used[each.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
        number = len(file.read_text().splitlines()) if file.exists() else 0
        at_lines += [sum(used.values())] * (number - len(at_lines))
        time.sleep(0.1)

    return at_lines


# ---- TRL, in a process with its own environment


def trl_python() -> Path:
    """Return the interpreter that has TRL in addition to this one's packages, and create it if it is missing."""
    folder = Path(
        os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"),
        "megarl",
        "benchmarks",
        TRL.replace("==", "-"),
    )
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
    (site,) = folder.glob("lib/python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]

    # each time, because it may have been created on top of another environment
    (site / "beside.pth").write_text("\n".join(own) + "\n")
    if not ready.exists():
        # pip would warn of what the packages of this environment lack, which is on purpose.
        quiet = ("--quiet", "--disable-pip-version-check", "--no-warn-conflicts")
        subprocess.run([python, "-m", "pip", "install", *quiet, TRL], check=True)
        ready.touch()

    return python


def trl_steps(inputs: Path, setting: Setting) -> list[Step]:
    processes, rows = setting
    environment = (
        os.environ | _threads(processes) | {"CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    )
    launch = (
        []
        if processes == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    command: list[str | Path] = [
        trl_python(),
        *launch,
        Path(__file__).with_name("step_of_trl.py"),
        inputs,
        str(rows),
        str(STEPS),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"TRL ended with status {run.returncode}: {run.stdout}{run.stderr}")

    return [Step(*step) for step in json.loads(run.stdout.splitlines()[-1])]


# ---- the race


def best(settings: Sequence[Setting], steps_of: Callable[[Setting], list[Step]]) -> Setting:
    """Return the setting whose steps are the fastest on the clock."""
    return min(settings, key=lambda setting: min(step.wall for step in steps_of(setting)))


def _table(settings: Mapping[str, Setting], steps: Mapping[str, Sequence[Step]]) -> Table:
    """Return a row per contestant, with the setting that is its best."""
    table = Table(
        "",
        "processes",
        "micro-batch",
        "s a step",
        "processor s",
        "phase, wall s",
        title=f"{PROMPTS} x {SAMPLES} samples",
    )

    for name, (processes, size) in settings.items():
        of = steps[name]
        parts = ", ".join(f"{part} {mean(step.parts[part] for step in of):.1f}" for part in of[0].parts)
        table.add_row(
            name,
            f"{processes} of {counted(CORES // processes, 'thread')}",
            f"{size:,} {_UNITS[name]}",
            f"{min(step.wall for step in of):.1f}",
            f"{min(step.cpu for step in of):.1f}",
            parts,
        )

    return table


def main() -> int:
    """Run the comparison and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engine", choices=["hf", "sglang"], default="hf")
    arguments = parser.parse_args()
    console = Console()
    disable_progress_bar()

    with tempfile.TemporaryDirectory() as folder:
        save_inputs(inputs := Path(folder))
        sides: dict[str, Callable[[Setting], list[Step]]] = {
            "megarl": lambda setting: megarl_steps(inputs, setting, arguments.engine),
            "TRL": lambda setting: trl_steps(inputs, setting),
        }
        settings = dict(QUICK)
        if not arguments.quick:
            settings = {
                name: best(list(product((1, CORES), _SIZES[name])), steps_of)
                for name, steps_of in sides.items()
            }

        steps: dict[str, list[Step]] = {name: [] for name in sides}
        for _ in range(1 if arguments.quick else REPEATS):
            for name, steps_of in sides.items():
                steps[name] += steps_of(settings[name])

    if not arguments.quick:
        console.print(_table(settings, steps))
    wall, cpu = (
        min(seconds(step) for step in steps["TRL"]) / min(seconds(step) for step in steps["megarl"])
        for seconds in (attrgetter("wall"), attrgetter("cpu"))
    )
    load = os.getloadavg()[0]
    console.print(
        f"TRL over megarl with {arguments.engine}: {wall:.2f} on the clock, {cpu:.2f} on the processor, "
        f"target {TARGET}; load {load:.1f}"
    )

    ratio = f"TRL over megarl with {arguments.engine}"
    judged = {ratio: at_least(wall, TARGET)} if arguments.engine == "hf" else {}
    record("benchmarks.step", ratios=judged, on_the_clock=wall, on_the_processor=cpu)
    return 0 if wall >= TARGET or arguments.engine != "hf" else 1


if __name__ == "__main__":
    raise SystemExit(main())
