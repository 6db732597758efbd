"""Prints what `megarl convert inspect` and `megarl convert verify` have found."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megarl.checkpoints.convert.inspect import ModelDescription
from megarl.checkpoints.convert.verify import Comparison, Match, TensorComparison

_MAX_DIFFERING = 20


def print_description(description: ModelDescription, console: Console) -> None:
    """The model, then every tensor, one a line."""
    facts = _table("Model", "quantity", "value")
    for name, value in _facts(description):
        facts.add_row(name, value)
    for name, value in description.architecture.items():
        if name != "model_type":
            facts.add_row(name, str(value))
    console.print(facts)
    rows = [(each.name, " x ".join(f"{size:,}" for size in each.shape), each.dtype, f"{each.nbytes:,}") for each in description.tensors]
    tensors = Table(title=f"Tensors: {len(rows):,}, by their Hugging Face names", title_justify="left", title_style="bold")
    for column, cells in zip(("name", "shape", "dtype", "bytes"), zip(*rows, strict=True), strict=True):
        tensors.add_column(column, no_wrap=True, min_width=max(map(len, cells)))  # names stay whole, for grep
    for row in rows:
        tensors.add_row(*row)
    console.print(tensors, crop=False)


def _facts(description: ModelDescription) -> list[tuple[str, str]]:
    return [
        ("folder", description.folder),
        ("format", description.format),
        ("layout", description.layout),
        ("step", "none recorded" if description.step is None else f"{description.step:,}"),
        ("family", description.family),
        ("class", description.model_class or "none in config.json"),
        ("head", description.head),
        ("dtype", description.dtype),
        ("parameters", f"{description.num_parameters:,}"),
        ("bytes", f"{description.nbytes:,}"),
        ("tokenizer", description.tokenizer),
    ]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The verdict in the last line; before it the first tensors that differ, where some do."""
    if comparison.architecture:
        table = _table("Architecture", "field", str(comparison.left.folder), str(comparison.right.folder))
        for name, left, right in comparison.architecture:
            table.add_row(name, str(left), str(right))
        console.print(table)
    if differing := comparison.differing:
        shown = differing[:_MAX_DIFFERING]
        table = _table(f"Tensors that differ: {len(differing):,}, the first {len(shown)}", "name", "elements", "largest difference", "")
        for tensor in shown:
            table.add_row(tensor.name, _elements(tensor), _difference(tensor), tensor.reason or tensor.match.value)
        console.print(table)
    console.print(verdict(comparison), highlight=False, soft_wrap=True)


def verdict(comparison: Comparison) -> str:
    """One line."""
    counts = ", ".join(f"{count:,} {match.value}" for match in Match if (count := comparison.count(match)))
    if not comparison.is_same:
        return f"not the same model: of {len(comparison.tensors):,} tensors {counts}"
    rounded = [tensor for tensor in comparison.tensors if tensor.match is Match.rounded]
    if not rounded:
        return f"the same model: {counts}"
    largest = max(tensor.max_difference for tensor in rounded)
    ways = ", ".join(sorted({tensor.reason for tensor in rounded}))
    return f"the same model but for rounding ({ways}; largest difference {largest:.3g}): {counts}"


def _elements(tensor: TensorComparison) -> str:
    return f"{tensor.num_different:,} of {tensor.num_elements:,}" if tensor.num_elements else ""


def _difference(tensor: TensorComparison) -> str:
    return f"{tensor.max_difference:.3g}" if tensor.num_elements else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
