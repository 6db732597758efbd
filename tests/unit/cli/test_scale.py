"""`megarl scale`: what is asked of a run, and of what nothing can be asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.load import dump_config
from megarl.config.schema import DataConfig, ModelConfig, PlacementConfig, PlacementStrategy, PPOConfig
from megarl.tracking.run_files import SCALE_FILE, take_request
from tests.unit.cli.test_status import write
from tests.unit.tracking.test_status import STATUS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run that has one replica."""
    write(tmp_path)
    dump(tmp_path, PlacementStrategy.split_collocate)
    return tmp_path


def dump(folder: Path, strategy: PlacementStrategy) -> None:
    config = PPOConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(train_files=["a.parquet"]),
        placement=PlacementConfig(strategy=strategy),
    )
    dump_config(config, folder / "config.yaml")


def test_a_run_is_asked_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert take_request(folder) is None
    assert main(["scale", str(folder), "--replicas", "3"]) == 0
    assert "requested 3 replicas instead of 1; the run applies this" in capsys.readouterr().out
    assert (take_request(folder), take_request(folder)) == (3, None)
    for count in ("3", "1"):  # the run has not said yet that it has three
        assert main(["scale", str(folder), "--replicas", count]) == 0
    assert take_request(folder) == 1


def test_what_cannot_be_asked_is_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["scale", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert not (folder / SCALE_FILE).exists()
        return said

    assert "--replicas 0: must be in [1, 10000]" in refused(str(folder), "--replicas", "0")
    assert "there is no such folder" in refused(str(folder / "nowhere"), "--replicas", "2")
    dump(folder, PlacementStrategy.hybrid)
    assert "with placement.strategy=hybrid the engines share devices with other roles" in refused(
        str(folder), "--replicas", "2"
    )
    write(folder, replace(STATUS, state="ended"))
    assert f"`megarl report {folder}` shows it. To resume with 2 replicas: rollout.num_replicas=2" in refused(
        str(folder), "--replicas", "2"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[3]", "num_replicas is None"),
        ('{"num_replicas": true}', "is True, but must be in"),
        ('{"num_replicas": 0}', "is 0"),
    ],
)
def test_a_file_that_says_no_number_is_refused_once(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / SCALE_FILE).write_text(content)
    with pytest.raises(ValueError, match=f"scale.json: .*{says}") as raised:
        take_request(tmp_path)
    assert "\n" not in str(raised.value)
    assert take_request(tmp_path) is None
