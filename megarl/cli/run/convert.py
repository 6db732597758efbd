"""`megarl convert`: converts models between Hugging Face and Megatron, inspects them and compares them.

This module has only the command line, so that help needs no torch. The implementation is in conversion.py.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from pathlib import Path

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

Commands = argparse._SubParsersAction


def add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="conversion", required=True, metavar="COMMAND")
    _add_to_megatron(commands)
    _add_to_hugging_face(commands)
    _add_merge(commands)

    inspect = _command(
        commands,
        "inspect",
        "show architecture, layout, and the name, shape and dtype of every tensor",
        _run("inspect"),
    )
    inspect.add_argument("folder", metavar="CKPT_OR_HF_DIR", type=_model)
    inspect.add_argument("--json", action="store_true", help="print one JSON document")
    _add_source_options(inspect)

    verify = _command(
        commands, "verify", "compare two folders tensor by tensor, across formats and layouts", _run("verify")
    )
    verify.description = "Exit code: 0 identical, 1 different, 2 one of the models cannot be read."
    verify.add_argument("left", metavar="A", type=_model)
    verify.add_argument("right", metavar="B", type=_model)
    _add_source_options(verify)


def _add_to_megatron(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "hf-to-megatron",
        "write a Megatron distributed checkpoint in any layout",
        _run("hf_to_megatron"),
    )

    command.add_argument("--input", required=True, metavar="HF_DIR", type=Path)
    _add_output(command, "DIR")
    command.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N")
    command.add_argument("--pipeline-parallel-size", type=positive, default=1, metavar="N")

    command.add_argument(
        "--virtual-pipeline-parallel-size",
        type=positive,
        metavar="N",
        help="virtual stages of each pipeline rank",
    )

    _add_source_options(command)


def _add_to_hugging_face(commands: Commands[argparse.ArgumentParser]) -> None:
    summary = (
        "write a Hugging Face folder: safetensors with index, configuration, tokenizer; of a checkpoint of "
        "adapters, an adapter in PEFT's format"
    )

    command = _command(commands, "megatron-to-hf", summary, _run("megatron_to_hf"))
    command.add_argument(
        "--input",
        required=True,
        metavar="CKPT_DIR",
        type=_model,
        help="a checkpoint of megarl or Megatron-LM, or the URL of one that checkpoint.upload has copied",
    )

    _add_output(command, "HF_DIR", FP8)
    _add_shard_size(command)
    _add_source_options(command)


def _add_merge(commands: Commands[argparse.ArgumentParser]) -> None:
    summary = "write a Hugging Face folder of a base model with an adapter merged into its weights"
    command = _command(commands, "merge-adapter", summary, _run("merge_adapter"))

    command.add_argument(
        "--input",
        required=True,
        metavar="ADAPTER_DIR",
        type=_model,
        help="a checkpoint of a run that trains adapters, or an adapter in PEFT's format",
    )
    command.add_argument(
        "--base", required=True, metavar="HF_DIR", type=Path, help="the folder of the base model"
    )

    _add_output(command, "HF_DIR", FP8)
    _add_shard_size(command)
    _add_source_options(command)


def _command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    summary: str,
    start: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(start=start)
    return command


def _add_output(command: argparse.ArgumentParser, metavar: str, *more_dtypes: str) -> None:
    command.add_argument("--output", required=True, metavar=metavar, type=Path, help="a new or empty folder")
    about_fp8 = ", bfloat16 for one in FP8; fp8: projections in blocks of 128 x 128, the rest in bfloat16"
    command.add_argument(
        "--dtype",
        choices=(*DTYPES, *more_dtypes),
        help="data type of the written weights; the default is that of the input"
        + (about_fp8 if FP8 in more_dtypes else ", bfloat16 for one in FP8"),
    )


def _add_shard_size(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-shard-size",
        type=_bytes,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of a file, such as 5GB (the default)",
    )


def _add_source_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--role",
        metavar="actor|critic",
        help="model of a run's checkpoint with several models; the default is actor",
    )

    config = (
        "a Hugging Face folder with config.json and tokenizer, for a Megatron checkpoint without them; "
        "layers that predict further tokens, and vision towers that are not trained, are copied from it"
    )
    command.add_argument("--config", metavar="HF_DIR", type=Path, help=config)

    code = (
        "accept a folder with its own model code, which is never executed; the model is that of its "
        "model_type"
    )
    command.add_argument("--trust-remote-code", action="store_true", help=code)


def _model(text: str) -> Path | str:
    """Return the path of a model, or the URL of a checkpoint as it is."""
    return text if is_url(text) else Path(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return int(text)


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


def _run(command: str) -> Callable[[argparse.Namespace], int]:
    return lambda parsed: getattr(importlib.import_module("megarl.cli.run.conversion"), command)(parsed)
