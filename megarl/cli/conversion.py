"""The work of `megarl convert`: opens, converts with a progress bar, and says what was made. Needs no process group and no GPU."""

from __future__ import annotations

import argparse
import functools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.inspect import describe
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.output import Written, check_new
from megarl.checkpoints.convert.source import ModelSource
from megarl.checkpoints.convert.streaming import Progress as Report
from megarl.checkpoints.convert.verify import compare
from megarl.checkpoints.role_folder import Layout
from megarl.cli.model_tables import print_comparison, print_description
from megarl.config.errors import CheckpointError
from megarl.weights.hf_folder import CONFIG_FILE

GOOD, NOT_THE_SAME, USER_ERROR = 0, 1, 2

Start = Callable[[argparse.Namespace], int]


def _in_one_line(start: Start) -> Start:
    """What a damaged folder, or the disk, makes of a command."""

    @functools.wraps(start)
    def run(parsed: argparse.Namespace) -> int:
        torch.set_num_threads(1)  # the conversion has threads of its own
        try:
            return start(parsed)
        except CheckpointError as error:
            print(f"megarl convert {parsed.conversion}: {error}", file=sys.stderr)
            return USER_ERROR

    return run


@_in_one_line
def hf_to_megatron(parsed: argparse.Namespace) -> int:
    layout = Layout(
        tensor_parallel_size=parsed.tensor_parallel_size,
        pipeline_parallel_size=parsed.pipeline_parallel_size,
        virtual_pipeline_parallel_size=parsed.virtual_pipeline_parallel_size,
        data_parallel_size=1,
    )
    return _convert(parsed, lambda source, dtype, report: write_distributed(source, parsed.output, layout, dtype, report))


@_in_one_line
def megatron_to_hf(parsed: argparse.Namespace) -> int:
    return _convert(parsed, lambda source, dtype, report: write_hugging_face(source, parsed.output, dtype, parsed.max_shard_size, report))


def _convert(parsed: argparse.Namespace, write: Callable[[ModelSource, torch.dtype | None, Report], Written]) -> int:
    check_new(parsed.output)  # before anything large is read
    start_s = time.monotonic()
    source = _open(parsed.input, parsed)
    with _progress_bar(parsed.conversion) as report:
        written = write(source, getattr(torch, parsed.dtype) if parsed.dtype else None, report)
    seconds = time.monotonic() - start_s
    files = f"{written.num_files} file" + ("s" if written.num_files > 1 else "")
    print(
        f"{parsed.output}: {source.num_parameters:,} parameters, {written.nbytes:,} bytes in {files}, {seconds:.1f} s, "
        f"{written.nbytes / seconds / 1e9:.2f} GB/s, "
        f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f} MB of memory, the program itself included"
    )
    return GOOD


@_in_one_line
def inspect(parsed: argparse.Namespace) -> int:
    description = describe(_open(parsed.folder, parsed, check_contents=False))
    if parsed.json:
        print(json.dumps(description.as_json(), indent=2))
    else:
        print_description(description, Console())
    return GOOD


@_in_one_line
def verify(parsed: argparse.Namespace) -> int:
    left, right = _open(parsed.left, parsed), _open(parsed.right, parsed)
    with _progress_bar("verify") as report:
        comparison = compare(left, right, report)
    print_comparison(comparison, Console())
    return GOOD if comparison.is_same else NOT_THE_SAME


def _open(folder: Path, parsed: argparse.Namespace, check_contents: bool = True) -> ModelSource:
    """A Hugging Face folder, of two that are compared, has its own configuration."""
    companions = None if parsed.conversion == "verify" and (folder / CONFIG_FILE).is_file() else parsed.config
    return open_model(folder, parsed.role, parsed.trust_remote_code, companions, check_contents)


@contextmanager
def _progress_bar(name: str) -> Iterator[Report]:
    """On the terminal, none in a log; gives what workers report to."""
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("left:"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda nbytes, total: bar.update(task, advance=nbytes, total=total)
