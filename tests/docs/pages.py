"""The pages that users read, and what is on them: links and fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
# Pages of the site. docs/generate holds the sources of generated ones.
SITE = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "generate"]
PAGES = sorted([*ROOT.glob("*.md"), *SITE, *(ROOT / "examples").rglob("*.md")])

_MARKDOWN = MarkdownIt("commonmark").enable("table")
WITH = "with: "  # the mark of a part of a configuration: the file, and overrides, that have the rest
OTHER_PROGRAM = "of another program"  # the mark of a YAML block that is not a configuration of megarl
_MARK = re.compile(r"<!-- (?!page: )(.*?) -->", re.DOTALL)  # `page: NAME` is of tests/failure_pages.py


class Block(NamedTuple):
    """A fenced block. `mark`: what the comment right above it says, as "needs a GPU"."""

    page: Path
    line: int
    language: str
    text: str
    mark: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    mark = None
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content, mark)
        found = _MARK.fullmatch(token.content.strip()) if token.type == "html_block" else None
        mark = found[1] if found else None


def links(page: Path) -> Iterator[str]:
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            for attribute in ("href", "src"):
                if attribute in child.attrs:
                    yield str(child.attrs[attribute])


@cache
def anchors(page: Path) -> set[str]:
    """What a code host calls the headings of a page: lower case, blanks as hyphens, no punctuation."""
    tokens = _MARKDOWN.parse(page.read_text(encoding="utf-8"))
    titles = [
        after.content
        for token, after in zip(tokens, tokens[1:], strict=False)
        if token.type == "heading_open"
    ]
    return {anchor(title) for title in titles}


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


class Command(NamedTuple):
    """A line that a reader may type, without its comment. `output`: what the page says that it prints; None
    where it says nothing."""

    block: Block
    text: str
    output: str | None


def commands(block: Block) -> Iterator[Command]:
    """`bash`: every line. `console`: lines after "$ ", each with what follows it. A line that ends with a
    backslash goes on."""
    if block.language == "bash":
        for line in block.text.replace("\\\n", " ").splitlines():
            if text := _without_comment(line):
                yield Command(block, text, None)
    elif block.language == "console":
        for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(block, _without_comment(line), output)


def inline_commands(page: Path) -> Iterator[Command]:
    """Commands of ours in the text, with the words that are typed behind them; `megarl check` alone is a
    name."""
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline" and re.match(
                r"(megarl|make|python|pip|\.venv/bin/\w+) \S", child.content
            ):
                yield Command(Block(page, (token.map or [0])[0] + 1, "inline", "", None), child.content, None)


def _without_comment(line: str) -> str:
    return " ".join(re.sub(r"(^|\s+)# .*$", "", line).split())


# ---- YAML blocks

# The tasks that need keys of their own, and the page with a whole file of each.
RECIPES = {
    "supervised fine-tuning": ("algorithms/supervised.md", "kind: sft"),
    "reward model": ("algorithms/supervised.md", "kind: reward_model"),
    "DPO": ("algorithms/supervised.md", "kind: dpo"),
    "PPO": ("algorithms/index.md", "ppo.yaml"),
    "GRPO": ("algorithms/grpo.md", "grpo.yaml"),
    "distillation": ("algorithms/distillation.md", "estimator: distillation"),
    "agent": ("agents.md", "tools:"),
    "judge": ("rewards.md", "judges:"),
    "LoRA": ("large_models.md", "lora:"),
    "FP8": ("large_models.md", "dtype: fp8"),
    "images": ("data.md", "_vl_"),
    "long context": ("large_models.md", "context_parallel_size:"),
    "mixture of experts": ("large_models.md", "expert_parallel_size:"),
}

YAML = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language == "yaml" and block.mark != OTHER_PROGRAM
]


def is_device(block: Block) -> bool:
    return "configs/devices/" in str(yaml.safe_load(block.text).get("base"))


def is_whole(block: Block) -> bool:
    """Whether a block is a whole configuration, and not a part of one."""
    sections = yaml.safe_load(block.text)
    return not is_device(block) and ("base" in sections or {"model", "data"} <= set(sections))


def recipe(task: str) -> Block:
    """Return the whole file of a task, which is the first one on its page with the key of the task."""
    page, key = RECIPES[task]
    files = [block for block in YAML if block.page == ROOT / "docs" / page and key in block.text]
    return next(block for block in files if is_whole(block))
