"""The phases of a PPO step as data: who works, what each reads, writes and needs in memory; and what may run at the same time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from megarl.placement.placement_plan import PlacementPlan

PARAMETERS, GRADIENTS, OPTIMIZER, ENGINE = "parameters", "gradients", "optimizer", "engine"


class Item(NamedTuple):
    """A part of a role's memory: one of the four above. The last is an engine's, with its weights."""

    role: str
    part: str


class Phase(NamedTuple):
    """`name`: as in `timing_s/<name>`. `roles`: who works; none is the driver. `needs`: what must be in memory meanwhile. `calls`:
    the methods of the first role's worker that do it, where some do."""

    name: str
    roles: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    needs: frozenset[Item]
    calls: tuple[str, ...] = ()


def _phase(name: str, roles: Sequence[str], reads: str, writes: str, needs: Mapping[str, Sequence[str]], *calls: str) -> Phase:
    items = frozenset(Item(role, part) for role, parts in needs.items() for part in parts)
    return Phase(name, tuple(roles), frozenset(reads.split()), frozenset(writes.split()), items, calls)


_TO_SCORE, _TO_TRAIN, _AWAKE = (PARAMETERS,), (PARAMETERS, GRADIENTS, OPTIMIZER), (ENGINE,)
# In an order in which one process could run them. `<role>.weights` are the role's; all else are keys of the batch.
STEP = (
    _phase("gen", ["rollout"], "prompts rollout.weights", "responses rollout_log_probs", {"rollout": _AWAKE}, "submit_and_poll"),
    _phase("reward", ["reward"], "responses", "token_level_scores", {"reward": _TO_SCORE}, "score", "begin", "scored", "finish"),
    _phase(
        "reward_model",
        ["reward_model"],
        "responses reward_model.weights",
        "reward_model_scores",
        {"reward_model": _TO_SCORE},
        "score_conversations",
    ),
    _phase("old_log_prob", ["actor"], "responses actor.weights", "old_log_probs", {"actor": _TO_SCORE}, "log_probs"),
    _phase("ref", ["reference"], "responses reference.weights", "ref_log_prob", {"reference": _TO_SCORE}, "log_probs"),
    _phase("values", ["critic"], "responses critic.weights", "values", {"critic": _TO_SCORE}, "values"),
    _phase("adv", [], "token_level_scores reward_model_scores old_log_probs ref_log_prob values", "advantages returns", {}),
    _phase("update_critic", ["critic"], "responses values returns critic.weights", "critic.weights", {"critic": _TO_TRAIN}, "update"),
    _phase(
        "update_actor",
        ["actor"],
        "responses old_log_probs advantages actor.weights",
        "actor.weights",
        {"actor": _TO_TRAIN},
        "update",
        "update_scored",
    ),
    _phase("update_weights", ["actor", "rollout"], "actor.weights", "rollout.weights", {"actor": _TO_SCORE, "rollout": _AWAKE}),
)


def phases_of(roles: Collection[str]) -> tuple[Phase, ...]:
    """Those of a run with these roles."""
    return tuple(phase for phase in STEP if set(phase.roles) <= set(roles))


def waits_for(step: Sequence[Phase]) -> dict[str, frozenset[str]]:
    """Of each phase the ones that must have ended before it begins, directly or through others: it reads what they write, or writes
    what they read or write."""
    before: dict[str, frozenset[str]] = {}
    for index, phase in enumerate(step):
        direct = [earlier.name for earlier in step[:index] if earlier.writes & (phase.reads | phase.writes) or earlier.reads & phase.writes]
        before[phase.name] = frozenset(direct).union(*(before[name] for name in direct))
    return before


def overlaps(plan: PlacementPlan, *, generates_ahead: bool = False) -> list[tuple[str, str]]:
    """The pairs of phases that run at the same time: neither waits for the other, and they have no device in common. generates_ahead: the
    samples of a step are not by the weights of the step before, so that only the push of weights is in the way of generation."""
    step = [phase for phase in phases_of(plan.roles) if phase.roles]
    before = waits_for(phases_of(plan.roles))
    return [
        (one.name, other.name)
        for one, other in combinations(step, 2)
        if (one.name not in before[other.name] or (generates_ahead and one.name == "gen" and "rollout" not in other.roles))
        and not any(_in_the_way(plan, role, them) for role in one.roles for them in other.roles)
    ]


def _in_the_way(plan: PlacementPlan, role: str, other: str) -> bool:
    """A process does one thing at a time, and so does a device."""
    return plan.group_of(role) is plan.group_of(other) or plan.share_devices(role, other)
