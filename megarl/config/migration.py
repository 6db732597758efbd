"""Recognizes the framework of unknown keys, and explains each key by that framework's table only.

Frameworks share names with different meanings, such as `loss_type` and `weight_decay`. So the framework is
chosen once, by all unknown keys of a configuration together.

The tables are `verl_names.yaml`, `trl_names.yaml`, `slime_names.yaml` and `nemo_rl_names.yaml` next to this
file. They are read when a key is unknown, and for the pages about verl and TRL.

`former_names.yaml` has the keys of earlier versions of megarl, which are still read: `with_current_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from megarl.config.dotted import flat, given_at, upwards
from megarl.config.megatron_options import find_section, owned_fields
from megarl.config.schema.keys import MISSING, names_code

# Sections that only verl has. Their keys are verl's, also those that are in no table.
_ONLY_VERLS = ("actor_rollout_ref", "reward_model", "custom_reward_function")

SERVER_PREFIX = "sglang_"  # before the names of SGLang's own options
_SERVER_ARGS = "rollout.sglang.server_args"


class Counterpart(NamedTuple):
    """The counterpart of a key of another framework.

    Attributes:
        ours: The dotted configuration key; None if there is no counterpart.
        note: Other differences, or why there is no counterpart; may be empty.
        how: How the value is converted; empty: it is the same. See conversions.py.
    """

    ours: str | None
    note: str
    how: str = ""

    @classmethod
    def of(cls, text: str) -> Counterpart:
        """Read an entry `<megarl key> [<how>]; <other differences>`, or `none; <reason>`."""
        place, _, note = text.partition("; ")
        ours, _, how = place.partition(" [")
        return cls(None if ours == "none" else ours, note, how.removesuffix("]"))


@cache
def keys_of(framework: str) -> dict[str, Counterpart]:
    """Return the table of one of FRAMEWORKS, other than TRL's, by dotted names.

    A branch (`actor_rollout_ref.model.mtp`) covers all keys below it that have no entry.
    """
    return {name: _entry(name, text) for name, text in _flat_table(_entries(framework))}


def _flat_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names of a table of nested keys, and their entries."""
    for names, entry in table.items():
        for name in names.split(", "):
            if isinstance(entry, Mapping):
                yield from _flat_table(entry, f"{prefix}{name}.")
            else:
                yield prefix.removesuffix(".") if name == "*" else prefix + name, entry


def _entry(name: str, text: str) -> Counterpart:
    entry = Counterpart.of(text)
    return entry if entry.ours is None else entry._replace(ours=of_role(entry.ours, name))


def of_role(key: str, name: str) -> str:
    """Return the whole key if it begins with a dot, because it belongs to the role of verl's key `name`."""
    role = "critic" if name.startswith("critic.") else "actor"
    return role + key if key.startswith(".") else key


# The message about a key of another framework, and the key to use instead; None if there is none.
Problem = tuple[str, str | None]
Problems = list[Problem]


def find_verl_key(key: str) -> tuple[str, Counterpart] | None:
    """Return the entry of a key or of the nearest branch above it, with its name.

    It is None if verl has no such key. Hydra's + and ~ are ignored.
    """
    entries = keys_of("verl")
    return next(((name, entries[name]) for name in upwards(key.lstrip("+~")) if name in entries), None)


def _branches(key: str, value: Any) -> Iterator[str]:
    # Follow a branch only while the table has entries below it; deeper levels are one key.
    if (
        isinstance(value, Mapping)
        and value
        and any(name.startswith(f"{key.lstrip('+~')}.") for name in keys_of("verl"))
    ):
        for name, below in value.items():
            yield from _branches(f"{key}.{name}", below)
    else:
        yield key


def leaf_names(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted names of the values in a branch, or the key itself."""
    return (name for name, _ in flat({key: value}))


def _problem(written: str, name: str, entry: Counterpart, known: Container[str]) -> Problem:
    if entry.ours == name and name in known:  # one of Hydra's signs before a key that is the same in both
        note = f" ({entry.note})" if entry.note else ""
        return f"{written}: write {entry.ours}=..., without a sign before it{note}", entry.ours
    return hint_of(name, entry, "verl key", known)


def hint_of(name: str, entry: Counterpart, what: str, known: Container[str]) -> Problem:
    """Return the message about a key of another framework.

    Args:
        what: What the key is, such as `verl key`.
    """
    if entry.ours is None:
        return f"{name}: is a {what} without a counterpart in megarl: {entry.note}", None
    if entry.ours not in known:
        return f"{name}: is the {what} for {entry.ours}, which this kind of run does not have", None
    note = f" ({entry.note})" if entry.note else ""
    return f"{name}: is a {what}; use {entry.ours}{note}", entry.ours


def unknown_in_verl(name: str) -> Problem:
    return f"{name}: unknown key, also in verl", None


class Framework(NamedTuple):
    """A framework whose keys are translated.

    Attributes:
        key: Its name on the command line, and of its table.
        name: Its name in messages.
        knows: Whether it has a key.
        explain: Returns the messages about a key with its value, given megarl's keys; empty without any.
    """

    key: str
    name: str
    knows: Callable[[str], bool]
    explain: Callable[[str, Any, Container[str]], Problems]


def framework_of(unknown: Mapping[str, Any]) -> Framework | None:
    """Return the framework that has the most of the unknown keys; None if none has any.

    Args:
        unknown: The unknown keys and their values. A branch counts by its leaves.
    """
    leaves = [leaf for key, value in unknown.items() for leaf in leaf_names(key, value)]
    best = max(FRAMEWORKS.values(), key=lambda framework: sum(map(framework.knows, leaves)))
    return best if any(map(best.knows, leaves)) else None


def is_argument(name: str) -> bool:
    """Whether a flat name, with underscores, is an argument of slime, TRL or Megatron-Core."""
    return _slime_knows(name) or name in trl_arguments()


def _verl_knows(key: str) -> bool:
    found = find_verl_key(key)
    is_below = key.lstrip("+~").partition(".")[0] in _ONLY_VERLS
    return is_below or (found is not None and found[1].ours != key)


def _explain_verl(key: str, value: Any, known: Container[str]) -> Problems:
    """Return a message for each verl key in an unknown key; none if there is no verl key in it.

    Args:
        value: Its value. A branch is followed to its leaves.
        known: The keys of the schema. A kind of run may lack keys that the table contains.
    """
    found = [(name, find_verl_key(name)) for name in _branches(key, value)]
    # A key with the same name in both frameworks is not verl's if this kind of run lacks it.
    found = [
        (name, entry if entry is None or entry[1].ours != entry[0] or entry[0] in known else None)
        for name, entry in found
    ]
    if any(entry for _, entry in found):
        problems = (
            _problem(name, *entry, known) if entry else unknown_in_verl(name) for name, entry in found
        )
        return list(dict.fromkeys(problems))

    # A key of a branch that megarl does not have is one that the user's version or patch of verl has.
    is_ours = key.lstrip("+~").partition(".")[0] in known
    return [] if is_ours else [unknown_in_verl(leaf) for leaf in leaf_names(key, value)]


def _slime_knows(key: str) -> bool:
    name = key.replace("-", "_")
    return name in keys_of("slime") or name.startswith(SERVER_PREFIX) or find_section(name) is not None


def _explain_slime(key: str, value: Any, known: Container[str]) -> Problems:
    name = key.replace("-", "_")
    if (entry := keys_of("slime").get(name)) is not None:
        return [hint_of(name, entry, "slime argument", known)]
    if name.startswith(SERVER_PREFIX) and _SERVER_ARGS in known:
        return [(f"{name}: is a slime argument; use {_SERVER_ARGS}.{name.removeprefix(SERVER_PREFIX)}", None)]
    if (section := find_section(name)) is None:
        return []
    reason = owned_fields(section).get(name, f"use actor.megatron.{section}.{name}")
    return [(f"{name}: is an argument of Megatron-Core; {reason.replace('{role}', 'actor')}", None)]


def _trl_knows(key: str) -> bool:
    # A mapping, such as lr_scheduler_kwargs, is an argument as a whole.
    name = key.replace("-", "_")
    outer, _, inner = name.partition(".")
    is_in_mapping = bool(inner) and outer.endswith(("_kwargs", "_config"))
    return name in trl_arguments() or (is_in_mapping and outer in trl_arguments())


def _explain_trl(key: str, value: Any, known: Container[str]) -> Problems:
    """Explain an argument of TRL. If several classes have it, the hint is that for this kind of run."""
    name = key.replace("-", "_")
    entries = [arguments[name] for arguments in trl_names().values() if name in arguments]
    entries.sort(key=lambda entry: (entry.ours is None or entry.ours not in known, entry.ours is not None))
    return [hint_of(name, entry, "TRL argument", known) for entry in entries[:1]]


def _explain_nemo_rl(key: str, value: Any, known: Container[str]) -> Problems:
    names = dict.fromkeys(leaf.lstrip("+~") for leaf in leaf_names(key, value))
    table = keys_of("nemo_rl")
    entries = {name: table[name] for name in names if name in table}
    return [hint_of(name, entry, "NeMo RL key", known) for name, entry in entries.items()]


# In the order of preference for keys that several frameworks have.
FRAMEWORKS = {
    framework.key: framework
    for framework in (
        Framework("verl", "verl", _verl_knows, _explain_verl),
        Framework("trl", "TRL", _trl_knows, _explain_trl),
        Framework("slime", "slime", _slime_knows, _explain_slime),
        Framework("nemo_rl", "NeMo RL", lambda key: key.lstrip("+~") in keys_of("nemo_rl"), _explain_nemo_rl),
    )
}


@cache
def trl_names() -> dict[str, dict[str, Counterpart]]:
    """Return the arguments of each class of TRL."""
    return {
        of_class: {name: Counterpart.of(text) for name, text in _flat_table(entries)}
        for of_class, entries in _entries("trl").items()
    }


@cache
def trl_arguments() -> frozenset[str]:
    """Return the arguments of all classes."""
    return frozenset(name for arguments in trl_names().values() for name in arguments)


@cache
def foreign_defaults(framework: str) -> dict[str, Any]:
    """Return the defaults of a framework that change the result or that a conversion reads, by name."""
    return dict(_table(framework)["defaults"])


def _entries(framework: str) -> dict[str, Any]:
    return {name: entry for name, entry in _table(framework).items() if name not in ("shared", "defaults")}


def _table(framework: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(f"{framework}_names.yaml").read_text(encoding="utf-8"))


@cache
def synonyms() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the keys that a name may stand for, the preferred one first, and a note."""
    table = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8"))
    entries = {}
    for names, text in table.items():
        keys, _, note = text.partition("; ")
        entry = (() if keys == "none" else tuple(keys.split(", ")), note)
        entries |= dict.fromkeys(names.split(", "), entry)
    return entries


def synonym_hint(key: str, known: Container[str]) -> str | None:
    """Return a hint for an unknown key by its meaning; None if the table has neither it nor its last part.

    A key of the same section comes first: the critic's `learning_rate` is its `lr`, not the actor's.
    """
    name = key.lower().replace("-", "_")
    section = name.rpartition(".")[0]
    keys, note = synonyms().get(name) or synonyms().get(name.rpartition(".")[2]) or ((), "")
    beside = [f"{section}.{each.rpartition('.')[2]}" for each in keys]
    ours = next((each for each in (*beside, *keys) if each in known), None)
    if ours is None:
        return None if keys else note or None
    return f"use {ours}{f' ({note})' if note else ''}"


@cache
def former_keys() -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the keys of earlier versions, by their section and their name in it; see `former_names.yaml`."""
    return {
        (section, name): entry
        for sections, entries in _table("former").items()
        for section in sections.split(", ")
        for name, entry in entries.items()
    }


# A key of an earlier version, what to say about it, and whether its value is refused.
Former = tuple[str, str, bool]


def with_current_keys(
    values: Mapping[str, Any],
    known: Container[str] | None = None,
    below: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Any], list[Former]]:
    """Return values with today's keys in place of those of earlier versions, and what to say about these.

    A former key with its former default is left out without a word, because nothing has changed.

    Args:
        known: The keys of the kind of run. Sections of other kinds stay as they are. None: all are known.
        below: The values of lower precedence, with today's keys.
    """
    current = deepcopy(dict(values))
    found: list[Former] = []
    for (section, name), former in former_keys().items():
        if known is None or section.partition("[]")[0] in known:
            for key, inside in _sections_at(current, section):
                found += _make_current(inside, key, name, former, below)
    return current, found


def _sections_at(values: Any, section: str, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the section with its key, if it is given; the items of a list one by one."""
    name, _, rest = section.partition(".")
    inside = values.get(name.removesuffix("[]")) if isinstance(values, dict) else None
    named = {f"{prefix}{name}": inside}
    if name.endswith("[]"):
        key = prefix + name.removesuffix("[]")
        named = {f"{key}[{i}]": item for i, item in enumerate(inside if isinstance(inside, list) else ())}
    for key, each in named.items():
        if rest:
            yield from _sections_at(each, rest, f"{key}.")
        elif isinstance(each, dict):
            yield key, each


def _make_current(
    inside: dict[str, Any], section: str, name: str, former: Mapping[str, Any], below: Mapping[str, Any]
) -> Iterator[Former]:
    """Replace a former key in its section. Yields what to say about it."""
    if name not in inside:
        return
    key = f"{section}.{name}"
    value = inside[name]

    if "values" in former:
        if isinstance(value, str) and value in former["values"]:
            inside[name] = former["values"][value]
            yield key, f"{value} is now called {inside[name]}; write {key}={inside[name]}", False
        return
    if "reference" in former:
        lower = given_at(below, key)
        is_section = former.get("is_section", False)
        if is_section and isinstance(lower, Mapping):
            if lower.get("hub") is not None:  # the name is that of the hub
                return
            lower = lower.get("path")
        yield from _make_reference(inside, key, name, former["reference"], lower)
        if is_section and name in inside and (inside[name] is None or isinstance(inside[name], str)):
            inside[name] = {"path": inside[name]}
        return

    del inside[name]
    # A default may change back what a file of lower precedence has.
    is_changed = "ours" in former and given_at(below, f"{section}.{former['ours']}") is not None
    if value == former["default"] and not is_changed:
        return
    if "suffix_of" in former:
        path = inside.get(former["suffix_of"])
        if isinstance(path, str) and path not in (MISSING, "") and not names_code(path):
            inside[former["suffix_of"]] = f"{path}:{value}"
            yield key, f"is now part of the path; write {section}.path={path}:{value}", False
        return
    if "ours" in former:
        # A section of a wrong type is reported where it is read.
        outer, _, last = former["ours"].rpartition(".")
        place = inside.setdefault(outer, {})
        if isinstance(place, dict):
            place.setdefault(last, value)
        yield key, f"is now {section}.{former['ours']}; write that", False
    elif former.get("refuses"):
        yield key, f"is {value}: {former['note']}", True
    else:
        yield key, f"is {value}, but has no effect any more: {former['note']}", False


def _make_reference(
    inside: dict[str, Any], key: str, name: str, usual: str | None, below: Any
) -> Iterator[Former]:
    """Replace a section with a path and a name, or a list of such sections, by FILE.py:NAME.

    Args:
        usual: The former default of the name.
        below: The reference of lower precedence, which has the half that is not given.
    """
    value = inside[name]
    items = value if isinstance(value, list) else [value]
    if isinstance(below, str) and isinstance(value, dict) and usual is not None:
        path, _, named = below.rpartition(":")
        usual = named if path and value.keys() == {"path"} else usual
        value = {"path": path, **value} if path and value.keys() == {"name"} else value
        items = [value]
    if isinstance(value, dict) and usual is not None and value.keys() == {"name"}:
        if value["name"] != usual:
            yield f"{key}.name", f"is now part of the path; write {key}=FILE.py:{value['name']}", True
        del inside[name]
        return
    if usual is None and any(isinstance(item, dict) and item.keys() == {"path"} for item in items):
        del inside[name]
        yield key, f"is {value}, but each is FILE.py:NAME now; write {key}=[FILE.py:NAME]", True
        return

    current = [_reference(item, usual) for item in items]
    if current == items:
        return
    inside[name] = current if isinstance(value, list) else current[0]
    if any(each is not None for each in current):
        shown = f"[{', '.join(map(str, current))}]" if isinstance(value, list) else current[0]
        yield key, f"is FILE.py:NAME now; write {key}={shown}", False


def _reference(value: Any, usual: str | None) -> Any:
    """Return FILE.py:NAME for a path and a name, and any other value as it is."""
    if isinstance(value, str) and usual is not None and value.endswith(".py"):
        return f"{value}:{usual}"
    if not isinstance(value, dict) or not value or value.keys() - {"path", "name"}:
        return value
    path = value.get("path")
    name = value.get("name", usual)
    if path is None:
        return name if usual is None else None
    if not isinstance(path, str) or not isinstance(name, str) or names_code(path):
        return value
    return path if path == MISSING else f"{path}:{name}"
