"""`megarl convert`: writes a model in another format, inspects one, and compares two.

It needs no process group and no GPU.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from json import dumps
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
from rich.table import Column, Table

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face import HUGGING_FACE, merged_source, open_hugging_face, write_peft
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.source import ModelSource, describe
from megarl.checkpoints.convert.streaming import Progress as Report
from megarl.checkpoints.convert.streaming import check_new
from megarl.checkpoints.convert.verify import Comparison, Match, TensorComparison, compare
from megarl.checkpoints.object_storage import local_copy
from megarl.checkpoints.role_folder import Layout
from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.cli.convert_options import DEFAULT_SHARD_BYTES, FP8
from megarl.cli.tables.console import output_console, print_line
from megarl.machine.errors import CheckpointError, counted
from megarl.machine.files import existing_folder
from megarl.weights.hf_folder import CONFIG_FILE
from megarl.weights.kept_tensors import MTP_LAYERS, KeptTensors, kept_parts, read_kept_tensors
from megarl.weights.peft_folder import has_adapter
from megarl.weights.tensors import WeightTransferError

NOT_THE_SAME = 1
_MAX_DIFFERING = 20
_HUGGING_FACE = "hf"
_MEGATRON = "megatron"


def run(source: Path | str, target: Path | str | None, **options: Any) -> None:
    """Write a model in another format, layout or dtype.

    Raises:
        ValueError: The options do not fit together, or the model cannot be read or written.
    """
    settings = argparse.Namespace(**options)
    if not isinstance(target, Path):
        raise ValueError("give TARGET, a new or empty folder on this machine, or --inspect")
    if settings.json:
        raise ValueError("--json requires --inspect")
    with _damage_in_one_line():
        check_new(target)  # before large files are read
        with _downloaded(target.parent, source) as (folder,):
            _convert(folder, target, settings)


def inspect(
    source: Path | str, json: bool, role: str | None, config: Path | None, trust_remote_code: bool
) -> None:
    """Print what is in a model's folder. Raises ValueError if it cannot be read."""
    with _damage_in_one_line(), _downloaded(None, source) as (folder,):
        description = describe(open_model(folder, role, trust_remote_code, config, check_contents=False))
        if json:
            print(dumps(description, indent=2))
        else:
            print_description(description, output_console())


def verify(
    source: Path | str,
    target: Path | str | None,
    role: str | None,
    config: Path | None,
    trust_remote_code: bool,
) -> int:
    """Compare two models. Return 0 if they are the same, and 1 if not.

    Raises:
        ValueError: There is only one model, or one of them cannot be read.
    """
    if target is None:
        raise ValueError("--verify compares two models; give TARGET too")
    with _damage_in_one_line(), _downloaded(None, source, target) as folders:
        # A Hugging Face folder uses its own configuration.
        left, right = (
            open_model(folder, role, trust_remote_code, None if (folder / CONFIG_FILE).is_file() else config)
            for folder in folders
        )
        with _progress_bar("verify") as report:
            comparison = compare(left, right, report)
    print_comparison(comparison, output_console())
    return 0 if comparison.is_same else NOT_THE_SAME


def _convert(folder: Path, target: Path, settings: argparse.Namespace) -> None:
    start_s = time.monotonic()
    # An adapter in PEFT's format does not specify its model.
    companions = settings.base if has_adapter(folder) and settings.base is not None else settings.config
    model = open_model(folder, settings.role, settings.trust_remote_code, companions)
    with _progress_bar("convert") as report:
        num_parameters, num_files, nbytes = _write(model, target, settings, report)
    seconds = time.monotonic() - start_s
    print(
        f"{target}: {counted(num_parameters, 'parameter')}, {counted(nbytes, 'byte')} "
        f"in {counted(num_files, 'file')}, {seconds:.1f} s, {nbytes / seconds / 1e9:.2f} "
        f"GB/s, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f} MB "
        "including the program"
    )


@contextmanager
def _damage_in_one_line() -> Generator[None]:
    """Raise ValueError for a CheckpointError of the block, because the user can only give another model."""
    torch.set_num_threads(1)  # the conversion has its own threads
    try:
        yield
    except CheckpointError as error:
        raise ValueError(str(error)) from error


@contextmanager
def _downloaded(parent: Path | None, *models: Path | str) -> Generator[list[Path]]:
    """Yield the folders of models. URLs of checkpoints are replaced by temporary local copies.

    Args:
        parent: The folder for the copies; None: that of the system.
    """
    if not any(isinstance(model, str) for model in models):
        yield [Path(model) for model in models]
        return
    place = None if parent is None else existing_folder(parent)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=place) as folder:
        yield [
            local_copy(model, CheckpointFolder(Path(folder) / str(number)))
            if isinstance(model, str)
            else model
            for number, model in enumerate(models)
        ]


def _write(
    model: ModelSource, target: Path, settings: argparse.Namespace, report: Report
) -> tuple[int, int, int]:
    """Write the model as the options require, and return its number of parameters, of files and of bytes.

    Raises:
        CheckpointError: The model cannot be written so.
        ValueError: The options do not fit together.
    """
    dtype = _dtype(settings.dtype)
    is_adapter = model.architecture.lora is not None
    by_default = _MEGATRON if model.kind == HUGGING_FACE else _HUGGING_FACE
    to = settings.to or (_HUGGING_FACE if settings.base is not None else by_default)
    sizes = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "virtual_pipeline_parallel_size": settings.virtual_pipeline_parallel_size,
    }
    if settings.base is not None and not is_adapter:
        raise CheckpointError(f"{model.folder}: has no adapters; convert it without --base")

    if to == _MEGATRON:
        if settings.base is not None:
            raise ValueError("--base writes a Hugging Face folder; convert that one to Megatron's format")
        if is_adapter:
            raise CheckpointError(
                f"{model.folder}: is an adapter; start a run from it with actor.lora.path, or merge it with "
                "--base HF_DIR"
            )
        if settings.dtype == FP8 or settings.max_shard_size != DEFAULT_SHARD_BYTES:
            raise ValueError("--dtype fp8 and --max-shard-size require --to hf")
        layout = Layout(**sizes, data_parallel_size=1)
        return model.num_parameters, *write_distributed(model, target, layout, dtype, report)

    if list(sizes.values()) != [1, 1, None]:
        raise ValueError("a layout requires --to megatron; a Hugging Face folder has none")
    if is_adapter and settings.base is None:
        if settings.dtype == FP8:
            raise CheckpointError(
                f"{model.folder}: has adapters, which are not quantized; merge them into the base model with "
                "--base HF_DIR, or use --dtype bfloat16"
            )
        return model.num_parameters, *write_peft(model, target, dtype, report)

    if settings.base is not None:
        model = merged_source(model, open_hugging_face(settings.base, settings.trust_remote_code))
    kept = _read_kept_tensors(model, target, dtype, has_original=settings.config is not None)
    written = write_hugging_face(model, target, dtype, settings.max_shard_size, report, kept)
    return model.num_parameters, *written


def _read_kept_tensors(
    source: ModelSource, target: Path, dtype: torch.dtype | None, *, has_original: bool
) -> KeptTensors | None:
    """Return the tensors that are kept, of the folder with the model's configuration.

    If they cannot be copied, the reason is printed.
    """
    without = f"megarl convert: {target} is written without"
    try:
        kept = read_kept_tensors(
            source.companions, source.architecture, source.head, dtype or source.single_dtype
        )
    except WeightTransferError as error:
        # A checkpoint has the configuration of the original model, but not its weights.
        is_known = has_original or source.companions == source.folder
        hint = "" if is_known else "; pass --config HF_DIR, the folder of the original model"
        print(f"{without} {kept_parts(source.architecture)}: {error}{hint}", file=sys.stderr)
        return None

    if kept is not None and kept.missing is not None:
        print(f"{without} {MTP_LAYERS}: {kept.missing}", file=sys.stderr)
    return kept


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    return torch.float8_e4m3fn if name == FP8 else getattr(torch, name)


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
    fields = description["architecture"].items()
    facts = [*_facts(description), *((name, str(value)) for name, value in fields if name != "model_type")]
    console.print(_table("Model", ("quantity", "value"), facts))
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
        columns = ("field", str(comparison.left.folder), str(comparison.right.folder))
        console.print(_table("Architecture", columns, comparison.architecture))

    # Show the first tensors that differ; the verdict counts all of them.
    if differing := comparison.differing:
        shown = differing[:_MAX_DIFFERING]
        console.print(
            _table(
                f"Tensors that differ: {len(differing):,}, the first {len(shown)}",
                ("name", "elements", "largest difference", ""),
                [(each.name, *_extent(each), each.reason or each.match.value) for each in shown],
            )
        )

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


def _extent(tensor: TensorComparison) -> tuple[str, str]:
    """Return how many elements differ, and the largest difference."""
    if not tensor.num_elements:
        return "", ""
    return f"{tensor.num_different:,} of {tensor.num_elements:,}", f"{tensor.max_difference:.3g}"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    headers = (Column(each, overflow="fold") for each in columns)
    table = Table(*headers, title=title, title_justify="left", title_style="bold")
    for row in rows:
        table.add_row(*map(str, row))
    return table
