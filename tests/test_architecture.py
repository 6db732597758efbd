"""Test the layers of megarl: imports go only downwards, and heavy libraries stay in their packages. Lines and
functions are as CONTRIBUTING.md describes them. The source is read with `ast`."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from megarl.models.families import FAMILIES
from megarl.models.mapping import PartKind

ROOT = Path(__file__).parent.parent

# Rooms from the ground up: packages, and sub-packages that stand on another layer than the rest of their package
# (`weights.sync`). A module belongs to the room with the longest matching name.
LAYERS = (
    ("machine",),
    ("models",),
    ("config", "batch"),
    ("algorithms", "agents", "data", "tracking", "weights"),
    ("plan",),
    ("checkpoints", "controller"),
    ("engine", "endpoint", "weights.sync"),
    ("rollout",),
    ("rewards", "rehearse"),
    ("roles",),
    ("trainers",),
    ("doctor", "recipes"),
    ("cli",),
    ("api",),
)
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}

# Room -> the rooms that it must not import, wherever they stand: the side of the driver and of worker processes.
FORBIDDEN = {"engine": ("weights.sync",), "checkpoints": ("weights.sync",)}

# Library -> the only packages (dotted prefixes) that may import it.
HOMES = {
    "ray": ("megarl.controller", "megarl.cli.launch"),
    "megatron": ("megarl.engine",),
    "transformer_engine": ("megarl.engine",),
    "sglang": ("megarl.rollout.sglang",),
    "mcp": ("megarl.agents.tools.mcp_server",),
    "wandb": ("megarl.tracking",),
    "mlflow": ("megarl.tracking",),
    "swanlab": ("megarl.tracking",),
    "prometheus_client": ("megarl.tracking",),
    "opentelemetry": ("megarl.tracking",),
}
WITHOUT_TORCH = (
    "megarl.models",
    "megarl.config",
    "megarl.agents",
    "megarl.plan",
    # What `megarl check --fast` and the help read, besides these packages.
    "megarl.cli.commands",
    "megarl.cli.inspect",
    "megarl.cli.main",
    "megarl.cli.run.migrate",
    "megarl.doctor.checks",
    "megarl.rollout.engines",
    "megarl.rollout.sglang.user_arguments",
)
# Roles create the losses on the driver; worker processes receive them with the rows, so they know no
# algorithm.
LOSSES = "megarl.algorithms.losses"
WITHOUT_LOSSES = (
    "megarl.engine",
    "megarl.rollout",
    "megarl.rewards",
    "megarl.roles.megatron_worker",
    "megarl.roles.reward_model_worker",
)


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) of every import statement at any depth; `from x import y` counts as x.y,
    which may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def within(module: str, home: str) -> bool:
    return module == home or module.startswith(home + ".")


def room_of(module: str, rooms: Collection[str] = LAYER_OF) -> str:
    """Return the room of a module of megarl, or "" for megarl itself and other libraries."""
    parts = module.split(".")
    if parts[0] != "megarl":
        return ""
    names = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
    return next((name for name in names if name in rooms), "")


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    found = []
    own = room_of(module)

    for line, imported in imported_modules(source, module, is_package):
        top = imported.split(".")[0]
        target = room_of(imported)
        if target in FORBIDDEN.get(own, ()):
            found.append(f"{module}:{line} imports {imported}: {own} must not know {target}")
        elif own and target and own != target and LAYER_OF[target] >= LAYER_OF[own]:
            found.append(
                f"{module}:{line} imports {imported}: {own} is in layer {LAYER_OF[own]}, {target} in "
                f"{LAYER_OF[target]}"
            )
        if top in HOMES and not any(within(module, home) for home in HOMES[top]):
            found.append(
                f"{module}:{line} imports {imported}: only {' and '.join(HOMES[top])} may import {top}"
            )
        if top == "torch" and any(within(module, package) for package in WITHOUT_TORCH):
            found.append(f"{module}:{line} imports {imported}: {own} must not import torch")
        if within(imported, LOSSES) and any(within(module, side) for side in WITHOUT_LOSSES):
            found.append(f"{module}:{line} imports {imported}: a worker gets its losses from the driver")

    return found


def test_imports_go_down_only() -> None:
    found = []
    for file in sorted((ROOT / "megarl").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += breaches(file.read_text(encoding="utf-8"), module, is_package)

    assert not found, "\n" + "\n".join(found)


def test_worker_processes_load_no_loss() -> None:
    """A loss is not reached through other modules either, also not by an import for types only."""
    edges = own_imports()
    reached = {name for name in edges if any(within(name, side) for side in WITHOUT_LOSSES)}
    assert {name for name in WITHOUT_LOSSES if name not in edges} == set()

    pending = list(reached)
    while pending:
        new = edges[pending.pop()] - reached
        reached |= new
        pending += new
    assert LOSSES in edges
    assert LOSSES not in reached


def test_a_training_rank_starts_without_transformers() -> None:
    """It takes seconds to load, at each start and each recovery of a rank; only towers of images need it."""
    script = "import sys, megarl.roles.megatron_worker; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_every_package_has_a_layer() -> None:
    packages = {file.parent.name for file in (ROOT / "megarl").glob("*/__init__.py")}
    modules = {file.stem for file in (ROOT / "megarl").glob("*.py")} - {"__init__", "__main__"}
    inner = {room for room in LAYER_OF if "." in room}
    assert packages | modules == LAYER_OF.keys() - inner
    assert {f"megarl.{room}" for room in inner} <= own_modules().keys()


@cache
def own_modules() -> dict[str, str]:
    """Return module -> source for all of megarl; a package has its own name."""
    found = {}
    for file in sorted((ROOT / "megarl").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if "stubs" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(
                encoding="utf-8"
            )

    return found


def imports_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return module -> the modules that it imports, including imports inside functions and for types only."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        imported = (name for _, name in imported_modules(source, module, is_package=False))
        # `from a.b import c`: the module a.b.c if it exists, otherwise a member of a.b.
        edges[module] = {
            name if name in sources else name.rpartition(".")[0] for name in imported
        } & sources.keys() - {module}

    return edges


@cache
def own_imports() -> dict[str, set[str]]:
    return imports_of(own_modules())


def between_packages(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return package -> the packages that its modules import. Rooms inside a package count as the package."""
    found: dict[str, set[str]] = {}
    for module, imported in edges.items():
        if package := ".".join(module.split(".")[1:2]):
            targets = {".".join(name.split(".")[1:2]) for name in imported} - {"", package}
            found.setdefault(package, set()).update(targets)

    return found


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return groups of modules or packages that import each other; each group contains all of its cycle."""
    edges = {name: set(imported) for name, imported in imports.items()}
    sorter = TopologicalSorter(edges)
    found = []

    while True:
        try:
            sorter.prepare()
            return found
        except CycleError as error:
            found.append(error.args[1])
            edges[error.args[1][1]] -= {error.args[1][0]}
            sorter = TopologicalSorter(edges)


def public_classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return name -> the modules that define it."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)

    return homes


def test_no_modules_import_each_other() -> None:
    assert cycles(own_imports()) == []


def test_no_packages_import_each_other() -> None:
    """Layers of rooms do not show this: `a.inner` above `b` above `a` would be allowed."""
    assert cycles(between_packages(own_imports())) == []


def test_a_class_name_exists_once() -> None:
    homes = public_classes(own_modules())
    assert len(homes) > 300
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_planted_cycle_and_a_doubled_name_are_found() -> None:
    sources = {
        "megarl.a": "def f():\n    from megarl.b import g",
        "megarl.b": "import megarl.c\nclass Twice: ...",
        "megarl.c": "if TYPE_CHECKING:\n    from megarl import a\nclass Twice: ...\nclass _Own: ...",
        "megarl.d": "import megarl.a\nclass _Own: ...",
    }
    (cycle,) = cycles(imports_of(sources))
    assert set(cycle) == {"megarl.a", "megarl.b", "megarl.c"}
    assert {name: modules for name, modules in public_classes(sources).items() if len(modules) > 1} == {
        "Twice": ["megarl.b", "megarl.c"]
    }


def test_a_planted_cycle_of_packages_is_found() -> None:
    sources = {
        "megarl.a.low": "",
        "megarl.a.inner.high": "from megarl.b import used",
        "megarl.b.used": "from megarl.a.low import f",
        "megarl.c": "import megarl.a.inner.high",
    }
    assert cycles(imports_of(sources)) == []
    (cycle,) = cycles(between_packages(imports_of(sources)))
    assert set(cycle) == {"a", "b"}


def test_a_module_belongs_to_the_innermost_room() -> None:
    rooms = {"weights": 0, "weights.sync": 1}
    assert room_of("megarl.weights.plan", rooms) == "weights"
    assert room_of("megarl.weights.sync.session.TransferSession", rooms) == "weights.sync"
    assert room_of("megarl.weights.sync", rooms) == "weights.sync"
    assert room_of("megarl.weights.synchronous", rooms) == "weights"
    assert (
        room_of("megarl", rooms) == room_of("megarl.__main__", rooms) == room_of("weights.sync", rooms) == ""
    )


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("megarl.config.load", "import megarl.trainers.ppo", "trainers"),
        ("megarl.config.load", "from megarl.batch.data_proto import DataProto", "sibling of the same layer"),
        ("megarl.engine.model", "from megarl.roles import models", "higher layer"),
        ("megarl.weights.load", "def f():\n    from megarl import rollout", "inside a function"),
        ("megarl.endpoint.session", "from ..engine.model import build_model", "relative, sibling"),
        (
            "megarl.engine.model",
            "if TYPE_CHECKING:\n    from megarl.trainers.ppo import PPOTrainer",
            "for types only",
        ),
        (
            "megarl.engine.model",
            "from megarl.weights.sync import source",
            "a room that the engine must not know",
        ),
        ("megarl.checkpoints.load", "import megarl.weights.sync.sync", "a forbidden room"),
        ("megarl.weights.plan", "from megarl.weights.sync.session import f", "a higher room of its package"),
        ("megarl.roles.models", "import ray", "ray outside the controller"),
        ("megarl.roles.models", "from megatron.core import parallel_state", "megatron outside the engine"),
        ("megarl.rollout.hf.engine", "import sglang.srt", "sglang outside rollout/sglang"),
        (
            "megarl.engine_room.layers",
            "import transformer_engine.pytorch as te",
            "a name that only begins like the home",
        ),
        ("megarl.trainers.ppo", "def f():\n    import wandb", "wandb outside tracking"),
        ("megarl.plan.placement.plan", "import torch.distributed", "torch in placement"),
        ("megarl.models.architecture", "import torch", "torch in the description of a model"),
        ("megarl.models.architecture", "from megarl.config.schema import PPOConfig", "a higher layer"),
        (
            "megarl.roles.megatron_worker",
            "from megarl.algorithms.losses import ActorLoss",
            "a loss in a worker",
        ),
        ("megarl.engine.engine", "def f():\n    import megarl.algorithms.losses", "a loss in the engine"),
    ],
)
def test_a_planted_breach_is_caught(module: str, source: str, named: str) -> None:
    assert len(breaches(source, module)) == 1, named


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megarl.cli.main", "from megarl import __version__\nfrom megarl.config.schema import PPOConfig"),
        ("megarl.cli.main", "from .check import run"),
        (
            "megarl.weights.sync.session",
            "from megarl.weights.plan import f\nfrom megarl.controller import group",
        ),
        (
            "megarl.engine.model",
            "import torch\nimport megatron.core\nfrom megarl.weights.shard_layout import ShardLayout",
        ),
        ("megarl.controller.group", "import ray\nfrom megarl.controller.futures import Call"),
        ("megarl.rollout.sglang.engine", "import sglang"),
        ("megarl.roles.models", "import rayleigh"),
        ("megarl.roles.models", "from megarl.algorithms.losses import ActorLoss"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert breaches(source, module) == []


# ---- calls to workers as `group.call(ActorWorker.update, parts, loss)`, which pyrefly checks

PUBLIC_NAMES = re.compile(r"execute_(all|rank|rank_zero)_(sync|async)")  # verl's names, for users


def calls_by_name(source: str) -> list[str]:
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and PUBLIC_NAMES.fullmatch(node.attr)
    ]
    return [f"{node.lineno}: {node.attr}" for node in found]


def callers() -> dict[str, list[Path]]:
    """Return the packages that use worker groups, and their files."""
    packages: dict[str, list[Path]] = {}
    for file in sorted((ROOT / "megarl").rglob("*.py")):
        if "megarl.controller.group" in file.read_text(encoding="utf-8"):
            packages.setdefault(file.relative_to(ROOT / "megarl").parts[0], []).append(file)
    return packages


def test_megarl_calls_no_worker_by_a_string() -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in (ROOT / "megarl").rglob("*.py")}
    del sources[ROOT / "megarl" / "controller" / "compat.py"]
    assert not {
        str(file): calls
        for file, source in sources.items()
        if "execute_" in source and (calls := calls_by_name(source))
    }
    assert calls_by_name('group.execute_all_sync("update")') == ["1: execute_all_sync"]


# Module -> why it may read the wall clock, although that of a node may be hours off, or be set meanwhile.
WALL_CLOCK = {
    "agents/sandboxes/container": "the age of a container that was never started, on the same machine",
    "checkpoints/snapshot_file": "tells two snapshots of a step apart, whichever is later",
    "cli/inspect/calibrate": "a date to show",
    "cli/inspect/status": "a time to show; only a process of the same machine counts as gone",
    "controller/calls": "orders the exceptions of several ranks in a message",
    "controller/host": "orders the exceptions of several ranks in a message",
    "controller/node_resources": "compares the clocks of the nodes for the doctor",
    "data/chat_clock": "the driver's date, which all processes put into prompts",
    "endpoint/openai_chat": "a time to show",
    "endpoint/openai_responses": "a time to show",
    "machine/folder_lock": "a time to show",
    "machine/clock": "where spans are on the timeline",
    "tracking/services": "a time to show",
    "tracking/status": "a time to show",
    "trainers/monitor": "where a metric is on the timeline",
}
READS_WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.now\(|\bdate\.today\(|\butcnow\(")


def test_the_wall_clock_is_read_only_where_a_wrong_one_does_no_harm() -> None:
    package = ROOT / "megarl"
    assert {
        str(file.relative_to(package).with_suffix(""))
        for file in package.rglob("*.py")
        if READS_WALL_CLOCK.search(file.read_text(encoding="utf-8"))
    } == WALL_CLOCK.keys()


@pytest.mark.parametrize("file", sorted((ROOT / "tests/soak").glob("*.py")), ids=lambda file: file.stem)
def test_soak_tests_can_be_imported(file: Path) -> None:
    """They run before releases only, and pyrefly does not check tests."""
    importlib.import_module(f"tests.soak.{file.stem}")


def test_pyrefly_checks_every_package_that_calls_workers() -> None:
    """It refuses a worker's method as a method of the group: tests/unit/controller/test_register.py shows
    that."""
    pyrefly = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyrefly"]
    assert {"megarl", "benchmarks"} <= set(pyrefly["project-includes"])
    left_out = {
        file
        for package in callers().values()
        for file in package
        for left in pyrefly["project-excludes"]
        if file.is_relative_to(ROOT / left)
    }
    assert not left_out
    assert "roles" in callers()


# ---- model families: code that only some of them need is in their files


def family_names(source: str) -> list[str]:
    """Return where a source checks a model's family: a comparison of `model_type`, or a family's name as a
    string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.Match):
            operands = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
            if any(is_model_type(operand) for operand in operands):
                found.append(f"{node.lineno}: model_type is compared")
        elif isinstance(node, ast.Constant) and node.value in FAMILIES:
            found.append(f"{node.lineno}: {node.value!r}")

    return found


def is_model_type(node: ast.expr) -> bool:
    """Return whether an expression reads `model_type`: as an attribute, an item, by `get` or as a variable."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "model_type"
    if isinstance(node, ast.Call):
        return any(
            isinstance(argument, ast.Constant) and argument.value == "model_type" for argument in node.args
        )

    return "model_type" in (getattr(node, "attr", None), getattr(node, "id", None))


def test_no_module_outside_models_asks_for_a_family_by_name() -> None:
    found = {}
    for module, source in own_modules().items():
        if not within(module, "megarl.models") and (places := family_names(source)):
            found[module] = places
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'architecture.model_type == "gemma"',
        'model_type in ("falcon", "gemma")',
        'config["model_type"] != other',
        'config.get("model_type") == other',
        "match architecture.model_type:\n    case _: ...",
        'HEADS = {"mixtral": 8}',
        'is_sparse = name == "qwen3_moe"',
    ],
)
def test_a_planted_family_is_found(source: str) -> None:
    assert len(family_names(source)) == 1


def test_what_does_not_ask_for_a_family_passes() -> None:
    allowed = (
        'raise ValueError(f"{architecture.model_type} has no '
        'experts")\nFAMILIES[architecture.model_type].sglang_differs(policy)'
    )
    assert family_names(allowed) == []
    assert family_names('fields = [name for name in config if name != "model_type"]') == []


# ---- kinds of layers: only the tables that have a row for each of them name one
TABLES_OF_KINDS = {
    "megarl.models.layers",
    "megarl.engine.layer_kinds",
    "megarl.plan.placement.part_activations",
}


def names_of_kinds(source: str, module: str) -> list[str]:
    """Return the imports of a layer kind's constant."""
    found = (imported for _, imported in imported_modules(source, module, is_package=False))
    return [each for each in found if isinstance(_value_of(each), PartKind)]


def _value_of(imported: str) -> object:
    module, _, name = imported.rpartition(".")
    return getattr(importlib.import_module(module), name, None) if within(module, "megarl.models") else None


def test_only_the_tables_of_kinds_name_a_kind_of_layer() -> None:
    found = {module for module, source in own_modules().items() if names_of_kinds(source, module)}
    assert found == TABLES_OF_KINDS


def test_a_planted_kind_is_found() -> None:
    source = "from megarl.models.experts import EXPERTS, is_sparse\nfrom megarl.models.layers import KINDS\n"
    assert names_of_kinds(source, "megarl.plan.search.variants") == ["megarl.models.experts.EXPERTS"]


# ---- tests use public names: a seam that a test needs is an argument, a public function or a public attribute

PUBLIC_OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
NAMES_BY_STRING = {"setattr", "getattr", "delattr", "hasattr", "object", "patch"}

# File -> the number of remaining accesses to private names of other modules, and the reason.
PRIVATE_ACCESSES = {
    # Our own modules.
    "tests/soak/kills.py": (1, "only the rollout knows which replicas are restarting"),
    "tests/unit/algorithms/test_advantages.py": (1, "blocks so small that a batch has several"),
    "tests/unit/algorithms/test_token_rows.py": (1, "blocks so small that a batch has several"),
    "tests/unit/batch/test_ragged.py": (1, "blocks so small that a batch has several"),
    "tests/unit/rewards/test_confined_call.py": (2, "the initializer of a process, run in the test's own"),
    "tests/unit/rollout/episodes/test_episodes.py": (2, "the server of a worker"),
    "tests/unit/rollout/driver/test_step_rollout.py": (2, "the buffer of a rollout"),
    "tests/unit/rollout/driver/test_scheduler.py": (1, "a method of the test's own scene"),
    # Other packages, which offer no public way.
    "tests/conftest.py": (1, "pytest-xdist's schedule by scope, which is extended by overriding it"),
    "tests/gpu/test_weights.py": (1, "torch: keep the device busy"),
    "tests/nccl_communicator.py": (7, "torch: register a backend, and gloo's options"),
    "tests/nccl_semantics.py": (3, "torch: the registry of backends, options and coalescing"),
    "tests/unit/checkpoints/convert/classic_side.py": (4, "Megatron's writer needs a process of its own"),
    "tests/unit/cli/test_examples.py": (1, "argparse does not list its subcommands otherwise"),
    "tests/unit/engine/test_flash_attention.py": (18, "torch: the adapters of FlashAttention 3 and 4"),
    "tests/unit/engine/test_fp8_training.py": (1, "Transformer Engine: the weights in FP8 that it keeps"),
    "tests/unit/engine/test_groups.py": (2, "torch: the time limit of a group"),
    "tests/unit/engine/test_layers.py": (2, "torch: the operators of flash attention"),
    "tests/unit/engine/test_nccl_training.py": (1, "torch: all groups of this process"),
    "tests/unit/engine/test_overlap.py": (3, "Megatron imports torch's coalescing under its private name"),
    "tests/unit/machine/test_processors.py": (1, "torch's own reading of CUDA_VISIBLE_DEVICES"),
    "tests/unit/rollout/sglang/plans_of_models.py": (1, "SGLang: parallel groups without a server"),
    "tests/unit/test_nccl_backend.py": (1, "torch: coalescing"),
    "tests/unit/test_nccl_semantics.py": (3, "torch: the default store, and coalescing on a bare backend"),
    "tests/fork_server/process.py": (2, "Python: end a forked process as the interpreter would"),
    "tests/fork_server/server.py": (3, "ray: its compiled module is loaded; weakref: no list of finalizers"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_OF_NAMED_TUPLES


def private_accesses(source: str) -> list[str]:
    """Return where a source reads or replaces a private name of another module or object: `x._name`, an
    import of `_name`, or `setattr(x, "_name", ...)`. An object's own names (`self._name`) do not count."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            # os._exit is documented.
            if is_private(node.attr) and owner not in ("self", "cls", "os"):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function not in NAMES_BY_STRING or ast.unparse(node.args[:1]) == "os":
                continue
            strings = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found += [
                f"{node.lineno}: {string}"
                for string in strings
                if isinstance(string, str) and is_private(string.rpartition(".")[2])
            ]

    return found


def test_tests_use_no_more_private_names_than_are_listed() -> None:
    """If a number has fallen, it must be lowered here as well."""
    found = {
        file.relative_to(ROOT).as_posix(): places
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if (places := private_accesses(file.read_text(encoding="utf-8")))
    }
    listed = {file: count for file, (count, _) in PRIVATE_ACCESSES.items()}
    differing = {file: places for file, places in found.items() if len(places) != listed.get(file)}
    assert differing == {}
    assert found.keys() == listed.keys()


@pytest.mark.parametrize(
    "source",
    [
        "rollout._runner",
        "self.rollout._runner.stop()",
        "from megarl.cli.inspect.plot import _moving_average",
        'monkeypatch.setattr(engine, "_score", None)',
        'monkeypatch.setattr("megarl.cli.tables.run._free_bytes", None)',
    ],
)
def test_a_planted_private_access_is_found(source: str) -> None:
    assert len(private_accesses(source)) == 1


def test_own_and_public_names_are_no_private_accesses() -> None:
    allowed = "self._own\nsample._replace(a=1)\nmodule.__name__\nos._exit(0)\nsetattr(os, '_exit', print)"
    assert private_accesses(allowed) == []


WIDTH = 110  # columns
LONG_BODY = 25  # lines without the docstring


def wide_lines(source: str) -> list[int]:
    """Return the numbers of lines with more than WIDTH columns, which the linter accepts with a pragma."""
    return [number for number, line in enumerate(source.splitlines(), 1) if len(line) > WIDTH]


def unbroken_functions(source: str) -> list[str]:
    """Return the functions whose body has more than LONG_BODY lines and several steps, but no blank line."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        steps = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if len(steps) < 3:
            continue
        body = lines[steps[0].lineno - 1 : node.end_lineno]
        if len(body) > LONG_BODY and all(line.strip() for line in body):
            found.append(f"{node.lineno}: {node.name}")

    return found


def test_lines_are_not_too_wide_and_long_functions_have_paragraphs() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{fault}"
        for file in sorted((ROOT / "megarl").rglob("*.py"))
        for source in [file.read_text(encoding="utf-8")]
        for fault in (*(f"{number}: too wide" for number in wide_lines(source)), *unbroken_functions(source))
    ]
    assert found == []


def test_a_planted_wide_line_and_unbroken_function_are_found() -> None:
    assert wide_lines(f"{'a' * WIDTH}\n{'b' * WIDTH}b\n") == [2]

    steps = "    step()\n" * LONG_BODY
    assert unbroken_functions(f'def long():\n    """Do it.\n\n    Twice.\n    """\n{steps}    step()\n') == [
        "1: long"
    ]
    assert unbroken_functions(f"def short():\n{steps}") == []
    assert unbroken_functions(f"def paragraphs():\n{steps}\n    step()\n") == []
    assert unbroken_functions(f"def table():\n    return (\n{steps}    )\n".replace("step()", "1,")) == []
