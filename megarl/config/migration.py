"""Recognizes the framework of unknown keys, and explains each key by that framework's table only.

Frameworks share names with different meanings, such as `loss_type` and `weight_decay`. So the framework is
chosen once, by all unknown keys of a configuration together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any, NamedTuple

from megarl.config.megatron_options import find_section, owned_fields
from megarl.config.nemo_rl_names import nemo_rl_names, nemo_rl_problem
from megarl.config.slime_names import SERVER_PREFIX, slime_names, slime_problem
from megarl.config.trl_names import trl_arguments, trl_problem
from megarl.config.verl_names import (
    MigrationProblem,
    find_verl_key,
    leaf_names,
    unknown_in_verl,
    verl_problems,
)

Problems = list[MigrationProblem]
# Sections that only verl has. Their keys are verl's, also those that are in no table.
_ONLY_VERLS = ("actor_rollout_ref", "reward_model", "custom_reward_function")


class Framework(NamedTuple):
    """A framework whose keys are translated.

    Attributes:
        knows: Whether it has a key.
        explain: Returns the messages about a key with its value, given megarl's keys; empty without any.
    """

    name: str
    knows: Callable[[str], bool]
    explain: Callable[[str, Any, Container[str]], Problems]


def framework_of(unknown: Mapping[str, Any]) -> Framework | None:
    """Return the framework that has the most of the unknown keys; None if none has any.

    Args:
        unknown: The unknown keys and their values. A branch counts by its leaves.
    """
    leaves = [leaf for key, value in unknown.items() for leaf in leaf_names(key, value)]
    best = max(FRAMEWORKS, key=lambda framework: sum(map(framework.knows, leaves)))
    return best if any(map(best.knows, leaves)) else None


def is_argument(name: str) -> bool:
    """Whether a flat name, with underscores, is an argument of slime, TRL or Megatron-Core."""
    return _slime_knows(name) or name in trl_arguments()


def _verl_knows(key: str) -> bool:
    found = find_verl_key(key)
    is_below = key.lstrip("+~").partition(".")[0] in _ONLY_VERLS
    return is_below or (found is not None and found[1].ours != key)


def _explain_verl(key: str, value: Any, known: Container[str]) -> Problems:
    if found := verl_problems(key, value, known):
        return found
    # A key of a branch that megarl does not have is one that the user's version or patch of verl has.
    is_ours = key.lstrip("+~").partition(".")[0] in known
    return [] if is_ours else [unknown_in_verl(leaf) for leaf in leaf_names(key, value)]


def _slime_knows(key: str) -> bool:
    name = key.replace("-", "_")
    return name in slime_names() or name.startswith(SERVER_PREFIX) or find_section(name) is not None


def _explain_slime(key: str, value: Any, known: Container[str]) -> Problems:
    name = key.replace("-", "_")
    found = slime_problem(name, known)
    if found is None and (section := find_section(name)) is not None:
        reason = owned_fields(section).get(name, f"use actor.megatron.{section}.{name}")
        found = MigrationProblem(
            f"{name}: is an argument of Megatron-Core; {reason.replace('{role}', 'actor')}"
        )
    return [] if found is None else [found]


def _explain_trl(key: str, value: Any, known: Container[str]) -> Problems:
    found = trl_problem(key.replace("-", "_"), known)
    return [] if found is None else [found]


def _explain_nemo_rl(key: str, value: Any, known: Container[str]) -> Problems:
    return list(
        dict.fromkeys(
            found for leaf in leaf_names(key, value) if (found := nemo_rl_problem(leaf, known)) is not None
        )
    )


# In the order of preference for keys that several frameworks have.
FRAMEWORKS = (
    Framework("verl", _verl_knows, _explain_verl),
    Framework("TRL", lambda key: key.replace("-", "_") in trl_arguments(), _explain_trl),
    Framework("slime", _slime_knows, _explain_slime),
    Framework("NeMo RL", lambda key: key.lstrip("+~") in nemo_rl_names(), _explain_nemo_rl),
)


def of_other_kinds(
    key: str, value: Any, keys_of_kinds: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, str]]:
    """Yield the leaves of an unknown key that other kinds of run have, and the names of these kinds."""
    for leaf in leaf_names(key, value):
        kinds = [kind for kind, keys in keys_of_kinds.items() if leaf in keys]
        if kinds:
            yield leaf, " and ".join(kinds)
