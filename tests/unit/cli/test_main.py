"""The dispatcher: which subcommand is started with what, and how each way to end becomes an exit status."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from megarl.algorithms.groups import refuse_unusable
from megarl.cli.commands import COMMANDS, FIRST, GROUPS
from megarl.cli.main import FORMER, build_parser, commands_of, in_argparse_order, main
from megarl.cli.run.context import run_context_of
from megarl.config.schema import PPOConfig
from megarl.controller.errors import PhaseTimeoutError
from megarl.machine.errors import ConfigError
from megarl.machine.reaper import OWNER
from megarl.trainers.monitor import Position


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., int]], None]:
    """Replaces a subcommand's module with a stub, or that of a part, named as in `check --plan`."""

    def install(name: str, run: Callable[..., int]) -> None:
        command, _, part = name.partition(" --")
        if COMMANDS[command].first is not None:  # it would read the configuration
            module_name, _, first = COMMANDS[command].first.partition(":")
            monkeypatch.setattr(importlib.import_module(module_name), first, lambda: None)
        place = COMMANDS[command].parts[part] if part else COMMANDS[command].module
        name, _, function = place.partition(":")
        if function:  # the module has other commands
            monkeypatch.setattr(importlib.import_module(name), function, run)
            return
        module = ModuleType(name)
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)

    return install


def test_runs_get_the_file_and_the_overrides(
    command: Callable[[str, Callable[..., int]], None],
) -> None:
    calls = []
    command("train", lambda **given: calls.append(given) or 0)
    assert main(["train", "x.yaml", "a.b=1", "--verbose", "algorithm=grpo"]) == 0
    assert calls == [{"config_path": "x.yaml", "overrides": ["a.b=1", "algorithm=grpo"], "verbose": True}]


@pytest.mark.parametrize(
    "arguments",
    [["b=2", "a.c=1", "x.yaml", "--role", "critic"], ["x.yaml", "--role", "critic", "b=2", "a.c=1"]],
)
def test_overrides_may_stand_anywhere(
    arguments: list[str],
    command: Callable[[str, Callable[..., int]], None],
) -> None:
    calls = []

    def run(config_path: str, overrides: list[str], role_name: str, ranks: str, json_path: str | None) -> int:
        calls.append((config_path, overrides, role_name, ranks, json_path))
        return 0

    command("check --dry_run", run)
    assert main(["check", "--dry-run", *arguments, "--json", "out=1.json"]) == 0
    assert calls == [("x.yaml", ["b=2", "a.c=1"], "critic", "distinct", "out=1.json")]


@pytest.mark.parametrize(
    "arguments", [["--b.c=2", "--device=cpu", "x.yaml"], ["x.yaml", "--b.c", "2", "--device=cpu"]]
)
def test_overrides_may_be_written_as_options(
    arguments: list[str], command: Callable[[str, Callable[..., int]], None]
) -> None:
    calls = []
    command("train", lambda **given: calls.append(given) or 0)
    assert main(["train", *arguments, "--verbose"]) == 0
    assert calls == [{"config_path": "x.yaml", "overrides": ["b.c=2", "device=cpu"], "verbose": True}]


@pytest.mark.parametrize(
    ("typed", "ordered"),
    [
        (
            ["check", "a=1", "x.yaml", "--output", "f=1.svg", "b=2"],
            ["check", "--output", "f=1.svg", "x.yaml", "a=1", "b=2"],
        ),
        (["check", "a=1", "--fast", "x.yaml"], ["check", "--fast", "x.yaml", "a=1"]),
        (
            ["check", "x.yaml", "--actor.optim.lr", "1", "--ranks", "0"],
            ["check", "--ranks", "0", "x.yaml", "actor.optim.lr=1"],
        ),
        # An option without its value must not take the configuration for it.
        (["check", "x.yaml", "--output"], ["check", "x.yaml", "--output"]),
        (["status", "--watch", "x=1"], ["status", "--watch", "x=1"]),  # takes no overrides: nothing is moved
        (["nothing", "a=1", "x"], ["nothing", "a=1", "x"]),
        ([], []),
    ],
)
def test_arguments_are_reordered_for_argparse(typed: list[str], ordered: list[str]) -> None:
    assert in_argparse_order(typed, commands_of(build_parser())) == ordered


def test_a_submitted_run_is_not_owned_by_this_process(
    command: Callable[[str, Callable[..., int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job continues on its cluster when this process ends."""
    # Set in this process if an earlier test started Ray in it.
    monkeypatch.delenv(OWNER, raising=False)
    calls = []

    def submit(config_path: str, overrides: list[str], address: str) -> int:
        calls.append((config_path, overrides, address, OWNER in os.environ))
        return 7

    command("train --address", submit)
    assert main(["train", "x.yaml", "--submit", "http://HEAD:8265", "a.b=1"]) == 7
    assert main(["submit", "x.yaml", "--address=http://HEAD:8265"]) == 7
    assert main(["submit", "x.yaml"]) == 7
    assert calls == [
        ("x.yaml", ["a.b=1"], "http://HEAD:8265", False),
        ("x.yaml", [], "http://HEAD:8265", False),
        ("x.yaml", [], "auto", False),
    ]
    assert main(["train", "x.yaml", "--submit", "auto", "--verbose"]) == 2
    assert "--verbose does not apply to --submit; remove it" in capsys.readouterr().err


def test_a_part_gets_its_options_and_its_status_is_ours(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command("report --png", lambda run_dirs: 0 if run_dirs == ["outputs/x"] else 2)
    assert main(["report", "outputs/x", "--png"]) == 0
    assert main(["report", "--png", "outputs/y"]) == 2
    assert main(["report", "--png", "outputs/x", "--port", "80"]) == 2
    assert capsys.readouterr().err == "megarl report: --port does not apply to --png; remove it\n"


def _fail(error: BaseException) -> Callable[..., int]:
    def run(config_path: str, overrides: list[str], verbose: bool = False) -> int:
        raise error

    return run


def test_errors_that_the_user_can_fix_have_status_2(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command("train", _fail(ConfigError("x.yaml", ["trainer.seed: is wrong"])))
    assert main(["train", "x.yaml"]) == 2
    assert capsys.readouterr().err == "megarl train: x.yaml: 1 problem\n  - trainer.seed: is wrong\n"


def test_a_value_error_of_megarl_is_the_users_and_one_of_a_library_is_not(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    from megarl.controller.resource_pool import RayResourcePool

    command("train", lambda **given: RayResourcePool([]))  # type: ignore[arg-type, return-value]
    assert main(["train", "x.yaml"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    command("train", lambda **given: int("many"))
    assert main(["train", "x.yaml"]) == 1
    err = capsys.readouterr().err
    assert "invalid literal for int()" in err
    assert err.endswith("megarl train: failed at run time; the cause is shown above\n")


def test_failures_and_interrupts(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command("train", _fail(RuntimeError("a worker died")))
    assert main(["train", "x.yaml"]) == 1
    assert "RuntimeError: a worker died" in capsys.readouterr().err
    command("train", _fail(KeyboardInterrupt()))
    assert main(["train", "x.yaml"]) == 130
    assert capsys.readouterr().err == "megarl train: interrupted\n"


@pytest.mark.parametrize("arguments", [["fly"], ["train"], ["report"]])
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: megarl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "x.yaml", "--epochs", "3"],
            "unrecognized arguments: --epochs; write settings as key=value",
        ),
        (
            ["scale", "outputs/x", "--replicas", "2", "--style", "dark"],
            "unrecognized arguments: --style dark\n",
        ),
        (["check"], "the following arguments are required: CONFIG\n"),
        (["eval"], "the following arguments are required: MODEL\n"),
    ],
)
def test_a_wrong_command_line_shows_the_usage_of_its_command(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: megarl {arguments[0]} ")
    assert said in err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    names = [line.split()[0] for line in out.splitlines() if re.match(r" {4}\w", line)]
    assert names == list(COMMANDS)
    assert [line.rstrip(":") for line in out.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)
    assert "six commands are enough: init, check, train, eval, generate and report.\n" in out
    assert set(FIRST) < set(names)
    assert not set(FORMER) & set(names)
    assert max(map(len, out.splitlines())) <= 101


def test_a_workers_failure_is_shown_without_the_drivers_stack(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command("train", _fail(PhaseTimeoutError("critic", "values", 5.0, [])))
    assert main(["train", "x.yaml"]) == 1
    said = capsys.readouterr().err
    assert "values" in said
    assert "Traceback" not in said


def test_what_the_user_can_mend_in_the_middle_of_a_run_gets_the_page_too(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error is a reward that is NaN. The page names its sample, the step, and where to look."""

    def run(config_path: str, overrides: list[str], verbose: bool) -> int:
        with run_context_of(PPOConfig()) as context:
            context.output_dir = tmp_path
            context.position = Position(step=3, phases=["step", "adv"])
            refuse_unusable(
                "the sum of token_level_rewards",
                torch.tensor([0.0, math.nan]),
                np.array(["0-1", "0-2"], dtype=object),
            )
        return 0

    command("train", run)
    assert main(["train", "x.yaml"]) == 2
    page = capsys.readouterr().err.partition("==== megarl train failed")[2]
    assert "nan for 1 of 2 samples (uid 0-2)" in page
    assert "when    step 3, phase adv" in page
    assert (tmp_path / "failure.txt").exists()


def test_check_answers_the_parts_that_are_asked_for(
    command: Callable[[str, Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """They run in one order, and the worst of their statuses counts."""
    calls: list[tuple[object, ...]] = []

    def plan(config_path: str, overrides: list[str], output: str | None) -> int:
        calls.append(("plan", config_path, overrides, output))
        return 0

    def doctor(config_path: str, overrides: list[str], as_document: bool = False) -> int:
        calls.append(("doctor", config_path, overrides))
        return 2

    def dry_run(
        config_path: str, overrides: list[str], role_name: str, ranks: str, json_path: str | None
    ) -> int:
        calls.append(("dry run", config_path, overrides, role_name, ranks, json_path))
        return 0

    def simulate(config_path: str, overrides: list[str], output: str | None, run_dir: str | None) -> int:
        calls.append(("simulate", config_path, overrides, output, run_dir))
        return 0

    for name, part in (("plan", plan), ("machine", doctor), ("dry_run", dry_run), ("simulate", simulate)):
        command(f"check --{name}", part)
    run = "configs/quickstart.yaml"
    given = (run, ["trainer.seed=3"])

    options = ["--plan", "--machine", "--ranks", "0,1", "--output", "x.svg"]
    assert main(["check", run, "--dry-run", "trainer.seed=3", *options]) == 2
    assert calls == [
        ("plan", *given, "x.svg"),
        ("doctor", *given),
        ("dry run", *given, "actor", "0,1", None),
    ]

    calls.clear()
    assert main(["check", "--simulate", "--from", "outputs/x", run, "trainer.seed=3"]) == 0
    assert calls == [("simulate", *given, None, "outputs/x")]

    # Without a part, the command itself checks.
    calls.clear()
    assert main(["check", "--fast", run, "trainer.seed=x"]) == 2
    assert "trainer.seed: is 'x'" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--output", "x.svg"], "--output requires --plan or --simulate"),
        (["--output", "x.svg", "--plan", "--simulate"], "--output applies to --plan and to --simulate"),
        (["--plan", "--lengths", "500"], "--lengths requires --simulate"),
        (["--ranks", "0"], "--ranks requires --dry-run"),
        (["--plan", "--json", "x.json"], "--json requires --dry-run"),
        (["--fast", "--machine"], "--fast does not apply to --machine"),
    ],
)
def test_an_option_of_a_part_that_is_not_asked_for_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "configs/quickstart.yaml", *options]) == 2
    assert said in capsys.readouterr().err


def test_replay_names_a_damaged_line_of_the_metrics_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"base: {Path('configs/quickstart.yaml').absolute()}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/grad_norm": 1.0}\n[1]\n')
    assert main(["replay", str(tmp_path), "1"]) == 2
    assert f"{tmp_path}/metrics.jsonl, line 2: expected an object with an integer 'step'" in (
        capsys.readouterr().err
    )

    # An unfinished last line, which a kill leaves, is no damage.
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/grad_norm": 1.0}\n{"step"')
    assert main(["replay", str(tmp_path), "1"]) == 2
    assert "metrics.jsonl" not in capsys.readouterr().err
