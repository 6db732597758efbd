"""Measure TRL's side of step.py in TRL's own environment, and print the seconds of each step as JSON in the last line.

python step_of_trl.py FOLDER ROWS_OF_A_MICRO_BATCH STEPS

Under torchrun, the processes share the batch, and the first one prints. megarl is not installed there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = 32
SAMPLES = 8
RESPONSE_TOKENS = 62


class Clock(TrainerCallback):
    """The wall and processor seconds of each step and of its parts."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, dict[str, float]]] = []
        self.parts: dict[str, float] = defaultdict(float)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall = time.perf_counter() - self._began[0]
        cpu = time.process_time() - self._began[1]
        self.parts["update"] = wall - sum(self.parts.values())
        self.steps.append((wall, cpu, dict(self.parts)))
        self.parts.clear()

    def of(self, owner: Any, name: str, part: str, only: Any = lambda: True) -> None:
        """Time a method."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                if only():
                    self.parts[part] += time.perf_counter() - began

        setattr(owner, name, timed)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [completion[0]["content"].count("7") / RESPONSE_TOKENS for completion in completions]


def main(folder: str, rows: str, steps: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/policy", padding_side="left")
    data = load_dataset("parquet", data_files=f"{folder}/train.parquet", split="train").select_columns(
        ["prompt"]
    )
    clock = Clock()
    processes = int(os.environ.get("WORLD_SIZE", "1"))

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=int(rows),
            gradient_accumulation_steps=PROMPTS * SAMPLES // (int(rows) * processes),
            num_generations=SAMPLES,
            max_completion_length=RESPONSE_TOKENS,
            temperature=1.0,
            beta=0.001,
            loss_type="grpo",
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=int(steps) + 1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=f"{folder}/policy",
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        clock.of(trainer, "_generate", "gen")
        clock.of(
            trainer, "_get_per_token_logps_and_entropies", "ref", only=lambda: not torch.is_grad_enabled()
        )
        trainer.train()

    of_processes = [clock.steps] * processes
    if processes > 1:
        dist.all_gather_object(of_processes, clock.steps)

    # The first process has the parts, the slowest the wall time, and all together the processor time.
    steps_of_all = [
        (max(wall for wall, _, _ in step), sum(cpu for _, cpu, _ in step), step[0][2])
        for step in zip(*of_processes, strict=True)
    ]
    if not int(os.environ.get("RANK", "0")):
        print(json.dumps(steps_of_all[1:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
