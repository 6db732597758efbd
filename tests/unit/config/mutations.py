"""Damaged configurations: the shipped ones with a change, an omission, a typo or garbage."""

from __future__ import annotations

import io
import random
import time
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megarl.cli.main import main
from megarl.config.load import load_config, plain_values, schema_of

ROOT = Path(__file__).parents[3]
RUNS = sorted((ROOT / "configs").glob("*.yaml"))
LIMIT_S = 5.0

_DEEP: Any = "x"
for _ in range(100):
    _DEEP = {"a": _DEEP} if _ % 2 else [_DEEP]
NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 64, 1000, 10**6, 10**9, 2**63, 2**64, 10**30, -(10**18)),
    *(0.5, 1e-300, 1e-30, 1e-9, 1.5, 1e9, 1e30, 1e300, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "x", "None", "null", "nan", "1e3", "0", "true", "auto", "grpo", "cuda"),
    *("/", "/dev/null", "/proc/x", ".", "..", "README.md", "~", "a" * 300, "/".join(["a" * 90] * 60)),
    *(
        "\u00e4\u20ac\U0001f600",
        "\ud800",
        "a\0b",
        "a\nb",
        "{",
        "}",
        "[",
        "%s",
        "{x}",
        "a: b",
        "- a",
        "#",
        "'",
        '"',
    ),
    *(
        "${",
        "${}",
        "${nothing}",
        "${trainer.seed}",
        "${model.path}",
        "${oc.env:NOTHING}",
        "${oc.decode:'['}",
        "${a:b}",
        "${..}",
    ),
    *("???", "\\${x}"),
)
COLLECTIONS: tuple[Any, ...] = (
    *([], [[]], [None], ["x"], [1, 2], ["x"] * 1000, {}, {"a": 1}, {1: 2}, {None: 3}, _DEEP),
    *(
        [{}],
        [{"path": 3}],
        [{"path": "x", "weight": "y"}],
        {"base": "ppo"},
        {"base": "../ppo"},
        {"base": None},
    ),
)
VALUES: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *COLLECTIONS)
DAMAGE = (
    *("\t", "{", "]", ":", "- ", "&a *a", "*a", "!!python/object:os.system x", "!!set", "\0", "\ud800"),
    *("%YAML 9", "---\n", "|", "\n  "),
)


def mishaps(seeds: range, folder: Path) -> list[str]:
    """Run `megarl check` in this process on a mutation of each seed.

    Returns descriptions of tracebacks, unexpected exit statuses, and checks that take too long.
    """
    found = []
    for seed in seeds:
        arguments = mutation(seed, folder)
        err = io.StringIO()
        began_s = time.process_time()
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            try:
                status = main(["check", "--fast", *arguments])
            except SystemExit as ended:  # argparse's
                status = ended.code
        took_s = time.process_time() - began_s
        if status not in (0, 2) or "Traceback" in err.getvalue() or took_s > LIMIT_S:
            found.append(
                f"seed {seed}: status {status} after {took_s:.1f} s of {arguments[1:]}: "
                f"{err.getvalue()[-500:]}"
            )

    return found


def mutation(seed: int, folder: Path) -> list[str]:
    """Return the arguments of `megarl check`: a file in `folder`, and overrides."""
    chance = random.Random(seed)
    run = chance.choice(RUNS)
    schema = schema_of(str(run))
    values = deepcopy(_in_full(schema, run)) if chance.random() < 0.5 else _in_few_words(run)
    overrides: list[str] = []

    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        key = chance.choice(_keys(values))
        match chance.randrange(8):
            case 0:
                _parent(values, key).pop(key[-1], None)
            case 1:
                parent = _parent(values, key)
                if key[-1] in parent:
                    parent[_misspelt(str(key[-1]), chance)] = parent.pop(key[-1])
            case 2:
                values[chance.choice(list(values) or ["x"])] = _value(chance)
            case 3:
                overrides.append(f"{_misspelt('.'.join(key), chance)}={_text(chance)}")
            case 4 | 5:
                overrides.append(f"{'.'.join(key)}={_text(chance)}")
            case _:
                parent = _parent(values, key)
                parent[key[-1]] = _value(chance)

    text = yaml.safe_dump(values, allow_unicode=chance.random() < 0.5)
    if chance.random() < 0.15:
        text = _damaged(text, chance)
    file = folder / "run.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))

    return [str(file), *overrides]


@cache
def _in_full(schema: type, run: Path) -> dict[str, Any]:
    return plain_values(load_config(schema, str(run)))


def _in_few_words(run: Path) -> dict[str, Any]:
    """Return a short configuration as a user writes it: the differences from another file."""
    values = yaml.safe_load(run.read_text())
    return {"base": str(run)} | {
        name: values[name] for name in ("model", "data", "trainer") if name in values
    }


def _keys(values: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the dotted paths of sections and of their keys."""
    keys = []
    for name, value in values.items() if isinstance(values, dict) else ():
        keys.append((*prefix, str(name)))
        if len(prefix) < 4:
            keys += _keys(value, (*prefix, str(name)))

    return keys or [("trainer",)]


def _parent(values: Any, key: tuple[str, ...]) -> dict[Any, Any]:
    for name in key[:-1]:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _misspelt(name: str, chance: random.Random) -> str:
    place = chance.randrange(len(name) + 1)
    return (
        name[:place]
        + chance.choice(("", "_", "x", ".", "[0]", "=", " ", "\u00e9", "-", ".."))
        + name[place + chance.randrange(2) :]
    )


def _value(chance: random.Random) -> Any:
    # A copy, which later changes of the same configuration are made in.
    return deepcopy(chance.choice(VALUES))


def _text(chance: random.Random) -> str:
    value = chance.choice(VALUES)
    return (
        value
        if isinstance(value, str)
        else chance.choice((str(value), yaml.safe_dump(value, default_flow_style=True).strip()))
    )


def _damaged(text: str, chance: random.Random) -> str:
    place = chance.randrange(len(text) + 1)
    inserted = chance.choice(DAMAGE)
    return text[:place] + inserted + text[place + chance.randrange(20) :]
