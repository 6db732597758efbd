"""tools/prose.py finds the retired idiom in pages, docstrings, comments and messages, and leaves code alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.prose import RETIRED, ROOT, check, findings, main, markdown_texts, python_texts, yaml_texts

GOOD = '''"""Send weights to the engines."""


def push(step: int) -> None:
    """Send the weights of one step.

    As in the paper, the first bucket is the largest.
    """
    # After the fork, the locks of the parent are gone.
    print("the engine is left behind")  # of the last step
'''


def rules(path: Path, source: str) -> list[tuple[int, str, str]]:
    reader = {".py": python_texts, ".md": markdown_texts, ".yaml": yaml_texts}[path.suffix]
    found = [finding for text in reader(path, source) for finding in check(text)]
    return sorted((finding.line, finding.rule, finding.text) for finding in found)


def of_python(source: str) -> list[tuple[int, str, str]]:
    return rules(Path("module.py"), source)


def of_page(source: str) -> list[tuple[int, str, str]]:
    return rules(Path("page.md"), source)


def test_plain_english_has_no_findings() -> None:
    assert of_python(GOOD) == []


@pytest.mark.parametrize(
    "docstring", ["Of a run whose weights are sent.", "What it needs.", "that of most elements."]
)
def test_a_docstring_with_a_bare_opening(docstring: str) -> None:
    assert of_python(f'def push():\n    """{docstring}"""\n') == [(2, "opening", docstring)]


def test_a_docstring_opens_with_a_word_that_only_begins_like_one() -> None:
    assert of_python('"""Offload the weights."""') == []
    assert of_python('"""Upper bound of the age."""') == []


def test_comments_with_a_bare_opening() -> None:
    assert of_python("# Of the last step.\nx = 1\n") == [(1, "opening", "Of the last step.")]

    # The second line of a block may begin with any word, as may a unit after code.
    assert of_python("# The weights\n# of the last step\nx = 1  # of one rank\n") == []
    # A comment may open with its reason.
    assert of_python("# In float32, since the sum is long.\nx = 1\n") == []
    assert of_python("x = 1  # noqa: E501\n#!/usr/bin/env python\n") == []


def test_the_first_line_of_a_docstring_is_a_sentence() -> None:
    cut = '"""Send the weights, which are in\nbfloat16, to the engines."""'
    assert of_python(cut) == [(1, "summary", "Send the weights, which are in")]
    assert of_python('"""Send the weights"""') == [(1, "summary", "Send the weights")]
    assert of_python('"""Send the weights.\n\nThey are in bfloat16."""') == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("The replica is started anew.", "anew"),
        ("A run goes on after a failure.", "goes on"),
        ("There are so many prompts.", "so many"),
        ("Tokens stand behind the prompt.", "behind"),
        ("The scores are beside the samples.", "beside"),
        ("The config.json says which layers are dense.", "says"),
        ("Experts are dealt over the ranks.", "dealt"),
        ("No replica of before is used.", "of before"),
    ],
)
def test_retired_phrases_in_every_kind_of_text(text: str, phrase: str) -> None:
    assert of_page(f"# Title\n\n{text}\n") == [(3, "retired", phrase)]
    assert of_page(f"| a | b |\n|---|---|\n| x | {text} |\n") == [(3, "retired", phrase)]
    assert of_python(f'"""{text}"""') == [(1, "retired", phrase)]
    assert of_python(f"# {text}\nx = 1\n") == [(1, "retired", phrase)]
    assert of_python(f'raise ValueError(f"{text} {{x}}")\n') == [(1, "retired", phrase)]
    assert rules(Path("run.yaml"), f"a: 1  # {text}\n") == [(1, "retired", phrase)]


@pytest.mark.parametrize(
    "text",
    [
        "The cluster is behind a proxy.",
        "A worker that was left behind is ended.",
        "At most no more than two are dropped.",
        "The error says which key is wrong.",
        "`megarl check` says which files are missing.",
        'Write "fix", not "mend".',
        "`mend` is a function.",
        "See docs/mend/anew.md and mend.anew().",
        "```text\ngoes on\n```",
        "<!-- goes on -->",
    ],
)
def test_accepted_phrases_quotations_and_code(text: str) -> None:
    assert of_page(text) == []


def test_short_strings_are_keys_and_values() -> None:
    assert of_python('choice = {"beside": "goes on"}\n') == []


def test_a_finding_in_the_middle_of_a_paragraph_has_its_own_line() -> None:
    assert of_page("One line.\nThe run goes on.\n") == [(2, "retired", "goes on")]


def test_every_retired_phrase_has_a_suggestion() -> None:
    assert all(RETIRED.values())


def test_the_command_prints_each_finding_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""

    page = tmp_path / "page.md"
    page.write_text("The run goes on.\n")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{page}:1: retired: goes on: continue, resume\n"
    assert findings([tmp_path], rules=["summary"]) == []

    with pytest.raises(SystemExit):
        main(["--rules", "nothing", str(tmp_path)])
    assert "opening, summary, retired" in capsys.readouterr().err


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A plain page.\n")
    subprocess.run([sys.executable, "-m", "tools.prose", tmp_path], cwd=ROOT, check=True)
