"""Former commands: what they are now, and that their command lines do the same."""

from __future__ import annotations

import pytest

from megarl.cli.commands import COMMANDS
from megarl.cli.main import (
    FORMER,
    build_parser,
    commands_of,
    in_argparse_order,
    in_current_words,
    main,
    message,
)


@pytest.mark.parametrize(
    ("typed", "now"),
    [
        ("sft run.yaml a.b=1 --verbose", "train kind=sft run.yaml a.b=1 --verbose"),
        ("plan run.yaml --output x.svg", "check --plan run.yaml --output x.svg"),
        ("plan run.yaml --simulate --from outputs/x", "check run.yaml --simulate --from outputs/x"),
        ("rehearse run.yaml --ranks 0,8", "check --dry-run run.yaml --ranks 0,8"),
        ("calibrate --output mine.yaml --device cpu", "tune --calibrate mine.yaml --device cpu"),
        ("calibrate run.yaml --output=mine.yaml", "tune run.yaml --calibrate=mine.yaml"),
        ("submit run.yaml --address http://HEAD:8265", "train run.yaml --submit http://HEAD:8265"),
        ("submit run.yaml a.b=1", "train --submit auto run.yaml a.b=1"),
        ("plot outputs/run", "report --png outputs/run"),
        ("score a.b=1 run.yaml rows.jsonl", "eval a.b=1 run.yaml --rows rows.jsonl"),
        (
            "score run.yaml --reward.time_limit_s 2 rows.jsonl",
            "eval run.yaml --reward.time_limit_s 2 --rows rows.jsonl",
        ),
        ("score --ground-truth run.yaml rows.jsonl", "eval --ground-truth run.yaml --rows rows.jsonl"),
        ("schema", "config --schema"),
        ("schema sft", "config --schema sft"),
        (
            "convert hf-to-megatron --input A --output B --dtype float16",
            "convert A B --to megatron --dtype float16",
        ),
        ("convert megatron-to-hf --role actor --output=B --input A", "convert A B --to hf --role actor"),
        ("convert merge-adapter --input A --base C --output B", "convert A B --base C"),
        ("convert hf-to-megatron --in A --out=B --tensor 2", "convert A B --to megatron --tensor 2"),
        ("convert inspect --json A", "convert --json A --inspect"),
        ("convert verify A B", "convert A B --verify"),
        ("plan --help", "check --help"),
        ("convert verify --help", "convert --help"),
        ("calibrate -h", "tune --help"),
    ],
)
def test_a_former_command_line_is_one_of_a_present_command(typed: str, now: str) -> None:
    words = in_current_words(typed.split())
    assert words == now.split()
    if "--help" not in words:
        parsers = commands_of(build_parser())
        parsed, unknown = build_parser().parse_known_args(in_argparse_order(words, parsers))
        assert unknown == []
        assert parsed.command == words[0]


def test_every_former_command_has_a_present_one() -> None:
    assert len(FORMER) == 8
    assert not FORMER.keys() & COMMANDS.keys()
    assert {now.split()[0] for now, _ in FORMER.values()} <= COMMANDS.keys()


def test_the_message_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "algorithm"]) == 0
    out, err = capsys.readouterr()
    assert err == "`megarl schema` is now `megarl config --schema`\n"
    assert main(["config", "--schema", "algorithm"]) == 0
    assert capsys.readouterr().out == out


def test_a_simulation_is_a_part_of_its_own() -> None:
    assert message(["plan", "x.yaml"]) == "`megarl plan` is now `megarl check --plan`"
    assert message(["plan", "x.yaml", "--simulate"]) == "`megarl plan` is now `megarl check --simulate`"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["calibrate", "run.yaml"], "megarl calibrate: --output is required, which is --calibrate now\n"),
        (
            ["convert", "merge-adapter", "--input", "A", "--output", "B"],
            "megarl convert: --base is required\n",
        ),
        (["score", "run.yaml"], "megarl score: the configuration and the file of responses are required\n"),
    ],
)
def test_a_required_argument_is_still_required(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    assert capsys.readouterr().err.endswith(said)


def test_another_kind_of_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "configs/quickstart.yaml", "kind=ppo"]) == 2
    assert "megarl sft: kind=ppo is another kind of run; use `megarl train`" in capsys.readouterr().err


def test_a_file_without_its_kind_is_fine_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    """The former `sft` needed no `kind` in the file, and refused other keys."""
    assert main(["sft", "configs/quickstart.yaml"]) == 2
    assert "belongs to kind: ppo; this file has kind: sft" in capsys.readouterr().err
