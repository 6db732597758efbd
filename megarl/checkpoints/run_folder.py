"""The folder of a run's checkpoints: whole ones, `latest`, and what is being written or removed, which no
reader takes for one.

latest                     step_00000020
best.json                  which one is the best by a metric of validation, where the run keeps one
step_00000010/  step_00000020/
.step_00000030.partial/    being written
.step_00000000.removed/    being removed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from megarl.machine.errors import CheckpointError
from megarl.machine.files import sync_folder, sync_tree, write_whole

LATEST_FILE = "latest"
BEST_FILE = "best.json"
DESCRIPTION_FILE = "checkpoint.json"
FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(partial|removed)|\.(latest|best\.json)\.partial")


class BestCheckpoint(NamedTuple):
    """step: of the checkpoint. value: of `metric`, of the validation after that step."""

    step: int
    metric: str
    value: float


class CheckpointFolder:
    """Of one run, which alone writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def whole(self) -> list[Path]:
        """The complete checkpoints, oldest step first. A folder appears under its name only when all of it is
        there."""
        found = {
            int(match[1]): path for path, match in self._named(_STEP) if (path / DESCRIPTION_FILE).is_file()
        }
        return [found[step] for step in sorted(found)]

    def latest(self) -> Path | None:
        """The checkpoint that was committed last; None where there never was one.

        Raises CheckpointError where `latest` names one that is not there: an older one is never taken in its
        place.
        """
        pointer = self.path / LATEST_FILE
        if not pointer.is_file():  # killed between the first checkpoint's last two renames
            return next(reversed(self.whole()), None)
        return self._named_by(pointer, lambda: pointer.read_bytes().decode(errors="backslashreplace").strip())

    def _named_by(self, pointer: Path, read: Callable[[], str]) -> Path:
        """The run may, since the name was read, have written another and removed that checkpoint:
        then it is read again."""
        name = read()
        while not (_STEP.fullmatch(name) and (self.path / name / DESCRIPTION_FILE).is_file()):
            before = name
            name = read()
            if name == before:
                # The name has not changed since the last read, so no running process has replaced it.
                others = ", ".join(path.name for path in self.whole()) or "none"
                raise CheckpointError(
                    f"{pointer}: names {name!r}, which is not a whole checkpoint in {self.path}; whole "
                    f"ones: {others}; "
                    "give the folder of one of them (a run resumes from it with checkpoint.resume=PATH)"
                )

        return self.path / name

    def prepare(self) -> None:
        """Makes the folder, and removes what a run that was killed has left half written or half removed.
        Raises CheckpointError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
            # A write is tried now, because the first save may be hours away.
            write_whole(self.path / ".writable", "")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: no checkpoint can be written here ({error.strerror or error}); give another "
                f"checkpoint.dir"
            ) from error

    def remove_leftovers(self) -> None:
        """What is half written or half removed, while nobody writes. Raises OSError."""
        for path, _ in self._named(_LEFTOVER):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into. Raises OSError, also where the folder that
        `prepare` made is gone."""
        partial = self._partial(step)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()

        return partial

    def seal(self, step: int, description: dict[str, Any]) -> int:
        """The last file of what was begun, and all of it to the disk; its size in bytes.

        `description` gets the size and checksum of each file outside the folders of `description["roles"]`.
        """
        partial = self._partial(step)
        # The role folders have manifests of their own, with the checksums of their items.
        outside = [
            path for path in _files(partial) if path.relative_to(partial).parts[0] not in description["roles"]
        ]
        files = {str(path.relative_to(partial)): _file_entry(path) for path in sorted(outside)}
        write_whole(
            partial / DESCRIPTION_FILE,
            json.dumps({"format": FORMAT, "step": step, **description, "files": files}, indent=2) + "\n",
        )
        # Everything must be on the disk before the rename makes it a checkpoint.
        sync_tree(partial)

        return sum(path.stat().st_size for path in _files(partial))

    def commit(self, step: int) -> Path:
        """What was sealed becomes the latest checkpoint."""
        final = self.path / step_name(step)

        # of a future that was given up when the run went back to an earlier step; `latest` is before it
        if final.exists():
            self.remove(final)
        # The name must be on the disk before `latest` names it.
        os.rename(self._partial(step), final)
        sync_folder(self.path)
        self.point_at(final)

        return final

    def point_at(self, checkpoint: Path) -> None:
        write_whole(self.path / LATEST_FILE, checkpoint.name + "\n")

    def point_at_best(self, best: BestCheckpoint | None) -> None:
        """`best.json`, with the folder's name; it is removed where there is no best one, or not here."""
        path = self.path / BEST_FILE
        if best is None or self.path / step_name(best.step) not in self.whole():
            path.unlink(missing_ok=True)
        else:
            write_whole(
                path, json.dumps({"checkpoint": step_name(best.step), **best._asdict()}, indent=2) + "\n"
            )

    def best(self) -> Path | None:
        """The checkpoint that `best.json` names; None where there is no such file. Raises CheckpointError for
        one that names none."""
        pointer = self.path / BEST_FILE
        if not pointer.is_file():
            return None

        def read() -> str:
            try:
                return str(json.loads(pointer.read_text(encoding="utf-8"))["checkpoint"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise CheckpointError(
                    f"{pointer}: does not name a checkpoint ({error}); the file is damaged"
                ) from error

        return self._named_by(pointer, read)

    def remove_old(self, keep: int, best: BestCheckpoint | None = None) -> None:
        """All but `latest`, the `keep` - 1 newest before it, and the best; `keep` 0 keeps every one. Those of
        later steps are of a future given up. Raises CheckpointError where there is none, though one was
        committed."""
        latest = self.latest()
        whole = self.whole()

        if latest not in whole:  # the folder may go away between the two
            raise CheckpointError(
                f"{latest or self.path / LATEST_FILE}: is no longer there; put back what was removed"
            )

        position = whole.index(latest)
        # Checkpoints after `latest` are never kept, not even where `keep` is 0.
        stay = whole[: position + 1] if keep == 0 else whole[max(0, position + 1 - keep) : position + 1]

        for path in whole:
            if path not in stay and (best is None or path.name != step_name(best.step)):
                self.remove(path)

    def remove(self, checkpoint: Path) -> None:
        """Its name goes first, so that a kill leaves no checkpoint with files missing. Refuses what this
        class did not write."""
        read_description(checkpoint)
        removed = self.path / f".{checkpoint.name}.removed"
        if removed.exists():
            shutil.rmtree(removed)
        os.rename(checkpoint, removed)
        shutil.rmtree(removed)

    def abandon(self, step: int) -> None:
        """Of a save that failed; a rank may still be writing, and then the next run's `prepare` removes the
        rest."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self.path / f".{step_name(step)}.partial"

    def _named(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        if not self.path.is_dir():
            return []
        return [
            (path, match) for path in sorted(self.path.iterdir()) if (match := pattern.fullmatch(path.name))
        ]


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def read_description(checkpoint: Path) -> dict[str, Any]:
    """`checkpoint.json`, with `step`, `roles` and `files` (see `seal`). Raises CheckpointError where it is
    not there, or not what this version writes."""
    path = checkpoint / DESCRIPTION_FILE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); {checkpoint} is not a checkpoint of a run"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); the checkpoint is damaged") from error

    # The format is compared before the fields, which another version may lay out differently.
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else description
        raise CheckpointError(
            f"{path}: has format {found!r}, but this version reads {FORMAT}; use the version that wrote it"
        )

    if problem := _problem(description):
        raise CheckpointError(f"{path}: {problem}; the checkpoint is damaged")
    return description


def _problem(description: dict[str, Any]) -> str | None:
    """What is missing in a description, or of another kind than `seal` writes."""
    step, roles, files = (description.get(key) for key in ("step", "roles", "files"))
    if type(step) is not int:
        return f"step is {step!r}, not a whole number"
    if not isinstance(roles, list) or not roles or not all(_is_name(role) for role in roles):
        return f"roles is {roles!r}, not a list of folders' names"
    if not isinstance(files, dict):
        return f"files is {files!r}, not a mapping of files"

    for name, expected in files.items():
        # A damaged description must not make the check read files outside the checkpoint.
        if not all(_is_name(part) for part in name.split("/")):
            return f"files names {name!r}, which is not in the checkpoint's folder"
        if (
            not isinstance(expected, dict)
            or type(expected.get("nbytes")) is not int
            or not isinstance(expected.get("checksum"), str)
        ):
            return f"files has {expected!r} for {name!r}, not its nbytes and checksum"

    return None


def _is_name(part: object) -> bool:
    """Of a file or folder, in the folder that it is looked for in."""
    return isinstance(part, str) and part not in ("", ".", "..") and "/" not in part and "\0" not in part


def check_files(checkpoint: Path) -> dict[str, Any]:
    """The description of a checkpoint whose files outside the roles' folders are as they were written, and
    which is of the step that its folder names.

    Raises CheckpointError that names the first that is not.
    """
    description = read_description(checkpoint)
    # A folder that was renamed says no step to compare with.
    if (named := _STEP.fullmatch(checkpoint.name)) and int(named[1]) != description["step"]:
        raise CheckpointError(
            f"{checkpoint / DESCRIPTION_FILE}: is of step {description['step']}, and its folder of step "
            f"{int(named[1])}: one was put into "
            "the place of the other; give the folder its own name back, or use another checkpoint"
        )

    for name, expected in description["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; the checkpoint is damaged")
        # The size is compared before the checksum, which reads the whole file.
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
    """xxh3_64 of the whole file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def _file_entry(path: Path) -> dict[str, Any]:
    return {"nbytes": path.stat().st_size, "checksum": file_checksum(path)}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
