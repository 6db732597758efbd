"""Measure what planning and dispatching a step costs the driver, by the number of ranks.

    python -m benchmarks.tuning.driver [--ranks 64 256 1024 4096]

The run is GRPO of Qwen3-32B with tensor parallelism of 8 and engines of 4 devices, on as many nodes as the ranks
need, with 32 samples per replica of the trainer. `placement` and `weight sync` are planned once, when a run starts.
`micro-batches` and `parts` are made in every step, for a scoring pass and four mini-batches: the plan of
micro-batches of all replicas, and one part of the batch for each of them. `calls` are the remote calls of a
step, two for scoring, four for updates, and eight that move state, prepare the weight sync and send weights.
Their cost is measured with empty workers in up to 16 real processes, which 2 to 8 relays call, and extrapolated: it
is linear in the relays and in the ranks.
Samples are short: `python -m benchmarks.scale` measures what their bytes cost.

All numbers are seconds of processor time of the driver process. The limit is 2 s per step at 1,024 ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.history.rows import record
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR, with_published_models
from megarl.config.validate import read_architectures
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.dispatch import RULES, Dispatch
from megarl.controller.group import RANKS_PER_RELAY, RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, Worker, register
from megarl.plan.placement.plan import plan_placement
from megarl.roles import megatron_role
from megarl.roles.megatron_role import MegatronRole
from megarl.weights.sync.forecast import forecast_weights

RANKS = (64, 256, 1024, 4096)
# Ranks, and ranks per relay.
CALLED = ((4, 2), (8, 4), (8, 2), (16, 8), (16, 4), (16, 2))
JUDGED_RANKS = 1024
LIMIT_S = 2.0
SAMPLES_PER_REPLICA = 32
SCORING_CALLS = 2
UPDATE_CALLS = 4
OTHER_CALLS = 8
_NUM_CALLS = 50
_CONFIG = "qwen3_32b_grpo"


class EmptyWorker(Worker):
    @register(RULES[Dispatch.ONE_TO_ALL])
    def nothing(self) -> None:
        pass


def processor_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


class CallCost(NamedTuple):
    """The driver's seconds for a call: for any call, for each relay and for each rank."""

    call_s: float
    relay_s: float
    rank_s: float

    def seconds(self, num_ranks: int, per_relay: int = RANKS_PER_RELAY) -> float:
        return self.call_s + num_ranks / per_relay * self.relay_s + num_ranks * self.rank_s


def call_s(num_ranks: int, per_relay: int) -> float:
    """Return the driver's time for a call of empty workers and the collection of their results."""
    pool = RayResourcePool([num_ranks], use_gpu=False, name=f"empty{num_ranks}")
    worker = RayClassWithInitArgs(EmptyWorker)
    group = RayWorkerGroup(pool, worker, role="empty", ranks_per_relay=per_relay)
    for _ in range(5):
        group.call(EmptyWorker.nothing)

    def calls() -> None:
        for _ in range(_NUM_CALLS):
            group.call(EmptyWorker.nothing)

    seconds = processor_s(calls) / _NUM_CALLS
    group.shutdown()
    pool.release()
    return seconds


def call_cost(console: Console) -> CallCost:
    """Measure calls, print them, and fit their cost."""
    start_ray(num_cpus=max(num_ranks for num_ranks, _ in CALLED))
    measured = [call_s(num_ranks, per_relay) for num_ranks, per_relay in CALLED]
    shutdown()
    terms = np.array([(1, num_ranks / per_relay, num_ranks) for num_ranks, per_relay in CALLED])
    fitted, *_ = np.linalg.lstsq(terms, np.array(measured), rcond=None)
    cost = CallCost(*map(float, fitted))
    for (num_ranks, per_relay), seconds in zip(CALLED, measured, strict=True):
        console.print(
            f"a call of {num_ranks} ranks by relays of {per_relay}: {1e3 * seconds:.2f} ms, "
            f"fitted {1e3 * cost.seconds(num_ranks, per_relay):.2f} ms"
        )
    console.print(
        f"each call {1e3 * cost.call_s:.2f} ms, each relay {1e3 * cost.relay_s:.2f} ms, "
        f"each rank {1e3 * cost.rank_s:.3f} ms; relays have {RANKS_PER_RELAY} ranks\n"
    )
    return cost


def configured(num_ranks: int) -> PPOConfig:
    path = CONFIGS_DIR / f"{_CONFIG}.yaml"
    replicas = num_ranks // 8
    overrides = [
        f"placement.num_nodes={num_ranks // 8}",
        f"actor.parallel.data_parallel_size={replicas}",
        f"rollout.num_replicas={num_ranks // 4}",
        f"trainer.prompts_per_step={replicas * SAMPLES_PER_REPLICA // 8}",
    ]
    return with_published_models(load_config(PPOConfig, path, overrides), str(path))[0]


def batch_of(num_rows: int) -> DataProto:
    lengths = np.random.default_rng(0).integers(16, 512, num_rows)
    prompts = [np.full(64, index // 8, np.int32) for index in range(num_rows)]
    responses = [np.full(length, 7, np.int32) for length in lengths]
    return DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows(prompts, torch.int32, on_left=True),
            "responses": RaggedTensor.of_rows(responses, torch.int32),
            "response_mask": RaggedTensor.of_rows([row != 0 for row in responses], torch.bool),
        },
        {"uid": [str(index) for index in range(num_rows)]},
    )


def step_s(config: PPOConfig) -> tuple[float, float]:
    """Return the time of planning micro-batches, and of making the parts of all replicas, in a step."""
    batch = batch_of(config.samples_per_step)
    role = MegatronRole(
        None,  # pyrefly: ignore[bad-argument-type]
        config.actor.parallel,
        config.actor.micro_batch,
        share_prompts=True,
    )
    size = len(batch) // UPDATE_CALLS
    mini_batches = [batch.select_idxs(range(start, start + size)) for start in range(0, len(batch), size)]
    megatron_role._plan.cache_clear()

    # The first split plans; the plan is kept for later passes over the same rows.
    first_s = processor_s(lambda: [role.split(each, each.columns) for each in (batch, *mini_batches)])
    again_s = processor_s(lambda: [role.split(each, each.columns) for each in (batch, *mini_batches)])
    parts_s = again_s + processor_s(lambda: role.split(batch, batch.columns))
    return max(0.0, first_s - again_s), parts_s


def print_table(all_ranks: Sequence[int], console: Console) -> float:
    """Print the table, and return the seconds of a step at the judged number of ranks."""
    cost = call_cost(console)
    table = Table(
        "ranks", "samples", "placement s", "weight sync s", "micro-batches s", "parts s", "calls s", "step s"
    )
    judged_s = 0.0
    for num_ranks in all_ranks:
        config = configured(num_ranks)
        policy = read_architectures(config)[0]["actor"]
        placement_s = processor_s(partial(plan_placement, config))
        plan = plan_placement(config)
        push_s = processor_s(partial(forecast_weights, config, plan, policy))
        plan_s, parts_s = step_s(config)
        calls_s = (SCORING_CALLS + UPDATE_CALLS + OTHER_CALLS) * cost.seconds(num_ranks)
        whole_s = plan_s + parts_s + calls_s
        if num_ranks == JUDGED_RANKS:
            judged_s = whole_s
        seconds = (placement_s, push_s, plan_s, parts_s, calls_s, whole_s)
        table.add_row(f"{num_ranks:,}", f"{config.samples_per_step:,}", *(f"{each:.2f}" for each in seconds))
    console.print(table)
    return judged_s


def main() -> int:
    """Run the benchmark and return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    judged_s = print_table(arguments.ranks, console)
    if JUDGED_RANKS not in arguments.ranks:
        return 0
    console.print(f"a step at {JUDGED_RANKS:,} ranks: {judged_s:.2f} s, limit {LIMIT_S:g}")
    record("benchmarks.tuning.driver", step_s=judged_s)
    return 1 if judged_s > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
