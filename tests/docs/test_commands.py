"""What a reader can type or copy from the pages works: commands and what they print, settings, code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from examples.quickstart.prepare import make_tokenizer
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import Overlong, PPOConfig, SFTConfig
from megarl.data.prompts import PromptDataset
from tests.docs.commands import COMMANDS, MARKS, QUICKSTART, ByHand, Executed, InTest, Make
from tests.docs.pages import PAGES, ROOT, Block, Command, blocks, commands, inline_commands

LANGUAGES = {"bash", "console", "text", "yaml", "python", "json", "{toctree}"}
TYPED = re.compile(r"^(\$ |(megarl|make|python|pip|docker|ray|torchrun|sbatch|srun|kubectl|curl|\.venv/bin/\w+|launch/\S+) )")
LIMIT_S = 900  # on a busy machine
READY = "--old-file=.venv/.ready"  # make takes the virtual environment as it is

BLOCKS = [block for page in PAGES for block in blocks(page)]
INLINE = [command for page in PAGES for command in inline_commands(page)]
NAMES = re.compile(r"make [a-z-]+|megarl [a-z]+|.* \.\.\.")  # of a command, said and not typed
FOUND = [
    *(command for block in BLOCKS for command in commands(block)),
    *(command for command in INLINE if not NAMES.fullmatch(command.text)),
]
EXECUTED = [text for text, entry in COMMANDS.items() if isinstance(entry, Executed)]


def test_every_block_says_what_it_is() -> None:
    assert len(BLOCKS) > 50
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [f"{block.place}: {block.mark}" for block in BLOCKS if block.mark not in (None, *MARKS)] == []


def test_what_a_failure_prints_is_compared_by_a_test() -> None:
    names = re.findall(r"<!-- page: (.*?) -->", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 10
    assert [name for name in names if f'"{name}"' not in sources] == []


def test_no_command_hides_in_a_block_of_text() -> None:
    """What a command printed may begin with its name, as in "megarl train: ..."."""
    lines = [(block, line) for block in BLOCKS if block.language == "text" for line in block.text.splitlines()]
    assert [f"{block.place}: {line}" for block, line in lines if TYPED.match(line) and not re.match(r"megarl [\w -]+: ", line)] == []


def test_every_command_is_run_by_a_test_or_marked() -> None:
    assert len(FOUND) > 30
    unknown = [f"{each.block.place}: {each.text}" for each in FOUND if each.text not in COMMANDS and each.block.mark is None]
    assert unknown == [], "give each an entry in tests/docs/commands.py, or its block a mark"


def test_commands_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    helped = subprocess.run([sys.executable, "-m", "megarl", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {f"make {target}" for target in targets} | {f"megarl {name}" for name in re.findall(r"^    ([a-z]+) ", helped, re.MULTILINE)}
    named = {" ".join(command.text.split()[:2]) for command in INLINE if command.text.startswith(("make ", "megarl "))}
    assert len(named) > 10
    assert named <= known


def test_the_table_has_no_command_that_is_on_no_page() -> None:
    assert set(COMMANDS) <= {each.text for each in FOUND}


@pytest.mark.parametrize("text", [text for text, entry in COMMANDS.items() if isinstance(entry, InTest)])
def test_the_test_that_runs_it_is_there(text: str) -> None:
    entry = COMMANDS[text]
    assert isinstance(entry, InTest)
    file, _, name = entry.test.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    assert name.partition("[")[0] in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert [mention for mention in entry.mentions if mention not in source] == []


def _by_hand() -> Iterator[Command]:
    yield from (each for each in FOUND if each.block.mark == "takes minutes" or isinstance(COMMANDS.get(each.text), ByHand))


@pytest.mark.parametrize("command", _by_hand(), ids=lambda command: command.text)
def test_what_takes_minutes_can_be_started(command: Command) -> None:
    """The program is there, and has the options."""
    _, *words = shlex.split(command.text)
    if words[:2] == ["install", "--no-deps"]:
        assert (ROOT / words[-1]).is_file()
        return
    file = ROOT / words[0] if words[0] != "-m" else (ROOT / words[1].replace(".", "/")).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def test_the_data_that_the_page_makes_are_data_of_a_run(tmp_path: Path) -> None:
    script = next(block for block in BLOCKS if block.page.name == "data.md" and block.language == "python")
    subprocess.run([sys.executable, "-c", script.text], cwd=tmp_path, check=True)
    prompts = PromptDataset([str(tmp_path / "my_prompts.parquet")], make_tokenizer(), max_prompt_length=64, overlong=Overlong.refuse)
    assert [prompts[99].messages[0]["content"], prompts[99].reward_model["ground_truth"]] == ["What is 99 + 1?", "100"]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.place)
def test_settings_on_the_pages_are_settings(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys exist and values have their type; what a fragment leaves out is nobody's mistake."""
    values: dict[str, Any] = yaml.safe_load(block.text)
    if not set(values) <= {"base", *PPOConfig.__dataclass_fields__}:
        pytest.skip("not a configuration of megarl")
    monkeypatch.chdir(ROOT)
    if "base" in values:
        values["base"] = str(ROOT / values["base"])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    problems = [_problems(kind, tmp_path / "run.yaml") for kind in (PPOConfig, SFTConfig)]
    assert [] in problems, problems[0]


def _problems(kind: type, file: Path) -> list[str]:
    try:
        load_config(kind, str(file))
    except ConfigError as error:
        return [problem for problem in error.problems if ": is missing;" not in problem]
    return []


class Ended(NamedTuple):
    status: int
    printed: str


class Clone:
    """A folder like a fresh clone, in which a reader types: its own configs and outputs, all else linked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in ROOT.iterdir():
            if path.name not in (".git", ".venv", "configs", "outputs", "build"):
                (folder / path.name).symlink_to(path)
        (folder / ".venv").symlink_to(sys.prefix)
        shutil.copytree(ROOT / "configs", folder / "configs")
        warm_up = folder / "configs" / "quickstart_sft.yaml"
        text = warm_up.read_text()
        for long, short in ((r"(total|warmup)_steps: \d+", r"\1_steps: 1"), ("sft_train.parquet", "sft_validation.parquet")):
            text, changes = re.subn(long, short, text)
            assert changes > 0
        warm_up.write_text(text)

    def type(self, text: str) -> Ended:
        """`megarl` and `python` are those of this test."""
        shell = f'export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD" COLUMNS=140; megarl() {{ python -m megarl "$@"; }}; {text}'
        # What the make that runs the tests was told is not for those that are typed here.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        ended = subprocess.run(
            ["bash", "-c", shell],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def quickstart(clone: Clone) -> Ended:
    entry = COMMANDS[QUICKSTART]
    assert isinstance(entry, Executed)
    return clone.type(f"{QUICKSTART} {entry.more} {READY}")


def test_quickstart_stages(quickstart: Ended, clone: Clone) -> None:
    """Each stage is printed as the command that it is, and leaves what the page says."""
    assert quickstart.status == 0, quickstart.printed
    for stage in ("-m examples.quickstart.prepare", "-m megarl sft configs/", "-m megarl train configs/", "-m megarl plot outputs/"):
        assert f"$ python {stage}" in quickstart.printed
    page = next(page for page in PAGES if page.name == "quickstart.md").read_text()
    left = [name for row in re.findall(r"^\| (`.+) \|.*\|$", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    assert len(left) > 5
    assert [name for name in left if not (clone.folder / "outputs" / "quickstart" / name).exists()] == []


@pytest.mark.parametrize("text", [text for text in EXECUTED if text != QUICKSTART])
def test_commands_do_what_the_pages_say(text: str, quickstart: Ended, clone: Clone) -> None:
    entry = COMMANDS[text]
    assert isinstance(entry, Executed)
    typed = text
    for name, value in entry.given:
        assert name in typed
        typed = typed.replace(name, value)
    ended = clone.type(f"{typed} {entry.more}")
    assert ended.status == entry.status, ended.printed
    for command in FOUND:
        if command.text == text and command.output is not None:
            for part in re.split(r"^\.\.\.\n", command.output, flags=re.MULTILINE):
                assert part.strip() in ended.printed, f"{command.block.place}: it prints\n{ended.printed}"


@pytest.mark.parametrize("text", [text for text, entry in COMMANDS.items() if isinstance(entry, Make)])
def test_make_runs_what_the_pages_say(text: str, clone: Clone) -> None:
    entry = COMMANDS[text]
    assert isinstance(entry, Make)
    ended = clone.type(f"{text} --dry-run {'--always-make' if entry.sets_up else READY}")
    assert ended.status == 0, ended.printed
    assert [words for words in entry.prints if words not in ended.printed] == []
