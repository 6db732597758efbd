"""Opens the model in a folder, whatever its format.

Folder of checkpoints (`latest`) -> step folder (`checkpoint.json`) -> role folder (`manifest.json`,
`.metadata`, `huggingface/`).
Folder of Megatron's own programs (`latest_checkpointed_iteration.txt`) -> `iter_0000010` or `release`.
A folder with `.metadata` is torch_dist; one with `config.json` is Hugging Face; one with
`adapter_config.json` alone is a PEFT adapter.
"""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoints.convert.classic import is_classic, open_classic
from megarl.checkpoints.convert.distributed import open_distributed
from megarl.checkpoints.convert.hugging_face import open_adapter_folder, open_hugging_face
from megarl.checkpoints.convert.source import ModelSource
from megarl.checkpoints.role_folder import HUGGING_FACE_FOLDER, MANIFEST_FILE
from megarl.checkpoints.run_folder import DESCRIPTION_FILE, LATEST_FILE, CheckpointFolder, read_description
from megarl.checkpoints.torch_dist import METADATA_FILE
from megarl.machine.errors import CheckpointError
from megarl.machine.folder_kinds import instead_of_model
from megarl.weights.hf_folder import CONFIG_FILE
from megarl.weights.peft_folder import has_adapter

TRACKER_FILE = "latest_checkpointed_iteration.txt"  # written by Megatron's own programs
DEFAULT_ROLE = "actor"
_MAX_LISTED = 8


def open_model(
    path: Path,
    role: str | None = None,
    trust_remote_code: bool = False,
    companions: Path | None = None,
    check_contents: bool = True,
) -> ModelSource:
    """Open the model in a folder.

    Args:
        role: For a run's checkpoint, which contains several models. Default: the only one, or the actor.
        companions: A Hugging Face folder, whose weights are not read, for a Megatron checkpoint without a
        model
            configuration.
        check_contents: Compare weights with their checksums, if there are any, which reads all of them.

    Raises:
        CheckpointError, ConfigError, WeightTransferError: The folder has no known format, cannot be read, or
            is damaged.
    """
    try:
        return _open(path.absolute(), role, trust_remote_code, companions, check_contents)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}"
        ) from error


def _open(
    path: Path, role: str | None, trust_remote_code: bool, companions: Path | None, check_contents: bool
) -> ModelSource:
    _check_is_folder(path)
    # Descend from a folder of checkpoints to the step, and from the step to the role.
    folder = CheckpointFolder(path).latest() or path

    if (folder / DESCRIPTION_FILE).is_file():
        folder = _role_folder(folder, role)
    elif role is not None:
        raise CheckpointError(
            f"{path}: role {role!r} was requested, but this is not a run's checkpoint and contains a single "
            f"model; omit the role"
        )

    is_policy = (folder / CONFIG_FILE).is_file()  # the exported policy, next to the roles
    of_step = (folder.parent / DESCRIPTION_FILE).is_file() and not is_policy
    if of_step and not (folder / MANIFEST_FILE).is_file():
        raise CheckpointError(f"{folder / MANIFEST_FILE}: is missing; the checkpoint is damaged")
    if (folder / TRACKER_FILE).is_file():
        folder = _tracked_folder(folder)

    # The formats are distinguished by their files; a Megatron checkpoint may also contain config.json.
    if (folder / METADATA_FILE).is_file():
        return open_distributed(
            folder, _companions(path, folder, companions), trust_remote_code, check_contents
        )

    if is_classic(folder):
        return open_classic(folder, _companions(path, folder, companions), trust_remote_code, check_contents)
    if (folder / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{folder / METADATA_FILE}: the file is missing, so the contents of the other files are unknown"
        )

    if has_adapter(folder) and not (folder / CONFIG_FILE).is_file():
        if companions is None:
            raise CheckpointError(
                f"{path}: is an adapter, which does not specify its model; pass --config HF_DIR, the folder "
                "of its base model"
            )
        return open_adapter_folder(folder, companions, trust_remote_code)

    if (folder / CONFIG_FILE).is_file():
        if companions is not None:
            raise CheckpointError(
                f"{path}: a Hugging Face folder has its own {CONFIG_FILE}; omit {companions}"
            )
        return open_hugging_face(folder, trust_remote_code)

    raise _nothing_known(folder)


def _check_is_folder(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: {'a file, not the folder of a model' if path.exists() else 'there is no such folder'}"
        )


def _nothing_known(folder: Path) -> CheckpointError:
    if meant := instead_of_model(folder):
        return CheckpointError(f"{folder}: is not a model; {meant}")
    # The contents of an unknown folder often show which folder was meant.
    names = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(names[:_MAX_LISTED]) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )
    return CheckpointError(
        f"{folder}: contains {listed or 'nothing'}, which is not a model; give a Hugging Face folder "
        f"({CONFIG_FILE} and safetensors), a run's "
        f"checkpoint ({DESCRIPTION_FILE}), a folder of them ({LATEST_FILE}), or a Megatron checkpoint "
        f"({METADATA_FILE}, or mp_rank_00 ...)"
    )


def _role_folder(step: Path, role: str | None) -> Path:
    roles: list[str] = read_description(step)["roles"]
    chosen = role or (roles[0] if len(roles) == 1 else DEFAULT_ROLE)
    if chosen not in roles:
        raise CheckpointError(f"{step}: has no role {chosen!r}; choose one of {', '.join(roles)}")
    if not (step / chosen).is_dir():
        raise CheckpointError(f"{step / chosen}: is missing; the checkpoint is damaged")

    return step / chosen


def _tracked_folder(folder: Path) -> Path:
    """Return the folder of the iteration that Megatron's own programs would load."""
    tracker = folder / TRACKER_FILE
    name = tracker.read_text(encoding="utf-8").strip()

    if name != "release":
        if not name.isdecimal():
            raise CheckpointError(
                f"{tracker}: contains {name!r}, which is neither the number of an iteration nor 'release'"
            )
        name = f"iter_{int(name):07d}"

    if not (folder / name).is_dir():
        raise CheckpointError(f"{tracker}: names {name}, which is not in {folder}")
    return folder / name


def _companions(path: Path, folder: Path, given: Path | None) -> Path:
    """Return the folder with config.json: the given one, or one in or next to the checkpoint."""
    if given is not None:
        _check_is_folder(given)
        return given.absolute()

    if (folder / MANIFEST_FILE).is_file():  # megarl's own, which is complete only with its companions
        return folder / HUGGING_FACE_FOLDER
    places = [folder / HUGGING_FACE_FOLDER, folder, folder.parent / HUGGING_FACE_FOLDER, folder.parent]

    for place in places:
        if (place / CONFIG_FILE).is_file():
            return place

    raise CheckpointError(
        f"{path}: a Megatron checkpoint does not specify its model, and there is no "
        f"{HUGGING_FACE_FOLDER}/{CONFIG_FILE} in it or "
        f"next to it; pass --config HF_DIR, a Hugging Face folder with the model's {CONFIG_FILE} and "
        f"tokenizer (its weights are not needed)"
    )
