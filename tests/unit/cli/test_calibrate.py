"""`megarl tune --calibrate` on a CPU. tests/soak measures SGLang too."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.plan.step_time.device import load_device, sourced_keys
from tests import fork_server

# Lowest and highest sensible value of each measured key, far apart, since other tests use the same cores.
BOUNDS = {
    "peak_tflops.float32": (1e-4, 10),
    "peak_tflops.bfloat16": (1e-5, 100),
    "memory_gb": (0.1, 10_000),
    "memory_gb_s": (0.01, 1000),
    "devices_per_node": (2, 8),
    "within_node.gb_s": (1e-4, 1000),
    "within_node.latency_us": (0, 1e6),
    "host_gb_s": (0.01, 1000),
    "host_memory_gb": (0.5, 100_000),
    "storage_gb_s": (1e-4, 1000),
    "efficiency.gemm": (1e-3, 1),
    "efficiency.attention": (1e-5, 1),
    "efficiency.training_layer_us": (10, 1e7),
}


@pytest.fixture
def forked_ranks(forked_processes: None) -> Iterator[None]:
    with fork_server.spawned():
        yield


@pytest.mark.usefixtures("forked_ranks")
def test_a_machine_without_a_gpu_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run does not generate, so that no engine is started."""
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "mine.yaml"
    assert main(["tune", "configs/quickstart_sft.yaml", "--calibrate", str(file)]) == 0
    profile = load_device(file)
    for key, (least, most) in BOUNDS.items():
        assert least <= attrgetter(key)(profile) <= most, key
        assert profile.sources[key].startswith("measured by megarl tune --calibrate on "), key

    shipped = load_device("cpu")
    assert profile.between_nodes == shipped.between_nodes
    assert profile.efficiency.decode_layer_us == shipped.efficiency.decode_layer_us
    assert profile.sources["between_nodes.gb_s"].startswith("cpu: ")
    assert profile.sources.keys() <= set(sourced_keys(profile))

    out, err = capsys.readouterr()
    assert "calibrate: matrix products" in err
    rows = [line.split() for line in out.splitlines()]
    (row,) = (row for row in rows if row[:1] == ["efficiency.decode_layer_us"])
    assert row == [
        "efficiency.decode_layer_us",
        "1,000",
        "us",
        "1,000",
        *["cpu:", "the", "run", "does", "not", "generate"],
    ]
    (row,) = (row for row in rows if row[:1] == ["host_gb_s"])
    assert row[2:] == ["GB/s", "8", "measured"]
    assert f"{file}: " in out
    assert not list(tmp_path.glob(".megarl-calibrate-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "none/mine.yaml"], "there is no folder"),
        (["--calibrate", "mine.yaml", "--device", "h100"], "no device called 'h100'"),
        (
            ["configs/quickstart.yaml", "--calibrate", "mine.yaml", "actor.optm.lr=1"],
            "actor.optm: unknown key",
        ),
        (["none.yaml", "--calibrate", "mine.yaml"], "there is no such file"),
        (
            ["configs/qwen2.5_7b_grpo.yaml", "device=cuda", "--calibrate", "mine.yaml"],
            "runs on GPUs, but there is none here; add device=cpu",
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_device_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run := tmp_path / "run.yaml").write_text("base: configs/quickstart.yaml\n")
    assert main(["tune", "--calibrate", str(run)]) == 2
    assert str(run) in capsys.readouterr().err
    assert run.read_text() == "base: configs/quickstart.yaml\n"

    # Without its value, the option does not take the configuration for it.
    with pytest.raises(SystemExit):
        main(["tune", str(run), "--calibrate"])
    assert "--calibrate: expected one argument" in capsys.readouterr().err
