"""Paths that no file can have are answered like paths of files that are absent."""

from __future__ import annotations

import pytest

from megarl.cli.main import main

LONG = "a" * 300  # longer than a file system allows for a name
RUN = "configs/quickstart.yaml"


@pytest.mark.parametrize(
    "arguments",
    [
        [LONG],
        [RUN, f"algorithm={LONG}"],
        [RUN, f"model.path={LONG}"],
        [RUN, f"data.train_files=[{LONG}.parquet]"],
        [RUN, f"reward.functions=[{{path: {LONG}.py}}]"],
        [RUN, f"checkpoint.resume={LONG}"],
        [RUN, f"agent.environment={LONG}.py:Any"],
    ],
)
def test_a_name_that_is_too_long_is_no_failure_of_the_program(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--fast", *arguments]) in (0, 2)  # 0: not on this machine
    assert "failed while running" not in capsys.readouterr().err
