"""The space of a search: which keys are free, and the devices over which a run is placed.

Layouts, placement, micro-batches, recomputation and the engines' shape are free. Everything else is fixed,
and so is every key that the user pins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import ParallelConfig, PPOConfig, RolloutEngineKind
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
        """The units with a model, in the order of the role table.

        A unit is a set of roles with one layout, which are placed together: the actor with its reference, or
        a single role. The first role names it.
        """
        first: dict[str, str] = {}
        for role in model_roles(self.config):
            first.setdefault(role.parallel_key, role.name)
        return tuple(first.values())

    @property
    def device_bytes(self) -> float:
        """The memory budget of a device in bytes."""
        limit_gb = self.config.placement.device_memory_gb
        assert limit_gb is not None, "the search needs a budget"
        return limit_gb * 2**30

    def is_pinned(self, key: str) -> bool:
        return key in self.pinned

    @property
    def memory_key(self) -> str | None:
        """The key of the engine's share of a device, None for an engine without one."""
        return self.config.rollout.engine.needs.memory_key


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


def roles_of(config: PPOConfig, unit: str) -> list[ModelRole]:
    """Return the roles of a unit with their values in a configuration."""
    roles = model_roles(config)
    key = next(role.parallel_key for role in roles if role.name == unit)
    return [role for role in roles if role.parallel_key == key]
