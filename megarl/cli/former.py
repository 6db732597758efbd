"""Commands that have another name now. Their command lines are accepted, and what they are now is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megarl.cli.options import OVERRIDE


def _sft(words: Sequence[str]) -> list[str]:
    for word in words:
        key, equals, kind = word.removeprefix("--").partition("=")
        if key == "kind" and equals and kind != "sft":
            raise ValueError(f"{word} is another kind of run; use `megarl train`")
    return ["train", "kind=sft", *words]


def _plan(words: Sequence[str]) -> list[str]:
    # The simulation was an option of the plan, and is a part of its own.
    return ["check", *words] if "--simulate" in words else ["check", "--plan", *words]


def _calibrate(words: Sequence[str]) -> list[str]:
    return ["tune", *_renamed(words, "--output", "--calibrate")]


def _submit(words: Sequence[str]) -> list[str]:
    if _has(words, "--address"):
        return ["train", *_renamed(words, "--address", "--submit")]
    return ["train", "--submit", "auto", *words]


def _score(words: Sequence[str]) -> list[str]:
    """Put `--rows` before the second positional argument, the file of responses."""
    # The command had one option, without a value. Any other one is an override, whose value may come next.
    takes_value = [
        word.startswith("--") and "=" not in word and word != "--ground-truth" for word in ("", *words)
    ]
    places = [
        index
        for index, word in enumerate(words)
        if not word.startswith("-") and not OVERRIDE.match(word) and not takes_value[index]
    ]
    if len(places) < 2:
        raise ValueError("the configuration and the file of responses are required")
    return ["eval", *words[: places[1]], "--rows", *words[places[1] :]]


def _renamed(words: Sequence[str], old: str, new: str) -> list[str]:
    if not _has(words, old):
        raise ValueError(f"{old} is required, which is {new} now")
    return [new + word.removeprefix(old) if _has([word], old) else word for word in words]


def _has(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in words)


# Each former name has the words that replace it, after `megarl`, and a function that rewrites the words after
# it. The function raises ValueError if a required option is missing, or if the words contradict the name.
FORMER: Mapping[str, tuple[str, Callable[[Sequence[str]], list[str]]]] = {
    "sft": ("train", _sft),
    "plan": ("check --plan", _plan),
    "rehearse": ("check --dry-run", lambda words: ["check", "--dry-run", *words]),
    "calibrate": ("tune --calibrate FILE", _calibrate),
    "submit": ("train --submit URL", _submit),
    "plot": ("report --png", lambda words: ["report", "--png", *words]),
    "score": ("eval CONFIG --rows FILE", _score),
    "schema": ("config --schema", lambda words: ["config", "--schema", *words]),
}

# Former subcommands of `convert`, which work as before, and the options that stand for them.
_CONVERSIONS: Mapping[str, tuple[str, ...]] = {
    "hf-to-megatron": ("--to", "megatron"),
    "megatron-to-hf": ("--to", "hf"),
    "merge-adapter": (),
    "inspect": ("--inspect",),
    "verify": ("--verify",),
}


def _conversion(words: Sequence[str]) -> list[str]:
    name, *rest = words
    if name in ("inspect", "verify"):
        return ["convert", *rest, *_CONVERSIONS[name]]
    source, rest = _taken(rest, "--input")
    target, rest = _taken(rest, "--output")
    # Without it, `convert` would write the adapter instead of the merged model.
    if name == "merge-adapter":
        base, rest = _taken(rest, "--base")
        rest = ["--base", base, *rest]
    return ["convert", source, target, *_CONVERSIONS[name], *rest]


def _taken(words: Sequence[str], option: str) -> tuple[str, list[str]]:
    """Return the value of an option, which may be abbreviated, and the other words."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if len(name) <= len("--") or not option.startswith(name):
            continue
        if equals:
            return value, [*words[:index], *words[index + 1 :]]
        if index + 1 < len(words):
            return words[index + 1], [*words[:index], *words[index + 2 :]]
    raise ValueError(f"{option} is required")


def message(words: Sequence[str]) -> str:
    """Say what a former command is now."""
    name = words[0]
    now = "check --simulate" if name == "plan" and "--simulate" in words else FORMER[name][0]
    return f"`megarl {name}` is now `megarl {now}`"


def in_current_words(words: Sequence[str]) -> list[str]:
    """Return a command line with the current name and options of its command.

    Raises:
        ValueError: It is one of a former command, and lacks a required option or contradicts the command.
    """
    name, *rest = words
    if name == "convert" and rest and rest[0] in _CONVERSIONS:
        return ["convert", "--help"] if "--help" in rest or "-h" in rest else _conversion(rest)
    if name not in FORMER:
        return list(words)
    now, rewrite = FORMER[name]
    if any(word in ("-h", "--help") for word in rest):
        return [now.split()[0], "--help"]
    return rewrite(rest)
