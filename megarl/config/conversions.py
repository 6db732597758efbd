"""Converts the settings of another framework's run to megarl's keys, by the tables of migration.py.

An entry of a table may say in brackets how its value is converted. It is one or several of these, with ` | `
between them, each with the key that it sets before a ` = ` unless that is the entry's own:

| how | meaning |
|---|---|
| `kl=k1 mse=k2` | a value for each value; `-` sets nothing, `*` is every other value |
| `kl=k1 mse=k2 if here.use_kl` | the same, if the condition holds; otherwise nothing is set |
| `data.train_batch_size / value` | arithmetic with the value and with other settings of the source |
| `'loss' if value else 'none'` | a condition; the result `None` sets nothing, and `null` is null |

`here.NAME` is the setting with this name in the section of the entry. A name of a section is true if the
source sets anything in it. Keys that begin with `@` are only for `placed`, but `@differs` has a text that the
file lists under "What differs". An entry `none [<condition>]` is listed there if the condition holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil, prod
from typing import Any

from megarl.config.dotted import upwards
from megarl.config.expressions import evaluate
from megarl.config.foreign import Foreign, parsed
from megarl.config.kinds import AdvantageEstimator
from megarl.config.megatron_options import find_section, owned_fields, requirements
from megarl.config.migration import (
    SERVER_PREFIX,
    Counterpart,
    find_verl_key,
    foreign_defaults,
    keys_of,
    of_role,
    trl_names,
)
from megarl.config.schema import MISSING, SCHEMAS, DataConfig, RunKind
from megarl.config.shell import UNKNOWN
from megarl.config.values import schema_keys
from megarl.machine.errors import counted

_CHOICE = re.compile(r"[^\s=]+=[^\s=]*")
_TARGET = re.compile(r"(@?\.?[A-Za-z_][\w.]*) = (.*)", re.DOTALL)
# Megatron's names for the layers of the first and the last pipeline stage.
_ENDS = {
    "first": ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
    "last": ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
}
_PASSED_ON = re.compile(r"(\w+)\.megatron\.(transformer|ddp|optimizer)")
# The classes of TRL, which also stand for the kind of run of another framework.
_KINDS = {
    "SFTConfig": RunKind.sft,
    "RewardConfig": RunKind.reward_model,
    **dict.fromkeys(("DPOConfig", "CPOConfig", "ORPOConfig"), RunKind.dpo),
}
_WITH_CRITIC = [each.value for each in AdvantageEstimator if each.needs.critic]
_ESTIMATOR = "algorithm.advantage.estimator"
_LEVEL = "algorithm.rollout_correction.level"
_ROUTES = "engine.routing_replay"
_DRAFTS = "rollout.sglang.server_args.speculative"
NULL = object()  # a null that is written, unlike a setting that is left out


@dataclass
class Migration:
    """The keys and answers for the settings of a source.

    Attributes:
        values: megarl's keys with their values. NULL is null, MISSING a value that the user has to give.
        origins: The settings of the source that each key comes from, as text.
        own: The keys that the source itself sets, and no default of its framework.
        answers: The settings without a counterpart, and why.
        unknown: The settings that no table has.
        defaults: The keys that come from a default of the framework.
        differing: The settings and defaults that change the result and have no key, and why.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    answers: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    defaults: set[str] = field(default_factory=set)
    differing: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, origin: str, *, is_own: bool = False) -> None:
        """Set a key, unless the source itself sets it in another way."""
        if key in self.own and not is_own:
            return
        before = self.origins.get(key, origin)
        if key in self.values and key not in self.defaults and origin not in before:
            # Another setting has set it: the same value, or one that it replaces.
            if self.values[key] == value:
                origin = f"{before}, {origin}"
            else:
                self.answers[before] = f"{key} comes from {origin}"
        self.values[key] = value
        self.origins[key] = origin
        if is_own:
            self.own.add(key)

    def drop(self, key: str, why: str) -> None:
        """Leave out a key. The setting of the source that it comes from is answered."""
        del self.values[key]
        if key not in self.defaults:
            self.answers[self.origins[key]] = f"{key}: {why}"


def migrated(source: Foreign) -> Migration:
    """Return megarl's keys and values of a source, with the placement derived from its sizes."""
    framework = source.framework.key
    usual = foreign_defaults(framework)
    if framework == "trl":
        usual = {**usual.get("all", {}), **usual.get(source.variant, {})}
    settings = {name.lstrip("+~"): value for name, value in source.settings.items()}
    everything = usual | settings
    found = Migration()

    # The source's own settings come last, so that they win over those of inherited files and of defaults.
    own = {name.lstrip("+~") for name in source.own}
    for name in sorted(everything, key=lambda each: (each in settings) + (each in own)):
        _convert(source, name, everything, found, is_given=name in settings, is_own=name in own)
    _set_launched(found, settings, kind_of(source))
    _complete(found, kind_of(source))
    _keep_all(found, source.framework.name)
    _set_stages(found, settings)
    if kind_of(source) is RunKind.ppo:
        _limit_prompts(found)
    if framework == "verl" and found.values.get("reward.functions") == [{"path": MISSING}]:
        found.differing["reward functions"] = (
            "they score known data sets without a setting; for GSM8K and MATH, with answers after #### or in "
            "\\boxed{}, use reward.functions=[{path: megarl/recipes/math/reward.py}], otherwise your own"
        )
    placed(found)
    return found


def _set_launched(found: Migration, settings: Mapping[str, Any], kind: RunKind) -> None:
    """Set what program and launcher say: the devices of TRL's commands, and slime's async training."""
    processes = settings.get("launcher.num_processes")
    nodes = settings.get("launcher.num_machines", 1)
    if (
        isinstance(processes, int)
        and isinstance(nodes, int)
        and "placement.devices_per_node" not in found.values
    ):
        origin = f"num_processes={processes}"
        found.put("placement.num_nodes", nodes, origin, is_own=True)
        found.put("placement.devices_per_node", max(1, processes // nodes), origin, is_own=True)
    # slime's other script trains on the samples of the step before.
    if str(settings.get("launcher.program")).endswith("train_async.py") and kind is RunKind.ppo:
        interval = settings.get("update_weights_interval", 1)
        origin = f"train_async.py, update_weights_interval={interval}"
        found.put("rollout.max_staleness", interval, origin, is_own=True)


def kind_of(source: Foreign) -> RunKind:
    """Return the kind of run that a source describes."""
    return _KINDS.get(source.variant, RunKind.ppo)


def _complete(found: Migration, kind: RunKind) -> None:
    """Add what every run needs, and a placeholder for what the source does not say."""
    values = found.values
    if kind is not RunKind.ppo:
        found.put("kind", kind.value, "")
    found.put("device", "cuda", "GPUs, as in the source")
    for key in ("model.path", "data.train_files"):
        if values.get(key) is None:
            found.put(key, MISSING, "not in the source", is_own=True)
    for key in ("data.train_files", "data.val_files"):
        if isinstance(values.get(key), str) and values[key] != MISSING:
            values[key] = [values[key]]
    targets = values.get("actor.lora.targets")
    if isinstance(targets, str) and targets != MISSING:
        values["actor.lora.targets"] = targets.split(",")

    # Files that state every option of Megatron have those of experts for all models.
    if values.get("actor.parallel.expert_parallel_size", 1) == 1:
        for key in [key for key in values if ".transformer.moe_" in key and key not in found.own]:
            found.drop(key, "inherited, and read by models with experts only")
    if kind is RunKind.ppo:
        found.put("rollout.engine", "sglang", "the engine for GPUs")
        _hold_longest_row(found)
        _drop_unread(found)
        _make_consistent(found)
        _score(found)


def _keep_all(found: Migration, framework: str) -> None:
    """Keep all checkpoints, as the other frameworks do unless the source limits their number."""
    key = "checkpoint.keep"
    if found.values.get("checkpoint.every_steps") and found.values.get(key) is None:
        found.answers = {name: why for name, why in found.answers.items() if f"; {key} has" not in why}
        found.put(key, 0, f"{framework} keeps all checkpoints")
        found.defaults.add(key)


def _limit_prompts(found: Migration) -> None:
    """State the limit of prompts, which megarl needs, where the source has none."""
    key = "data.max_prompt_length"
    if key in found.values:
        return
    found.put(key, DataConfig().max_prompt_length, "megarl's default", is_own=True)
    found.differing["limit of prompts"] = (
        f"none in the source, while {key}={found.values[key]} refuses longer prompts; set the length of your "
        "longest one, or data.overlong=filter, which skips longer ones"
    )


def _set_stages(found: Migration, settings: Mapping[str, Any]) -> None:
    """Set the layers of each pipeline stage, if the source gives those of the first or the last one."""
    for section in ("actor", "critic"):
        given = {
            end: (name, value)
            for name, value in settings.items()
            for end, words in _ENDS.items()
            if name.rpartition(".")[2] in words
            and isinstance(value, int)
            and name.startswith("critic.") == (section == "critic")
            and not name.startswith("actor_rollout_ref.ref.")
        }
        if not given:
            continue

        num_stages = found.values.get(f"{section}.parallel.pipeline_parallel_size")
        num_layers = settings.get("num_layers")
        layout: Any = MISSING
        if isinstance(num_stages, int) and isinstance(num_layers, int) and num_stages > len(given):
            num_others = num_stages - len(given)
            each, rest = divmod(num_layers - sum(value for _, value in given.values()), num_others)
            first, last = ([given[end][1]] if end in given else [] for end in _ENDS)
            layout = MISSING if rest else [*first, *[each] * num_others, *last]
        said = ", ".join(f"{name}={value}" for name, value in given.values())
        if layout == MISSING:
            said = f"{said}; the layers of each stage, whose sum is num_hidden_layers"
        for name, _ in given.values():
            found.answers.pop(name, None)
        found.put(f"{section}.parallel.pipeline_layout", layout, said, is_own=True)


def _hold_longest_row(found: Migration) -> None:
    """Raise limits of micro-batches, which the longest row must fit."""
    values = found.values
    lengths = [values.get(f"data.max_{part}_length", 1024) for part in ("prompt", "response")]
    if not all(isinstance(length, int) for length in lengths):
        return

    for section in ("actor", "reference", "critic", "teacher"):
        key = f"{section}.micro_batch.max_tokens"
        limit = values.get(key, 16384)
        role = "actor" if section == "reference" else section
        ranks = values.get(f"{role}.parallel.context_parallel_size", 1)
        if f"{section}.micro_batch.sequences" not in values and isinstance(limit, int):
            needed = ceil(sum(lengths) / ranks) if isinstance(ranks, int) else limit
            of_estimator = {"critic": "gae", "teacher": "distillation"}.get(section)
            if limit < needed and of_estimator in (None, values.get(_ESTIMATOR)):
                found.put(key, needed, "the longest row, prompt and response", is_own=True)


def _drop_unread(found: Migration) -> None:
    """Leave out keys that another key of the source gives no effect, which megarl refuses."""
    values = found.values
    if values.get(_ESTIMATOR, AdvantageEstimator.gae.value) not in _WITH_CRITIC:
        for key in [key for key in values if key.startswith(("critic.", "algorithm.value_loss."))]:
            found.drop(key, "there is no critic")
    updates = [values.get(f"trainer.{name}", 1) for name in ("updates_per_step", "epochs_per_batch")]
    if values.get(_ROUTES) == "trainer" and updates == [1, 1]:
        found.drop(_ROUTES, "with one update per step there are no log-probs of an earlier pass")
    for key in [key for key in values if key.startswith(f"{_DRAFTS}_")]:
        if f"{_DRAFTS}_algorithm" not in values:
            found.drop(key, "read with a speculative_algorithm only")


def _make_consistent(found: Migration) -> None:
    """Set what an asynchronous run needs in megarl."""
    values = found.values
    # The trainer refuses to learn from samples of older weights as if they were its own.
    is_corrected = values.get(_LEVEL, "none") != "none" or values.get("algorithm.rollout_correction.bypass")
    if values.get("rollout.max_staleness") and not is_corrected:
        found.put(_LEVEL, "token", "async training needs a correction", is_own=True)
        found.differing["no correction of samples from older weights"] = (
            "algorithm.rollout_correction.level=token is set, because async training needs one"
        )
    # Engines that continue samples with new weights have no routes of one policy.
    if values.get(_ROUTES) == "rollout" and values.get("rollout.max_staleness"):
        found.put("rollout.on_update", "drain", "as engine.routing_replay needs", is_own=True)


def _score(found: Migration) -> None:
    """Set the reward functions. Those of a source have another form, so the user writes their file."""
    values = found.values
    given = {part: values.pop(f"reward.functions.{part}", None) for part in ("path", "name", "weight")}
    names = given["name"] if isinstance(given["name"], list) else [given["name"]]
    weights = given["weight"] if isinstance(given["weight"], list) else []
    learns_from_teacher = values.get(_ESTIMATOR) == AdvantageEstimator.distillation.value
    reads_rewards = not learns_from_teacher or values.get("algorithm.advantage.distillation.reward_weight")
    is_given = given["path"] is not None or given["name"] is not None
    if not reads_rewards or (not is_given and "reward.model.path" in values):
        return

    functions = []
    for index, name in enumerate(names):
        called = re.split(r"[.:]", str(name or ""))[-1]
        is_named = given["path"] is not None and called.isidentifier() and called != "compute_score"
        function = {"path": f"{given['path']}:{called}" if is_named else given["path"] or MISSING}
        if len(weights) == len(names):
            function["weight"] = weights[index]
        functions.append(function)
    origins = [found.origins.pop(f"reward.functions.{part}", "") for part in ("path", "name")]
    usual = "a Python file with compute_score(data_source, solution_str, ground_truth, extra_info)"
    found.put("reward.functions", functions, ", ".join(filter(None, origins)) or usual, is_own=True)


def _convert(
    source: Foreign,
    name: str,
    everything: Mapping[str, Any],
    found: Migration,
    *,
    is_given: bool,
    is_own: bool,
) -> None:
    """Convert one setting, or answer it."""
    value = everything[name]
    # NeMo RL's files state all settings of the sections that are off.
    off = _switched_off(name, everything) if source.framework.key == "nemo_rl" else None
    entry = _entry(source, name)
    if off is not None:
        found.answers[name] = f"off in the source ({off})"
    elif entry is None:
        if name.startswith("launcher."):
            return
        if value is None:
            found.answers[name] = "not set in the source (null)"
        elif is_given:
            found.unknown.append(name)
    elif entry.ours is None and not _TARGET.match(entry.how):
        if entry.how and value is not None and _result(entry.how, value, name, everything):
            found.differing[f"{name}={_text(value)}"] = entry.note
        elif is_given:
            found.answers[name] = entry.note
    elif value is not None:
        _set(source, name, entry, everything, found, is_given=is_given, is_own=is_own)
    elif is_given:
        found.answers[name] = f"null in the source; {entry.ours} has its default"


def _set(
    source: Foreign,
    name: str,
    entry: Counterpart,
    everything: Mapping[str, Any],
    found: Migration,
    *,
    is_given: bool,
    is_own: bool,
) -> None:
    """Set the keys of a setting by its entry, or answer it if none of them gets a value."""
    value = everything[name]
    shown = f"{name}={_text(value)}"
    origin = shown if is_given else f"{source.framework.name}'s default: {shown}"
    has_set = False
    elsewhere = ""

    for part in (entry.how or "value").split(" | "):
        said = origin
        target, how = (match[1], match[2]) if (match := _TARGET.fullmatch(part)) else (entry.ours or "", part)
        target = of_role(target, name)
        try:
            result = _result(how, value, name, everything)
        except ValueError as error:
            if not is_given:
                continue
            if _is_choice(how):
                found.answers[name] = f"has no counterpart; {entry.note}"
                continue
            result = MISSING
            said = f"{origin}: cannot be computed from the source ({error})"

        if result is None:
            continue
        if target == "@differs":
            found.differing[shown] = result
            continue
        if isinstance(result, str) and UNKNOWN in result:
            result = MISSING
            said = f"{said}; {entry.note}" if entry.note else said
        if not _is_key(target, kind_of(source)):
            elsewhere = target
            continue
        has_set = True
        found.put(target, result, said, is_own=is_own)
        if is_given and said not in found.origins[target]:
            found.answers.setdefault(name, f"{target} comes from {found.origins[target]}")
        if not is_given:
            found.defaults.add(target)
        else:
            found.defaults.discard(target)

    if is_given and not has_set:
        is_said = entry.how == "None"
        why = f"see {entry.ours}" if is_said else f"nothing to set for {entry.ours} with this value"
        why = f"{why}; {entry.note}" if entry.note else why
        if elsewhere:
            why = f"this kind of run does not have {elsewhere}"
        found.answers.setdefault(name, why)


def _entry(source: Foreign, name: str) -> Counterpart | None:
    """Return the entry of a setting, by the table, Megatron's fields, or SGLang's options."""
    framework = source.framework.key
    if framework == "verl":
        if (found := find_verl_key(name)) is None:
            return None
        branch, entry = found
        match = _PASSED_ON.fullmatch(entry.ours or "")
        if match and len(name) > len(branch):
            field_name = name.removeprefix(f"{branch}.").partition(".")[0]
            return _megatron(match[1], match[2], field_name) or _megatron(match[1], "", field_name)
        return entry

    if framework == "trl":
        classes = (source.variant, "ScriptArguments", "ModelConfig", "TrainingArguments")
        entries = [trl_names()[each] for each in classes]
        # An argument with a mapping has the names in it below its own.
        return next((each[part] for part in upwards(name) for each in entries if part in each), None)

    if framework == "nemo_rl":
        table = keys_of(framework)
        if (entry := next((table[each] for each in upwards(name) if each in table), None)) is not None:
            return entry
        return _megatron("actor", "", name.rpartition(".")[2]) if ".megatron_cfg." in name else None

    # slime: its own arguments, SGLang's options, and those of Megatron-Core.
    if (entry := keys_of(framework).get(name)) is not None:
        return entry
    if name.startswith(SERVER_PREFIX):
        target = f"rollout.sglang.server_args.{name.removeprefix(SERVER_PREFIX)}"
        return Counterpart("rollout.sglang.server_args", "", f"{target} = value")
    found = _megatron("actor", "", name)
    return found or _megatron("actor", "", name.removeprefix("no_"))


def _megatron(role: str, section: str, name: str) -> Counterpart | None:
    """Return how megarl sets a field of Megatron-Core.

    Args:
        section: The section of the field; empty: that which has it.
    """
    section = section or find_section(name) or ""
    if not section:
        return None
    if (reason := owned_fields(section).get(name)) is not None:
        return Counterpart(None, reason.format(role=role))
    if name not in requirements(section):
        return None
    # False is Megatron's default, except in `ddp`, where it turns off what megarl sets.
    how = "value" if section == "ddp" else "value or None"
    return Counterpart(f"{role}.megatron.{section}", "", f"{role}.megatron.{section}.{name} = {how}")


def _switched_off(name: str, everything: Mapping[str, Any]) -> str | None:
    """Return the switch that turns the section of a setting off."""
    switches = (
        f"{section}.{each}" for section in upwards(name.rpartition(".")[0]) for each in ("enabled", "enable")
    )
    return next((f"{key}=false" for key in switches if everything.get(key) is False and key != name), None)


@cache
def _keys(kind: RunKind) -> frozenset[str]:
    return frozenset(schema_keys(SCHEMAS[kind]))


def _is_key(target: str, kind: RunKind) -> bool:
    """Whether a kind of run has a key, or the map or list that it is in."""
    places = [each for each in upwards(target) if "." in each or each == target]
    return target.startswith("@") or any(each in _keys(kind) for each in places)


def _is_choice(how: str) -> bool:
    return all(_CHOICE.fullmatch(word) for word in how.partition(" if ")[0].split())


def _result(how: str, value: Any, name: str, everything: Mapping[str, Any]) -> Any:
    """Return the converted value; None to set nothing."""

    def look_up(key: str) -> Any:
        if key in ("value", "null"):
            return value if key == "value" else NULL
        key = re.sub(r"^here\b", name.rpartition(".")[0], key).removeprefix(".")
        if key in everything:
            return everything[key]
        is_section = any(each.startswith(f"{key}.") for each in everything)
        if not is_section:
            missing.append(key)
        return is_section or None

    missing: list[str] = []
    if _is_choice(how):
        words, _, condition = how.partition(" if ")
        if condition and not evaluate(condition, look_up):
            return None
        choices = dict(word.rsplit("=", 1) for word in words.split())
        written = _text(value)
        if (chosen := choices.get(written, choices.get("*"))) is None:
            raise ValueError(f"{written} is none of {', '.join(choices)}")
        return None if chosen == "-" else NULL if chosen == "null" else parsed(chosen)

    try:
        result = evaluate(how, look_up)
    except ValueError as error:
        if not missing:
            raise
        raise ValueError(f"it does not set {', '.join(dict.fromkeys(missing))}") from error
    return int(result) if isinstance(result, float) and result.is_integer() and how != "value" else result


def _text(value: Any) -> str:
    """Return a value as the source would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


# ---- placement


def placed(found: Migration) -> None:
    """Set the replicas of the actor and of the engines by the number of devices.

    A conversion gives the devices as `placement.num_nodes` and `placement.devices_per_node`, or as those of
    each role: `@actor_devices` and `@rollout_devices`, if the engines have their own.
    """
    hidden = {key: found.values.pop(key) for key in [*found.values] if key.startswith("@")}
    values = found.values
    per_node = values.get("placement.devices_per_node")
    nodes = values.get("placement.num_nodes", 1)
    whole = nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None
    actor = _number(hidden.get("@actor_devices"), whole)
    engines = _number(hidden.get("@rollout_devices"), None)
    replica = _product(values, "actor.parallel", ("tensor", "pipeline", "context"))
    size = _product(values, "rollout", ("tensor", "pipeline"))

    is_split = values.get("placement.strategy") == "split_collocate"
    if is_split and engines is None and actor is not None and "@actor_devices" not in hidden:
        engines = max(size or 1, whole // 2) if whole else None
        actor = whole - engines if whole and engines else None
    if is_split and actor and engines and isinstance(per_node, int):
        nodes = max(1, ceil((actor + engines) / per_node))
        found.put("placement.num_nodes", nodes, f"{actor} + {counted(engines, 'device')}", is_own=True)
    if not is_split:
        engines = actor

    # A layout larger than the devices is left to `megarl check`, which names both.
    found.put("actor.parallel.data_parallel_size", *_replicas(actor, replica), is_own=True)
    if "critic.parallel.tensor_parallel_size" in values or any(key.startswith("critic.") for key in values):
        critic = _product(values, "critic.parallel", ("tensor", "pipeline", "context"))
        found.put("critic.parallel.data_parallel_size", *_replicas(actor, critic))
    if "rollout.engine" in values or "rollout.n" in values:
        found.put("rollout.num_replicas", *_replicas(engines, size), is_own=True)


def _replicas(devices: int | None, size: int | None) -> tuple[Any, str]:
    """Return the number of replicas of a size, and where it comes from."""
    if devices is None or size is None:
        return MISSING, "the number of devices is not in the source: devices / (TP x PP x CP)"
    return max(1, devices // size), f"{counted(devices, 'device')} / {size}"


def _number(value: Any, usual: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else usual


def _product(values: Mapping[str, Any], section: str, axes: tuple[str, ...]) -> int | None:
    """Return the product of parallel sizes; None if one of them is not known."""
    sizes = [values.get(f"{section}.{axis}_parallel_size", 1) for axis in axes]
    return prod(sizes) if all(isinstance(size, int) for size in sizes) else None
