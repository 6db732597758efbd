"""Select the checkpoint a run resumes from, check that it may, and find configuration changes.

Only small files are read, before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megarl.checkpoints.object_storage import ObjectStorage, local_copy
from megarl.checkpoints.role_folder import HUGGING_FACE_FOLDER, check_folder, read_description
from megarl.checkpoints.run_folder import (
    DESCRIPTION_FILE,
    LATEST_FILE,
    CheckpointFolder,
    check_files,
    step_of,
)
from megarl.config.load import FIXED, Difference, differences
from megarl.config.roles import model_roles
from megarl.config.schema import RESUME_AUTO, RESUME_DISABLE, Device, RunConfig
from megarl.config.validate import read_architectures
from megarl.machine.errors import CheckpointError, ConfigError, one_line
from megarl.machine.files import parse_json
from megarl.machine.folder_kinds import instead_of_checkpoint
from megarl.machine.processors import threads_setting
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.tensor_table import Head
from megarl.roles.model_snapshots import TakenSnapshot
from megarl.tracking.run_files import CONFIG_FILE
from megarl.weights.peft_folder import adapter_tensors, has_adapter, read_lora

STATE_FILE = "trainer.json"  # of a checkpoint, and of the driver's part of a snapshot


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Checkpoint from which a run resumes.

    Attributes:
        checkpoint: Folder of the checkpoint; of the driver's part if the models are in memory.
        state: State of the trainer.
        is_own: Whether it is in the run's own checkpoint folder, so that the run's files continue. A
            checkpoint of another run starts a new run.
        snapshot: The snapshot in memory that has the state of the models; None if the checkpoint has it.
    """

    checkpoint: Path
    step: int
    state: dict[str, Any]
    differences: Sequence[Difference]
    is_own: bool
    snapshot: TakenSnapshot | None = None


def checkpoint_folder(config: RunConfig) -> CheckpointFolder:
    return CheckpointFolder(config.checkpoint_path)


def find_resume(config: RunConfig) -> Resume | None:
    """Find the checkpoint to resume from, or return None if the run starts from the beginning.

    Raises:
        ConfigError: The configuration does not fit the checkpoint.
        CheckpointError: The checkpoint is damaged. The message names the file and the complete older
            checkpoints; none of them is used silently.
    """
    folder = checkpoint_folder(config)

    # A run must not write its checkpoints among those of another run.
    if config.checkpoint.resume == RESUME_DISABLE:
        if folder.whole():
            raise _problem(
                "checkpoint.resume",
                f"is disable, but {folder.path} has checkpoints of a run; use another trainer.output_dir, "
                f"or auto",
            )
        return None

    if config.checkpoint.resume == RESUME_AUTO:
        found = folder.latest() or _uploaded(config, folder)
    else:
        found = _given(local_copy(config.checkpoint.resume, _downloads(config, folder)))
        # Resuming from elsewhere would mix the checkpoints of two runs in one folder.
        if folder.whole() and not _is_in(found, folder):
            raise _problem(
                "checkpoint.resume",
                f"is {str(found)!r}, but {folder.path} has checkpoints of this run; resume from those "
                f"with auto, or use another folder",
            )

    return None if found is None else _read(found, folder, config)


def _uploaded(config: RunConfig, folder: CheckpointFolder) -> Path | None:
    """Download the latest checkpoint that this run has copied elsewhere, if there is one."""
    if config.checkpoint.upload is None:
        return None
    storage = ObjectStorage(config.checkpoint.upload)
    name = storage.latest()
    return None if name is None else storage.download(name, folder)


def _downloads(config: RunConfig, folder: CheckpointFolder) -> CheckpointFolder:
    """Return where a checkpoint at a URL is downloaded to: only the run's own ones to its own folder."""
    upload = config.checkpoint.upload
    resume = config.checkpoint.resume.rstrip("/") + "/"
    is_own = upload is not None and resume.startswith(upload.rstrip("/") + "/")
    return folder if is_own else CheckpointFolder(folder.path / "downloaded")


def _given(path: Path) -> Path:
    """Resolve a checkpoint path. For a folder of checkpoints, return the latest one."""
    if (path / DESCRIPTION_FILE).is_file():
        return path
    found = CheckpointFolder(path).latest() if path.is_dir() else None

    if found is None:
        raise _problem(
            "checkpoint.resume",
            f"is {str(path)!r}, which is neither a checkpoint (with {DESCRIPTION_FILE}) nor a folder of "
            f"them (with {LATEST_FILE}); {instead_of_checkpoint(path) or 'use one of these'}, or auto, or "
            "disable",
        )

    return found


def _is_in(checkpoint: Path, folder: CheckpointFolder) -> bool:
    return checkpoint.resolve().parent == folder.path.resolve()


def _read(checkpoint: Path, folder: CheckpointFolder, config: RunConfig) -> Resume:
    # Check the small files first. The large ones are verified by the ranks that read them.
    try:
        description = check_files(checkpoint)
        _check_steps(checkpoint, description)
        state = read_state(checkpoint, description["step"])
        changes = _changes(checkpoint, config)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {older_ones(checkpoint)}") from error

    return _resume(
        Resume(
            checkpoint=checkpoint,
            step=state["step"],
            state=state,
            differences=changes,
            is_own=_is_in(checkpoint, folder),
        ),
        config,
        _role_problems(checkpoint, description["roles"], config),
    )


def read_driver_state(folder: Path, config: RunConfig, sizes: Mapping[str, int]) -> Resume:
    """Read the driver's part of a snapshot in memory.

    Args:
        folder: Its folder.
        config: The configuration that continues.
        sizes: The number of ranks of each model that wrote the snapshot.

    Raises:
        ConfigError: The configuration does not fit it.
        CheckpointError: It cannot be read.
    """
    state = read_state(folder, step_of(folder))
    changes = _changes(folder, config)

    layouts = tuple(f"{role.parallel_key}." for role in model_roles(config) if role.optim is not None)
    has_this_layout = not any(change.key.startswith(layouts) for change in changes)

    found = Resume(
        checkpoint=folder,
        step=state["step"],
        state=state,
        differences=changes,
        is_own=True,
        snapshot=TakenSnapshot(state["step"], sizes, has_this_layout),
    )

    return _resume(found, config, [])


def _resume(found: Resume, config: RunConfig, problems: Sequence[str]) -> Resume:
    """Add the number of threads to the differences, and raise ConfigError if there are any problems."""
    changes = list(found.differences)
    # On a CPU the order of summation depends on the number of threads.
    if config.device is not Device.cuda and found.state.get("threads", now := threads_setting()) != now:
        changes.append(
            Difference(
                "OMP_NUM_THREADS, or cores: the last bits of CPU results depend on it",
                found.state["threads"],
                now,
            )
        )

    # Collect all problems, so that the user sees them at once.
    of_keys = [
        f"{change.key}: is {change.now!r}, but the checkpoint was written with {change.before!r}, and this "
        f"key decides {FIXED[change.key]}; use the same value, or start again in another folder"
        for change in changes
        if change.key in FIXED
    ]
    if all_problems := [*of_keys, *problems, *_step_problems(found.state, config)]:
        raise ConfigError(f"{found.checkpoint}, from which the run would resume", all_problems)
    return replace(found, differences=changes)


def _check_steps(checkpoint: Path, description: dict[str, Any]) -> None:
    """Check that each role's folder has its manifest and belongs to the checkpoint's step.

    The ranks check the remaining files against the manifest. A folder copied from another step is consistent
    in itself, so its checksums do not reveal the mistake.
    """
    for role in description["roles"]:
        step = read_description(checkpoint / role).step
        if step != description["step"]:
            raise CheckpointError(
                f"{checkpoint / role}: is of step {step}, but it is in the checkpoint of step "
                f"{description['step']}: models of two steps cannot be resumed together; restore the right "
                "folder, or use another checkpoint"
            )


def read_state(checkpoint: Path, step: int) -> dict[str, Any]:
    """Read `trainer.json` of the checkpoint of `step`.

    Raises:
        CheckpointError: It cannot be read, or is of another checkpoint.
    """
    path = checkpoint / STATE_FILE
    try:
        state = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); the checkpoint is damaged") from error

    if not isinstance(state, dict) or (
        absent := [key for key in ("step", "trainer", "seconds", "data") if key not in state]
    ):
        what = (
            f"has no {' and no '.join(absent)}"
            if isinstance(state, dict)
            else f"is a {type(state).__name__}, not a mapping"
        )
        raise CheckpointError(f"{path}: {what}; the checkpoint is damaged")

    # A file copied from another checkpoint is valid JSON, so compare the step as well.
    if state["step"] != step:
        raise CheckpointError(
            f"{path}: is of step {state['step']}, but it is in the checkpoint of step {step}; restore the "
            "right file, or use another checkpoint"
        )

    return state


def _changes(checkpoint: Path, config: RunConfig) -> list[Difference]:
    try:
        return differences(checkpoint / CONFIG_FILE, config)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint / CONFIG_FILE}: cannot be read ({one_line(error)}); the checkpoint is damaged"
        ) from error


def _role_problems(checkpoint: Path, saved: Sequence[str], config: RunConfig) -> list[str]:
    """List differences between the models of the checkpoint and those that the run trains."""
    heads: dict[str, Head] = {
        role.name: "value" if role.with_value_head else "lm"
        for role in model_roles(config)
        if role.optim is not None
    }
    trained = list(heads)
    if sorted(saved) != sorted(trained):
        return [
            f"roles: the checkpoint has {', '.join(sorted(saved))}, but this run trains "
            f"{', '.join(sorted(trained))}"
        ]

    problems = []
    (now, _) = read_architectures(config)

    for role in trained:
        folder = checkpoint / role / HUGGING_FACE_FOLDER
        before = read_architecture(str(folder), config.model.trust_remote_code)
        problems += _adapter_problems(role, heads[role], folder, before, now[role])
        for field in fields(before):
            # Fields that `==` ignores are of the original's files, which a checkpoint does not have.
            if field.name == "lora" or not field.compare:
                continue
            was = getattr(before, field.name)
            wanted = getattr(now[role], field.name)
            if was != wanted:
                problems.append(
                    f"{role}: {field.name} is {wanted!r}, but the checkpoint's model has {was!r}; use the "
                    f"same model"
                )

    return problems


def _adapter_problems(
    role: str, head: Head, folder: Path, before: Architecture, now: Architecture
) -> list[str]:
    """List differences between the adapters of the checkpoint and those that the run trains."""
    stored = read_lora(folder) if has_adapter(folder) else None
    if stored is None or now.lora is None:
        if stored is now.lora:
            return []
        had, has = ("weights", "adapters") if stored is None else ("adapters", "weights")
        said = f"the checkpoint trained {had}, but this run trains {has}"
        return [f"{role}.lora.rank: {said}; use {role}.lora.rank={stored.rank if stored else 'null'}"]

    problems = [
        f"{role}.lora.{name}: is {getattr(now.lora, name):g}, but the checkpoint's adapters have "
        f"{getattr(stored, name):g}; use that value"
        for name in ("rank", "alpha")
        if getattr(now.lora, name) != getattr(stored, name)
    ]
    if now.lora.modules_to_save != stored.modules_to_save:
        saved = ", ".join(stored.modules_to_save)
        problems.append(
            f"{role}.lora.modules_to_save: the checkpoint trained {saved or 'adapters only'}; use "
            f"{role}.lora.modules_to_save=[{saved}]"
        )
        return problems

    if adapter_tensors(replace(before, lora=stored), head).keys() != adapter_tensors(now, head).keys():
        named = ", ".join(stored.targets)
        problems.append(
            f"{role}.lora.targets: the checkpoint has adapters at {named}; use {role}.lora.targets=[{named}]"
        )

    return problems


def _step_problems(state: dict[str, Any], config: RunConfig) -> list[str]:
    problems = []
    kind = config.kind.value

    if state["trainer"] != kind:
        problems.append(
            f"trainer: the checkpoint was written by {state['trainer']}, but this is {kind}; start from its "
            f"Hugging Face folder"
        )

    if state["step"] > config.trainer.total_steps:
        problems.append(
            f"trainer.total_steps: is {config.trainer.total_steps}, but the checkpoint is of step "
            f"{state['step']}; raise it, or resume from an earlier checkpoint with checkpoint.resume=PATH"
        )

    return problems


def older_ones(damaged: Path) -> str:
    """List the checkpoints from which a user can resume instead of a damaged one."""
    # Offer only complete checkpoints, so that the next attempt does not fail as well.
    whole = [
        path
        for path in CheckpointFolder(damaged.parent).whole()
        if path.name < damaged.name and _is_whole(path)
    ]

    if not whole:
        return "There is no older complete checkpoint"

    return (
        "Older complete checkpoints: "
        + ", ".join(map(str, reversed(whole)))
        + "; resume from one with checkpoint.resume=PATH"
    )


def _is_whole(checkpoint: Path) -> bool:
    try:
        description = check_files(checkpoint)
        _check_steps(checkpoint, description)
        for role in description["roles"]:
            check_folder(checkpoint / role)
    except CheckpointError:
        return False
    return True


def _problem(key: str, problem: str) -> ConfigError:
    return ConfigError("checkpoint", [f"{key}: {problem}"])
