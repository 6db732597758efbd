"""Rules for the section `reward`: a source of scores, a reward model that reads conversations, and judges."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.config.batch_arithmetic import max_conversation_tokens, micro_batch_room
from megarl.config.finding import Finding, Findings, is_http_url, refusals
from megarl.config.roles import needs_reward_model
from megarl.config.schema import JudgeConfig, OverlongConversation, PPOConfig
from megarl.machine.folder_kinds import SCORING_MODELS, fields_of, model_called
from megarl.models.architecture import Architecture
from megarl.models.families import REWARD_CLASS

_LABELS_BY_DEFAULT = 2  # the default of transformers for a config.json without labels
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def has_scores(config: PPOConfig) -> bool:
    """Return whether anything scores the samples. The program of a harness may set the rewards itself."""
    has_source = config.reward.functions or config.reward.judges or needs_reward_model(config)
    return bool(has_source) or config.agent.has_program


def something_scores(config: PPOConfig) -> Findings:
    if has_scores(config):
        return
    reads_rewards = config.algorithm.reads_rewards
    yield from refusals(
        (
            ("reward.functions", "reward.model.path"),
            reads_rewards,
            "there are neither functions nor a model, so samples have no scores; give a list such as "
            "[{path: reward.py}], the folder of a reward model, or reward.judges",
        ),
        (
            ("data.val_files", "reward.functions"),
            not reads_rewards and bool(config.data.val_files),
            "nothing scores the responses to held-out prompts, because there are neither reward functions "
            "nor a model; remove the files, or give a reward function (it does not affect the training with "
            "algorithm.advantage.distillation.reward_weight 0)",
        ),
    )


def reads_conversations(config: PPOConfig, architecture: Architecture) -> Findings:
    """Check that the reward model, whose architecture is given, can read conversations of the policy."""
    model = config.reward.model
    assert model.path is not None
    folder = Path(model.path)
    yield from _scores_with_one_number(folder)

    if not has_chat_template(folder):
        yield Finding(
            ("reward.model.path",),
            f"{model.path} has no chat template to render conversations with; add the chat_template.jinja "
            "that it was trained with to the folder",
        )

    yield from _lengths(config, architecture)


def _scores_with_one_number(folder: Path) -> Findings:
    fields = fields_of(folder / "config.json")
    named = fields.get("architectures") or []

    if not any(str(name).endswith(REWARD_CLASS) for name in named):
        yield Finding(
            ("reward.model.path",),
            f"{folder / 'config.json'}: field 'architectures' is {named}, so this is {model_called(fields)}, "
            f"but a reward model must be a ...{REWARD_CLASS}, whose head returns the score; give the folder "
            "of such a model (`kind: reward_model` trains one from a language model), or score with "
            "reward.functions or reward.judges",
        )
        return

    # config.json gives the number of labels as num_labels or id2label; without both the default applies.
    labels = fields.get("num_labels", len(fields.get("id2label") or ()) or _LABELS_BY_DEFAULT)
    if labels != 1:
        yield Finding(
            ("reward.model.path",),
            f"{folder / 'config.json'}: the model has {labels} labels, but a score is one number; use a "
            f"reward model with num_labels 1",
        )


def _lengths(config: PPOConfig, architecture: Architecture) -> Findings:
    model = config.reward.model
    tokens = config.max_row_tokens
    # A conversation must fit both the model and one micro-batch.
    for name, limit in {
        "max_position_embeddings": architecture.max_position_embeddings,
        "micro_batch.max_tokens": micro_batch_room(model.micro_batch, model.parallel),
    }.items():
        if model.max_length is not None and limit is not None and model.max_length > limit:
            yield Finding(
                (
                    "reward.model.max_length",
                    *([f"reward.model.{name}"] if name.startswith("micro_batch") else []),
                ),
                f"max_length {model.max_length} is above {name} "
                f"{limit}{'' if '.' in name else f' of {model.path}'}; use {limit} or less",
            )

    limit = max_conversation_tokens(model, architecture)
    if model.overlong is OverlongConversation.refuse and tokens > limit:
        yield Finding(
            (
                "reward.model.max_length",
                "reward.model.micro_batch",
                "data.max_prompt_length",
                "data.max_response_length",
            ),
            f"a row may have {tokens} of the policy's tokens, but the reward model reads at most {limit} of "
            "its own tokens (limited by max_length, max_position_embeddings "
            f"{architecture.max_position_embeddings}, and a micro-batch); "
            "use shorter rows, raise these limits up to max_position_embeddings, or use "
            "reward.model.overlong=truncate to remove the oldest tokens",
        )


def has_chat_template(folder: Path) -> bool:
    """Whether a Hugging Face model folder has a chat template."""
    if any(os.path.isfile(folder / name) for name in _TEMPLATE_FILES):
        return True
    return bool(fields_of(folder / "tokenizer_config.json").get("chat_template"))


# Fields of requests whose type and range are known: (type, smallest value, largest value).
_RANGES: dict[str, tuple[Any, float, float]] = {
    "temperature": (int | float, 0, 2),
    "seed": (int, -math.inf, math.inf),
    "max_tokens": (int, 1, math.inf),
}


def judges(config: PPOConfig) -> Findings:
    """Check the judges' names, servers, parsers and requests."""
    seen: dict[str, int] = {}
    for index, judge in enumerate(config.reward.judges):
        key = f"reward.judges[{index}]"

        first = seen.setdefault(judge.name, index)
        yield from refusals(
            # Metrics are named after the judge.
            (
                (f"{key}.name",),
                re.fullmatch(r"[A-Za-z0-9_-]+", judge.name) is None,
                f"is {judge.name!r}, but is part of metrics such as reward/judge/<name>/mean; use letters, "
                "digits, '_' and '-'",
            ),
            (
                (f"{key}.name",),
                first != index,
                f"is {judge.name!r}, the name of reward.judges[{first}]; use another",
            ),
        )

        yield from _server(judge, key) if judge.path is None else _served(judge, key)
        yield from _request(judge, key)
        yield from _parse(judge, key)


def _served(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    """Check a judge whose model the run serves."""
    for name in ("url", "model", "api_key_env"):
        if getattr(judge, name) is not None:
            yield Finding(
                (f"{key}.{name}", f"{key}.path"),
                "are both given, but the run serves the model in `path` itself; remove one of them",
            )

    assert judge.path is not None
    called = model_called(fields_of(Path(judge.path) / "config.json"))
    if called.startswith(SCORING_MODELS):
        yield Finding(
            (f"{key}.path",),
            f"{judge.path!r} is {called}, which returns a score instead of the reply that a judge writes; "
            "give the folder of a language model, or use this one as reward.model.path",
        )


def _server(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    """Check a judge on a server that the user has started."""
    example = "give the base URL of the API, such as http://localhost:30000/v1"
    if judge.url is None:
        yield Finding((f"{key}.url", f"{key}.path"), f"neither is given; {example}, or the folder of a model")
        return
    if judge.model is None:
        yield Finding((f"{key}.model",), "is missing; give the name of the model on the server")
    parts = urlsplit(judge.url) if is_http_url(judge.url) else None
    if parts is None:
        yield Finding((f"{key}.url",), f"{judge.url!r} is not an http or https URL; {example}")
    elif parts.username is not None or parts.query or parts.fragment:
        yield Finding(
            (f"{key}.url",),
            f"has a user name, a query or a fragment; {example}, and name the environment variable with the "
            "key in api_key_env",
        )
    elif parts.path.rstrip("/").endswith("/chat/completions"):
        yield Finding((f"{key}.url",), f"{judge.url!r} ends with /chat/completions; {example}")

    # A key that is pasted here would be written to the run's folder.
    if judge.api_key_env is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", judge.api_key_env) is None:
        yield Finding(
            (f"{key}.api_key_env",),
            "is not the name of an environment variable; give the name of the variable that contains the "
            "key, such as OPENAI_API_KEY, and not the key",
        )


def _request(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    """Check the fields that a judge adds to its requests."""
    for name, (kind, least, most) in _RANGES.items():
        value = judge.request.get(name)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value <= most):
            number = "an integer" if kind is int else "a number"
            lower = "" if least == -math.inf else f" of at least {least:g}"
            upper = "" if most == math.inf else f" and at most {most:g}"
            yield Finding(
                (f"{key}.request",),
                f"has {name}={value!r}, which must be {number}{lower}{upper}",
            )

    if owned := [name for name in ("model", "messages", "n", "stream") if name in judge.request]:
        yield Finding(
            (f"{key}.request",),
            f"has {', '.join(owned)}, which megarl sets; use the judge's own key for model, and remove the "
            "others",
        )


def _parse(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    parse = judge.parse
    given = [name for name in ("regex", "json", "path") if getattr(parse, name) is not None]
    if len(given) != 1:
        yield Finding(
            (f"{key}.parse",),
            f"has {' and '.join(given) or 'neither regex, json nor path'}, but needs exactly one of them, "
            "such as {regex: 'Score: ([0-9.]+)'}",
        )

    if parse.regex is not None:
        try:
            groups = re.compile(parse.regex).groups
        except re.error as error:
            yield Finding((f"{key}.parse.regex",), f"{parse.regex!r} is no regular expression: {error}")
            return

        if groups != 1:
            yield Finding(
                (f"{key}.parse.regex",),
                f"{parse.regex!r} has {groups} groups, but its only group must be the score, such as "
                "'Score: ([0-9.]+)'; write other groups as (?:...)",
            )
