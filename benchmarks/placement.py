"""What a placement gains: the critic's update beside the actor's, in every placement.

For each placement one run is started: actor, reference and critic of one rank each, a rollout of one engine, and one batch is made with
it. Then the two updates are timed, each alone and both together, in turns, `--repeats` times; the fastest of each counts. `together` is
from the first start to the last end, with all moves of state that the placement asks for. The ratio is together / (critic alone + actor
alone): below 0.7 where the two have devices of their own and there is a core for each, 1 or above where they take turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.config.architecture import read_architecture
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
from megarl.placement.dataflow import overlaps
from megarl.placement.plan import plan_placement
from megarl.protocol.batch import DataProto
from megarl.trainers.ppo import AdvantageStep
from megarl.workers.rollout import TokenRules
from megarl.workers.start import Architectures, PPORoles, start_ppo
from tests.integration.tiny_run import SYMBOLS, save_inputs

TARGET = 0.7
UPDATES = ("update_critic", "update_actor")
CUSTOM = {
    "roles": {"actor": "trained", "critic": "trained", "reference": "frozen", "rollout": "frozen"},
    "pools": {"trained": [1], "frozen": [1]},
}


class Times(NamedTuple):
    """Seconds."""

    critic: float
    actor: float
    together: float

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
    custom = CUSTOM if strategy is PlacementStrategy.custom else {}
    return PPOConfig(
        model=ModelConfig(path=str(folder / "policy"), dtype=DType.float32),
        data=DataConfig(train_files=[str(folder / "train.parquet")], max_prompt_length=8, max_response_length=length),
        actor=ActorConfig(micro_batch=micro_batch, optim=OptimConfig(lr=1e-6)),
        critic=CriticConfig(micro_batch=micro_batch, optim=OptimConfig(lr=1e-6)),
        reference=ReferenceConfig(micro_batch=micro_batch),
        reward=RewardConfig(functions=[RewardFunctionConfig(path=str(folder / "reward.py"))], num_processes=1),
        rollout=RolloutConfig(n=2),
        resharding=ReshardingConfig(verify=Verify.off),
        placement=PlacementConfig(strategy=strategy, **custom),  # type: ignore[arg-type]
        trainer=TrainerConfig(prompts_per_step=rows // 2, total_steps=1000, output_dir=str(folder / "output")),
        device=Device.cpu,
    )


@contextmanager
def started(config: PPOConfig):  # type: ignore[no-untyped-def]
    plan, path = plan_placement(config), config.model.path
    architecture, tokenizer = read_architecture(path), load_tokenizer(path)
    start_ray(num_cpus=plan.num_cpus, object_store_mb=256)
    try:
        pools = ResourcePoolManager(
            plan.process_on_nodes, plan.role_pools, use_gpu=False, max_colocate_counts=plan.colocate_counts, nodes=plan.nodes
        )
        pools.create_resource_pool()
        rules = TokenRules(pad_token_id=0, stop_token_ids=(), max_response_length=config.data.max_response_length)
        models = Architectures(policy=architecture, reference=architecture, critic=architecture)
        roles = start_ppo(config, models, rules, Device.cpu, pools)
        data = PromptDataset(config.data.train_files, tokenizer, config.data.max_prompt_length, config.data.overlong)
        yield roles, next(BatchLoader(data, config.trainer.prompts_per_step, shuffle=False, seed=0))
    finally:
        shutdown()


def make_batch(config: PPOConfig, roles: PPORoles, prompts: DataProto) -> DataProto:
    roles.actor.sync_weights(roles.rollout)
    batch = roles.rollout.generate(prompts, config.rollout.training, 1)
    scores = [roles.reward.score(batch), roles.actor.log_probs(batch)]
    if roles.reference:
        scores.append(roles.reference.log_probs(batch))
    if roles.critic:
        scores.append(roles.critic.values(batch))
    return AdvantageStep(config.algorithm, max_response_length=config.data.max_response_length)(batch.union(*scores))[0]


def seconds(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def measure(config: PPOConfig, repeats: int) -> Times:
    with started(config) as (roles, prompts):
        batch = make_batch(config, roles, prompts)
        assert roles.critic is not None
        critic, actor = roles.critic, roles.actor
        both = lambda: gather(critic.update(batch, 1), actor.update(batch, 1))  # noqa: E731
        both()
        rounds = [
            (seconds(lambda: critic.update(batch, 1).get()), seconds(lambda: actor.update(batch, 1).get()), seconds(both))
            for _ in range(repeats)
        ]
    return Times(*(min(times) for times in zip(*rounds, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens of a response")
    parser.add_argument("--placement", nargs="*", default=[each.value for each in PlacementStrategy])
    arguments = parser.parse_args()
    print("| placement | critic alone, s | actor alone, s | together, s | ratio | planned |")
    print("|---|---|---|---|---|---|")
    missed = False
    with tempfile.TemporaryDirectory() as temporary:
        save_model(Path(temporary), arguments.hidden, arguments.layers)
        for name in arguments.placement:
            config = configuration(Path(temporary), PlacementStrategy(name), arguments.rows, arguments.length)
            beside = UPDATES in overlaps(plan_placement(config))
            times = measure(config, arguments.repeats)
            missed |= beside and times.ratio >= TARGET
            planned = f"side by side, below {TARGET}" if beside else "in turns"
            print(f"| {name} | {times.critic:.2f} | {times.actor:.2f} | {times.together:.2f} | {times.ratio:.2f} | {planned} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
