"""Who may be a driver: not one of several processes that a launcher has started."""

import pytest

from megarl.cli.main import main

OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize(
    "given", [OF_TORCHRUN, {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}]
)
def test_a_process_of_torchrun_is_told_what_to_run(
    command: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main([command, "run.yaml"]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert (
        f"as one of {given['WORLD_SIZE']} (WORLD_SIZE), but `megarl train` starts its own processes" in said
    )
    assert "torchrun --nproc-per-node 1 -m megarl launch CONFIG" in said


def test_one_process_alone_may_drive(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["sft", "no_such_file.yaml"]) == 2
    assert "no_such_file.yaml" in capfd.readouterr().err
