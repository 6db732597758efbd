"""Reads the settings of a run of another framework from its script or file. Nothing of it is executed.

| framework | files |
|---|---|
| verl | a shell script with `python3 -m verl.trainer.main_ppo key=value ...`, or a Hydra YAML |
| slime, miles | a shell script with `python3 train.py --name value ...`, whose arrays may be in other files |
| TRL | a YAML of `trl grpo --config`, a command with `--name value` (also in a docstring), or Python |
| NeMo RL | a YAML with `defaults:` of other files |
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.config.dotted import flat, merged
from megarl.config.expressions import MOST_VALUES, evaluate, is_too_large, read_limited
from megarl.config.migration import FRAMEWORKS, Framework, framework_of, leaf_names, trl_arguments, trl_names
from megarl.config.python_script import configured
from megarl.config.shell import UNKNOWN, ShellScript
from megarl.config.values import each_text
from megarl.machine.files import YAML_ERRORS, yaml_problem

# The end of a name whose value is not copied, because the file is shared more widely than a script.
SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)
SETTING = re.compile(r"[+~]*([A-Za-z_][\w/@]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
# What shell.py leaves of arguments and arrays that the script does not have.
_PASSED_ON = re.compile(r"\$@|\$\{\w+\[@\]\}")
_VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)  # before the program
_OPERATORS = {"mul": "*", "div": "//", "add": "+", "sub": "-"}  # of references such as `${mul:2,3}`
_FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_MOST_FILES = 20  # of `defaults`, so that files which name each other end
_LONGEST_VALUE = 100_000  # of a value whose references are resolved
# Words in a subcommand or a script's name, and the class of TRL whose arguments it reads.
_TRL_SCRIPTS = {
    **dict.fromkeys(("grpo", "gspo", "rloo", "papo", "openenv", "wordle"), "GRPOConfig"),
    "dpo": "DPOConfig",
    "cpo": "CPOConfig",
    "orpo": "ORPOConfig",
    "sft": "SFTConfig",
    "reward": "RewardConfig",
}


class Foreign(NamedTuple):
    """The settings of another framework's run.

    Attributes:
        settings: The values by dotted name. `${oc.env:NAME}` and UNKNOWN are what the file does not say.
        own: The names that the file sets itself, not a file that it inherits from.
        variant: The class of TRL whose arguments they are, or which has the same kind of run; may be empty.
        notes: What was left out of the file, one line each.
    """

    framework: Framework
    settings: Mapping[str, Any]
    own: frozenset[str]
    variant: str = ""
    notes: tuple[str, ...] = ()


def read_foreign(file: Path, framework: str | None = None) -> Foreign:
    """Read a file of another framework.

    Args:
        framework: One of FRAMEWORKS; None: recognized by all names together.

    Raises:
        ValueError: The file cannot be read, or no framework has its settings.
    """
    text = read_limited(file)
    if file.suffix in (".yaml", ".yml"):
        settings, own = _yaml_settings(file)
        words: list[str] = []
        notes: tuple[str, ...] = ()
    else:
        settings, words, notes = _best_command(file, text, framework)
        own = frozenset(settings)
    variant = ""
    if file.suffix == ".py" and framework in (None, "trl"):
        variant, called = configured(text, settings, set(_TRL_SCRIPTS.values()))
        if variant:
            framework = "trl"
            # The other options of the command are arguments of the script's own parser.
            known = (name for name in settings if name in trl_arguments() or name.startswith("launcher."))
            settings = {name: settings[name] for name in known} | called

    found = FRAMEWORKS.get(framework or "") or framework_of(settings)
    if found is None or not any(map(found.knows, settings)):
        raise ValueError(
            f"{file}: no setting of verl, slime, TRL or NeMo RL was found; give a command script with "
            "key=value or --name value, or a YAML file"
        )
    _refuse_other_trainers(file, found.name, settings, words)
    program = str(settings.get("launcher.program", ""))
    if found.name == "verl" and words and not _VERL_PROGRAMS.search(program):
        notes = (
            *notes,
            f"{program} is another trainer of verl: read as the PPO trainer, verl.trainer.main_ppo",
        )
    if found.name == "TRL":
        variant = variant or _trl_class(words or [file.as_posix()], settings)
        settings = dict(_trl_setting(name, value) for name, value in flat(settings))
        own = frozenset(settings)
        if not (words or any(name in trl_names()[variant] for name in settings)):
            notes = (*notes, f"no argument is of one trainer only: read as those of {variant}")
    elif settings.get("loss_type") == "sft_loss":
        variant = "SFTConfig"
    return Foreign(found, settings, own, variant, notes)


# ---- commands


def _best_command(
    file: Path, text: str, framework: str | None
) -> tuple[dict[str, Any], list[str], tuple[str, ...]]:
    """Return the settings of the command with the most of them, its words, and a note about the others."""
    named = FRAMEWORKS.get(framework or "")
    found = []
    for script in _scripts(file, text):
        for command in _whole_commands(script):
            words = [word for word in command if not _PASSED_ON.fullmatch(word)]
            settings = _command_settings(words, file.parent)
            best = named or (framework_of(settings) if len(settings) > 1 else None)
            # The options of a Python script may all be those of its own parser.
            if settings and (best is not None or any(word.endswith(file.name) for word in words)):
                num_known = sum(map(best.knows, settings)) if best is not None else 0
                found.append((num_known, settings, words, [*_left_out(command, script, file.parent)]))
    if not found:
        return {}, [], ()
    _, settings, words, left_out = max(found, key=lambda each: each[0])
    settings = {"launcher.program": words[_program_end(words) - 1], **settings}
    others = len(found) - 1
    if others:
        left_out.append(f"{others} other command{'s' * (others > 1)} of the file: not converted")
    return settings, words, tuple(left_out)


def _left_out(command: Sequence[str], script: ShellScript, folder: Path) -> Iterator[str]:
    """Yield what a command has besides settings: arguments that the file lacks, and its environment."""
    for word in dict.fromkeys(word for word in command if _PASSED_ON.fullmatch(word)):
        what = "the arguments of the script" if word == "$@" else "an array that the file does not set"
        yield f"{word} stands for {what}: add the settings that you give there"

    launcher = command[: _program_end(command)]
    environment = dict(script.environment)
    environment |= {match[1]: match[2] for word in launcher if (match := _VARIABLE.fullmatch(word))}
    for name, value in _options(launcher):
        # Ray's runtime environment, as JSON or as a YAML file.
        if name == "runtime-env-json" and isinstance(value, dict):
            environment |= _variables_of(dict(flat(value)))
        elif name == "runtime-env" and (file := _named_file(value, folder)) is not None:
            environment |= _variables_of(_yaml_settings(file)[0])
    if environment:
        shown = " ".join(
            name if SECRET.search(name) else f"{name}={value}" for name, value in environment.items()
        )
        yield f"environment variables, which a run has if they are set before `megarl train`: {shown}"


def _variables_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of Ray's runtime environment."""
    section = "env_vars."
    found = {name: value for name, value in settings.items() if name.startswith(section)}
    return {name.removeprefix(section): str(value) for name, value in found.items()}


def _whole_commands(script: ShellScript) -> Iterator[list[str]]:
    """Yield the commands. Options without a program belong to the command before them.

    A script without the backslash at the end of a line is meant that way.
    """
    whole: list[str] = []
    for words in script.commands():
        if whole and not words[0].startswith("-"):
            yield whole
            whole = []
        whole = [*whole, *words]
    if whole:
        yield whole


def _scripts(file: Path, text: str) -> Iterator[ShellScript]:
    """Yield the shell scripts of a file: itself, or the commands in prose."""
    if file.suffix not in (".py", ".md"):
        yield ShellScript(file)
        return
    prose = text
    if file.suffix == ".py":
        try:
            prose = ast.get_docstring(ast.parse(text)) or ""
        except SyntaxError:
            prose = ""
    # Without fences each paragraph may be a command. An apostrophe of another one is no quote in it.
    for block in _FENCE.findall(prose) or prose.split("\n\n"):
        # A comma between the words of a list is Python's, as in `--targets q_proj, v_proj`.
        yield ShellScript(file, re.sub(r"(?<=[\w\"']),(?=[ ])", "", block))


def _command_settings(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the settings in the words of one command."""
    program = _program_end(words)
    settings = _launched(words[:program], folder)
    given = list(_options(words[program:]))
    overrides = {
        match[1].replace("/", "."): parsed(match[2])
        for word in words[program:]
        if not word.startswith("-") and (match := SETTING.fullmatch(word))
    }

    # Hydra's configuration next to the script, or the YAML of `trl --config`, is below the command.
    options = dict(given)
    config = options.pop("config", None)
    name = options.pop("config-name", None)
    path = options.pop("config-path", ".")
    if isinstance(name, str):
        config = f"{path}/{name.removesuffix('.yaml')}.yaml"
    positional = words[program : program + 1]
    if config is None and positional and positional[0].endswith((".yaml", ".yml")):
        config = positional[0]
    if (file := _named_file(config, folder)) is not None:
        settings |= _yaml_settings(file)[0]
    if overrides and not options.keys() - {"cp", "cn"}:
        return settings | overrides
    return settings | {each.replace("-", "_"): value for each, value in options.items()}


def _launched(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return how many processes a launcher starts on how many machines, by its options and their file."""
    # The program that follows an option looks like a second value.
    given = {
        name.replace("-", "_"): value[0] if isinstance(value, list) else value
        for name, value in _options(words)
    }
    if (file := _named_file(given.get("config_file"), folder)) is not None:
        given = _yaml_settings(file)[0] | given
    nodes = next((given[name] for name in ("num_machines", "nnodes", "num_nodes") if name in given), 1)
    per_node = given.get("nproc_per_node", given.get("num_gpus"))
    processes = given.get("num_processes")
    if processes is None and isinstance(per_node, int) and isinstance(nodes, int):
        processes = per_node * nodes
    return {} if processes is None else {"launcher.num_processes": processes, "launcher.num_machines": nodes}


def _named_file(name: Any, folder: Path) -> Path | None:
    """Return a file that a command names, relative to the folder of its script or to one above it."""
    if not isinstance(name, str):
        return None
    return next((each / name for each in (folder, *folder.parents) if os.path.isfile(each / name)), None)


def _program_end(words: Sequence[str]) -> int:
    """Return the number of words up to the program: a Python file, a module, or a subcommand of trl."""
    for index in range(len(words) - 1, -1, -1):
        is_script = words[index].endswith(".py") and "=" not in words[index]
        if is_script and not (words[index - 1].startswith("--") and "=" not in words[index - 1]):
            return index + 1
        if words[index] == "-m" or words[index] == "trl":
            return min(index + 2, len(words))
    return 1


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options with their values: a list for several, true for none."""
    index = 0
    while index < len(words):
        match = _OPTION.fullmatch(words[index])
        index += 1
        if match is None:
            continue
        values = [] if match[2] is None else [match[2]]
        while not values or match[2] is None:
            if index == len(words) or _OPTION.fullmatch(words[index]) or SETTING.fullmatch(words[index]):
                break
            values.append(words[index])
            index += 1
        name = match[1]
        if not values:
            yield name, True
        else:
            yield name, parsed(values[0]) if len(values) == 1 else [parsed(value) for value in values]


def parsed(text: str) -> Any:
    """Return the value that a text on a command line stands for."""
    stripped = text.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        stripped = stripped[1:-1]
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", stripped):
        number = float(stripped)
        return int(number) if re.fullmatch(r"[-+]?\d+", stripped) else number
    if stripped in ("None", "null", "~", ""):
        return None
    # A reference in a list would end it, so its braces are hidden from the parser.
    hidden = stripped.replace("${oc.env:", "\ue000").replace("}", "\ue001") if "${" in stripped else stripped
    try:
        value = yaml.safe_load(hidden) if hidden[0] in "[{" else hidden
    except YAML_ERRORS:
        value = hidden
    value = hidden if is_too_large(value) else value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return _shown(value)


def _shown(value: Any) -> Any:
    return each_text(value, lambda text: text.replace("\ue000", "${oc.env:").replace("\ue001", "}"))


# ---- YAML


def _yaml_settings(file: Path) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the settings of a YAML file with those that it inherits, and the names of its own."""
    tree, own = _tree(file, [])
    settings = _settings_of(tree)
    return {name: _resolved(value, name, settings) for name, value in settings.items()}, frozenset(own)


def _tree(file: Path, files: list[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the merged tree of a file, and its own flat values.

    Args:
        files: The files that have been read, to which this one is added.
    """
    files.append(file)
    text = read_limited(file)
    try:
        tree = yaml.safe_load(text)
    except YAML_ERRORS as error:
        raise ValueError(f"{file}: is not YAML: {yaml_problem(error)}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: must contain a mapping of settings")
    if is_too_large(tree):
        raise ValueError(f"{file}: has more than {MOST_VALUES:,} values; give the file of a run")
    tree = {str(name): value for name, value in tree.items()}
    defaults = tree.pop("defaults", [])
    tree.pop("hydra", None)

    whole: dict[str, Any] = {}
    for item in defaults if isinstance(defaults, list) else [defaults]:
        inherited, place = _inherited(item, file.parent)
        if inherited is not None and os.path.isfile(inherited) and len(files) < _MOST_FILES:
            below, _ = _tree(inherited, files)
            for part in reversed(place.split(".") if place else []):
                below = {part: below}
            whole = merged(whole, below)
    return merged(whole, tree), _settings_of(tree)


def _inherited(item: Any, folder: Path) -> tuple[Path | None, str]:
    """Return the file of an item of `defaults`, and the section that it is placed in."""
    if isinstance(item, dict) and item:
        group, name = next(iter(item.items()))
        group, _, place = str(group).removeprefix("override ").partition("@")
        place = place or group.replace("/", ".")
        return folder / group / f"{name}.yaml", "" if place == "_global_" else place
    if not isinstance(item, str) or item == "_self_":
        return None, ""
    return folder / (item if item.endswith((".yaml", ".yml")) else f"{item}.yaml"), ""


def _settings_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a tree by dotted name. An empty section has none."""
    return {name: _number(value) for name, value in flat(tree) if value != {}}


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-6 as a text.
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _resolved(value: Any, key: str, settings: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value without its references, except to environment variables."""
    if isinstance(value, list):
        return [_resolved(item, key, settings, depth) for item in value]
    if not isinstance(value, str) or "${" not in value or depth > _MOST_FILES:
        return value
    match = _REFERENCE.search(value)
    # The innermost reference first; one to the environment is hidden until the others are resolved.
    if match is None:
        return _shown(value)
    found = _referred(match[1].strip(), key, settings)
    found = _resolved(found, key, settings, depth + 1)
    if match.group() == value:
        return found
    text = str(found).replace("${oc.env:", "\ue000").replace("}", "\ue001") if found is not None else ""
    if len(value) + len(text) > _LONGEST_VALUE:
        raise ValueError(f"{key}: becomes too long with its references")
    return _resolved(value[: match.start()] + text + value[match.end() :], key, settings, depth + 1)


def _referred(inner: str, key: str, settings: Mapping[str, Any]) -> Any:
    """Return what `${...}` stands for, UNKNOWN if that is not in the files."""
    name, colon, rest = inner.partition(":")
    target, comma, usual = rest.partition(",")
    if name == "oc.env":
        return parsed(usual) if comma else f"\ue000{target.strip()}\ue001"
    if name == "oc.select":
        return settings.get(target.strip(), parsed(usual))
    if colon and name in _OPERATORS:
        try:
            return evaluate(f" {_OPERATORS[name]} ".join(f"({part})" for part in rest.split(",")), str)
        except ValueError:
            return UNKNOWN
    if colon:
        return UNKNOWN
    if name.startswith("."):
        parents = key.split(".")[: -(len(name) - len(name.lstrip(".")))]
        name = ".".join([*parents, name.lstrip(".")])
    return settings.get(name, UNKNOWN)


# ---- trainers

# The settings that every run has which a framework's table is about.
_TRAINERS = {
    "verl": ("actor_rollout_ref.", "the PPO trainer (verl.trainer.main_ppo)"),
    "NeMo RL": ("grpo.", "GRPO"),
}
_VERL_PROGRAMS = re.compile(r"main_ppo|main_dapo|fully_async|one_step_off|partial_rollout")
_OTHER_TRAINERS = re.compile(
    r"(?:^|[/_ ])(rloo|kto|bco|gkd|gold|xpo|nash_md|online_dpo|prm|ppo|tpo|ssd|sdpo|sdft|"
    r"distillation)(?:[/_.]|$)"
)


def _refuse_other_trainers(
    file: Path, framework: str, settings: Mapping[str, Any], words: Sequence[str]
) -> None:
    """Raise ValueError for a trainer whose settings would be read with another meaning."""
    prefix, trainer = _TRAINERS.get(framework, ("", ""))
    if not any(name.lstrip("+~").startswith(prefix) for name in settings):
        raise ValueError(
            f"{file}: only settings of {trainer} are converted from {framework}, and it has none"
        )
    program = " ".join(word for word in words if word.endswith(".py") or words[0] == "trl")
    if framework == "TRL" and (other := _OTHER_TRAINERS.search(program)):
        raise ValueError(
            f"{file}: is for TRL's trainer {other[1]}, which has no counterpart; GRPO, DPO, CPO, ORPO, SFT "
            "and reward models are converted"
        )


def _trl_setting(name: str, value: Any) -> tuple[str, Any]:
    """Return an argument of TRL; `--no_NAME` is false."""
    name = name.replace("-", "_")
    positive = name.removeprefix("no_")
    if positive != name and name not in trl_arguments() and positive in trl_arguments():
        return positive, False
    # A single service is given as a text or as a list.
    if name == "report_to" and isinstance(value, list) and len(value) == 1:
        return name, value[0]
    return name, value


def _trl_class(words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Return the class of TRL that reads the settings, by names in the command or by the most arguments."""
    for word in words:
        is_file = word.endswith(".py") or words == [word]
        if is_file or (word in _TRL_SCRIPTS and "trl" in words):
            for part, name in _TRL_SCRIPTS.items():
                if part in word.rpartition("/")[2] or f"/{part}/" in f"/{word}":
                    return name
    own = {name: entries for name, entries in trl_names().items() if name in _TRL_SCRIPTS.values()}
    given = [leaf.replace("-", "_") for name, value in settings.items() for leaf in leaf_names(name, value)]
    return max(own, key=lambda name: sum(each in own[name] for each in given))
