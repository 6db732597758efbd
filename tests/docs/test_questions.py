"""Test that the README answers a new user's questions, and that the section on learning names real metrics.

Each link of the README's section "How do I ...?" leads to a section with the command that answers it.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlparse

import pytest
from markdown_it import MarkdownIt

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.schema.keys import leaves
from tests.docs.pages import ROOT, anchor
from tests.metric_names import unknown_metrics

README = ROOT / "README.md"
# What each question asks for, and the command that its section must contain.
ANSWERS = {
    "8 GPUs": "megarl train my_run.yaml",
    "data and reward": "megarl init my_run --model MODEL_DIR --data FILE",
    "verl": "megarl check",
    "fits in memory": "megarl check configs/qwen2.5_7b_grpo.yaml",
    "a step will take": "megarl check configs/qwen3_32b_grpo.yaml --plan",
    "fastest layout": "megarl tune",
    "DPO": "megarl train configs/quickstart_dpo.yaml",
    "resume": "megarl train configs/qwen2.5_7b_grpo.yaml",
    "Hugging Face": "megarl convert outputs/qwen2.5_7b_grpo/checkpoints",
}


def section(page: Path, name: str) -> str:
    """Return the text below the heading with the anchor `name`, up to the next heading of its level or above."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    tokens = MarkdownIt("commonmark").parse(text)
    headings = [
        (token.map[0], int(token.tag[1]), anchor(after.content))
        for token, after in zip(tokens, tokens[1:], strict=False)
        if token.type == "heading_open" and token.map is not None
    ]
    ((start, level),) = [(line, level) for line, level, found in headings if found == name]
    end = min((line for line, other, _ in headings if line > start and other <= level), default=len(lines))

    return "\n".join(lines[start:end])


def questions() -> dict[str, str]:
    """Question -> its first link, of the README's list."""
    return dict(re.findall(r"^- \[([^\]]+)\]\(([^)\s]+)\)", section(README, "how-do-i-"), re.MULTILINE))


def test_the_readme_lists_every_question() -> None:
    assert len(questions()) == len(ANSWERS)
    for topic in ANSWERS:
        assert len([question for question in questions() if topic in question]) == 1, topic


@pytest.mark.parametrize(("topic", "command"), ANSWERS.items())
def test_a_link_leads_to_the_command_that_answers_the_question(topic: str, command: str) -> None:
    (link,) = [link for question, link in questions().items() if topic in question]
    parsed = urlparse(link)
    assert parsed.fragment, link

    found = section(ROOT / parsed.path, parsed.fragment)
    # A command of a fenced block, with or without the prompt of a console.
    typed = re.findall(r"(?ms)^```(?:bash|console)\n(.*?)^```", found)
    assert command in "\n".join(typed), f"{link} does not show `{command}`"


def learning() -> str:
    return section(ROOT / "docs" / "troubleshooting.md", "when-training-does-not-learn")


def test_learning_problems_name_existing_metrics_and_keys() -> None:
    words = re.findall(r"`([a-z_]+[./][\w./=-]+)`", learning())
    metrics = {word for word in words if "/" in word and "." not in word}
    keys = {word.partition("=")[0] for word in words if re.match(r"[a-z_]+\.", word)}
    files = {"generation_config.json"}
    known = [leaf.key for leaf in leaves(PPOConfig())]
    assert len(metrics) > 25
    assert len(keys) > 25
    assert unknown_metrics(metrics) == []
    assert [key for key in keys - files if not any(f"{leaf}.".startswith(f"{key}.") for leaf in known)] == []


def test_learning_changes_are_valid_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = sorted(set(re.findall(r"`([a-z_.]+=[^`]+)`", learning())))
    assert len(overrides) > 20

    for override in overrides:
        load_config(PPOConfig, "configs/quickstart.yaml", [override])
