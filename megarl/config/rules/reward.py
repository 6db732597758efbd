"""What the reward's settings must satisfy: something that scores, and a reward model that can read what the
policy writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megarl.config.batch_arithmetic import max_conversation_tokens, micro_batch_room
from megarl.config.roles import needs_reward_model
from megarl.config.schema import OverlongConversation, PPOConfig, RewardModelConfig
from megarl.config.violation import Violation, Violations
from megarl.models.architecture import Architecture
from megarl.models.families import REWARD_CLASS

_LABELS_BY_DEFAULT = 2  # transformers', for a config.json that names none
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def something_scores(config: PPOConfig) -> Violations:
    if not config.reward.functions and not needs_reward_model(config):
        yield Violation(
            ("reward.functions", "reward.model.path"),
            "functions is empty and there is no model: nothing would be learnt; give a list such as "
            "[{path: reward.py, name: compute_score}], or the folder of a reward model",
        )
    if not needs_reward_model(config) and config.reward.model != RewardModelConfig():
        yield Violation(
            ("reward.model.path",),
            "is null, so what else is set in reward.model does nothing; give a folder, or leave the rest as "
            "it is",
        )


def reads_conversations(config: PPOConfig, architecture: Architecture) -> Violations:
    """`architecture`: the reward model's, so its config.json can be read."""
    model = config.reward.model
    assert model.path is not None
    folder = Path(model.path)
    yield from _scores_with_one_number(folder)

    if not has_chat_template(folder):
        yield Violation(
            ("reward.model.path",),
            f"{model.path} has no chat template, so conversations cannot be rendered for it; "
            "put the chat_template.jinja that it was trained with into the folder",
        )

    yield from _lengths(config, architecture)


def _scores_with_one_number(folder: Path) -> Violations:
    fields = _fields(folder / "config.json")
    named = fields.get("architectures") or []

    if not any(str(name).endswith(REWARD_CLASS) for name in named):
        yield Violation(
            ("reward.model.path",),
            f"{folder / 'config.json'}: field 'architectures' is {named}, but a reward model is a "
            f"...{REWARD_CLASS}, whose head gives its "
            "score; train one, or give the folder of one",
        )
        return

    # config.json gives the number of labels as num_labels or id2label; without both a default holds.
    labels = fields.get(
        "num_labels", len(fields["id2label"]) if fields.get("id2label") else _LABELS_BY_DEFAULT
    )
    if labels != 1:
        yield Violation(
            ("reward.model.path",),
            f"{folder / 'config.json'}: the model has {labels} labels, but a score is one number; give a "
            f"reward model with num_labels 1",
        )


def _lengths(config: PPOConfig, architecture: Architecture) -> Violations:
    model = config.reward.model
    positions = architecture.max_position_embeddings
    tokens = config.max_row_tokens
    # A conversation has to fit both the model's positions and one micro-batch.
    room = {
        "max_position_embeddings": positions,
        "micro_batch.max_tokens": micro_batch_room(model.micro_batch, model.parallel),
    }

    for name, limit in room.items():
        if model.max_length is not None and limit is not None and model.max_length > limit:
            yield Violation(
                (
                    "reward.model.max_length",
                    *([f"reward.model.{name}"] if name.startswith("micro_batch") else []),
                ),
                f"max_length {model.max_length} is above {name} "
                f"{limit}{'' if '.' in name else f' of {model.path}'}; use {limit} or less",
            )

    limit = max_conversation_tokens(model, architecture)
    if model.overlong is OverlongConversation.refuse and tokens > limit:
        yield Violation(
            (
                "reward.model.max_length",
                "reward.model.micro_batch",
                "data.max_prompt_length",
                "data.max_response_length",
            ),
            f"a row may have {tokens} tokens of the policy, but the reward model reads at most {limit} of "
            f"its own (max_length, "
            f"{positions} positions, a micro-batch); use shorter rows, or as much as its positions allow, "
            "or reward.model.overlong=truncate to leave the oldest tokens out",
        )


def has_chat_template(folder: Path) -> bool:
    """Whether conversations can be rendered for the model of a Hugging Face folder."""
    if any(os.path.isfile(folder / name) for name in _TEMPLATE_FILES):
        return True
    return bool(_fields(folder / "tokenizer_config.json").get("chat_template"))


def _fields(file: Path) -> dict[str, Any]:
    """Of a JSON object; none of a file that is missing, or something else."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
