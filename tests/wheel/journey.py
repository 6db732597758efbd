"""Steps of a new user with the wheel, in an empty folder: from the quickstart to a converted checkpoint, with
both engines."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 900.0  # per command
_MODEL = "outputs/quickstart/sft/huggingface"  # the quickstart's model, trained from scratch
_RUN = "train mine/run.yaml trainer.prompts_per_step=4 rollout.n=4 data.max_response_length=16"
_LAST = "outputs/mine/checkpoints/step_00000003/actor"

# Name -> arguments of `megarl`, or a command line if the first word is python. Later commands use the results
# of earlier ones.
COMMANDS: Mapping[str, str] = {
    "doctor": "doctor",
    "quickstart": "quickstart trainer.total_steps=2",
    "init": f"init mine --model {_MODEL} --device cpu",
    "make_data.py": "python mine/make_data.py",
    "reward.py": "python mine/reward.py",
    "check": "check mine/run.yaml rollout.engine=hf",
    "dry run": "check configs/quickstart.yaml device=cuda --dry-run",
    "train, hf": f"{_RUN} rollout.engine=hf trainer.output_dir=outputs/mine trainer.total_steps=2",
    "resume, hf": f"{_RUN} rollout.engine=hf trainer.output_dir=outputs/mine trainer.total_steps=3",
    "eval, hf": "eval outputs/mine --data mine/validation.jsonl --max-tokens 8 rollout.engine=hf",
    "generate": "generate outputs/mine 12+30 --max-tokens 8",
    "status": "status outputs/mine",
    "report": "report outputs/mine",
    "hf to Megatron": f"convert hf-to-megatron --input {_MODEL} --output outputs/megatron "
    f"--tensor-parallel-size 2",
    "Megatron to hf": "convert megatron-to-hf --input outputs/megatron --output outputs/back",
    "verify": f"convert verify {_MODEL} outputs/back",
    "run to hf": "convert megatron-to-hf --input outputs/mine/checkpoints --output outputs/trained --role "
    "actor",
    "train, SGLang": f"{_RUN} rollout.engine=sglang trainer.output_dir=outputs/sglang trainer.total_steps=2",
    "resume, SGLang TP2": f"{_RUN} rollout.engine=sglang rollout.tensor_parallel_size=2 "
    f"actor.parallel.data_parallel_size=2 "
    "trainer.output_dir=outputs/sglang trainer.total_steps=3",
    "eval, SGLang": "eval outputs/sglang --data mine/validation.jsonl --max-tokens 8 rollout.engine=sglang",
    "generate again": "generate outputs/trained 12+30 --max-tokens 8",
}


class Step(NamedTuple):
    """Result of a command. `status` is the process's; None if it exceeded `LIMIT_S`."""

    name: str
    status: int | None
    seconds: float
    log: Path


def walk(folder: Path, logs: Path, variables: Mapping[str, str]) -> Iterator[Step]:
    """Run `COMMANDS` in `folder`, with their output in `logs`. The environment consists only of
    `variables`."""
    for number, (name, line) in enumerate(COMMANDS.items()):
        words = line.split()
        command = words if words[0] == "python" else ["megarl", *words]
        log = logs / f"{number:02d}_{name.replace(' ', '_').replace(',', '')}.log"
        started_s = time.monotonic()
        with log.open("w") as output:
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            try:
                done = subprocess.run(
                    ["env", *command],
                    cwd=folder,
                    env=dict(variables),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT_S,
                    check=False,
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = None
        yield Step(name, status, time.monotonic() - started_s, log)
