"""Golden runs: three short trainings whose batches, metrics and final states are compared bitwise with a
record.

python -m tests.integration.golden [--write] [--tensors FOLDER]

It prints the differences from the record of this platform; `--write` rewrites that record. `--tensors` keeps
the tensors themselves, one safetensors file per run, so that two versions of the code can be compared element
by element. A record is valid for one platform (`platform_key`): another processor rounds differently, so
there only metrics can be compared, with a tolerance.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.history.rows import processor_kind
from megarl.batch.data_proto import DataProto
from megarl.config.load import load_config
from megarl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    CheckpointConfig,
    EnvironmentConfig,
    MicroBatchConfig,
    ParallelConfig,
    PPOConfig,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.roles.start import PPORoles
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config

RECORDS = Path(__file__).with_name("golden")
# Preset of configs/algorithm -> the actor's layout; each kind of parallelism once.
LAYOUTS = {
    "ppo": ParallelConfig(data_parallel_size=2),
    "grpo": ParallelConfig(tensor_parallel_size=2),
    "dapo": ParallelConfig(pipeline_parallel_size=2),
}
# The samples of this run are episodes of one turn, bitwise identical to those without an environment, which
# the record contains.
OF_EPISODES = "grpo"
ENVIRONMENT = """
from megarl.agents.protocol import Reply
class Environment:
    async def start(self, task): ...
    async def respond(self, turn):
        return Reply()
    async def close(self): ...
"""
STEPS = 3
PROMPTS = 4
SAMPLES_PER_PROMPT = 4
UPDATES_PER_STEP = 2
RESPONSE_LENGTH = 8
_CONFIGS = Path(__file__).parents[2] / "configs"
# Metrics of clocks rather than computations, and metrics of episodes only.
_TIMED = re.compile(
    r"(timing_s|perf|memory|resharding|agent)/.*|rollout/replica_\d+/tokens_per_s|val/(.+/)?turns/mean"
)
_EPISODES_ALONE = ("answer_mask", "environment_rewards")

See = Callable[[int, DataProto], None]  # step and batch


class Observed(NamedTuple):
    """Results of a run.

    Attributes:
        metrics: Lines of metrics.jsonl, without timings.
        tensors: `step_N/KEY` is a column of the batch for the updates of step N, in its row order;
            `policy/NAME` is a weight of the Hugging Face folder; `actor/NAME` and `critic/NAME` are weights,
            master weights or moments of the last checkpoint.
    """

    metrics: list[dict[str, float]]
    tensors: dict[str, torch.Tensor]


class Recorded(NamedTuple):
    """Results as stored in a record. `tensors` contains the output of `digest` by name."""

    metrics: list[dict[str, float]]
    tensors: dict[str, str]


def watch_updates(roles: PPORoles, see: See) -> None:
    """Call `see` with each batch that the actor is trained on, including advantages."""
    update = roles.actor.update

    def watched(batch: DataProto, step: int) -> Any:
        see(step, batch)
        return update(batch, step)

    roles.actor.update = watched  # type: ignore[method-assign]


def observe(name: str, inputs: Path, output_dir: Path) -> Observed:
    """Run a preset on the current Ray cluster. `inputs` is a folder written by `save_inputs`."""
    tensors: dict[str, torch.Tensor] = {}

    def see(step: int, batch: DataProto) -> None:
        columns = sorted(set(batch.tensors) - {*_EPISODES_ALONE})
        tensors.update((f"step_{step}/{key}", batch.tensors[key].clone()) for key in columns)

    def look(step: int, roles: PPORoles) -> None:
        if step == 1:
            watch_updates(roles, see)

    finished = run_ppo(golden_config(name, inputs, output_dir), look)
    metrics = [
        {key: value for key, value in line.items() if not _TIMED.fullmatch(key)} for line in finished.metrics
    ]
    for file in sorted(finished.policy.glob("*.safetensors")):
        tensors |= {f"policy/{key}": value for key, value in load_file(file).items()}
    (checkpoint,) = (output_dir / "checkpoints").glob("step_*")

    for role in ("actor", "critic"):
        if (checkpoint / role).exists():
            tensors |= {f"{role}/{key}": value for key, value in _checkpointed(checkpoint / role)}

    return Observed(metrics, tensors)


def golden_config(name: str, inputs: Path, output_dir: Path) -> PPOConfig:
    micro_batch = MicroBatchConfig(max_tokens=64)
    environment = inputs / "environment.py"
    environment.write_text(ENVIRONMENT)
    return tiny_config(
        inputs,
        output_dir,
        data={"max_response_length": RESPONSE_LENGTH},
        agent=AgentConfig(
            environment=EnvironmentConfig(path=f"{environment}:Environment" if name == OF_EPISODES else None),
            max_turns=1,
        ),
        algorithm=_preset(name),
        actor={"parallel": LAYOUTS[name], "micro_batch": micro_batch},
        critic={"micro_batch": micro_batch},
        reference={"micro_batch": micro_batch},
        rollout={"n": SAMPLES_PER_PROMPT},
        checkpoint=CheckpointConfig(every_steps=STEPS, save_hf=False),
        trainer={"total_steps": STEPS, "prompts_per_step": PROMPTS, "updates_per_step": UPDATES_PER_STEP},
    )


def _preset(name: str) -> AlgorithmConfig:
    overrides = [f"algorithm={name}", f"data.max_response_length={RESPONSE_LENGTH}"]
    return load_config(PPOConfig, str(_CONFIGS / "quickstart.yaml"), overrides).algorithm


def _checkpointed(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a role's distributed checkpoint, unsharded, read by torch itself."""
    items = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in items.items()
        if isinstance(item, TensorStorageMetadata)
    }

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)

    return iter(sorted(tensors.items()))


def digest(tensor: torch.Tensor) -> str:
    """Return the dtype, shape and SHA-256 of the elements in C order."""
    elements = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {sha256(elements).hexdigest()}"


def differences(name: str, observed: Observed, recorded: Recorded) -> list[str]:
    """Return one line for each metric and tensor that is not bitwise identical to the record."""
    before = {
        f"metrics/{line['step']}/{key}": value for line in recorded.metrics for key, value in line.items()
    }
    after = {
        f"metrics/{line['step']}/{key}": value for line in observed.metrics for key, value in line.items()
    }
    pairs = [
        (before, after),
        (recorded.tensors, {key: digest(tensor) for key, tensor in observed.tensors.items()}),
    ]

    return [
        f"{name}: {key} is {now.get(key, 'missing')}, the record has {then.get(key, 'nothing')}"
        for then, now in pairs
        for key in dict.fromkeys([*then, *now])
        if repr(then.get(key)) != repr(now.get(key))
    ]


# ---- records


def platform_key() -> str:
    """Return what the bits of a run depend on other than the code: torch, the kernels that it selects, and
    the processor, by which matrix libraries select theirs."""
    return f"torch-{torch.__version__}_{torch.backends.cpu.get_cpu_capability()}_{processor_kind()}"


def read_record(file: Path) -> dict[str, Recorded]:
    """Return the record by run."""
    return {name: Recorded(**run) for name, run in json.loads(file.read_text()).items()}


def own_record() -> Path:
    """Return the path of this platform's record."""
    return RECORDS / f"{platform_key()}.json"


def write_record(runs: Mapping[str, Observed]) -> None:
    record = {
        name: {
            "metrics": run.metrics,
            "tensors": {key: digest(tensor) for key, tensor in run.tensors.items()},
        }
        for name, run in runs.items()
    }
    RECORDS.mkdir(exist_ok=True)
    own_record().write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="rewrite the record of this platform")
    parser.add_argument("--tensors", type=Path, metavar="FOLDER", help="keep the tensors in this folder")
    arguments = parser.parse_args()
    start_ray(num_cpus=12, object_store_mb=256)

    with tempfile.TemporaryDirectory() as scratch:
        save_inputs(inputs := Path(scratch))
        runs = {name: observe(name, inputs, inputs / name) for name in LAYOUTS}

    shutdown()
    if arguments.tensors:
        arguments.tensors.mkdir(parents=True, exist_ok=True)
        for name, run in runs.items():
            save_file(
                {key: tensor.contiguous() for key, tensor in run.tensors.items()},
                arguments.tensors / f"{name}.safetensors",
            )

    if arguments.write:
        write_record(runs)
        print(f"written: {own_record()}")
        return 0

    if not own_record().exists():
        print(f"there is no record of this platform: {own_record()}")
        return 1

    recorded = read_record(own_record())
    found = [line for name, run in runs.items() for line in differences(name, run, recorded[name])]
    print("\n".join(found or ["the same, bit for bit"]))

    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
