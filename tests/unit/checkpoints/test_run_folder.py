"""The checkpoint folder: whatever a kill leaves, a complete checkpoint is found, and foreign files are not
removed."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.run_folder import BestCheckpoint, CheckpointFolder, check_files
from megarl.machine.errors import CheckpointError

Reader = Callable[[CheckpointFolder], Path | None]


def add(folder: CheckpointFolder, step: int, content: str = "") -> Path:
    partial = begin(folder, step, content)
    folder.seal(step, {"roles": ["actor"], "versions": {}})
    final = folder.commit(step)
    assert not partial.exists()
    return final


def begin(folder: CheckpointFolder, step: int, content: str = "") -> Path:
    partial = folder.begin(step)
    (partial / "actor").mkdir()
    (partial / "actor" / "weights").write_text("w")
    (partial / "huggingface").mkdir()
    (partial / "huggingface" / "config.json").write_text("{}")
    (partial / "trainer.json").write_text(content or f"state of {step}")

    return partial


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    made = CheckpointFolder(tmp_path / "checkpoints")
    made.prepare()
    return made


def test_a_checkpoint_appears_with_all_of_it(folder: CheckpointFolder) -> None:
    assert folder.latest() is None
    begin(folder, 5)
    assert (folder.latest(), folder.whole()) == (None, [])
    nbytes = folder.seal(5, {"roles": ["actor"], "versions": {"megarl": "1"}})
    assert (folder.latest(), folder.whole()) == (None, [])
    assert folder.commit(5) == folder.latest() == folder.path / "step_00000005"
    assert names(folder) == ["latest", "step_00000005"]
    assert (folder.path / "latest").read_text() == "step_00000005\n"
    description = check_files(folder.path / "step_00000005")

    # The role's own manifest has the rest.
    assert sorted(description["files"]) == ["huggingface/config.json", "trainer.json"]
    assert (description["step"], description["versions"]) == (5, {"megarl": "1"})
    assert nbytes == sum(path.stat().st_size for path in folder.path.glob("step_*/**/*") if path.is_file())


def test_the_oldest_go_when_a_new_one_is_whole(folder: CheckpointFolder) -> None:
    for step in (2, 4, 6):
        add(folder, step)
        folder.remove_old(keep=2)

    assert names(folder) == ["latest", "step_00000004", "step_00000006"]
    add(folder, 8)
    folder.remove_old(keep=0)
    assert len(folder.whole()) == 3
    folder.remove_old(keep=1)
    assert names(folder) == ["latest", "step_00000008"]


def test_what_is_in_use_stays(folder: CheckpointFolder) -> None:
    first, second, _ = (add(folder, step) for step in (2, 4, 6))
    folder.remove_old(keep=1, in_use={first})
    assert names(folder) == ["latest", "step_00000002", "step_00000006"]
    assert not second.exists()


def test_going_back_gives_up_what_came_after(folder: CheckpointFolder) -> None:
    for step in (2, 4, 6):
        add(folder, step)
    folder.point_at(folder.path / "step_00000002")
    assert folder.latest() == folder.path / "step_00000002"
    assert len(folder.whole()) == 3  # until a new one is complete
    add(folder, 4, "another future")
    assert (folder.path / "step_00000004" / "trainer.json").read_text() == "another future"
    folder.remove_old(keep=2)
    assert names(folder) == ["latest", "step_00000002", "step_00000004"]


def test_a_kill_between_the_renames_leaves_a_latest_one(folder: CheckpointFolder) -> None:
    begin(folder, 2)
    folder.seal(2, {"roles": ["actor"], "versions": {}})
    # The process is killed after this rename.
    os.rename(folder.path / ".step_00000002.partial", folder.path / "step_00000002")
    assert folder.latest() == folder.path / "step_00000002"
    add(folder, 4)
    begin(folder, 6)
    folder.seal(6, {"roles": ["actor"], "versions": {}})
    os.rename(folder.path / ".step_00000006.partial", folder.path / "step_00000006")
    assert folder.latest() == folder.path / "step_00000004"
    add(folder, 6, "once more")
    assert (folder.path / "step_00000006" / "trainer.json").read_text() == "once more"


def test_leftovers_of_a_killed_run_are_removed_at_its_start(folder: CheckpointFolder) -> None:
    add(folder, 2)
    begin(folder, 4)
    (folder.path / ".step_00000001.removed").mkdir()
    (folder.path / ".latest.partial").write_text("step_0000")
    (folder.path / "notes").mkdir()
    folder.prepare()
    assert names(folder) == ["latest", "notes", "step_00000002"]


def test_what_is_not_ours_is_never_removed(folder: CheckpointFolder) -> None:
    stranger = folder.path / "step_00000001"
    stranger.mkdir()
    (stranger / "thesis.tex").touch()
    add(folder, 2)
    add(folder, 4)
    folder.remove_old(keep=1)
    assert names(folder) == ["latest", "step_00000001", "step_00000004"]
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        folder.remove(stranger)
    (stranger / "checkpoint.json").write_text('{"format": "of somebody else"}')
    with pytest.raises(CheckpointError, match="format 'of somebody else'"):
        folder.remove_old(keep=1)
    assert (stranger / "thesis.tex").exists()


def test_a_latest_that_is_gone_is_an_error_that_lists_the_others(folder: CheckpointFolder) -> None:
    for step in (2, 4):
        add(folder, step)
    folder.remove(folder.path / "step_00000004")

    with pytest.raises(
        CheckpointError,
        match=r"latest: names 'step_00000004', which is not a complete.*complete ones: step_00000002",
    ):
        folder.latest()

    (folder.path / "latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match="names '../../etc'"):
        folder.latest()
    (folder.path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"latest: names .*xff.*complete ones: step_00000002"):
        folder.latest()
    folder.remove(folder.path / "step_00000002")
    (folder.path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"latest: no longer exists; restore what was removed"):
        folder.remove_old(keep=1)


FILE_CALLS = {
    "stat",
    "lstat",
    "open",
    "scandir",
    "listdir",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "fsync",
}


def save_while_the_folder_goes_away(folder: CheckpointFolder, before_call: int) -> Exception | None:
    """Return the error of a save of step 6 if the folder is renamed before its n-th file system call; None if
    it succeeds."""
    best = BestCheckpoint(2, "val/loss", 0.5)
    num_calls = 0

    def look(frame: object, event: str, function: Any) -> None:
        nonlocal num_calls
        if (
            event == "c_call"
            and function.__module__ in ("posix", "io", "_io")
            and function.__name__ in FILE_CALLS
        ):
            num_calls += 1
            if num_calls == before_call:
                sys.setprofile(None)
                folder.path.rename(folder.path.with_name("away"))

    sys.setprofile(look)
    try:
        add(folder, 6)
        folder.point_at_best(best)
        folder.remove_old(1, best)
    except (OSError, CheckpointError) as error:
        return error
    finally:
        sys.setprofile(None)

    return None


def test_a_folder_that_goes_away_at_any_call_of_a_save_is_a_file_or_checkpoint_error(tmp_path: Path) -> None:
    kinds = set[type[Exception]]()
    for call in itertools.count(1):
        folder = CheckpointFolder(tmp_path / str(call) / "checkpoints")
        folder.prepare()
        for step in (2, 4):
            add(folder, step)
        error = save_while_the_folder_goes_away(folder, call)
        if folder.path.exists():
            break  # the save has fewer calls
        kinds |= set() if error is None else {type(error)}

    assert call > 50
    assert kinds == {FileNotFoundError, CheckpointError}
    assert names(folder) == ["best.json", "latest", "step_00000002", "step_00000006"]


def test_the_best_is_named_where_it_is_there_and_stays(folder: CheckpointFolder) -> None:
    best = BestCheckpoint(2, "val/loss", 0.5)
    folder.point_at_best(best)
    assert names(folder) == []

    for step in (2, 4, 6):
        add(folder, step)
        folder.point_at_best(best)
        folder.remove_old(1, best)

    assert names(folder) == ["best.json", "latest", "step_00000002", "step_00000006"]
    (folder.path / "best.json").write_text('{"checkpoint": "step_00000004"}')

    with pytest.raises(
        CheckpointError,
        match=r"best.json: names 'step_00000004', which is not a complete.*complete ones: step_00000002, "
        r"step_00000006",
    ):
        folder.best()

    (folder.path / "best.json").write_text('{"step": 4}')
    with pytest.raises(CheckpointError, match=r"best.json: does not name a checkpoint"):
        folder.best()
    folder.point_at_best(None)
    folder.remove_old(1)
    assert names(folder) == ["latest", "step_00000006"]


@pytest.mark.parametrize("reads", [CheckpointFolder.latest, CheckpointFolder.best])
def test_a_run_that_goes_on_while_the_name_is_read(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, reads: Reader
) -> None:
    """Between reading the name and checking the checkpoint, the run has written the next one and removed this
    one, twice."""
    add(folder, 2)
    folder.point_at_best(BestCheckpoint(2, "val/loss", 0.5))
    is_file = Path.is_file
    left = [4, 6]

    def later(path: Path) -> bool:
        if path.name == "checkpoint.json" and left:
            step = left.pop(0)
            with monkeypatch.context() as undisturbed:
                undisturbed.setattr(Path, "is_file", is_file)
                add(folder, step)
                folder.point_at_best(best := BestCheckpoint(step, "val/loss", 0.5))
                folder.remove_old(1, best)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", later)
    assert reads(folder) == folder.path / "step_00000006"


def described(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "trainer.json").unlink(), "trainer.json: is missing"),
        (lambda path: (path / "trainer.json").write_text("stat"), "trainer.json: has 4 bytes instead of 10"),
        (
            lambda path: (path / "trainer.json").write_text("state of 3"),
            "trainer.json: its content is not what was written",
        ),
        (lambda path: (path / "actor" / "weights").unlink() or (path / "actor").rmdir(), "actor: is missing"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "checkpoint.json: not JSON"),
        (
            lambda path: (path / "checkpoint.json").write_text("[" * 100_000),
            r"checkpoint.json: not JSON \(it is nested too deep\); the checkpoint is damaged",
        ),
        (
            lambda path: (path / "checkpoint.json").write_text(json.dumps({"format": 2})),
            "checkpoint.json: has format 2, .* reads 1",
        ),
        (
            lambda path: described(path, step="2"),
            "checkpoint.json: step is '2', not an integer; the checkpoint is damaged",
        ),
        (lambda path: described(path, roles=None), "checkpoint.json: roles is None, not a list"),
        (
            lambda path: described(path, roles=["../actor"]),
            r"checkpoint.json: roles is \['../actor'\], not a list of folder names",
        ),
        (lambda path: described(path, files=[]), r"checkpoint.json: files is \[\], not a mapping"),
        (
            lambda path: described(path, files={"../x": {}}),
            "checkpoint.json: files contains '../x', which is not in the checkpoint",
        ),
        (
            lambda path: described(path, files={"x": {"nbytes": 1}}),
            "checkpoint.json: files has .* for 'x', not its nbytes and checksum",
        ),
        (
            lambda path: described(path, step=4),
            "contains step 4, but its folder is named after step 2: checkpoints were swapped",
        ),
    ],
)
def test_damage_is_named(folder: CheckpointFolder, damage, said: str) -> None:
    path = add(folder, 2)
    check_files(path)
    damage(path)
    with pytest.raises(CheckpointError, match=said) as caught:
        check_files(path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_known_before_a_run_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", Path("/proc/checkpoints")):
        with pytest.raises(
            CheckpointError, match=f"{path}: no checkpoint can be written here .*checkpoint.dir"
        ):
            CheckpointFolder(path).prepare()
