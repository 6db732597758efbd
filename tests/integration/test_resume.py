"""Test that a run that was killed or stopped and then resumed is bitwise identical to an uninterrupted run.

The tests run real commands as a user would. tests/soak/save_kills.py does the same with as many kills as time
allows.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.cli.main import main
from megarl.config.memory_sizes import checkpoint_bytes
from megarl.config.schema import CheckpointConfig, DType, EarlyStopConfig, MetricMode, ModelConfig, SFTConfig
from megarl.config.validate import read_architectures
from tests.command import Command
from tests.failure_pages import check_documented, last_page_of
from tests.integration.tiny_run import run_sft, save_inputs, tiny_sft_config
from tests.processes import gone_within
from tests.soak.save_kills import (
    LOOK_S,
    Outcome,
    Run,
    assert_same,
    assert_whole,
    kill_in_save,
    ppo_config,
    sft_config,
)

pytestmark = pytest.mark.usefixtures("forked_processes")

SFT_STEPS = 16
PPO_STEPS = 4
LONGEST_SAVE_S = 0.3
END_LIMIT_S = 60.0
CLOCK_SET = Path(__file__).with_name("driver_with_a_set_clock.py")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


@pytest.fixture(scope="module")
def straight_run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run supervised training without interruption, keeping all checkpoints."""
    config = sft_config(inputs, DType.float32, SFT_STEPS, every_steps=1)
    return Run(
        replace(config, checkpoint=replace(config.checkpoint, keep=0)), tmp_path_factory.mktemp("straight")
    )


@pytest.fixture(scope="module")
def straight(straight_run: Run) -> Outcome:
    return straight_run.finish()


def test_sft_killed_in_a_save_and_told_to_end_goes_on_as_if_nothing_had_been(
    straight: Outcome, inputs: Path, tmp_path: Path
) -> None:
    run = Run(sft_config(inputs, DType.float32, SFT_STEPS, every_steps=1), tmp_path)
    kill_in_save(run, random.Random(0), LONGEST_SAVE_S)
    had_one = assert_whole(run, had_one=False)

    command = run.start()
    command.wait_for(lambda: run.is_saving(after_step=4), LOOK_S)
    command.process.send_signal(signal.SIGTERM)
    assert command.status() == 128 + signal.SIGTERM, command.said()
    assert assert_whole(run, had_one)
    latest = run.checkpoints.latest()
    assert latest is not None
    step = int(latest.name[5:])
    assert 5 <= step < SFT_STEPS
    assert (
        f"stopped by SIGTERM after step {step}, which is saved; run the same command to resume from there"
        in run.log.read_text()
    )
    assert list(run.checkpoints.path.glob(".step_*")) == []

    assert_same(run.finish(), straight)
    assert f"after step {step}" in run.log.read_text()
    best = json.loads(straight.best)["step"]
    newest = {SFT_STEPS - 1, SFT_STEPS}

    # checkpoints of an earlier run are removed as well
    assert [int(path.name[5:]) for path in run.checkpoints.whole()] == sorted({best, *newest})


def test_a_checkpoint_has_the_tensors_that_are_predicted(straight: Outcome, straight_run: Run) -> None:
    """The vocabulary of the trained model is padded, and that of the exported one is not."""
    folder = straight_run.checkpoints.latest()
    assert folder is not None
    stored = FileSystemReader(folder / "actor").read_metadata().state_dict_metadata.values()
    num_bytes = sum(
        math.prod(tensor.size) * tensor.properties.dtype.itemsize
        for tensor in stored
        if isinstance(tensor, TensorStorageMetadata)
    )
    for file in (folder / "huggingface").glob("*.safetensors"):
        with file.open("rb") as opened:
            num_bytes += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")

    config = straight_run.config
    assert checkpoint_bytes(config, read_architectures(config)[0]) == num_bytes
    # The rest are headers and small files.
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert num_bytes < on_disk < num_bytes + 2**20


def test_a_template_that_reads_the_clock_is_told_one_time_however_often_a_run_is_started(
    inputs: Path, tmp_path: Path
) -> None:
    """Every prompt contains the clock, to the microsecond."""
    shutil.copytree(inputs, own := tmp_path / "inputs")
    template = own / "policy" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%S%f') }}" + template.read_text())
    (tmp_path / "run").mkdir()
    config = sft_config(own, DType.float32, 1, every_steps=1)
    config = replace(config, data=replace(config.data, max_length=32))
    Run(config, tmp_path / "run").finish()
    Run(replace(config, trainer=replace(config.trainer, total_steps=2)), tmp_path / "run").finish()
    states = [
        json.loads(file.read_text())["data"]
        for file in sorted((tmp_path / "run").rglob("step_*/trainer.json"))
    ]
    assert [sum(state["num_served"]) for state in states] == [7, 14]
    assert states[0]["chat_time"] == states[1]["chat_time"]
    assert states[0]["tokens"] is None


def test_a_run_that_starts_from_a_checkpoints_weights_differs_in_its_second_step(
    ray_cluster: None, straight: Outcome, straight_run: Run, tmp_path: Path
) -> None:
    """The same weights and data give the same loss; with new moments and a new schedule, the next step
    differs."""
    done = 8
    path = straight_run.checkpoints.path / f"step_{done:08d}"
    config = replace(
        straight_run.config,
        model=ModelConfig(path=str(path / "huggingface"), dtype=DType.float32),
        checkpoint=CheckpointConfig(),
        trainer=replace(straight_run.config.trainer, total_steps=2, output_dir=str(tmp_path)),
    )
    assert isinstance(config, SFTConfig)
    first, second = run_sft(config, json.loads((path / "trainer.json").read_text())["data"]).metrics
    assert first["sft/loss"] == straight.metrics[done]["sft/loss"]
    assert first["sft/lr"] != straight.metrics[done]["sft/lr"]
    assert second["sft/loss"] != straight.metrics[done + 1]["sft/loss"]


def test_a_flipped_bit_is_named_with_its_tensor_and_what_is_whole_is_listed(
    straight: Outcome, straight_run: Run
) -> None:
    latest = straight_run.checkpoints.path / straight.latest
    (shard,) = (latest / "actor").glob("*.distcp")
    whole = shard.read_bytes()
    position = whole.index(b"PK", 5000) - 2000  # in the data of a tensor
    shard.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
    assert straight_run.start(f"trainer.total_steps={SFT_STEPS + 1}").status() == 1
    shard.write_bytes(whole)
    line = next(line for line in straight_run.log.read_text().splitlines() if str(shard) in line)
    assert "is not what was written (its checksum differs)" in line
    assert "decoder." in line or "embedding." in line
    assert (
        f"Older complete checkpoints: {straight_run.checkpoints.path / f'step_{SFT_STEPS - 1:08d}'}, " in line
    )
    assert "Traceback" not in straight_run.log.read_text()


def test_a_complete_run_says_so_and_starts_nothing(
    straight: Outcome, straight_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(straight_run.folder / "run.yaml")]) == 0
    out = capsys.readouterr().out
    assert (
        f"is complete: {straight_run.checkpoints.latest()} is the checkpoint of step {SFT_STEPS}. To train "
        f"further, raise trainer.total_steps (now 16)" in out
    )


def test_a_run_that_gets_no_better_ends_saved_says_so_and_can_be_trained_on(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last step is saved with the defaults of `checkpoint`."""
    stop = EarlyStopConfig(metric="val/loss", mode=MetricMode.min, patience=1, min_delta=100)
    trainer = {"total_steps": 9, "validate_every_steps": 1, "early_stop": stop}
    run = Run(
        tiny_sft_config(inputs, inputs / "run", checkpoint=CheckpointConfig(), trainer=trainer), tmp_path
    )
    command = run.start()
    assert command.status() == 0, command.said()
    why = "none of the last 1 validations of val/loss was better than "
    assert f"stopped early, after step 2: {why}" in command.said()
    assert [path.name for path in run.checkpoints.whole()] == ["step_00000002"]
    summary = json.loads((run.output_dir / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["stopped_early"].startswith(why)

    for more in ([], ["trainer.total_steps=12"]):
        assert main(["train", str(run.folder / "run.yaml"), *more]) == 0
        assert "It ended early: none of the last 1 validations" in capsys.readouterr().out

    command = run.start("trainer.early_stop.metric=null", "trainer.total_steps=3")
    assert command.status() == 0, command.said()
    assert [
        json.loads(line)["step"] for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]
    assert json.loads((run.output_dir / "summary.json").read_text()).keys() == {"steps", "seconds", "samples"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.total_steps=8", "trainer.total_steps: is 8, but the checkpoint is of step 16"),
        (
            "data.seed=1",
            "data.seed: is 1, but the checkpoint was written with 0, and this key decides the order of the data",
        ),
        ("trainer.samples_per_step=8", "trainer.samples_per_step: is 8"),
        ("model.dtype=bfloat16", "model.dtype: is 'bfloat16', but the checkpoint was written with 'float32'"),
        ("checkpoint.resume=disable", "has checkpoints of a run; use another trainer.output_dir, or auto"),
        (
            "data.train_files=OTHER",
            "cannot resume the data: the checkpoint was written with num_rows=32, this run has 8",
        ),
    ],
)
def test_what_would_be_another_run_is_refused(
    straight: Outcome,
    straight_run: Run,
    inputs: Path,
    override: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    override = override.replace("OTHER", f"[{inputs / 'sft_validation.parquet'}]")
    steps = [] if "total_steps" in override else [f"trainer.total_steps={SFT_STEPS + 1}"]
    assert main(["train", str(straight_run.folder / "run.yaml"), override, *steps]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err


def test_damage_that_the_driver_sees_is_known_before_a_process_starts(
    straight: Outcome, straight_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = straight_run.checkpoints.path / straight.latest
    state = latest / "trainer.json"
    content = state.read_bytes()
    state.write_bytes(content.replace(b"num_served", b"num_severd"))
    assert main(["train", str(straight_run.folder / "run.yaml"), f"trainer.total_steps={SFT_STEPS + 1}"]) == 1
    state.write_bytes(content)
    said = capsys.readouterr().err
    check_documented("checkpoint-damaged", last_page_of(said))
    err = said.splitlines()
    assert err[0].startswith(f"{state}: its content is not what was written (checksum)")
    assert "Older complete checkpoints: " in err[0]


def test_ppo_whose_driver_is_killed_in_a_save_leaves_no_process_and_goes_on_as_if_nothing_had_been(
    inputs: Path, tmp_path: Path
) -> None:
    """Runs with critic warm-up, an adaptive KL controller, validations, and bfloat16 weights with float32
    masters."""
    config = ppo_config(inputs, DType.bfloat16, PPO_STEPS, every_steps=2)
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    run = Run(config, tmp_path / "killed")
    command = run.start()
    command.wait_for(run.is_saving, LOOK_S)
    everything = command.processes()
    assert len(everything) > 8  # Ray's daemons, workers, and scoring processes
    command.process.kill()
    assert gone_within(everything, END_LIMIT_S) == []
    assert_whole(run, had_one=False)

    outcome = run.finish()
    assert_same(outcome, Run(config, tmp_path / "straight").finish())
    assert {"actor", "critic"} == outcome.states.keys()
    assert list(outcome.samples) == list(range(1, PPO_STEPS + 1))


class Faulty(Run):
    """Run that is disturbed once its next step is saved, and inspected when it has ended."""

    def disturb(
        self, act: Callable[[Command], object], clock_is_set: bool = False, is_read_only: bool = False
    ) -> str:
        """Disturb the run and return its failure page. Only complete checkpoints may be left, except where
        nothing can be removed; the next run removes those leftovers."""
        before = self.last_step()
        program = [str(CLOCK_SET)] if clock_is_set else ["-m", "megarl"]
        command = Command([*program, "sft", str(self.folder / "run.yaml")], self.log)
        command.wait_for(lambda: self.last_step() > before, LOOK_S)
        everything = command.processes()
        act(command)
        assert command.status(END_LIMIT_S) == 1, command.said()
        assert gone_within(everything, END_LIMIT_S) == []

        if self.checkpoints.path.is_dir():
            assert_whole(self, had_one=True)
            assert is_read_only or list(self.checkpoints.path.glob(".*")) == []

        return last_page_of(command.said())

    def last_step(self) -> int:
        latest = self.checkpoints.latest()
        return int(latest.name[5:]) if latest else 0


def kill(name: str) -> Callable[[Command], object]:
    def act(command: Command) -> None:
        (daemon,) = [process for process in command.processes() if process.name() == name]
        daemon.kill()

    return act


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Remount the folder read-only in the block. Permissions would not stop root. A second mount makes it
    take effect at once."""
    (side := folder.with_name("side")).mkdir()
    with ExitStack() as mounted:
        for command in (["--bind", folder, side], ["-o", "remount,bind,ro", side], ["--bind", side, folder]):
            subprocess.run(["mount", *command], check=True, capture_output=True)
            if command[0] == "--bind":
                mounted.callback(subprocess.run, ["umount", "--lazy", command[-1]], check=True)
        yield

    side.rmdir()


def mounts(folder: Path) -> bool:
    folder.mkdir()
    try:
        with read_only(folder):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def test_a_run_that_meets_one_fault_after_another_ends_as_an_undisturbed_one(
    straight: Outcome, inputs: Path, tmp_path: Path
) -> None:
    """Ray's daemons die under a changing clock, the output folder disappears and returns, and its disk
    becomes read-only."""
    run = Faulty(sft_config(inputs, DType.float32, SFT_STEPS, every_steps=1), tmp_path)
    away = tmp_path / "away"
    page = run.disturb(kill("raylet"), clock_is_set=True)
    assert "what    RayEndedError: Ray's raylet has ended (killed, out of memory, or crashed)" in page
    assert "checkpoints; the same command resumes from the latest" in page
    page = run.disturb(kill("gcs_server"))
    assert "what    RayEndedError: Ray's gcs_server has ended" in page
    assert "raylet.err of Ray's logs (below)" in page
    page = run.disturb(lambda command: run.output_dir.rename(away))

    # Which missing file is noticed first depends on the progress of the save when the folder disappears.
    assert "restore the folder" in page or "the run's folder was removed" in page
    assert not run.output_dir.exists()
    away.rename(run.output_dir)

    if can_mount := mounts(tmp_path / "probe"):
        with ExitStack() as made:
            page = run.disturb(
                lambda command: made.enter_context(read_only(run.output_dir)), is_read_only=True
            )
            assert "cannot be written" in page  # by the driver or by a rank
            assert "Read-only file system" in page
            assert (
                "fix the folder and run the same command: it resumes from the latest complete checkpoint"
                in page
            )
            assert "failure.txt could not be written" in run.log.read_text()

    assert_same(run.finish(), straight)
    assert list(run.checkpoints.path.glob(".*")) == []

    if not can_mount:
        pytest.skip(
            "all was tried but an output folder that becomes read-only: this user, or this container, may "
            "not mount"
        )
