"""Count what a reader of a package has to hold in mind: statements, records, modules, rooms, and more.

    python -m benchmarks.house                   # this checkout
    python -m benchmarks.house BEFORE AFTER      # two trees side by side

A tree is the folder of any Python package, the folder of a checkout of megarl, or a git revision of this
repository. Tests, and stubs of other packages, do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"stand_ins", "stubs", "tests"}
LAYERS_FILE = "tests/test_architecture.py"

# The most that megarl allows itself of each figure.
LIMITS = {
    "statements": 52_000,
    "records": 450,
    "protocols": 24,
    "modules": 640,
    "rooms": 23,
    "modules with one importer": 110,
    "places that ask for a kind of layer": 20,
}

# The attributes of `Architecture` that say which kinds of layers a model has, and the modules that declare
# them and have the table of kinds.
KIND_ATTRIBUTES = (
    *("experts", "sparse_layers", "num_dense_layers", "delta_net", "delta_layers", "num_attention_layers"),
    *("has_several_kinds_of_layers", "latent", "windows", "has_sinks", "vision"),
)
KIND_TABLE = {"megarl.models.architecture", "megarl.models.layers"}

RECORD_DECORATORS = {"attrs", "dataclass", "define", "frozen"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Tree:
    """The parsed modules of a package."""

    def __init__(self, sources: Mapping[str, str], layers: str = "") -> None:
        """Parse the sources.

        Args:
            sources: The source of each file by its path from the folder that contains the package.
            layers: The source that declares `LAYERS`; empty if there is none.
        """
        self.layers = layers
        self.packages: set[str] = set()
        self.nodes: dict[str, list[ast.AST]] = {}  # by module, with dots; a package has its own name
        self.num_lines = 0

        for path, text in sources.items():
            parts = Path(path).with_suffix("").parts
            if LEFT_OUT.isdisjoint(parts):
                name = ".".join(parts).removesuffix(".__init__")
                self.packages |= {name} if parts[-1] == "__init__" else set()
                self.nodes[name] = list(ast.walk(ast.parse(text)))
                self.num_lines += len(text.splitlines())

    def figures(self) -> dict[str, float]:
        """Return every figure by its name."""
        nodes = list(chain.from_iterable(self.nodes.values()))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        functions = [node for node in nodes if isinstance(node, Function)]
        statements = sum(isinstance(node, ast.stmt) for node in nodes) - sum(map(_has_docstring, nodes))
        lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions) or [0]
        places = list(self._places_of_kinds())

        return {
            "statements": statements,
            "statements per line": statements / max(self.num_lines, 1),
            "classes": len(classes),
            "records": num_records(classes),
            "protocols": sum("Protocol" in _names(node.bases) for node in classes),
            "modules": len(self.nodes),
            "rooms": self._num_rooms(),
            "modules with one importer": sum(len(users) == 1 for users in self.importers().values()),
            "places that ask for a kind of layer": len(places),
            "modules that ask for a kind of layer": len(set(places)),
            "lines of a function, median": statistics.median(lengths),
            "lines of a function, 95 %": lengths[int(0.95 * (len(lengths) - 1))],
            "lines of the longest function": lengths[-1],
            "functions of at most 35 lines, %": 100 * sum(length <= 35 for length in lengths) / len(lengths),
        }

    def importers(self) -> dict[str, set[str]]:
        """Return the modules that import each module, also inside functions and for types only."""
        found: dict[str, set[str]] = {name: set() for name in self.nodes}
        for importer in self.nodes:
            for name in self._imported_by(importer):
                # `from a.b import c`: the module a.b.c if it exists, otherwise a member of a.b.
                target = name if name in found else name.rpartition(".")[0]
                if target in found and target != importer:
                    found[target].add(importer)

        return found

    def _imported_by(self, importer: str) -> Iterator[str]:
        package = importer.split(".") if importer in self.packages else importer.split(".")[:-1]
        for node in self.nodes[importer]:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def _num_rooms(self) -> int:
        """Count the packages below the top, and the sub-packages in `LAYERS`, such as "config.schema"."""
        declared = {
            constant.value
            for node in ast.walk(ast.parse(self.layers))
            if isinstance(node, ast.Assign) and "LAYERS" in _names(node.targets)
            for constant in ast.walk(node.value)
            if isinstance(constant, ast.Constant) and "." in str(constant.value)
        }
        return sum(name.count(".") == 1 for name in self.packages) + len(declared)

    def _places_of_kinds(self) -> Iterator[str]:
        """Yield the module of each place that reads an attribute of a kind of layer."""
        for name in self.nodes.keys() - KIND_TABLE:
            for node in self.nodes[name] if name.startswith("megarl.") else ():
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    yield from [name] if node.attr in KIND_ATTRIBUTES else []


def num_records(classes: list[ast.ClassDef]) -> int:
    """Count the dataclasses, named tuples, typed dictionaries, and classes of pydantic and attrs."""
    bases = {"BaseModel", "TypedDict"}
    while grown := {node.name for node in classes if not bases.isdisjoint(_names(node.bases))} - bases:
        bases |= grown

    bases.add("NamedTuple")  # its subclasses have no fields of their own
    return sum(
        not bases.isdisjoint(_names(node.bases))
        or not RECORD_DECORATORS.isdisjoint(_names(node.decorator_list))
        for node in classes
    )


def _names(nodes: Iterable[ast.expr]) -> set[str]:
    """Return the last names of expressions, such as `dataclass` of `dataclasses.dataclass(frozen=True)`."""
    return {re.split(r"[(\[]", ast.unparse(node))[0].rpartition(".")[2] for node in nodes}


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None


def read_tree(place: str) -> Tree:
    """Read a folder, or otherwise a git revision of this repository."""
    folder = Path(place).resolve()
    if folder.is_dir():
        package = folder / "megarl" if (folder / "megarl").is_dir() else folder
        files = [*package.rglob("*.py"), *package.parent.glob(LAYERS_FILE)]
        sources = {str(file.relative_to(package.parent)): file.read_text(encoding="utf-8") for file in files}
    else:
        command = ["git", "archive", place, "megarl", "tests"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            opened = {name: tar.extractfile(name) for name in tar.getnames() if name.endswith(".py")}
            sources = {name: file.read().decode() for name, file in opened.items() if file is not None}

    return Tree(sources, sources.get(LAYERS_FILE, ""))


def table_of(trees: Mapping[str, Tree]) -> Table:
    """Make the table of one or two trees. Its last column is about the last tree."""
    table = Table("figure", *trees, "limit", "met")
    figures = [tree.figures() for tree in trees.values()]

    for name, last in figures[-1].items():
        limit = LIMITS.get(name)
        shown = (f"{each[name]:,.3f}".rstrip("0").rstrip(".") for each in figures)
        verdict = ("", "") if limit is None else (f"{limit:,}", "yes" if last <= limit else "no")
        table.add_row(name, *shown, *verdict)

    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", default=[str(ROOT)], metavar="TREE", help="one or two trees")
    places = parser.parse_args().trees
    Console().print(table_of({place: read_tree(place) for place in places}))


if __name__ == "__main__":
    main()
