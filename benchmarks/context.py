"""Compare training on one long row with context parallelism and with tensor and sequence parallelism on two ranks.

    python benchmarks/context.py [--tokens 8192] [--repeats 3] [--cpu-time]

The benchmark measures forward + backward of one row (no optimizer step) in float32, by two processes of one
thread each over gloo, with the 10M model of benchmarks/engine.py and random weights. Speeds are tokens per
second of the fastest of several repeats, after a warm-up. On a busy machine the two processes wait for each
other most of the time: `--cpu-time` takes the processor seconds of the process that has more.

CP2      context_parallel_size 2: each rank has half of the tokens, and receives the keys and values of the
other half TP2+SP   tensor_parallel_size 2 with sequence_parallel: each rank has half of every matrix, and
between matrices half of the tokens
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
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Device, ParallelConfig

LAYOUTS = {
    "CP2": ParallelConfig(context_parallel_size=2),
    "TP2+SP": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
}
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    speeds = {}

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=4096, max_position_embeddings=options.tokens, tie_word_embeddings=True, **SHAPE
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        for name, parallel in LAYOUTS.items():
            seconds = Path(folder, f"{name}.seconds")
            arguments_of_rank = (
                folder,
                name,
                parallel,
                options.tokens,
                options.repeats,
                options.cpu_time,
                seconds,
            )
            mp.spawn(measure, arguments_of_rank, nprocs=parallel.world_size)
            speeds[name] = options.tokens / float(seconds.read_text())
            print(f"{name:<8} {speeds[name]:10,.0f} tokens/s", flush=True)

    print(f"CP2 over TP2+SP, one row of {options.tokens:,} tokens: {speeds['CP2'] / speeds['TP2+SP']:.2f}")


def measure(
    rank: int,
    folder: str,
    name: str,
    parallel: ParallelConfig,
    num_tokens: int,
    repeats: int,
    cpu_time: bool,
    seconds: Path,
) -> None:
    """Measure one layout in the process of a rank."""
    from megarl.engine import platform

    torch.set_num_threads(1)
    platform.activate(Device.cpu)
    from megarl.config.schema import DType, EngineConfig, OptimConfig
    from megarl.engine import groups
    from megarl.engine.engine import MegatronEngine
    from megarl.engine.spec import ModelSpec
    from megarl.models.families import read_architecture

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.store", rank=rank, world_size=parallel.world_size
    )
    spec = ModelSpec(
        path=folder,
        architecture=read_architecture(folder),
        head="lm",
        dtype=DType.float32,
        parallel=parallel,
        engine=EngineConfig(),
        device=Device.cpu,
        seed=0,
        optim=OptimConfig(),
    )
    engine = MegatronEngine(spec, groups.initialize(parallel, seed=0))
    ids = torch.randint(0, 4096, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    batch = {
        "prompts": RaggedTensor.of_slots(ids[:, :1]),
        "responses": RaggedTensor.of_slots(ids[:, 1:]),
        "response_mask": RaggedTensor.of_slots(torch.ones(1, num_tokens - 1, dtype=torch.bool)),
    }

    def loss(outputs: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return outputs["log_probs"].sum() / num_tokens, {}

    clock = time.process_time if cpu_time else time.perf_counter
    passes = [_timed(lambda: engine.forward_backward(batch, [[0]], loss), clock) for _ in range(1 + repeats)]
    if rank == 0:
        seconds.write_text(str(min(passes[1:])))
    dist.destroy_process_group()


def _timed(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the time of the slowest rank."""
    dist.barrier()
    begin = clock()
    work()
    taken = torch.tensor(clock() - begin)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)

    return float(taken)


if __name__ == "__main__":
    main(sys.argv[1:])
