"""Export a run's checkpoint as a Hugging Face folder, and answer a question with it.

    python -m examples.export_and_serve outputs/run/checkpoints outputs/run/exported "48 + 61"

`megarl convert` writes the folder; transformers and SGLang load it. A run also leaves its final policy in
trainer.output_dir/huggingface (see checkpoint.save_hf). To serve the folder to many users, on a GPU:

    python -m sglang.launch_server --model-path outputs/run/exported --host 127.0.0.1 --port 30000 --api-key KEY
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli.main import main as megarl

MAX_NEW_TOKENS = 16


def answer(folder: str, question: str) -> str:
    """Return the greedy answer of the model in `folder`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(
        **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )

    return tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(checkpoints: str, folder: str, question: str) -> int:
    status = megarl(
        ["convert", "megatron-to-hf", "--input", checkpoints, "--output", folder, "--role", "actor"]
    )
    if status == 0:
        print(f"{question} -> {answer(folder, question)}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
