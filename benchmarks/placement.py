"""Measure how much a placement gains: the updates of critic and actor, alone and together, in every placement.

For each placement, one run is started with one rank each of actor, reference and critic and a rollout of one
engine, and one batch is generated. Then the two updates run, each alone and both together, in alternation,
`--repeats` times; the fastest of each counts. Times are read from the timeline, from the first start to the
last end in the processes of the two roles, including all moves of state that the placement needs. The ratio
is together / (critic alone + actor alone): below 0.7 if both have their own devices and there is a core for
each, 1 or above if they time-share. Overlap is the time in which both updates run, as a share of the shorter
one.

Finally the plan for a cluster of 64 nodes x 8 devices is made, which must take less than a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.batch.data_proto import DataProto
from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    Device,
    DType,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ReferenceConfig,
    ReshardingConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    TrainerConfig,
    Verify,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.futures import gather
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.data.loader import BatchLoader
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.models.families import read_architecture
from megarl.plan.placement.dataflow import OffloadPlan, overlaps
from megarl.plan.placement.plan import plan_placement
from megarl.roles.start import PPORoles, start_ppo
from megarl.rollout.driver.rollout import TokenRules
from megarl.tracking.timeline import Span
from megarl.trainers.advantages import AdvantageStep
from megarl.trainers.monitor import phases_by_call
from tests.integration.tiny_run import SYMBOLS, save_inputs
from tests.unit.plan.placement.test_plan import large_cluster

TARGET = 0.7
PLAN_LIMIT_S = 1.0
UPDATES = ("update_critic", "update_actor")
CUSTOM = {
    "roles": {"actor": "trained", "critic": "trained", "reference": "frozen", "rollout": "frozen"},
    "pools": {"trained": [1], "frozen": [1]},
}


class Times(NamedTuple):
    """Seconds of the updates, and the share in which they overlap."""

    critic: float
    actor: float
    together: float
    overlap: float

    @property
    def ratio(self) -> float:
        return self.together / (self.critic + self.actor)


def save_model(folder: Path, hidden: int, layers: int) -> None:
    save_inputs(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(SYMBOLS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder / "policy")


def configuration(folder: Path, strategy: PlacementStrategy, rows: int, length: int) -> PPOConfig:
    micro_batch = MicroBatchConfig(max_tokens=2048)
    custom: dict[str, Any] = CUSTOM if strategy is PlacementStrategy.custom else {}
    return PPOConfig(
        model=ModelConfig(path=str(folder / "policy"), dtype=DType.float32),
        data=DataConfig(
            train_files=[str(folder / "train.parquet")], max_prompt_length=8, max_response_length=length
        ),
        actor=ActorConfig(micro_batch=micro_batch, optim=OptimConfig(lr=1e-6)),
        critic=CriticConfig(micro_batch=micro_batch, optim=OptimConfig(lr=1e-6)),
        reference=ReferenceConfig(micro_batch=micro_batch),
        reward=RewardConfig(
            functions=[RewardFunctionConfig(path=str(folder / "reward.py"))], num_processes=1
        ),
        rollout=RolloutConfig(n=2),
        resharding=ReshardingConfig(verify=Verify.off),
        placement=PlacementConfig(strategy=strategy, **custom),
        trainer=TrainerConfig(
            prompts_per_step=rows // 2, total_steps=1000, output_dir=str(folder / "output")
        ),
        device=Device.cpu,
    )


@contextmanager
def started(config: PPOConfig) -> Generator[tuple[PPORoles, DataProto]]:
    plan = plan_placement(config)
    path = config.model.path
    architecture = read_architecture(path)
    tokenizer = load_tokenizer(path)
    start_ray(num_cpus=plan.num_cpus, object_store_mb=256)

    try:
        pools = ResourcePoolManager(
            plan.process_on_nodes,
            plan.role_pools,
            use_gpu=False,
            max_colocate_counts=plan.colocate_counts,
            nodes=plan.nodes,
        )
        pools.create_resource_pool()
        rules = TokenRules(
            pad_token_id=0, stop_token_ids=(), max_response_length=config.data.max_response_length
        )
        models = dict.fromkeys(("actor", "reference", "critic"), architecture)
        roles = start_ppo(config, models, rules, Device.cpu, pools)
        data = PromptDataset(config.data.train_files, tokenizer, config.data)
        yield roles, next(BatchLoader(data, config.trainer.prompts_per_step, shuffle=False, seed=0))
    finally:
        shutdown()


def make_batch(config: PPOConfig, roles: PPORoles, prompts: DataProto) -> DataProto:
    roles.weights.push()
    batch = roles.rollout.generate(prompts, config.rollout.training, 1)
    scores = [roles.reward.score(batch), roles.actor.log_probs(batch)]
    if roles.reference:
        scores.append(roles.reference.log_probs(batch))
    if roles.critic:
        scores.append(roles.critic.values(batch))

    return AdvantageStep(config.algorithm, max_response_length=config.data.max_response_length)(
        batch.union(*scores)
    )[0]


def on_the_timeline(roles: PPORoles, action: Callable[[], object]) -> list[Span]:
    """Return what the processes of critic and actor do during an action."""
    assert roles.critic
    groups = (roles.critic.group, roles.actor.group)
    for group in groups:
        group.drain_spans()
    action()

    return [span for group in groups for span in group.drain_spans()]


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    return min(span.start_s for span in spans), max(span.end_s for span in spans)


def duration(spans: Sequence[Span]) -> float:
    start_s, end_s = extent(spans)
    return end_s - start_s


def overlap(spans: Sequence[Span]) -> float:
    """Return the overlap of the two updates as a share of the shorter one."""
    (critic_start_s, critic_end_s), (actor_start_s, actor_end_s) = (
        extent([span for span in spans if phases_by_call().get((span.role, span.name)) == name])
        for name in UPDATES
    )
    both_s = min(critic_end_s, actor_end_s) - max(critic_start_s, actor_start_s)
    return max(0.0, both_s) / min(critic_end_s - critic_start_s, actor_end_s - actor_start_s)


def measure(config: PPOConfig, repeats: int) -> Times:
    with started(config) as (roles, prompts):
        batch = make_batch(config, roles, prompts)
        assert roles.critic
        critic = roles.critic
        actor = roles.actor
        both = lambda: gather(critic.update(batch, 1), actor.update(batch, 1))  # noqa: E731
        both()
        rounds = [
            (
                on_the_timeline(roles, lambda: critic.update(batch, 1).get()),
                on_the_timeline(roles, lambda: actor.update(batch, 1).get()),
                on_the_timeline(roles, both),
            )
            for _ in range(repeats)
        ]

    alone_critic, alone_actor, together = (min(spans, key=duration) for spans in zip(*rounds, strict=True))
    return Times(duration(alone_critic), duration(alone_actor), duration(together), overlap(together))


def large_plan() -> float:
    """Return the seconds for the placement plan and the colocation schedule of 512 devices."""
    config = large_cluster()
    start_s = time.perf_counter()
    OffloadPlan(plan_placement(config)).held()
    return time.perf_counter() - start_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens of a response")
    parser.add_argument("--placement", nargs="*", default=[each.value for each in PlacementStrategy])
    arguments = parser.parse_args()
    print("| placement | critic alone, s | actor alone, s | together, s | ratio | overlap | planned |")
    print("|---|---|---|---|---|---|---|")
    missed = False

    with tempfile.TemporaryDirectory() as temporary:
        save_model(Path(temporary), arguments.hidden, arguments.layers)
        for name in arguments.placement:
            config = configuration(Path(temporary), PlacementStrategy(name), arguments.rows, arguments.length)
            beside = UPDATES in overlaps(plan_placement(config))
            times = measure(config, arguments.repeats)
            missed |= times.ratio >= TARGET if beside else times.overlap > 0
            planned = f"concurrent, below {TARGET}" if beside else "sequential"
            seconds = f"{times.critic:.2f} | {times.actor:.2f} | {times.together:.2f}"
            print(f"| {name} | {seconds} | {times.ratio:.2f} | {times.overlap:.0%} | {planned} |", flush=True)

    plan_s = large_plan()
    print(f"\nthe plan for 64 nodes x 8 devices: {plan_s:.3f} s, {plan_s / PLAN_LIMIT_S:.3f} of the limit")
    return int(missed or plan_s >= PLAN_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
