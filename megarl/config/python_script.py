"""Reads what a Python script passes to the classes of TRL and PEFT. Nothing of the script is executed.

A value is read if it follows from constants: names that are assigned once, arithmetic, lists, and the
attributes of an `ArgumentParser`'s result, which are the options of a command or their defaults. Any other
is UNKNOWN.

    class_name, settings = configured(text, options={"learning_rate": 1e-6}, classes=["GRPOConfig"])
    settings["num_generations"]  # 8, of GRPOConfig(num_generations=8)
"""

from __future__ import annotations

import ast
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megarl.config.expressions import evaluate, is_too_large
from megarl.config.shell import UNKNOWN

_LONGEST = 10_000  # characters of a text that is joined from others
# The arguments of PEFT's LoraConfig whose names differ from those of TRL's ModelConfig, and its defaults.
_ADAPTER = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "exclude_modules": "lora_exclude_modules",
    "task_type": "lora_task_type",
    "bias": "lora_bias",
}
_ADAPTER_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
# The arguments of a trainer that are settings. Functions and classes are given by their names.
_TRAINER = {
    "model": "model_name_or_path",
    "reward_funcs": "reward_funcs",
    "tools": "tools",
    "environment_factory": "environment_factory",
    "rollout_func": "rollout_func",
    "callbacks": "callbacks",
}


def configured(text: str, options: Mapping[str, Any], classes: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the class of the script's configuration and the settings by TRL's names; empty without any.

    Args:
        options: The options of the command that starts the script, with underscores.
        classes: The classes of configurations. If the script calls several, the longest call is read.
    """
    try:
        script = _Script(ast.parse(text), options)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return "", {}
    calls = [(_called(node), node) for node in script.reached() if isinstance(node, ast.Call)]
    configs = [(name, node) for name, node in calls if name in classes]
    if not configs:
        return "", {}
    class_name, config = max(configs, key=lambda each: len(each[1].keywords))

    settings: dict[str, Any] = {}
    for name, node in calls:
        if name.endswith("Trainer"):
            settings |= _of_trainer(node, script)
        elif name == "LoraConfig":
            given = {_ADAPTER.get(key, key): value for key, value in script.arguments(node).items()}
            settings |= {"use_peft": True, **_ADAPTER_DEFAULTS, **given}
        elif name == "load_dataset" and node.args:
            settings.setdefault("dataset_name", script.value(node.args[0]))

    # A model that the script builds itself has its name in the call that loads it.
    if settings.get("model_name_or_path", UNKNOWN) == UNKNOWN:
        loaded = (
            {"model_name_or_path": script.value(node.args[0])}
            for name, node in calls
            if name == "from_pretrained" and node.args and "Model" in ast.unparse(node.func)
        )
        settings |= next(loaded, {})
    return class_name, settings | script.arguments(config) | script.set_later(config)


def _of_trainer(node: ast.Call, script: _Script) -> dict[str, Any]:
    given = {}
    for keyword in node.keywords:
        if keyword.arg in _TRAINER:
            value = script.value(keyword.value)
            is_named = value == UNKNOWN and keyword.arg != "model"
            given[_TRAINER[keyword.arg]] = _names(keyword.value) if is_named else value
    return given


def _names(node: ast.expr) -> str | list[str]:
    if isinstance(node, ast.List | ast.Tuple):
        return [ast.unparse(item) for item in node.elts]
    return ast.unparse(node)


def _called(node: ast.Call) -> str:
    """Return the last name of the called function; empty if it is no name."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


class _Script:
    """The values of a script's names, of which those that are set in several places are unknown."""

    def __init__(self, tree: ast.Module, options: Mapping[str, Any]) -> None:
        self._tree = tree
        self._assigned: dict[str, ast.expr] = {}
        self._values: dict[str, Any] = {}  # a name whose value is being looked up is UNKNOWN
        self._arguments: dict[str, Any] = {}
        self._changed: set[str] = set()  # attributes that are assigned, such as config.beta
        times: Counter[str] = Counter()

        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    times[name] += 1
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assigned[name] = value
                case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()):
                    self._changed.add(f"{name}.{attribute}")
                case ast.Call(func=ast.Attribute(attr="add_argument")):
                    self._declare(node, options)
        self._assigned = {name: value for name, value in self._assigned.items() if times[name] == 1}

    def _declare(self, node: ast.Call, options: Mapping[str, Any]) -> None:
        """Take up an option of an ArgumentParser."""
        names = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        longest = next((name for name in names if name.startswith("--")), None)
        if longest is None:
            return
        given = self.arguments(node)
        name = str(given.get("dest", longest)).lstrip("-").replace("-", "_")
        action = given.get("action")
        usual = given.get("default", {"store_true": False, "store_false": True}.get(str(action)))
        written = [each.lstrip("-").replace("-", "_") for each in names]
        value = next((options[each] for each in written if each in options), usual)
        is_off = action == "store_false" and any(each in options for each in written)
        self._arguments[name] = False if is_off else value

    def reached(self) -> Iterator[ast.AST]:
        """Yield all nodes but those of branches whose test is known not to hold."""
        nodes: deque[ast.AST] = deque([self._tree])
        while nodes:
            node = nodes.popleft()
            yield node
            if isinstance(node, ast.If | ast.IfExp) and (holds := self.value(node.test)) != UNKNOWN:
                taken = node.body if holds else node.orelse
                nodes += taken if isinstance(taken, list) else [taken]
            else:
                nodes += ast.iter_child_nodes(node)

    def arguments(self, node: ast.Call) -> dict[str, Any]:
        """Return the values of a call's named arguments."""
        return {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}

    def set_later(self, call: ast.Call) -> dict[str, Any]:
        """Return the attributes that the script assigns to the result of a call."""
        results = {name for name, value in self._assigned.items() if value is call}
        found: dict[str, Any] = {}
        for node in self.reached():
            match node:
                case ast.Assign([ast.Attribute(value=ast.Name(id=name), attr=attribute)], value) if (
                    name in results
                ):
                    found[attribute] = self.value(value)
        return found

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; UNKNOWN if only a running script has it."""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(self.value(part)) for part in node.values)
            return UNKNOWN if len(text) > _LONGEST else text
        if isinstance(node, ast.FormattedValue):
            return self.value(node.value)
        try:
            value = evaluate(ast.unparse(node), self._look_up)
        except (ValueError, RecursionError):
            return UNKNOWN
        return UNKNOWN if is_too_large(value) else value

    def _look_up(self, name: str) -> Any:
        if name == "__name__":
            return "__main__"
        parsed, _, argument = name.partition(".")
        assigned = self._assigned.get(parsed)
        if assigned is None or name in self._changed:
            raise ValueError(f"{name} has no known value")
        if argument in self._arguments and "parse_" in ast.unparse(assigned):
            return self._arguments[argument]

        # A name that is assigned from itself has no end.
        if name not in self._values:
            self._values[name] = UNKNOWN
            self._values[name] = UNKNOWN if argument else self.value(assigned)
        if self._values[name] == UNKNOWN:
            raise ValueError(f"{name} has no known value")
        return self._values[name]
