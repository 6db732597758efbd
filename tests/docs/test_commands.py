"""What a reader can type or copy from the pages works: commands and what they print, settings, code."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megarl.cli.main import FORMER, build_parser, commands_of, main
from megarl.config.load import load_config, schema_of
from megarl.config.schema import DataConfig, LossyText
from megarl.data.prompts import PromptDataset
from megarl.recipes.quickstart.prepare import make_tokenizer
from tests import fork_server
from tests.docs.clone import Clone, Ended
from tests.docs.commands import COMMANDS, MARKS, QUICKSTART, SAME_FILES, ByHand, Executed, InTest, Make
from tests.docs.pages import (
    OTHER_PROGRAM,
    PAGES,
    ROOT,
    WITH,
    Command,
    blocks,
    commands,
    inline_commands,
)

LANGUAGES = {"bash", "console", "text", "yaml", "python", "json", "{toctree}", "{csv-table}"}
TYPED = re.compile(
    r"^(\$ |(megarl|make|python|pip|docker|ray|torchrun|sbatch|srun|kubectl|curl|\.venv/bin/\w+|launch/\S+) )"
)

BLOCKS = [block for page in PAGES for block in blocks(page)]
INLINE = [command for page in PAGES for command in inline_commands(page)]
# Of a command, said and not typed, also with its options and what stands for values.
NAMES = re.compile(r"make [a-z-]+|megarl [a-z]+( --[a-z-]+| [A-Z]+)*|.* \.\.\.")
FOUND = [
    *(command for block in BLOCKS for command in commands(block)),
    *(command for command in INLINE if not NAMES.fullmatch(command.text)),
]
# Their files are those of the quickstart's own run, whose check is not shortened.
PRESET_RUN = re.compile(r"megarl train configs/quickstart.yaml algorithm=\w+ trainer.output_dir=\S+")
EXECUTED = [text for text, entry in COMMANDS.items() if isinstance(entry, Executed)]


def test_every_block_says_what_it_is() -> None:
    assert len(BLOCKS) > 50
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    marked = [block for block in BLOCKS if block.mark is not None]
    of_yaml = [block for block in marked if block.mark.startswith(WITH) or block.mark == OTHER_PROGRAM]
    assert [block.place for block in of_yaml if block.language != "yaml"] == []
    others = [block for block in marked if block not in of_yaml]
    assert [f"{block.place}: {block.mark}" for block in others if block.mark not in MARKS] == []


def test_what_a_failure_prints_is_compared_by_a_test() -> None:
    names = re.findall(
        r"<!-- page: (.*?) -->", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    )
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 10
    assert [name for name in names if f'"{name}"' not in sources] == []


def test_no_command_hides_in_a_block_of_text() -> None:
    """What a command printed may begin with its name, as in "megarl train: ..."."""
    lines = [
        (block, line) for block in BLOCKS if block.language == "text" for line in block.text.splitlines()
    ]
    assert [
        f"{block.place}: {line}"
        for block, line in lines
        if TYPED.match(line) and not re.match(r"megarl [\w -]+: ", line)
    ] == []


def test_every_command_is_run_by_a_test_or_marked() -> None:
    assert len(FOUND) > 30
    unknown = [
        f"{each.block.place}: {each.text}"
        for each in FOUND
        if each.text not in COMMANDS and each.block.mark is None
    ]
    assert unknown == [], "give each an entry in tests/docs/commands.py, or its block a mark"


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    helped = capsys.readouterr().out
    names = [*re.findall(r"^    ([a-z]+)\b", helped, re.MULTILINE), *FORMER]
    known = {*(f"make {target}" for target in _targets()), *(f"megarl {name}" for name in names)}
    named = {
        " ".join(command.text.split()[:2])
        for command in INLINE
        if command.text.startswith(("make ", "megarl "))
    }
    assert len(named) > 10
    assert named <= known


def test_options_that_are_named_exist() -> None:
    helped = {name: parser.format_help() for name, parser in commands_of(build_parser()).items()}
    named = [command.text.split() for command in INLINE if NAMES.fullmatch(command.text)]
    options = [(name, word) for _, name, *words in named for word in words if word.startswith("--")]
    assert len(options) > 10
    assert [
        f"megarl {name} {word}" for name, word in options if not re.search(rf"{word}\b(?!-)", helped[name])
    ] == []


def test_the_table_has_no_command_that_is_on_no_page() -> None:
    assert set(COMMANDS) <= {each.text for each in FOUND}


@pytest.mark.parametrize("text", [text for text, entry in COMMANDS.items() if isinstance(entry, InTest)])
def test_the_test_that_runs_it_is_there(text: str) -> None:
    entry = COMMANDS[text]
    assert isinstance(entry, InTest)
    file, _, name = entry.test.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    assert name.partition("[")[0] in {
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
    }
    written = "".join(source.split())  # the formatter may have put a line break anywhere
    assert [mention for mention in entry.mentions if "".join(mention.split()) not in written] == []


def _by_hand() -> Iterator[Command]:
    yield from (
        each
        for each in FOUND
        if each.block.mark == "takes minutes" or isinstance(COMMANDS.get(each.text), ByHand)
    )


@pytest.mark.parametrize("command", _by_hand(), ids=lambda command: command.text)
def test_what_takes_minutes_can_be_started(command: Command) -> None:
    """The program is there, and has the options; what is installed is there."""
    words = [word for word in shlex.split(command.text) if not re.match(r"[A-Z_]+=", word)]
    if words[0] == "make":
        assert words[1] in _targets()
        return
    if words[:2] in (["megarl", "train"], ["megarl", "check"]):
        overrides = [word for word in words[3:] if "=" in word]
        load_config(schema_of(str(ROOT / words[2]), overrides), ROOT / words[2], overrides)
        return
    if words[0] == "megarl":
        build_parser().parse_args(words[1:])
        return

    if words[0].startswith(".venv/") or not (ROOT / words[0]).is_file():
        words = words[1:]
    if words[:2] == ["-m", "venv"]:
        return
    if words[0] in ("install", "wheel"):
        what = words[-1].replace("$(ls dist/megarl-*.whl)", "megarl")
        if "==" in what:
            extras = metadata("megarl").get_all("Requires-Dist")
            assert what in [each.partition(";")[0].strip() for each in extras]
        elif not ((ROOT / what).is_file() or (ROOT / what / "setup.py").is_file()):
            wanted = Requirement(what)
            assert wanted.name in ("megarl", "sglang")
            assert wanted.extras <= set(metadata("megarl").get_all("Provides-Extra"))
        return

    if words[:2] == ["-m", "pytest"]:
        assert [word for word in words[2:] if not (ROOT / word).exists()] == []
        return

    file = ROOT / words[0] if words[0] != "-m" else (ROOT / words[1].replace(".", "/")).with_suffix(".py")
    if not file.is_file():
        file = file.with_suffix("") / "__main__.py"
    source = file.read_text(encoding="utf-8")
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def test_the_data_that_the_page_makes_are_data_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = next(block for block in BLOCKS if block.page.name == "data.md" and block.language == "python")
    monkeypatch.chdir(tmp_path)
    exec(script.text, {"__name__": "__main__"})
    prompts = PromptDataset(
        [str(tmp_path / "my_prompts.parquet")], make_tokenizer(), DataConfig(lossy=LossyText.allow)
    )
    assert [prompts[99].messages[0]["content"], prompts[99].reward_model["ground_truth"]] == [
        "What is 99 + 1?",
        "100",
    ]


def test_quickstart_stages(quickstart: Ended, clone: Clone) -> None:
    """Each stage is printed as the command that it is, and leaves what the page says."""
    assert quickstart.status == 0, quickstart.printed
    made = ("-m megarl.recipes.quickstart.prepare", "-m megarl train configs/")
    for stage in (*made, "-m megarl report outputs/"):
        assert f"$ python {stage}" in quickstart.printed
    page = next(page for page in PAGES if page.name == "quickstart.md").read_text()
    left = [
        name
        for row in re.findall(r"^\| (`.+) \|.*\|$", page, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    ]
    assert len(left) > 5
    assert [name for name in left if not (clone.folder / "outputs" / "quickstart" / name).exists()] == []


@pytest.mark.parametrize("text", [text for text in EXECUTED if text != QUICKSTART])
def test_commands_do_what_the_pages_say(
    text: str,
    quickstart: Ended,
    clone: Clone,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = COMMANDS[text]
    assert isinstance(entry, Executed)
    typed = text

    for name, value in entry.given:
        assert name in typed
        typed = typed.replace(name, value)

    # A dry run starts its processes before torch is imported.
    is_light = text.startswith("megarl check ") and "--dry-run" not in text
    with fork_server.spawned() if is_light else nullcontext():
        ended = clone.call(f"{typed} {entry.more}", capsys, monkeypatch)
    assert ended.status == entry.status, ended.printed

    for command in FOUND:
        if command.text == text and command.output is not None:
            printed = _without_trailing_blanks(ended.printed)
            for part in re.split(r"^\.\.\.\n", command.output, flags=re.MULTILINE):
                assert part.strip() in printed, f"{command.block.place}: it prints\n{printed}"


def _without_trailing_blanks(text: str) -> str:
    """Tables are padded to their width; pages leave that out."""
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [text for text in COMMANDS if re.match(r"megarl (train|sft) configs/", text) and text not in EXECUTED],
)
def test_runs_on_the_pages_are_good(
    text: str,
    quickstart: Ended,
    clone: Clone,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of these commands are made of another configuration by the tests that the table names."""
    _, _, *arguments = text.split()
    more = SAME_FILES.more if PRESET_RUN.fullmatch(text) else ""
    with fork_server.spawned():
        ended = clone.call(" ".join(["megarl check", *arguments, more]), capsys, monkeypatch)
    assert ended.status == 0, ended.printed


@pytest.mark.parametrize("text", [text for text, entry in COMMANDS.items() if isinstance(entry, Make)])
def test_make_runs_what_the_pages_say(text: str, clone: Clone) -> None:
    entry = COMMANDS[text]
    assert isinstance(entry, Make)
    ended = clone.type(f"{text} --dry-run {'--always-make' if entry.sets_up else ''}")
    assert ended.status == 0, ended.printed
    assert [words for words in entry.prints if words not in ended.printed] == []
