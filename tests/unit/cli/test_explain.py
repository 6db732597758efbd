"""`megarl explain`: a key's description, and the file that sets it in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.inspect.config import explain
from megarl.cli.main import main
from megarl.config.schema import SCHEMAS
from megarl.config.values import schema_keys


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["explain", *arguments]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_a_key_has_its_type_range_default_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "actor.optim.min_lr")
    assert lines[0] == "actor.optim.min_lr"
    assert "type: a number, at least 0" in lines
    assert "default: 0" in lines
    assert "when to set it: `sglang` on GPUs" in explained(capsys, "rollout.engine")
    assert any(line.startswith("only with `decay` ") for line in lines)

    lines = explained(capsys, "algorithm.advantage.estimator")
    assert "only in runs of kind: ppo" in lines
    assert any(line.startswith("grpo: ") for line in lines)
    assert "required" in explained(capsys, "model.path")


def test_a_section_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "actor.optim")
    assert any(line.startswith("actor.optim.lr: ") for line in lines)
    assert any(line.startswith("type: a string") for line in explained(capsys, "reward.functions[].path"))
    assert any(line.startswith("type: a string") for line in explained(capsys, "teachers[].path"))


@pytest.mark.parametrize("kind", list(SCHEMAS))
def test_every_key_can_be_explained(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for key in schema_keys(SCHEMAS[kind]):
        explain(key, None, [])
        assert len(capsys.readouterr().out.splitlines()) > 1, key


def test_a_value_comes_from_the_last_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "run.yaml").write_text(
        "base: configs/quickstart.yaml\nalgorithm: grpo\nrollout: {n: 6}\n"
    )
    lines = explained(capsys, "rollout.n", str(file), "rollout.n=3")
    assert lines[-4:-1] == ["value: 3", "from: command line", f"replaces: 6 of {file}"]
    assert lines[-1].endswith(" of configs/quickstart.yaml")
    lines = explained(capsys, "algorithm.advantage.estimator", str(file))
    assert lines[-2:] == ["value: grpo", "from: configs/algorithm/grpo.yaml"]
    assert explained(capsys, "trainer.phase_time_limit_s", str(file))[-1] == "from: the default"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("data.max_image_mb", "a file has at most 32 MiB"),
        ("reward.judges[0].seed", "it is now reward.judges[].request.seed"),
        ("agent.harness.function.path", "it is one text now: agent.harness.function=FILE.py:NAME"),
        ("agent.tools[0].name", "a tool is one text now: agent.tools=[FILE.py:NAME]"),
        ("reward.functions[].name", "it is part of the path now: FILE.py:NAME"),
        (
            "rollout.sglang.deterministic",
            "it is now rollout.sglang.server_args.enable_deterministic_inference",
        ),
    ],
)
def test_a_key_of_an_earlier_version_says_what_to_do(
    key: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", key]) == 2
    assert f"{key}: was a key of an earlier version; {said}" in capsys.readouterr().err


def test_an_unknown_key_has_the_hint_of_the_loader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "actor.optm.lr"]) == 2
    assert "did you mean actor.optim?" in capsys.readouterr().err
    assert main(["explain", "actor_rollout_ref.rollout.n"]) == 2
    assert "rollout.n" in capsys.readouterr().err
    assert main(["explain", "algorithm.kl", "configs/quickstart_sft.yaml"]) == 2
    assert "belongs to kind: ppo" in capsys.readouterr().err
