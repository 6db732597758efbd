"""`megarl check --simulate`: given lengths or those of a run, splits of devices, and unsupported runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli.main import main
from megarl.config.load import dump_config, load_config
from megarl.config.schema import PPOConfig
from megarl.plan.placement.plan import plan_placement
from megarl.rehearse.simulation.forecast import Split, forecast, log_normal, measured, splits_of
from megarl.rehearse.simulation.run import Script
from megarl.tracking.samples import SAMPLES_FOLDER, SCHEMA
from tests.unit.cli.test_shipped_configs import ROOT, path_of

RUN = "qwen2.5_7b_ppo_split"
GIVEN = ["--lengths", "600,4096", "--training-s", "60", "--tokens-per-s", "40"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")


def load(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, path_of(RUN), overrides)


def test_lengths_have_the_mean_and_the_most_that_are_asked_for() -> None:
    lengths = [length for of_prompt in log_normal(500, 4000, 8) for length in of_prompt]
    assert fmean(lengths) == pytest.approx(500, rel=0.1)
    assert max(lengths) == 4000
    assert sum(length == 4000 for length in lengths) / len(lengths) == pytest.approx(0.001, abs=0.0015)

    for mean, longest in ((500, 400), (0.5, 10), (10, 100_000)):
        with pytest.raises(
            ValueError, match=f"a mean of {mean:g} and a maximum of {longest:,}: the mean must be"
        ):
            log_normal(mean, longest, 2)


def test_a_step_takes_what_it_takes_by_hand() -> None:
    """Two engines of two slots generate samples of 10 tokens.

    A step of four samples is generated in 10 s, and trained in 6 s.
    """
    script = Script(
        lengths=[[10, 10]] * 64, prompts_per_step=2, slots=2, total_steps=16, training_s=6.0, token_s=1.0
    )
    split = Split(trainer_devices=4, num_engines=2, of=1.0)
    at_0 = forecast(script, split, 0)
    assert (at_0.step_s, at_0.waiting, at_0.busy, at_0.mean_age) == (16.0, 10 / 16, 20 / 16 / 2, 0.0)
    at_1 = forecast(script, split, 1)
    assert at_1.step_s == pytest.approx(10.0, abs=0.5)  # the longer of the two

    # 12 s of training, and the first wait
    slower = forecast(script, split._replace(of=2.0), 1)
    assert slower.step_s == pytest.approx(12.6, abs=0.1)


def test_devices_are_split_in_whole_models() -> None:
    config = load()  # the actor has TP 4 x DP 2, the critic four devices, and there are four engines
    assert splits_of(config, plan_placement(config)) == [
        Split(12, 4, 1.0),
        Split(8, 8, 1.5),
        Split(4, 12, 3.0),
    ]
    hybrid = load_config(PPOConfig, path_of("qwen2.5_7b_grpo"))
    with pytest.raises(ValueError, match="placement.strategy=hybrid: the engines share"):
        splits_of(hybrid, plan_placement(hybrid))


def test_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "check",
                path_of(RUN),
                "--simulate",
                *GIVEN,
                "rollout.n=2",
                "--output",
                str(tmp_path / "steps.svg"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith((" 12 ", " 8 ", " 4 "))]
    assert [(row[0], row[1], [cell for cell in row if cell != "*"][2]) for row in rows] == [
        (trainer, engines, k) for trainer, engines in (("12", "4"), ("8", "8"), ("4", "12")) for k in "0124"
    ]
    assert "fastest: 4 engines and rollout.max_staleness=" in out
    assert "assuming 60 s of training on the configured devices" in out
    assert "; 40 tokens/s per sample" in out
    assert "max_staleness 4" in (tmp_path / "steps.svg").read_text()


def make_run(folder: Path, gen_s: float, max_staleness: int = 0) -> None:
    """Write a run of two prompts per step with two samples each, on one engine of four slots."""
    run = [
        "rollout.n=2",
        "trainer.prompts_per_step=2",
        "trainer.updates_per_step=1",
        "rollout.num_replicas=1",
        "rollout.max_concurrency=4",
    ]
    (folder / SAMPLES_FOLDER).mkdir(parents=True)
    dump_config(load(*run, f"rollout.max_staleness={max_staleness}"), folder / "config.yaml")
    times = {"timing_s/step": gen_s + 7.0, "timing_s/gen": gen_s, "timing_s/update_weights": 2.0}
    lines = [{"step": 0, "val/score/mean": 0.5}, *({"step": step, **times} for step in (1, 2, 3))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [("a", 20), ("a", 10), ("b", 15), ("b", 20)]
    table = pa.Table.from_pylist(
        [{"step": 2, "uid": uid, "response_length": length} for uid, length in rows], schema=SCHEMA
    )
    metadata = {b"megarl.tokens": b"{}", b"megarl.score_parts": b"[]"}
    pq.write_table(table.replace_schema_metadata(metadata), folder / SAMPLES_FOLDER / "step_2.parquet")


def test_a_run_has_measured_lengths_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", gen_s=5.0)
    lengths, times = measured(tmp_path / "run")
    assert lengths == [[20, 10], [15, 20]]
    assert (times["training_s"], times["push_s"]) == (pytest.approx(5.0), 2.0)
    assert times["token_s"] == pytest.approx(5.0 / 20)  # the longest sample takes as long as a generation
    assert (
        main(
            [
                "check",
                path_of(RUN),
                "--simulate",
                "--from",
                str(tmp_path / "run"),
                "trainer.prompts_per_step=32",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "assuming 5 s of training on the configured devices" in out
    assert "; 4 tokens/s per sample" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--simulate"],
            "--simulate requires --lengths, --training-s, --tokens-per-s, or --from with the folder of a run",
        ),
        (["--lengths", "500"], "--lengths requires --simulate"),
        (
            ["--simulate", "--lengths", "many", *GIVEN[2:]],
            "--lengths many: must be MEAN or MEAN,MAX in tokens, such as 500,4096",
        ),
        (["--simulate", *GIVEN[:4], "--tokens-per-s", "0"], "--tokens-per-s 0: must be above 0"),
        (
            ["--simulate", *GIVEN, "--output", "steps.pdf"],
            "--output steps.pdf: the file name must end in .svg",
        ),
        (["--simulate", "--from", "{late}"], "ran with rollout.max_staleness=2"),
        (["--simulate", "--from", "{bare}"], "has no samples, whose lengths are needed"),
        (
            ["--simulate", "--from", "nowhere"],
            "nowhere: there is no such folder; give a run's trainer.output_dir",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "late", gen_s=5.0, max_staleness=2)
    make_run(tmp_path / "bare", gen_s=5.0)
    (tmp_path / "bare" / SAMPLES_FOLDER / "step_2.parquet").unlink()
    folders = {"late": tmp_path / "late", "bare": tmp_path / "bare"}
    assert main(["check", path_of(RUN), *(argument.format(**folders) for argument in arguments)]) == 2
    assert says in capsys.readouterr().err
