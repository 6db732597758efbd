"""`megarl recipes`: lists, prints and copies the configurations that are included in megarl."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from megarl.cli.tables.console import output_console, print_line, table
from megarl.config.load import read_config
from megarl.config.schema import RunConfig
from megarl.config.shipped import CONFIGS_DIR, shown
from megarl.config.sources import BASE
from megarl.plan.placement.plan import plan_placement

_PRESETS = "algorithm"
_BASE = re.compile(rf"(?m)^{BASE}: (?=[\w.]+\.yaml$)")  # of a file in the same folder


def run(action: str | None = None, name: str | None = None, file: str | None = None) -> None:
    """List all configurations, print one, or copy one to a new file.

    Raises:
        ValueError: There is no such configuration, or the file exists.
    """
    if action is None:
        _print_list()
        return
    if name is None:
        raise ValueError(f"give the name of a configuration to {action}; `megarl recipes` lists them")
    recipe = _found(name)
    text = recipe.read_text(encoding="utf-8")
    if action == "show":
        print(text, end="")
    else:
        _copy(recipe, text, Path(file or recipe.name))


def _copy(recipe: Path, text: str, copy: Path) -> None:
    # A base is relative to its file. The name of an included file holds in every folder.
    folder = recipe.parent.relative_to(CONFIGS_DIR.parent)
    try:
        with copy.open("x", encoding="utf-8") as opened:
            opened.write(_BASE.sub(f"{BASE}: {folder}/", text))
    except FileExistsError:
        raise ValueError(f"{copy}: there is such a file already; give another name") from None
    except OSError as error:
        raise ValueError(f"{copy}: cannot be written ({error.strerror})") from error
    print(f"{copy}: a copy of {shown(recipe)}")


def _recipes() -> dict[str, Path]:
    """Return the files by name: runs, and then presets."""
    files = [*sorted(CONFIGS_DIR.glob("*.yaml")), *sorted((CONFIGS_DIR / _PRESETS).glob("*.yaml"))]
    return {str(file.relative_to(CONFIGS_DIR).with_suffix("")): file for file in files}


def _found(name: str) -> Path:
    """Return the file of a name of the list, which may also be written as `configs/NAME.yaml`.

    Files that others inherit from, such as `configs/base/cluster.yaml`, have a name, too.
    """
    files = {str(file.relative_to(CONFIGS_DIR).with_suffix("")): file for file in CONFIGS_DIR.rglob("*.yaml")}
    short = name.removeprefix(f"{CONFIGS_DIR.name}/").removesuffix(".yaml")
    recipe = files.get(short) or files.get(f"{_PRESETS}/{short}")
    if recipe is None:
        near = difflib.get_close_matches(short, _recipes(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`megarl recipes` lists them"
        raise ValueError(f"{name}: there is no such configuration; {hint}")
    return recipe


def _print_list() -> None:
    """Print runs with their size, and presets with the first sentence of their comment."""
    console = output_console()
    presets = [file for file in _recipes().values() if file.parent.name == _PRESETS]
    runs = {
        name: read_config(RunConfig, file).config for name, file in _recipes().items() if file not in presets
    }

    console.print(
        table(
            "Runs, for `megarl train configs/NAME.yaml`",
            ("name", "kind", "model", "nodes", "devices"),
            [
                (
                    name,
                    config.kind.value,
                    config.model.path,
                    str(config.placement.num_nodes),
                    str(plan_placement(config).num_devices),
                )
                for name, config in runs.items()
            ],
            wraps="model",
        )
    )
    console.print(
        table(
            "Presets, for algorithm=NAME",
            ("name", "description"),
            [(file.stem, _about(file)) for file in presets],
        )
    )
    print_line(console, "megarl recipes show NAME prints a file, megarl recipes copy NAME FILE copies it")


def _about(file: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    # A period after `al` or `Dr` ends no sentence.
    return re.split(r"(?<!\bal)(?<!\bDr)\. ", comment, maxsplit=1)[0].rstrip(".:")
