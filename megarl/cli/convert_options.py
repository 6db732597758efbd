"""The options of `megarl convert`, without torch, so that help needs none."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megarl.cli.options import argument, group, positive
from megarl.config.sources import is_url

DTYPES = ("float32", "bfloat16", "float16")
FP8 = "fp8"  # Hugging Face folders only
DEFAULT_SHARD_BYTES = 5 * 10**9
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def _model(text: str) -> Path | str:
    """Return the path of a model, or the URL of a checkpoint as it is."""
    return text if is_url(text) else Path(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if (
        match is None
        or match[2].upper() not in _UNITS
        or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give a number of bytes, or a size such as 5GB, 500MB or 2GiB"
        )

    return size


CONVERT = (
    argument(
        "source",
        metavar="SOURCE",
        type=_model,
        help="a Hugging Face folder, a checkpoint of megarl or Megatron-LM, an adapter in PEFT's format, or "
        "the URL of a checkpoint that checkpoint.upload has copied",
    ),
    argument(
        "target",
        metavar="TARGET",
        nargs="?",
        type=_model,
        help="a new or empty folder; with --verify, the other model",
    ),
    argument(
        "--to",
        choices=("hf", "megatron"),
        help="format of TARGET; by default the other one than that of SOURCE. hf: safetensors with index, "
        "configuration and tokenizer, or an adapter in PEFT's format for one; megatron: a distributed "
        "checkpoint",
    ),
    argument(
        "--base",
        metavar="HF_DIR",
        type=Path,
        help="merge SOURCE, which is an adapter or a checkpoint of one, into the weights of this model",
    ),
    argument(
        "--dtype",
        choices=(*DTYPES, FP8),
        help="data type of the written weights; the default is that of SOURCE, bfloat16 for one in FP8. fp8, "
        "with --to hf: projections in blocks of 128 x 128, the rest in bfloat16",
    ),
    argument(
        "--max-shard-size",
        type=_bytes,
        default=DEFAULT_SHARD_BYTES,
        metavar="SIZE",
        help="with --to hf: maximum size of a file, such as 5GB (the default)",
    ),
    *(
        argument(
            f"--{axis}-parallel-size",
            type=positive,
            default=default,
            metavar="N",
            help=f"with --to megatron: {meaning}",
        )
        for axis, default, meaning in (
            ("tensor", 1, "ranks that share each layer"),
            ("pipeline", 1, "stages of layers"),
            ("virtual-pipeline", None, "virtual stages of each pipeline rank"),
        )
    ),
    argument(
        "--role",
        metavar="actor|critic",
        help="model of a run's checkpoint with several models; the default is actor",
    ),
    argument(
        "--config",
        metavar="HF_DIR",
        type=Path,
        help="a Hugging Face folder with config.json and tokenizer, for a Megatron checkpoint without them; "
        "layers that predict further tokens, and vision towers that are not trained, are copied from it",
    ),
    argument(
        "--trust-remote-code",
        action="store_true",
        help="accept a folder with its own model code, which is never executed; the model is that of its "
        "model_type",
    ),
    group(
        "instead of a conversion",
        argument(
            "--inspect",
            action="store_true",
            help="show architecture, layout, and the name, shape and dtype of every tensor of SOURCE",
        ),
        argument("--json", action="store_true", help="with --inspect: print one JSON document"),
        argument(
            "--verify",
            action="store_true",
            help="compare SOURCE and TARGET tensor by tensor, across formats and layouts. Exit code: 0 "
            "identical, 1 different, 2 one of the models cannot be read",
        ),
    ),
)
