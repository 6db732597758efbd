"""Example command lines for the help of each command and for the documentation. A test parses all of them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": ("megarl train run.yaml", "megarl train run.yaml trainer.total_steps=10 algorithm=grpo"),
    "sft": (
        "megarl sft sft.yaml",
        "megarl sft configs/quickstart_sft.yaml trainer.total_steps=10 actor.optim.lr=1e-4",
    ),
    "check": (
        "megarl check run.yaml",
        "megarl check --fast run.yaml trainer.updates_per_step=2",
        "megarl check run.yaml --machine --plan --output placement.svg",
    ),
    "plan": (
        "megarl plan configs/qwen2.5_7b_grpo.yaml --output placement.svg",
        "megarl plan run.yaml --simulate --lengths 900,4096",
    ),
    "rehearse": (
        "megarl rehearse configs/qwen2.5_7b_grpo.yaml",
        "megarl rehearse configs/llama3_70b_ppo.yaml --role critic --ranks 0,8 --json ranks.json",
    ),
    "tune": (
        "megarl tune configs/qwen3_32b_grpo.yaml --nodes 4 --device h100_80gb --output tuned.yaml",
        "megarl tune run.yaml algorithm=async_grpo --devices 8,16,32,64 --max-staleness 1 --plot sizes.svg",
    ),
    "calibrate": (
        "megarl calibrate --output my_device.yaml",
        "megarl calibrate run.yaml --output my_device.yaml --device h100_80gb",
    ),
    "submit": ("megarl submit run.yaml --address http://HEAD:8265",),
    "launch": ("torchrun --nnodes 2 --nproc-per-node 1 -m megarl launch run.yaml",),
    "doctor": ("megarl doctor", "megarl doctor run.yaml --json"),
    "eval": (
        "megarl eval outputs/run",
        "megarl eval MODEL_DIR --data test.jsonl --reward reward.py:compute_score --n 8 --temperature 0.6",
        "megarl eval MODEL_DIR --data qa.csv --reward reward.py:compute_score "
        "data.columns.prompt=question data.columns.ground_truth=answer data.columns.data_source=null",
    ),
    "generate": (
        'megarl generate outputs/run "12 + 30"',
        "megarl generate MODEL_DIR --lines --json --n 4 --temperature 1",
    ),
    "status": ("megarl status outputs/run", "megarl status outputs/run --watch"),
    "scale": ("megarl scale outputs/run --replicas 4",),
    "replay": (
        "megarl replay outputs/run 3 actor.parallel.tensor_parallel_size=2",
        "megarl replay outputs/run 3 --against other/replays/step_00000003/original",
    ),
    "plot": ("megarl plot outputs/run",),
    "report": ("megarl report outputs/run", "megarl report outputs/run outputs/other --live"),
    "score": (
        "megarl score run.yaml outputs/run/generations.jsonl",
        "megarl score run.yaml train.jsonl --ground-truth",
    ),
    "quickstart": ("megarl quickstart", "megarl quickstart trainer.total_steps=10"),
    "init": (
        "megarl init my_run --model MODEL_DIR --data rows.jsonl",
        "megarl init my_run --model MODEL_DIR --kind sft",
    ),
    "schema": ("megarl schema", "megarl schema algorithm"),
    "completion": ('eval "$(megarl completion bash)"',),
    "convert": ("megarl convert hf-to-megatron --help",),
}


def epilog(command: str) -> str:
    """Return the examples of a command as the end of its help."""
    return "\n".join(["examples:", *(f"  {line}" for line in EXAMPLES[command])])
