"""Compare the training speed of a mixture of experts with that of a dense model of as many active parameters.

    python benchmarks/experts.py [--tokens 2048] [--repeats 5] [--cpu-time]

The benchmark measures forward + backward of rows of 256 tokens (no optimizer step) in float32, by one process
of one thread, for two models with random weights that differ only in their feed-forward networks: 16 experts
of width 256 in each of 8 layers, of which each token uses 4, and one network of width 1024. The experts add a
router, tokens that are sorted by expert and put back, and products of fewer tokens each. A speed is tokens
per second of the fastest of several repeats, after a warm-up; the two models alternate.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Device, ParallelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
ROW = 256


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    configs: dict[str, tuple[PretrainedConfig, Any]] = {
        "experts": (Qwen3MoeConfig(**SHAPE, **EXPERTS), Qwen3MoeForCausalLM),
        "dense": (Qwen3Config(**SHAPE), Qwen3ForCausalLM),
    }

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        for name, (config, kind) in configs.items():
            kind(config).save_pretrained(Path(folder, name))
        passes = training_passes(
            {name: str(Path(folder, name)) for name in configs}, options.tokens, f"{folder}/store"
        )
        seconds: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(1 + options.repeats):
            for name, run in passes.items():
                seconds[name].append(_timed(run, clock))
        dist.destroy_process_group()

    speeds = {name: options.tokens / min(taken[1:]) for name, taken in seconds.items()}
    for name, speed in speeds.items():
        print(f"{name:<8} {speed:10,.0f} tokens/s")
    print(f"experts over dense, the same active parameters: {speeds['experts'] / speeds['dense']:.2f}")


def training_passes(folders: dict[str, str], num_tokens: int, store: str) -> dict[str, Callable[[], Any]]:
    """Return, for each model, a forward and backward pass over the same rows."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.config.schema import DType, EngineConfig, OptimConfig
    from megarl.engine import groups
    from megarl.engine.engine import MegatronEngine
    from megarl.engine.spec import ModelSpec
    from megarl.models.counts import num_active_parameters
    from megarl.models.families import read_architecture

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    num_rows = num_tokens // ROW
    ids = torch.randint(0, SHAPE["vocab_size"], (num_rows, ROW), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((num_rows,), ROW - 1)
    batch = {
        "prompts": RaggedTensor.of_slots(ids[:, :1]),
        "responses": RaggedTensor.of_slots(ids[:, 1:]),
        "response_mask": RaggedTensor.constant(True, lengths, torch.bool),
    }

    def loss(outputs: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return outputs["log_probs"].sum() / num_tokens, {}

    parallel = ParallelConfig()
    made = groups.initialize(parallel, seed=0)
    passes = {}

    for name, folder in folders.items():
        architecture = read_architecture(folder)
        spec = ModelSpec(
            path=folder,
            architecture=architecture,
            head="lm",
            dtype=DType.float32,
            parallel=parallel,
            engine=EngineConfig(),
            device=Device.cpu,
            seed=0,
            optim=OptimConfig(),
        )
        print(f"{name:<8} {num_active_parameters(architecture):10,} active parameters")
        engine = MegatronEngine(spec, made)
        passes[name] = _pass(engine, batch, [list(range(num_rows))], loss)

    return passes


def _pass(
    engine: Any, batch: dict[str, RaggedTensor], micro_batches: list[list[int]], loss: Any
) -> Callable[[], Any]:
    return lambda: engine.forward_backward(batch, micro_batches, loss)


def _timed(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return clock() - begin


if __name__ == "__main__":
    main(sys.argv[1:])
