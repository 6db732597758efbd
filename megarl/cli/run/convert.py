"""`megarl convert`: converts models between Hugging Face and Megatron, inspects them and compares them.

This module has only the command line, so that help needs no torch. The implementation is in conversion.py.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

from megarl.cli.options import Adds, argument, positive
from megarl.config.paths import is_url

DTYPES = ("float32", "bfloat16", "float16")
FP8 = "fp8"  # Hugging Face folders only
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


def _output(metavar: str, *more_dtypes: str) -> tuple[Adds, ...]:
    """Return what adds the options of a conversion's output."""
    about_fp8 = ", bfloat16 for one in FP8; fp8: projections in blocks of 128 x 128, the rest in bfloat16"
    return (
        argument("--output", required=True, metavar=metavar, type=Path, help="a new or empty folder"),
        argument(
            "--dtype",
            choices=(*DTYPES, *more_dtypes),
            help="data type of the written weights; the default is that of the input"
            + (about_fp8 if FP8 in more_dtypes else ", bfloat16 for one in FP8"),
        ),
    )


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


_SHARD_SIZE = argument(
    "--max-shard-size",
    type=_bytes,
    default=5 * 10**9,
    metavar="SIZE",
    help="maximum size of a file, such as 5GB (the default)",
)
_SOURCE = (
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
)
# The summary of each conversion, and what add its arguments. Its function in conversion.py has the same name.
_CONVERSIONS: dict[str, tuple[str, tuple[Adds, ...]]] = {
    "hf-to-megatron": (
        "write a Megatron distributed checkpoint in any layout",
        (
            argument("--input", required=True, metavar="HF_DIR", type=Path),
            *_output("DIR"),
            argument("--tensor-parallel-size", type=positive, default=1, metavar="N"),
            argument("--pipeline-parallel-size", type=positive, default=1, metavar="N"),
            argument(
                "--virtual-pipeline-parallel-size",
                type=positive,
                metavar="N",
                help="virtual stages of each pipeline rank",
            ),
            *_SOURCE,
        ),
    ),
    "megatron-to-hf": (
        "write a Hugging Face folder: safetensors with index, configuration, tokenizer; of a checkpoint of "
        "adapters, an adapter in PEFT's format",
        (
            argument(
                "--input",
                required=True,
                metavar="CKPT_DIR",
                type=_model,
                help="a checkpoint of megarl or Megatron-LM, or the URL of one that checkpoint.upload has "
                "copied",
            ),
            *_output("HF_DIR", FP8),
            _SHARD_SIZE,
            *_SOURCE,
        ),
    ),
    "merge-adapter": (
        "write a Hugging Face folder of a base model with an adapter merged into its weights",
        (
            argument(
                "--input",
                required=True,
                metavar="ADAPTER_DIR",
                type=_model,
                help="a checkpoint of a run that trains adapters, or an adapter in PEFT's format",
            ),
            argument(
                "--base", required=True, metavar="HF_DIR", type=Path, help="the folder of the base model"
            ),
            *_output("HF_DIR", FP8),
            _SHARD_SIZE,
            *_SOURCE,
        ),
    ),
    "inspect": (
        "show architecture, layout, and the name, shape and dtype of every tensor",
        (
            argument("folder", metavar="CKPT_OR_HF_DIR", type=_model),
            argument("--json", action="store_true", help="print one JSON document"),
            *_SOURCE,
        ),
    ),
    "verify": (
        "compare two folders tensor by tensor, across formats and layouts",
        (
            argument("left", metavar="A", type=_model),
            argument("right", metavar="B", type=_model),
            *_SOURCE,
        ),
    ),
}
_DESCRIPTIONS = {"verify": "Exit code: 0 identical, 1 different, 2 one of the models cannot be read."}


def add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="conversion", required=True, metavar="COMMAND")
    for name, (summary, arguments) in _CONVERSIONS.items():
        command = commands.add_parser(name, help=summary, description=_DESCRIPTIONS.get(name, summary))
        for add in arguments:
            add(command)
        command.set_defaults(start=_run)


def _run(parsed: argparse.Namespace) -> int:
    conversion = importlib.import_module("megarl.cli.run.conversion")
    return getattr(conversion, parsed.conversion.replace("-", "_"))(parsed)
