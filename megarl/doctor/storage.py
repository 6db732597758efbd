"""Checks the checkpoint folder.

It checks write access, atomic renames, free space, and the time to write a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.config.finding import Finding, doubtful, good, wrong
from megarl.config.memory_sizes import checkpoint_bytes, most_checkpoints
from megarl.config.schema import RESUME_AUTO, RESUME_DISABLE, RunConfig
from megarl.doctor.run_inputs import ExaminedRun
from megarl.machine.errors import CheckpointError, ConfigError, counted, sized
from megarl.machine.files import existing_folder

CHECK = "checkpoints"
MARK = ".megarl-doctor-"  # prefix of the temporary files of the checks
_SAMPLE_BYTES = 32 * 2**20  # size of the file that measures the write speed
_BLOCK = bytes(range(256)) * 4096  # 1 MiB that no file system stores as a hole
_LONG_S = 300.0
NETWORK = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "afs")
CLUSTER = ("lustre", "gpfs", "beegfs", "ceph", "wekafs", "fuse.ceph", "virtiofs", "fuse.juicefs")
_GONE = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk of a folder.

    Attributes:
        kind: The file system.
        speed: Write speed in bytes per second, to the disk and not to the cache.
        renames: Whether a rename replaces a file atomically.
        error: Why nothing could be written.
    """

    folder: str
    kind: str
    total: int
    free: int
    speed: float = 0.0
    renames: bool = True
    error: str | None = None


def probe(path: Path, sample_bytes: int = _SAMPLE_BYTES) -> Disk:
    """Write a file in the nearest existing parent of `path`, rename it over another file, and remove both."""
    folder = existing_folder(path)
    usage = shutil.disk_usage(folder)
    kind = file_system(folder)

    try:
        # Checkpoints rely on a rename that replaces a file, which some file systems do not offer.
        with tempfile.TemporaryDirectory(prefix=MARK, dir=folder) as scratch:
            speed = _write(Path(scratch) / "new", sample_bytes)
            (Path(scratch) / "old").write_bytes(b"old")
            os.replace(Path(scratch) / "new", Path(scratch) / "old")
            renames = (
                os.listdir(scratch) == ["old"] and (Path(scratch) / "old").stat().st_size == sample_bytes
            )
    except OSError as error:
        return Disk(
            folder=str(folder),
            kind=kind,
            total=usage.total,
            free=usage.free,
            error=error.strerror or str(error),
        )

    return Disk(
        folder=str(folder), kind=kind, total=usage.total, free=usage.free, speed=speed, renames=renames
    )


def _write(file: Path, nbytes: int) -> float:
    begin = time.monotonic()
    with file.open("wb", buffering=0) as stream:
        for _ in range(nbytes // len(_BLOCK)):
            stream.write(_BLOCK)
        os.fsync(stream.fileno())
    return nbytes / max(time.monotonic() - begin, 1e-6)


def file_system(folder: Path) -> str:
    """Return the file system of the mount that contains `folder`.

    The last of several mounts at the same point counts.
    """
    whole = folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if whole.is_relative_to(each.mountpoint)]
    nearest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return "unknown" if nearest is None else nearest.fstype


def judge(disk: Disk, *, num_nodes: int, one: int, most: int) -> Iterator[Finding]:
    """Check the disk.

    Args:
        one: Bytes of a checkpoint.
        most: Maximum number of checkpoints at a time.
    """
    elsewhere = "set checkpoint.dir (or trainer.output_dir) to a writable folder on a larger disk"
    facts: dict[str, object] = {
        "folder": disk.folder,
        "file_system": disk.kind,
        "free": disk.free,
        "one": one,
        "most": most,
        "bytes_per_s": round(disk.speed),
    }

    # Without atomic renames, a killed run could leave an inconsistent checkpoint.
    if disk.error is not None or not disk.renames:
        problem = (
            f"({disk.kind}) does not support atomic renames over an existing file"
            if disk.error is None
            else f"({disk.kind}, {sized(disk.free)} free) cannot be written: {disk.error}"
        )
        yield wrong(CHECK, f"{disk.folder} {problem}", elsewhere, **facts)
        return

    faults = [*_room(disk, one, most, facts), *_kind(disk, num_nodes, facts)]
    seconds = one / disk.speed

    if seconds > _LONG_S:
        faults.append(
            doubtful(
                CHECK,
                f"a checkpoint of {sized(one)} will take {seconds / 60:,.0f} minutes at "
                f"{sized(disk.speed)}/s",
                f"raise checkpoint.every_steps, or {elsewhere}",
                **facts,
            )
        )

    yield from faults
    if not faults:
        room = f"; {counted(most, 'checkpoint')} of {sized(one)}" if most else ""
        yield good(
            CHECK,
            f"{disk.folder} ({disk.kind}): {sized(disk.free)} free, {sized(disk.speed)}/s{room}",
            **facts,
        )


def _room(disk: Disk, one: int, most: int, facts: dict[str, object]) -> Iterator[Finding]:
    hint = "lower checkpoint.keep, raise checkpoint.every_steps, or set checkpoint.dir to a larger disk"
    if disk.free < one:
        yield wrong(
            CHECK,
            f"{disk.folder} has {sized(disk.free)} free, but one checkpoint needs {sized(one)}",
            hint,
            **facts,
        )
    elif disk.free < most * one:
        yield doubtful(
            CHECK,
            f"{disk.folder} has {sized(disk.free)} free, but will contain up to "
            f"{counted(most, 'checkpoint')} of {sized(one)}",
            hint,
            **facts,
        )


def _kind(disk: Disk, num_nodes: int, facts: dict[str, object]) -> Iterator[Finding]:
    if disk.kind.startswith(NETWORK):
        yield doubtful(
            CHECK,
            f"{disk.folder} is on {disk.kind}, which is slow for many writers, and on which nodes may see a "
            f"renamed file late",
            "use a parallel file system of the cluster (Lustre, GPFS, ...) if there is one",
            **facts,
        )
    elif num_nodes > 1 and not disk.kind.startswith(CLUSTER):
        yield doubtful(
            CHECK,
            f"{disk.folder} is on {disk.kind}, which seems to be local to this node, but {num_nodes} nodes "
            f"write to it",
            "set checkpoint.dir to a shared folder with the same path on every node",
            **facts,
        )
    elif disk.kind in _GONE and not disk.folder.startswith("/tmp"):
        yield doubtful(
            CHECK,
            f"{disk.folder} is on {disk.kind}, so checkpoints are lost with the "
            f"{'container' if disk.kind == 'overlay' else 'machine'}",
            "mount a volume, and set checkpoint.dir to a folder in it",
            **facts,
        )


def check(subject: ExaminedRun) -> Iterator[Finding]:
    config = subject.config
    if config is None:
        return
    one = checkpoint_bytes(config, subject.architectures) if subject.all_models_known else 0
    yield from judge(
        probe(config.checkpoint_path),
        num_nodes=1 if subject.plan is None else subject.plan.num_nodes,
        one=one,
        most=most_checkpoints(config),
    )


def resumption(config: RunConfig) -> Iterator[Finding]:
    """Check that the run can resume from the folder `checkpoint.resume`, if it is on this machine."""
    resume = config.checkpoint.resume
    if resume in (RESUME_AUTO, RESUME_DISABLE) or not os.path.isdir(resume):
        return
    # Imported here, because only a run that resumes needs it.
    from megarl.trainers.resume import find_resume

    try:
        find_resume(config)
    except ConfigError as error:
        yield from (Finding((), line) for line in error.problems)
    except CheckpointError as error:
        yield Finding(("checkpoint.resume",), str(error))
