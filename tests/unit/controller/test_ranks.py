"""What is refused under torchrun before any rank meets another; tests/integration/test_launch.py runs them."""

import pytest

from megarl.cli.main import main
from megarl.controller import ranks


@pytest.fixture(autouse=True)
def _of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_another_number_of_processes_than_the_model_has_ranks_is_refused() -> None:
    assert ranks.launched()
    with pytest.raises(ValueError, match=r"started 3 processes, but actor.parallel has 2 ranks .* make --nnodes x --nproc-per-node"):
        ranks.join(2).__enter__()


def test_ppo_starts_its_own_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml"]) == 2
    assert "run launch/torchrun.sh under torchrun" in capfd.readouterr().err
