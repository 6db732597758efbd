"""`megarl migrate SOURCE`: writes a configuration for a run of verl, slime, TRL or NeMo RL."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.config.conversions import NULL, Migration, kind_of, migrated
from megarl.config.dotted import given_at, nested, upwards
from megarl.config.foreign import SECRET, Foreign, read_foreign
from megarl.config.kinds import RolloutEngineKind
from megarl.config.load import read_config
from megarl.config.readers import unread_keys
from megarl.config.schema import MISSING, SCHEMAS, RunConfig, RunKind
from megarl.config.schema.keys import default_of
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import range_violations, validate
from megarl.config.values import contents_of, schema_keys
from megarl.machine.errors import ConfigError, counted
from megarl.rollout.engines import SERVER_ARGS_CHECKS

_ALGORITHM = "algorithm"
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")
_LONGEST_COMMENT = 110
_SERVER_ARGS = "rollout.sglang.server_args."
_MOST_ROUNDS = 5  # of leaving out keys that have no effect, which may leave others without one


def run(source: str, output: str | None = None, framework: str | None = None) -> None:
    """Print the configuration, or write it to a new file. A summary goes to the error stream.

    Raises:
        ValueError: The source cannot be read, or the output exists.
    """
    if output is not None and Path(output).exists():
        raise ValueError(f"{output}: there is such a file already; give another name")
    foreign = read_foreign(Path(source), framework)
    found = migrated(foreign)
    kind = kind_of(foreign)
    _set_output_dir(found, Path(source).stem)
    _fit(found, kind)
    preset = _preset(found, kind)
    differing = [*_differences(found, foreign, kind)]
    text = "\n".join(_lines(found, foreign, kind, preset, source, differing)) + "\n"

    if output is None:
        print(text, end="")
    else:
        try:
            with Path(output).open("x", encoding="utf-8") as opened:
                opened.write(text)
        except OSError as error:
            raise ValueError(f"{output}: cannot be written ({error.strerror})") from error
    for line in _summary(found, foreign, kind, output, differing):
        print(_one_line(line), file=sys.stderr)


# ---- values


def _set_output_dir(found: Migration, stem: str) -> None:
    """Give the run a folder of its own, unless the source names it.

    It is that of the source's checkpoints, or is called like the run in the loggers, or like the source.

    Args:
        stem: The name of the source's file.
    """
    values = found.values
    if "trainer.output_dir" in values:
        return
    if isinstance(values.get("checkpoint.dir"), str):
        found.put(
            "trainer.output_dir",
            values.pop("checkpoint.dir"),
            f"{found.origins['checkpoint.dir']}; the checkpoints are in its folder checkpoints",
            is_own=True,
        )
        return
    names = [values.get(f"tracking.{name}") for name in ("project", "run_name")]
    plain = [name for name in names if isinstance(name, str) and not _is_open(name)]
    parts = [re.sub(r"[^\w.-]+", "-", name) for name in plain] or [stem]
    found.put(
        "trainer.output_dir",
        "/".join(["outputs", *parts]),
        "checkpoints, logs and the trained model",
        is_own=True,
    )


def _fit(found: Migration, kind: RunKind) -> None:
    """Leave out values that a key does not take, and keys that have no effect, and say so."""
    for _ in range(_MOST_ROUNDS):
        loaded = read_config(RunConfig, _nested(found.values, kind))
        dropped = False
        for key in loaded.refused & found.values.keys():
            value = found.values[key]
            if _is_open(value):
                continue
            problem = next((each for each in loaded.problems if each.startswith(f"{key}: ")), "does not fit")
            _refit(found, kind, key, value, problem.partition(": ")[2].removesuffix(" [given values]"))
            dropped = True
        for finding in [
            *range_violations(loaded.config),
            *unread_keys(loaded.config, {}, refused=True),
        ]:
            # The last key may be the one to set, which the message names.
            keys = finding.keys[:-1] if f"set {finding.keys[-1]}=" in finding.message else finding.keys
            for key in [each for each in keys if each in found.values and not _is_open(found.values[each])]:
                found.drop(key, finding.message)
                dropped = True
        for key in [key for key in found.values if key.startswith(_SERVER_ARGS)]:
            try:
                option = key.removeprefix(_SERVER_ARGS)
                SERVER_ARGS_CHECKS[RolloutEngineKind.sglang]({option: found.values[key]})
            except ConfigError as error:
                # Without SGLang on this machine, its options are not known.
                if error.source == _SERVER_ARGS.removesuffix("."):
                    found.drop(key, "; ".join(error.problems))
                    dropped = True
        if not dropped:
            return


def _refit(found: Migration, kind: RunKind, key: str, value: Any, problem: str) -> None:
    """Keep the items of a list that fit, ask for a number that is no integer, and leave out other values."""
    if isinstance(value, list):
        kept = [
            item for item in value if key not in read_config(RunConfig, _nested({key: [item]}, kind)).refused
        ]
        if kept:
            left_out = ", ".join(str(item) for item in value if item not in kept)
            found.values[key] = kept
            found.origins[key] += f"; without {left_out}"
            return
    if isinstance(value, float):
        found.values[key] = MISSING
        found.origins[key] = f"{found.origins[key]} gives {value:g}, but {problem.partition('but ')[2]}"
        return
    found.drop(key, problem)


def _is_open(value: Any) -> bool:
    """Whether a value has a part that the user or the environment gives."""
    text = str(value)
    return MISSING in text or "${" in text


def _nested(values: Mapping[str, Any], kind: RunKind) -> dict[str, Any]:
    """Return dotted keys as sections."""
    plain = {key: None if value is NULL else value for key, value in values.items()}
    return nested(plain if kind is RunKind.ppo else {"kind": kind.value} | plain)


def _preset(found: Migration, kind: RunKind) -> str | None:
    """Return the preset that is exactly the algorithm of the run."""
    if kind is not RunKind.ppo:
        return None
    ours = read_config(RunConfig, _nested(found.values, kind)).config
    others = {key: value for key, value in found.values.items() if not key.startswith(f"{_ALGORITHM}.")}
    for file in sorted((CONFIGS_DIR / _ALGORITHM).glob("*.yaml")):
        if file.stem.startswith("async_"):
            continue
        preset = read_config(RunConfig, _nested(others | {_ALGORITHM: file.stem}, kind)).config
        if _in_effect(ours) == _in_effect(preset):
            return file.stem
    return None


def _in_effect(config: Any) -> dict[str, Any]:
    """Return the algorithm without the settings that a switch turns off."""
    values = contents_of(config.algorithm)
    if values["kl"]["where"] == "none":
        values["kl"] = "none"
    if values["advantage"]["estimator"] != "gae":
        del values["value_loss"]
    if not values["dynamic_sampling"]["enabled"]:
        del values["dynamic_sampling"]
    return values


# ---- text


def _lines(
    found: Migration,
    foreign: Foreign,
    kind: RunKind,
    preset: str | None,
    source: str,
    differing: list[str],
) -> Iterator[str]:
    name = foreign.framework.name
    yield f"# Converted from {name}: {_one_line(source)}. {_counted(found, foreign)}."
    yield "# A comment names the setting that a key comes from. Replace every '???'."
    written = {key: found.values[key] for key in _written(found, kind)}
    if preset is not None:
        written = {key: value for key, value in written.items() if not key.startswith(f"{_ALGORITHM}.")}
        written[_ALGORITHM] = preset
        found.origins[_ALGORITHM] = f"exactly what {name} computes with its settings"
    yield from _section(_in_schema_order(written, kind), found, "", "")
    yield from _listed("What differs", differing)
    yield from _listed("What else the file has", foreign.notes)
    by_reason: dict[str, list[str]] = {}
    for each, why in found.answers.items():
        by_reason.setdefault(why, []).append(_given(each, foreign))
    reasons = [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]
    yield from _listed(f"Settings of {name} that have no key here", reasons)
    yield from _listed("Settings that no table has: compare them yourself", found.unknown)


def _given(name: str, foreign: Foreign) -> str:
    """Return a setting with its value, unless that is long or secret."""
    if name not in foreign.settings or SECRET.search(name):
        return name
    shown = f"{name}={_scalar(foreign.settings[name])}"
    return shown if len(shown) <= _LONGEST_COMMENT else name


def _written(found: Migration, kind: RunKind) -> Iterator[str]:
    """Yield the keys to write: those of the source itself, and those that differ from megarl's defaults."""
    for key, value in found.values.items():
        if key == "kind" or key in found.own or value != _default(key, kind):
            yield key


def _default(key: str, kind: RunKind) -> Any:
    return given_at(contents_of(default_of(SCHEMAS[kind])), key)


def _in_schema_order(values: Mapping[str, Any], kind: RunKind) -> dict[str, Any]:
    order = {key: number for number, key in enumerate(schema_keys(SCHEMAS[kind]))}

    def place(key: str) -> int:
        return next((order[each] for each in upwards(key) if each in order), len(order))

    return {key: values[key] for key in sorted(values, key=place)}


def _section(values: Mapping[str, Any], found: Migration, prefix: str, indent: str) -> Iterator[str]:
    """Yield the lines of a section, with a blank line before each top-level one."""
    for name in dict.fromkeys(key.removeprefix(prefix).partition(".")[0] for key in values):
        key = f"{prefix}{name}"
        if key in values:
            if not indent:
                yield ""
            yield f"{indent}{name}: {_scalar(values[key])}{_comment(found.origins.get(key, ''))}"
            continue
        below = {each: value for each, value in values.items() if each.startswith(f"{key}.")}
        if not indent:
            yield ""
        yield f"{indent}{name}:"
        yield from _section(below, found, f"{key}.", f"{indent}  ")


def _scalar(value: Any) -> str:
    plain = None if value is NULL else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> str:
    if not text:
        return ""
    line = _one_line(text)
    return f" # {line if len(line) <= _LONGEST_COMMENT else line[: _LONGEST_COMMENT - 3] + '...'}"


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"# {title}:"
        yield from (f"#   {_one_line(line)}" for line in lines)


def _one_line(text: str) -> str:
    """Return a text as a comment or a terminal shows it: one line without control characters."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


# ---- summary


def _counted(found: Migration, foreign: Foreign) -> str:
    total = sum(not name.startswith("launcher.") for name in foreign.settings)
    carried = f"{total - len(found.unknown)} of {total} settings carried over or answered"
    missing = [key for key, value in found.values.items() if MISSING in str(value)]
    if not missing:
        return carried
    return f"{carried}; {counted(len(missing), 'value')} for you to set: {', '.join(missing)}"


def _differences(found: Migration, foreign: Foreign, kind: RunKind) -> Iterator[str]:
    """Yield the defaults of the framework that the file states, because megarl has others."""
    for key in sorted(found.defaults & found.values.keys()):
        usual = _default(key, kind)
        if found.values[key] not in (usual, MISSING) and _scalar(found.values[key]) != _scalar(usual):
            yield (
                f"{key}: {_scalar(found.values[key])} is {foreign.framework.name}'s default, which is kept; "
                f"megarl's is {_scalar(usual)}"
            )
    for default, why in found.differing.items():
        is_given = default.partition("=")[0] in {name.lstrip("+~") for name in foreign.settings}
        yield f"{default}: {why}" if is_given else f"{foreign.framework.name}'s default {default}: {why}"
    yield (
        "placement.device_memory_gb: not set, so `megarl check` plans for the GPUs that it finds or for "
        "80 GB; set about 90 % of the memory of yours"
    )


def _summary(
    found: Migration, foreign: Foreign, kind: RunKind, output: str | None, differing: list[str]
) -> Iterator[str]:
    if output is not None:
        yield f"{output}: written; continue with `megarl check {output} --fast`"
    yield from foreign.notes
    yield from (f"differs: {line}" for line in differing)
    for key, value in found.values.items():
        if MISSING in str(value):
            yield f"to set: {key} ({found.origins.get(key, '')})"
    variables = {name: key for key, value in found.values.items() for name in _VARIABLE.findall(str(value))}
    for name, key in variables.items():
        if name not in os.environ:
            yield f"to set: the environment variable {name}, which {key} reads"
    yield from (f"check: {problem}" for problem in _problems(found, kind))
    yield from (f"not converted: {name}" for name in found.unknown)
    yield f"{foreign.framework.name}: {_counted(found, foreign)}"


def _problems(found: Migration, kind: RunKind) -> Iterator[str]:
    """Yield what `megarl check` will say about the values themselves."""
    try:
        loaded = read_config(RunConfig, _nested(found.values, kind))
    except ConfigError as error:
        yield from error.problems
        return
    is_open = {key for key, value in found.values.items() if _is_open(value)}
    for finding in validate(loaded.config):
        # Folders and files may be on other machines.
        names_a_file = any(key.endswith("path") for key in finding.keys)
        is_known = not loaded.refuses(finding.keys) and not is_open & {*finding.keys}
        if is_known and not names_a_file and finding.absence is None:
            yield str(finding)
