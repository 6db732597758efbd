"""Measure the code of megarl: size, style, the location of concepts, and the modules that a PPO step runs through.

    python benchmarks/house.py                  # this checkout
    python benchmarks/house.py --tree FOLDER    # another one, of any age
    python benchmarks/house.py --no-step        # without the run

The step is a real one: `megarl train` with actor, reference, critic, reward function and one hf engine, on a
model of four layers. In each process, every function call of the second `train_step` is recorded; a module
counts once, in whichever process it runs.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

WIDTH = 110  # columns
STUBS = {"stand_ins", "stubs"}  # folders of stubs of other packages
# Modules whose path matches are about the concept.
CONCEPTS = {
    "the weight sync": r"weight|transport|carrier|receiv|/wire|/p2p|/ipc|/slots|/rounds|destination",
    "agents": r"agent|episode|environment|playing|tool|trajectory",
}

# Python runs a `sitecustomize` on its path in every process that starts. Ray calls its actors' methods in
# threads of its own, which no other hook reaches. The function that executes a call in a worker therefore starts
# the recording there.
_WATCH = """
import os, sys, threading, time
_TREE, _FOLDER = os.path.join(os.environ["WATCHED_TREE"], "megarl", ""), os.environ["WATCHED_FOLDER"]
_OPEN, _known = os.path.join(_FOLDER, "open"), {}

def _look(frame, event, argument):
    if event not in ("call", "return"):
        return
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name == "train_step" and file.endswith("/trainers/ppo.py"):
        if event == "return":
            os.path.exists(_OPEN) and os.remove(_OPEN)
        elif frame.f_locals["step"] == 2:
            open(_OPEN, "w").close()
    if file in _known:
        return
    if not file.startswith(_TREE):
        _known[file] = True
    elif os.path.exists(_OPEN):
        _known[file] = True
        with open(os.path.join(_FOLDER, "passed"), "a") as passed:
            passed.write("megarl/" + file[len(_TREE) :] + "\\n")

def _watch_worker():
    while (host := getattr(sys.modules.get("megarl.controller.host"), "WorkerHost", None)) is None:
        time.sleep(0.01)
    inner = host.execute
    def execute(self, *arguments):
        sys.setprofile(_look)
        return inner(self, *arguments)
    host.execute = execute

sys.setprofile(_look)
threading.setprofile(_look)
threading.Thread(target=_watch_worker, daemon=True).start()
"""

_CONFIG = """
algorithm: {{kl: {{where: reward}}}}
model: {{path: {folder}/policy, dtype: float32}}
data: {{train_files: [{folder}/train.parquet], max_prompt_length: 8, max_response_length: 8}}
rollout: {{engine: hf, n: 2, max_concurrency: 64}}
resharding: {{bucket_mb: 1}}
reward: {{functions: [{{path: {folder}/reward.py, name: compute_score}}], num_processes: 1}}
trainer: {{total_steps: 2, prompts_per_step: 4, output_dir: {folder}/run}}
tracking: {{loggers: [jsonl]}}
device: cpu
"""


def measure_files(tree: Path) -> tuple[dict[str, Counter], int]:
    """Return files, lines and classes by package, and the number of public class names in more than one file."""
    packages: dict[str, Counter] = {}
    homes: Counter = Counter()

    for file in sorted((tree / "megarl").rglob("*.py")):
        if STUBS.intersection(file.parts):
            continue
        text = file.read_text(encoding="utf-8")
        package = file.relative_to(tree / "megarl").parts[0] if file.parent != tree / "megarl" else "(top)"
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        homes.update({node.name for node in classes if not node.name.startswith("_")})
        packages.setdefault(package, Counter()).update(
            files=bool(text.strip()), lines=text.count("\n"), classes=len(classes)
        )

    return packages, sum(count > 1 for count in homes.values())


class Style(NamedTuple):
    """Counts over all files of megarl, without the stubs of other packages."""

    files: int
    lines: int
    longest_file: int
    functions: int
    longest_function: int
    function_lines: int
    blank_lines: int  # inside functions, outside docstrings
    commented_lines: int  # inside functions
    parallel_assignments: int  # `a, b = x, y`
    wide_lines: int

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield each figure with its name."""
        yield "files", f"{self.files:,}"
        yield "lines", f"{self.lines:,}"
        yield "longest file, lines", f"{self.longest_file:,}"
        yield "functions", f"{self.functions:,}"
        yield "longest function, lines", f"{self.longest_function:,}"
        yield "blank lines inside functions", f"{self.blank_lines / self.function_lines:.1%}"
        yield "lines with a comment inside functions", f"{self.commented_lines / self.function_lines:.1%}"
        yield "parallel assignments per 1,000 lines", f"{1000 * self.parallel_assignments / self.lines:.1f}"
        yield f"lines over {WIDTH} columns", f"{self.wide_lines:,}"


def measure_style(sources: Mapping[str, str]) -> Style:
    """Measure files, given as their path and text."""
    longest_file = 0
    functions: list[int] = []
    totals: Counter = Counter()

    for text in sources.values():
        lines = text.splitlines()
        longest_file = max(longest_file, len(lines))
        totals["lines"] += len(lines)
        totals["wide"] += sum(len(line) > WIDTH for line in lines)

        in_functions: set[int] = set()
        in_docstrings: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                functions.append(node.end_lineno - node.lineno + 1)
                in_functions.update(range(node.lineno, node.end_lineno + 1))
                if ast.get_docstring(node) is not None:
                    docstring = node.body[0]
                    assert docstring.end_lineno is not None
                    in_docstrings.update(range(docstring.lineno, docstring.end_lineno + 1))
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and isinstance(node.value, ast.Tuple)
            ):
                totals["parallel"] += 1

        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        totals["in functions"] += len(in_functions)
        totals["blank"] += sum(not lines[number - 1].strip() for number in in_functions - in_docstrings)
        totals["commented"] += len(commented & in_functions)

    return Style(
        files=sum(bool(text.strip()) for text in sources.values()),
        lines=totals["lines"],
        longest_file=longest_file,
        functions=len(functions),
        longest_function=max(functions, default=0),
        function_lines=max(totals["in functions"], 1),
        blank_lines=totals["blank"],
        commented_lines=totals["commented"],
        parallel_assignments=totals["parallel"],
        wide_lines=totals["wide"],
    )


def read_sources(tree: Path) -> dict[str, str]:
    """Return the text of each file of megarl by its path, without the stubs of other packages."""
    files = sorted(file for file in (tree / "megarl").rglob("*.py") if not STUBS.intersection(file.parts))
    return {file.relative_to(tree).as_posix(): file.read_text(encoding="utf-8") for file in files}


def homes_of(concept: str, sources: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the names of the packages with modules about a concept, and the number of these modules."""
    modules = [path for path in sources if re.search(CONCEPTS[concept], path)]
    return sorted({path.split("/")[1] for path in modules}), len(modules)


def files_of_changes(tree: Path) -> dict[str, int]:
    """Return how many files of megarl each change of docs/architecture.md touches.

    A new file counts as well.
    """
    text = (
        (tree / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .split("## How to add", 1)[1]
        .split("\n## ", 1)[0]
    )
    parts = re.split(r"(?m)^### (.+)$", text)
    return {
        title: len(set(re.findall(r"`(megarl/[\w/<>]+\.py)`", section)))
        for title, section in zip(parts[1::2], parts[2::2], strict=True)
    }


def modules_of_a_step(tree: Path) -> list[str]:
    """Return the modules of megarl that a step runs through, as paths in the checkout.

    Raises:
        CalledProcessError: The run failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "hook").mkdir()
        (folder / "config.yaml").write_text(_CONFIG.format(folder=folder))
        plain = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        make_inputs = (
            f"from pathlib import Path; from tests.integration.tiny_run import save_inputs; "
            f"save_inputs(Path({str(folder)!r}))"
        )
        subprocess.run([sys.executable, "-c", make_inputs], cwd=tree, env=plain, check=True)
        (folder / "hook" / "sitecustomize.py").write_text(_WATCH)
        watched = {
            **plain,
            "PYTHONPATH": f"{folder / 'hook'}:{tree}",
            "WATCHED_TREE": str(tree),
            "WATCHED_FOLDER": str(folder),
        }
        run = [sys.executable, "-m", "megarl", "train", str(folder / "config.yaml")]
        subprocess.run(run, cwd=tree, env=watched, check=True, stdout=sys.stderr)
        return sorted(set((folder / "passed").read_text().splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument(
        "--names", action="store_true", help="also the names of the modules that a step passes"
    )
    parser.add_argument("--no-step", action="store_true", help="do not run a step")
    parsed = parser.parse_args()
    tree = parsed.tree.resolve()
    console = Console()
    packages, doubled = measure_files(tree)
    table = Table("package", "files", "lines", "classes", title="megarl", title_justify="left")
    total: Counter = Counter()

    for name, counts in packages.items():
        table.add_row(name, *(str(counts[key]) for key in ("files", "lines", "classes")))
        total.update(counts)

    table.add_section()
    table.add_row("all", *(f"{total[key]:,}" for key in ("files", "lines", "classes")))
    console.print(table)
    console.print(f"public class names in more than one file: {doubled}")

    sources = read_sources(tree)
    figures = Table("figure", "", title="style", title_justify="left")
    for name, figure in measure_style(sources).rows():
        figures.add_row(name, figure)

    for concept in CONCEPTS:
        homes, count = homes_of(concept, sources)
        figures.add_row(f"packages of {concept}", f"{len(homes)} ({', '.join(homes)}), {count} modules")

    for title, count in files_of_changes(tree).items():
        figures.add_row(f"files to change for: {title.lower()}", str(count))
    console.print(figures)
    if parsed.no_step:
        return

    modules = modules_of_a_step(tree)
    console.print(f"modules that one PPO step passes: {len(modules)}", highlight=False)
    if parsed.names:
        console.print("\n".join(modules), highlight=False)


if __name__ == "__main__":
    main()
