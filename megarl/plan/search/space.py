"""The space of a search: which keys are free, the devices over which a run is placed, and what was left out.

Layouts, placement, micro-batches, recomputation and the engines' shape are free. Everything else is fixed,
and so is every key that the user pins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import Enum

from megarl.config.roles import SOURCE_TEACHER, ModelRole, judge_roles, model_roles
from megarl.config.schema import ParallelConfig, PPOConfig, RolloutEngineKind
from megarl.config.validate import validate
from megarl.machine.errors import ConfigError

ROLLOUT = "rollout"
_SIZES = tuple(entry.name for entry in fields(ParallelConfig))
_TRAINED = ("recompute", "recompute_modules", "recompute_num_layers", "micro_batch.max_tokens")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The space of a search.

    Attributes:
        config: The run, with the fixed values, and the values of pinned keys.
        pinned: The free keys whose values in `config` are kept.
        max_staleness: The highest `rollout.max_staleness` to consider.
    """

    config: PPOConfig
    pinned: frozenset[str] = frozenset()
    num_nodes: int
    devices_per_node: int
    max_staleness: int = 0

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units (`units_of`)."""
        return tuple(units_of(self.config))

    @property
    def device_bytes(self) -> float:
        """The memory budget of a device in bytes."""
        limit_gb = self.config.placement.device_memory_gb
        assert limit_gb is not None, "the search needs a budget"
        return limit_gb * 2**30

    def is_pinned(self, key: str) -> bool:
        return key in self.pinned


def free_keys(config: PPOConfig) -> tuple[str, ...]:
    """Return the keys that a search chooses for a run, unless they are pinned."""
    keys: list[str] = []
    for role in model_roles(config):
        keys += [f"{role.parallel_key}.{name}" for name in _SIZES]
        section = role.parallel_key.removesuffix(".parallel")
        if role.optim is not None:
            keys += [f"{section}.{name}" for name in _TRAINED]
        elif role.name == "reference":
            keys.append(f"{role.micro_batch_key}.max_tokens")

    engine: RolloutEngineKind = config.rollout.engine
    keys += [f"rollout.{name}" for name in ("num_replicas", "tensor_parallel_size", "expert_parallel_size")]
    keys += ["rollout.max_concurrency", "rollout.max_staleness"]
    keys += [engine.needs.memory_key] if engine.needs.memory_key else []
    keys += ["placement.strategy", "placement.roles", "placement.pools"]
    # Roles that share a layout have the same keys.
    return tuple(dict.fromkeys(keys))


def pinned_keys(config: PPOConfig, given: Iterable[str], overridden: Iterable[str]) -> frozenset[str]:
    """Return the free keys that are kept as configured.

    Args:
        given: Keys or sections that must be free keys.
        overridden: Keys of the command line's overrides, some of which may be free keys.

    Raises:
        ConfigError: One of `given` is not a free key or a section with free keys.
    """
    free = free_keys(config)
    problems = []
    pinned: set[str] = set()

    for key in given:
        if not (within := _within(key, free)):
            near = get_close_matches(key, free, 2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the search chooses {', '.join(free)}"
            problems.append(f"--pin {key}: the search does not choose this key; {hint}")
        pinned.update(within)
    if problems:
        raise ConfigError("--pin", problems)

    for key in overridden:
        pinned.update(_within(key, free))
    return frozenset(pinned)


def _within(key: str, free: Collection[str]) -> list[str]:
    # An override of a single key of a free mapping, such as one pool, pins the mapping.
    return [each for each in free if each == key or each.startswith(f"{key}.") or key.startswith(f"{each}.")]


def units_of(config: PPOConfig) -> dict[str, list[ModelRole]]:
    """Return the roles of each unit with a model, in the order of the role table.

    A unit is a set of roles with one layout, which are placed together: the actor with its reference, or a
    single role. The first role names it.
    """
    units: dict[str, list[ModelRole]] = {}
    for role in model_roles(config):
        units.setdefault(role.parallel_key, []).append(role)
    return {roles[0].name: roles for roles in units.values()}


def refusals(space: Space) -> list[str]:
    """Return what a search does not choose, and violations that nothing in the space can change."""
    config = space.config
    problems = []
    if served := judge_roles(config):
        problems.append(
            f"reward.judges: the search places no judges that the run serves ({', '.join(served)}); start "
            "their servers by hand, and set url and model instead of path"
        )

    teachers = [role.name for role in model_roles(config) if role.name.startswith(SOURCE_TEACHER)]
    if teachers:
        problems.append(
            f"teachers: the search chooses no layouts of teachers of data sources ({', '.join(teachers)}), "
            "which no override can set; tune the run with the largest of them as `teacher`, and give the "
            "others layouts by hand"
        )

    # No override can remove custom pools of a file.
    keys = ("placement.roles", "placement.pools")
    if (config.placement.roles or config.placement.pools) and not all(map(space.is_pinned, keys)):
        problems.append(
            f"{', '.join(keys)}: an override of the file cannot remove its pools; remove both keys from the "
            "file, or keep the placement with --pin placement"
        )

    if (stages := config.rollout.pipeline_parallel_size) > 1:
        problems.append(
            f"rollout.pipeline_parallel_size: is {stages}, but the search chooses engines of one stage; use "
            "pipeline_parallel_size=1, or predict a step with `megarl check`"
        )

    free = [key for key in free_keys(config) if not space.is_pinned(key)]
    return problems or [
        str(violation)
        for violation in validate(config)
        if not any(f"{key}.".startswith(f"{mine}.") for key in free for mine in violation.keys)
    ]


class Reason(str, Enum):
    """Why something was left out of a search."""

    divisibility = "divisibility"  # a size of the model does not divide over the ranks
    node = "node boundary"  # a tensor-parallel group does not fit on a node
    rules = "rules"  # another rule of `megarl check`
    memory = "memory"  # a device would exceed its memory
    dominated = "no smaller and no faster"  # than another variant of the same layout
    slower = "slower"  # its lower bound exceeds the best results


class Rejections:
    """Counts what was considered at each level of a search, and why the rest was left out.

    The levels are layouts of a model, their variants, and complete configurations. At each level, the number
    considered is the number kept plus the numbers rejected.

    Attributes:
        considered: The number of things that were considered, by level.
        rejected: The number of rejections, by level and reason.
    """

    def __init__(self) -> None:
        self.considered: Counter[str] = Counter()
        self.rejected: Counter[tuple[str, Reason]] = Counter()
        self._examples: dict[tuple[str, Reason], str] = {}

    def consider(self, level: str, count: int = 1) -> None:
        self.considered[level] += count

    def reject(self, level: str, reason: Reason, example: str = "", count: int = 1) -> None:
        """Count a rejection of something that has been considered. The first example is kept."""
        if count:
            self.rejected[level, reason] += count
            self._examples.setdefault((level, reason), example)

    def kept(self, level: str) -> int:
        """Return how many things of a level were not rejected."""
        return self.considered[level] - sum(
            count for (name, _), count in self.rejected.items() if name == level
        )

    def example(self, level: str, reason: Reason) -> str:
        """Return the first example of a rejection; empty if there is none."""
        return self._examples.get((level, reason), "")
