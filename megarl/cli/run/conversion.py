"""The implementation of `megarl convert`: conversion with a progress bar, inspection and comparison.

It needs no process group and no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from megarl.checkpoints.convert.adapters import merged_source, write_peft
from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face import open_hugging_face
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.source import ModelSource, describe
from megarl.checkpoints.convert.streaming import Progress as Report
from megarl.checkpoints.convert.streaming import check_new
from megarl.checkpoints.convert.verify import Comparison, Match, TensorComparison, compare
from megarl.checkpoints.object_storage import local_copy
from megarl.checkpoints.role_folder import Layout
from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.cli.run.convert import FP8
from megarl.cli.tables.console import output_console, print_line
from megarl.machine.errors import CheckpointError
from megarl.machine.files import existing_folder
from megarl.machine.wording import counted
from megarl.weights.hf_folder import CONFIG_FILE
from megarl.weights.kept_tensors import MTP_LAYERS, KeptTensors, kept_parts, read_kept_tensors
from megarl.weights.peft_folder import has_adapter
from megarl.weights.tensors import WeightTransferError

GOOD = 0
NOT_THE_SAME = 1
USER_ERROR = 2
_MAX_DIFFERING = 20
_MODELS = ("input", "folder", "left", "right")  # arguments that name a model, by a path or a URL

Start = Callable[[argparse.Namespace], int]


def _in_one_line(start: Start) -> Start:
    """Print a CheckpointError of a command in one line, and return its exit code."""

    @functools.wraps(start)
    def run(parsed: argparse.Namespace) -> int:
        torch.set_num_threads(1)  # the conversion has its own threads
        try:
            with _downloaded(parsed) as local:
                return start(local)
        except CheckpointError as error:
            print(f"megarl convert {parsed.conversion}: {error}", file=sys.stderr)
            return USER_ERROR

    return run


@contextmanager
def _downloaded(parsed: argparse.Namespace) -> Generator[argparse.Namespace]:
    """Replace the URLs of checkpoints by temporary local copies, next to the output if there is one."""
    urls = {name: value for name in _MODELS if isinstance(value := getattr(parsed, name, None), str)}
    if not urls:
        yield parsed
        return
    beside = None if "output" not in parsed else existing_folder(parsed.output.parent)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=beside) as folder:
        local = {name: local_copy(url, CheckpointFolder(Path(folder) / name)) for name, url in urls.items()}
        yield argparse.Namespace(**{**vars(parsed), **local})


@_in_one_line
def hf_to_megatron(parsed: argparse.Namespace) -> int:
    layout = Layout(
        tensor_parallel_size=parsed.tensor_parallel_size,
        pipeline_parallel_size=parsed.pipeline_parallel_size,
        virtual_pipeline_parallel_size=parsed.virtual_pipeline_parallel_size,
        data_parallel_size=1,
    )

    def write(source: ModelSource, dtype: torch.dtype | None, report: Report) -> tuple[int, int]:
        if source.architecture.lora is not None:
            raise CheckpointError(
                f"{parsed.input}: is an adapter; start a run from it with actor.lora.path, or merge it with "
                "megarl convert merge-adapter"
            )
        return write_distributed(source, parsed.output, layout, dtype, report)

    return _convert(parsed, write)


@_in_one_line
def megatron_to_hf(parsed: argparse.Namespace) -> int:
    def write(source: ModelSource, dtype: torch.dtype | None, report: Report) -> tuple[int, int]:
        if source.architecture.lora is not None:
            if parsed.dtype == FP8:
                raise CheckpointError(
                    f"{parsed.input}: has adapters, which are not quantized; merge them into the base model "
                    "with megarl convert merge-adapter --dtype fp8, or use --dtype bfloat16"
                )
            return write_peft(source, parsed.output, dtype, report)
        kept = _read_kept_tensors(parsed, source, dtype)
        return write_hugging_face(source, parsed.output, dtype, parsed.max_shard_size, report, kept)

    return _convert(parsed, write)


@_in_one_line
def merge_adapter(parsed: argparse.Namespace) -> int:
    def write(source: ModelSource, dtype: torch.dtype | None, report: Report) -> tuple[int, int]:
        if source.architecture.lora is None:
            raise CheckpointError(f"{parsed.input}: has no adapters; use megarl convert megatron-to-hf")
        merged = merged_source(source, open_hugging_face(parsed.base, parsed.trust_remote_code))
        kept = _read_kept_tensors(parsed, merged, dtype)
        return write_hugging_face(merged, parsed.output, dtype, parsed.max_shard_size, report, kept)

    # An adapter in PEFT's format does not specify its model.
    if has_adapter(parsed.input):
        parsed.config = parsed.base
    return _convert(parsed, write)


def _read_kept_tensors(
    parsed: argparse.Namespace, source: ModelSource, dtype: torch.dtype | None
) -> KeptTensors | None:
    """Return the tensors that are kept, of the folder with the model's configuration.

    If they cannot be copied, the reason is printed.
    """
    without = f"megarl convert {parsed.conversion}: {parsed.output} is written without"
    try:
        kept = read_kept_tensors(
            source.companions, source.architecture, source.head, dtype or source.single_dtype
        )
    except WeightTransferError as error:
        # A checkpoint has the configuration of the original model, but not its weights.
        has_original = parsed.config is not None or source.companions == source.folder
        hint = "" if has_original else "; pass --config HF_DIR, the folder of the original model"
        print(f"{without} {kept_parts(source.architecture)}: {error}{hint}", file=sys.stderr)
        return None

    if kept is not None and kept.missing is not None:
        print(f"{without} {MTP_LAYERS}: {kept.missing}", file=sys.stderr)
    return kept


def _convert(
    parsed: argparse.Namespace, write: Callable[[ModelSource, torch.dtype | None, Report], tuple[int, int]]
) -> int:
    check_new(parsed.output)  # before large files are read
    start_s = time.monotonic()
    source = _open(parsed.input, parsed)
    with _progress_bar(parsed.conversion) as report:
        num_files, nbytes = write(source, _dtype(parsed.dtype), report)
    seconds = time.monotonic() - start_s
    print(
        f"{parsed.output}: {counted(source.num_parameters, 'parameter')}, {counted(nbytes, 'byte')} "
        f"in {counted(num_files, 'file')}, {seconds:.1f} s, {nbytes / seconds / 1e9:.2f} "
        f"GB/s, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f} MB "
        "including the program"
    )

    return GOOD


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype: torch.dtype = torch.float8_e4m3fn if name == FP8 else getattr(torch, name)
    return dtype


@_in_one_line
def inspect(parsed: argparse.Namespace) -> int:
    description = describe(_open(parsed.folder, parsed, check_contents=False))
    if parsed.json:
        print(json.dumps(description, indent=2))
    else:
        print_description(description, output_console())
    return GOOD


@_in_one_line
def verify(parsed: argparse.Namespace) -> int:
    left = _open(parsed.left, parsed)
    right = _open(parsed.right, parsed)
    with _progress_bar("verify") as report:
        comparison = compare(left, right, report)
    print_comparison(comparison, output_console())
    return GOOD if comparison.is_same else NOT_THE_SAME


def _open(folder: Path, parsed: argparse.Namespace, check_contents: bool = True) -> ModelSource:
    """Open a model. When two are compared, a Hugging Face folder uses its own configuration."""
    companions = None if parsed.conversion == "verify" and (folder / CONFIG_FILE).is_file() else parsed.config
    return open_model(folder, parsed.role, parsed.trust_remote_code, companions, check_contents)


@contextmanager
def _progress_bar(name: str) -> Generator[Report]:
    """Show a progress bar on a terminal, and yield the function that workers report to."""
    columns = (
        TextColumn(name),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    console = output_console(stderr=True)

    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda nbytes, total: bar.update(task, advance=nbytes, total=total)


def print_description(description: dict[str, Any], console: Console) -> None:
    """Print the model, then every tensor on one line."""
    facts = _table("Model", "quantity", "value")
    for name, value in _facts(description):
        facts.add_row(name, value)

    for name, value in description["architecture"].items():
        if name != "model_type":
            facts.add_row(name, str(value))

    console.print(facts)
    rows = [
        (
            each["name"],
            " x ".join(f"{size:,}" for size in each["shape"]),
            each["dtype"],
            f"{each['nbytes']:,}",
        )
        for each in description["tensors"]
    ]
    tensors = Table(
        title=f"Tensors: {len(rows):,}, by their Hugging Face names", title_justify="left", title_style="bold"
    )
    for column, cells in zip(("name", "shape", "dtype", "bytes"), zip(*rows, strict=True), strict=True):
        tensors.add_column(column, no_wrap=True, min_width=max(map(len, cells)))  # names stay whole, for grep
    for row in rows:
        tensors.add_row(*row)
    console.print(tensors, crop=False)


def _facts(description: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("folder", description["folder"]),
        ("format", description["format"]),
        ("layout", description["layout"]),
        ("step", "not recorded" if description["step"] is None else f"{description['step']:,}"),
        ("family", description["family"]),
        ("class", description["model_class"] or "none in config.json"),
        ("head", description["head"]),
        ("dtype", description["dtype"]),
        ("parameters", f"{description['num_parameters']:,}"),
        ("bytes", f"{description['nbytes']:,}"),
        ("tokenizer", description["tokenizer"]),
    ]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tensors that differ, if any, and the verdict in the last line."""
    if comparison.architecture:
        table = _table("Architecture", "field", str(comparison.left.folder), str(comparison.right.folder))
        for name, left, right in comparison.architecture:
            table.add_row(name, str(left), str(right))
        console.print(table)

    # Show the first tensors that differ; the verdict counts all of them.
    if differing := comparison.differing:
        shown = differing[:_MAX_DIFFERING]
        table = _table(
            f"Tensors that differ: {len(differing):,}, the first {len(shown)}",
            "name",
            "elements",
            "largest difference",
            "",
        )
        for tensor in shown:
            table.add_row(
                tensor.name, _elements(tensor), _difference(tensor), tensor.reason or tensor.match.value
            )
        console.print(table)

    print_line(console, verdict(comparison))


def verdict(comparison: Comparison) -> str:
    """Describe in one line whether the models are identical."""
    counts = ", ".join(
        f"{counted(count, 'tensor')} {match.value}" for match in Match if (count := comparison.count(match))
    )

    if comparison.num_kept_skipped:
        counts += (
            f"; not compared: {counted(comparison.num_kept_skipped, 'tensor')} of layers that predict "
            "further tokens or of a vision tower, which Megatron's formats do not contain"
        )

    if not comparison.is_same:
        return f"different: {counts}"
    rounded = [tensor for tensor in comparison.tensors if tensor.match is Match.rounded]
    if not rounded:
        return f"identical: {counts}"
    largest = max(tensor.max_difference for tensor in rounded)
    ways = ", ".join(sorted({tensor.reason for tensor in rounded}))

    return f"identical except for rounding ({ways}; largest difference {largest:.3g}): {counts}"


def _elements(tensor: TensorComparison) -> str:
    return f"{tensor.num_different:,} of {tensor.num_elements:,}" if tensor.num_elements else ""


def _difference(tensor: TensorComparison) -> str:
    return f"{tensor.max_difference:.3g}" if tensor.num_elements else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
