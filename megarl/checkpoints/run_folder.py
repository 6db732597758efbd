"""The folder of a run's checkpoints.

It contains complete checkpoints, `latest`, and checkpoints being written or removed, whose names no reader
accepts:

latest                     step_00000020
best.json                  the best checkpoint by a validation metric, if the run keeps one
step_00000010/  step_00000020/
.step_00000030.partial/    being written; .step_00000030.2.partial/ if a first attempt was abandoned
.step_00000000.removed/    being removed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_json, sync_folder, sync_tree, write_whole

LATEST_FILE = "latest"
BEST_FILE = "best.json"
DESCRIPTION_FILE = "checkpoint.json"
FORMAT = 1
STEP_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}(\.\d+)?\.(partial|removed)|\.(latest|best\.json)\.partial")


def step_of(checkpoint: Path) -> int:
    """Return the step of a complete checkpoint, which its name contains."""
    found = STEP_NAME.fullmatch(checkpoint.name)
    assert found is not None, f"{checkpoint} is not a checkpoint"
    return int(found[1])


class BestCheckpoint(NamedTuple):
    """The best checkpoint: `value` is the value of `metric` in the validation after `step`."""

    step: int
    metric: str
    value: float


class CheckpointFolder:
    """The checkpoint folder of one run, which is its only writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_abandoned: Counter[int] = Counter()  # attempts at the checkpoint of a step

    def whole(self) -> list[Path]:
        """Return the complete checkpoints, oldest step first.

        A folder gets its final name only when it is complete.
        """
        found = {
            int(match[1]): path
            for path, match in self._named(STEP_NAME)
            if (path / DESCRIPTION_FILE).is_file()
        }
        return [found[step] for step in sorted(found)]

    def latest(self) -> Path | None:
        """Return the checkpoint that was committed last; None if there never was one.

        Raises:
            CheckpointError: `latest` names a checkpoint that does not exist. An older one is never used
                instead.
        """
        pointer = self.path / LATEST_FILE
        if not pointer.is_file():  # killed between the first checkpoint's last two renames
            return next(reversed(self.whole()), None)
        return self._named_by(pointer, lambda: pointer.read_bytes().decode(errors="backslashreplace").strip())

    def _named_by(self, pointer: Path, read: Callable[[], str]) -> Path:
        """Return the checkpoint that a pointer file names.

        The name is read again if the run may have replaced the checkpoint in the meantime.
        """
        name = read()
        while not (STEP_NAME.fullmatch(name) and (self.path / name / DESCRIPTION_FILE).is_file()):
            before = name
            name = read()
            if name == before:
                # The name has not changed since the last read, so no running process is replacing it.
                others = ", ".join(path.name for path in self.whole()) or "none"
                raise CheckpointError(
                    f"{pointer}: names {name!r}, which is not a complete checkpoint in {self.path}; complete "
                    f"ones: {others}; "
                    "give the folder of one of them (a run resumes from it with checkpoint.resume=PATH)"
                )

        return self.path / name

    def prepare(self) -> None:
        """Create the folder, and remove partially written or removed checkpoints of a killed run.

        Raises CheckpointError.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
            # Try a write now, because the first save may be hours away.
            write_whole(self.path / ".writable", "")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: no checkpoint can be written here ({error.strerror or error}); give another "
                f"checkpoint.dir"
            ) from error

    def remove_leftovers(self) -> None:
        """Remove partially written or removed checkpoints, while nothing is being written. Raises OSError."""
        for path, _ in self._named(_LEFTOVER):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of `step`.

        Raises OSError, also if the folder that `prepare` created no longer exists.
        """
        partial = self._partial(step)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()

        return partial

    def seal(self, step: int, description: dict[str, Any]) -> int:
        """Write the last file of a checkpoint that was begun, and return its size in bytes.

        All of the checkpoint is synced to disk.

        The size and checksum of each file outside the folders of `description["roles"]` are added to
        `description`.
        """
        partial = self._partial(step)
        # Role folders have their own manifests, with the checksums of their items.
        outside = [
            path
            for path in files_of(partial)
            if path.relative_to(partial).parts[0] not in description["roles"]
        ]
        files = {str(path.relative_to(partial)): file_entry(path) for path in sorted(outside)}
        write_whole(
            partial / DESCRIPTION_FILE,
            json.dumps({"format": FORMAT, "step": step, **description, "files": files}, indent=2) + "\n",
        )
        # Everything must be on disk before the rename makes it a checkpoint.
        sync_tree(partial)

        return sum(path.stat().st_size for path in files_of(partial))

    def commit(self, step: int) -> Path:
        """Make a sealed checkpoint the latest one."""
        final = self.path / step_name(step)

        # A later step from before the run resumed from an earlier one is obsolete; `latest` precedes it.
        if final.exists():
            self.remove(final)
        # The renamed folder must be on disk before `latest` names it.
        os.rename(self._partial(step), final)
        sync_folder(self.path)
        self.point_at(final)

        return final

    def point_at(self, checkpoint: Path) -> None:
        write_whole(self.path / LATEST_FILE, checkpoint.name + "\n")

    def point_at_best(self, best: BestCheckpoint | None) -> None:
        """Write `best.json`, with the folder's name, or remove it if there is no best checkpoint here."""
        path = self.path / BEST_FILE
        if best is None or self.path / step_name(best.step) not in self.whole():
            path.unlink(missing_ok=True)
        else:
            write_whole(
                path, json.dumps({"checkpoint": step_name(best.step), **best._asdict()}, indent=2) + "\n"
            )

    def best(self) -> Path | None:
        """Return the checkpoint that `best.json` names; None if there is no such file.

        Raises CheckpointError if it names none.
        """
        pointer = self.path / BEST_FILE
        if not pointer.is_file():
            return None

        def read() -> str:
            try:
                return str(parse_json(pointer.read_text(encoding="utf-8"))["checkpoint"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise CheckpointError(
                    f"{pointer}: does not name a checkpoint ({error}); the file is damaged"
                ) from error

        return self._named_by(pointer, read)

    def remove_old(
        self, keep: int, best: BestCheckpoint | None = None, in_use: Collection[Path] = ()
    ) -> None:
        """Remove all checkpoints except `latest`, the `keep` - 1 newest before it, the best one and `in_use`.

        `keep` 0 keeps all of these.

        Checkpoints after `latest` are obsolete and always removed. Raises CheckpointError if no checkpoint
        exists although one was committed.
        """
        latest = self.latest()
        whole = self.whole()

        if latest not in whole:  # the folder may be deleted between the two calls
            raise CheckpointError(
                f"{latest or self.path / LATEST_FILE}: no longer exists; restore what was removed"
            )

        position = whole.index(latest)
        # Checkpoints after `latest` are never kept, not even with `keep` 0.
        stay = whole[: position + 1] if keep == 0 else whole[max(0, position + 1 - keep) : position + 1]

        for path in whole:
            if (
                path not in stay
                and path not in in_use
                and (best is None or path.name != step_name(best.step))
            ):
                self.remove(path)

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint.

        It is renamed first, so that a kill leaves no incomplete checkpoint. Folders that this class did not
        write are refused.
        """
        read_description(checkpoint)
        removed = self.path / f".{checkpoint.name}.removed"
        if removed.exists():
            shutil.rmtree(removed)
        os.rename(checkpoint, removed)
        shutil.rmtree(removed)

    def abandon(self, step: int) -> None:
        """Remove the files of a failed or dropped save.

        A rank may still be writing; the next run's `prepare` then removes the rest. The next attempt at this
        step has a folder of another name, in which such a rank cannot write.
        """
        shutil.rmtree(self._partial(step), ignore_errors=True)
        self._num_abandoned[step] += 1

    def _partial(self, step: int) -> Path:
        attempt = f".{number + 1}" if (number := self._num_abandoned[step]) else ""
        return self.path / f".{step_name(step)}{attempt}.partial"

    def _named(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        if not self.path.is_dir():
            return []
        return [
            (path, match) for path in sorted(self.path.iterdir()) if (match := pattern.fullmatch(path.name))
        ]


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def read_description(checkpoint: Path) -> dict[str, Any]:
    """Read `checkpoint.json`, with `step`, `roles` and `files` (see `seal`).

    Raises CheckpointError if it does not exist, or is not in the format of this version.
    """
    path = checkpoint / DESCRIPTION_FILE
    try:
        description = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); {checkpoint} is not a checkpoint of a run"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); the checkpoint is damaged") from error

    # Compare the format before the fields, which another version may define differently.
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else description
        raise CheckpointError(
            f"{path}: has format {found!r}, but this version reads {FORMAT}; use the version that wrote it"
        )

    if problem := _problem(description):
        raise CheckpointError(f"{path}: {problem}; the checkpoint is damaged")
    return description


def _problem(description: dict[str, Any]) -> str | None:
    """Return what is missing or invalid in a description, or None."""
    step, roles, files = (description.get(key) for key in ("step", "roles", "files"))
    if type(step) is not int:
        return f"step is {step!r}, not an integer"
    if not isinstance(roles, list) or not roles or not all(_is_name(role) for role in roles):
        return f"roles is {roles!r}, not a list of folder names"
    if not isinstance(files, dict):
        return f"files is {files!r}, not a mapping of files"

    for name, expected in files.items():
        # A damaged description must not make the check read files outside of the checkpoint.
        if not all(_is_name(part) for part in name.split("/")):
            return f"files contains {name!r}, which is not in the checkpoint's folder"
        if (
            not isinstance(expected, dict)
            or type(expected.get("nbytes")) is not int
            or not isinstance(expected.get("checksum"), str)
        ):
            return f"files has {expected!r} for {name!r}, not its nbytes and checksum"

    return None


def _is_name(part: object) -> bool:
    """Return whether a value is the plain name of a file or folder."""
    return isinstance(part, str) and part not in ("", ".", "..") and "/" not in part and "\0" not in part


def check_files(checkpoint: Path) -> dict[str, Any]:
    """Check the files outside of the role folders, and return the description of the checkpoint.

    The files must be unchanged, and the step must match the name of the folder.

    Raises:
        CheckpointError: Names the first file that is not.
    """
    description = read_description(checkpoint)
    # The name of a renamed folder contains no step to compare with.
    if (named := STEP_NAME.fullmatch(checkpoint.name)) and int(named[1]) != description["step"]:
        raise CheckpointError(
            f"{checkpoint / DESCRIPTION_FILE}: contains step {description['step']}, but its folder is named "
            f"after step {int(named[1])}: "
            "checkpoints were swapped; restore the folder's own name, or use another checkpoint"
        )

    for name, expected in description["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; the checkpoint is damaged")
        # Compare the size before the checksum, which reads the whole file.
        if path.stat().st_size != expected["nbytes"]:
            raise CheckpointError(
                f"{path}: has {path.stat().st_size} bytes instead of {expected['nbytes']}; the checkpoint "
                f"is damaged"
            )
        if file_checksum(path) != expected["checksum"]:
            raise CheckpointError(
                f"{path}: its content is not what was written (checksum); the checkpoint is damaged"
            )

    for role in description["roles"]:
        if not (checkpoint / role).is_dir():
            raise CheckpointError(f"{checkpoint / role}: is missing; the checkpoint is damaged")

    return description


def file_checksum(path: Path) -> str:
    """Return the xxh3_64 of the whole file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """Return what descriptions contain of a file."""
    return {"nbytes": path.stat().st_size, "checksum": file_checksum(path)}


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
