"""Finds the policy that a command names.

The name is a Hugging Face folder, a run's folder, a checkpoint, or a Megatron-LM folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.checkpoints.convert.hugging_face import base_of_adapter, with_merged_adapter
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.source import ModelSource
from megarl.checkpoints.run_folder import DESCRIPTION_FILE, CheckpointFolder, step_name
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.config.sources import is_hub_name
from megarl.data.hub import model_folder
from megarl.machine.errors import CheckpointError
from megarl.trainers.checkpoint import CONFIG_FILE
from megarl.weights.checkpoint_index import read_checkpoint_index
from megarl.weights.manifest import manifest_of

LATEST = "latest"
BEST = "best"
# Subfolders of a run's folder.
_CHECKPOINTS = "checkpoints"
_HUGGING_FACE = "huggingface"


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model and the run that produced it.

    Attributes:
        run: The configuration of the run, from `run_file`; None for a model without a run.
    """

    source: ModelSource
    run: RunConfig | None = None
    run_file: Path | None = None
    run_dir: Path | None = None


def find_model(path: Path, step: str = LATEST) -> NamedModel:
    """Find a model. A model on the hub is fetched.

    Args:
        path: The model folder, run folder, checkpoint or hub name.
        step: `latest`, `best` (`checkpoint.keep_best`) or a step number, for a folder of checkpoints or a
            run's folder.

    Raises:
        ValueError: The folder contains no language model, is damaged, or has no such step.
    """
    if is_hub_name(str(path)):
        path = model_folder(str(path), "MODEL", fetch=True)
    try:
        folder, run_file = _model_folder(path, step)
        run = None if run_file is None else load_config(RunConfig, run_file)
        source = with_merged_adapter(open_model(folder, companions=base_of_adapter(folder)))
    except CheckpointError as error:  # Nothing has run yet, so the error is reported in one line.
        raise ValueError(str(error)) from error

    if source.head != "lm":
        raise ValueError(
            f"{source.folder}: is a critic or a reward model, which cannot generate text; give a language "
            f"model"
        )

    return NamedModel(
        source=source,
        run=run,
        run_file=run_file,
        run_dir=path if os.path.isfile(path / CONFIG_FILE) and path != folder else None,
    )


def _model_folder(path: Path, step: str) -> tuple[Path, Path | None]:
    """Return the folder of one model, and the file of its run's configuration."""
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{path}: "
            f"{'is a file, not the folder of a model' if os.path.exists(path) else 'there is no such folder'}"
        )

    # Distinguish a checkpoint, the folder of a run, a folder of checkpoints, and a plain model.
    if os.path.isfile(path / DESCRIPTION_FILE):
        _refuse_step(path, step, "is a checkpoint of one step")
        return path, path / CONFIG_FILE

    if os.path.isfile(path / CONFIG_FILE):
        return _of_run(path, step)
    if CheckpointFolder(path).whole():
        chosen = _of_step(CheckpointFolder(path), step)
        return chosen, chosen / CONFIG_FILE

    _refuse_step(path, step, "is not the folder of a run")
    return path, None


def _of_run(path: Path, step: str) -> tuple[Path, Path]:
    elsewhere = load_config(RunConfig, path / CONFIG_FILE).checkpoint.dir
    checkpoints = CheckpointFolder(path / _CHECKPOINTS if elsewhere is None else Path(elsewhere))

    if checkpoints.whole():
        chosen = _of_step(checkpoints, step)
        return chosen, chosen / CONFIG_FILE

    # The run has saved only the trained model.
    if step == LATEST and os.path.isdir(path / _HUGGING_FACE):
        return path / _HUGGING_FACE, path / CONFIG_FILE
    raise CheckpointError(
        f"{path}: is the folder of a run without checkpoints in {checkpoints.path} and without a trained "
        "model"
    )


def _of_step(checkpoints: CheckpointFolder, step: str) -> Path:
    if step == LATEST:
        latest = checkpoints.latest()
        assert latest is not None, "there are complete checkpoints"
        return latest

    if step == BEST and (best := checkpoints.best()) is not None:
        return best
    whole = {path.name: path for path in checkpoints.whole()}

    # List the available steps in the error.
    if not step.isdecimal() or (name := step_name(int(step))) not in whole:
        kept = "" if step != BEST else ", because the run kept no best checkpoint (checkpoint.keep_best)"
        raise CheckpointError(
            f"{checkpoints.path}: has no step {step!r}{kept}; give --step {LATEST}, or the number of one of "
            f"{', '.join(whole)}"
        )

    return whole[name]


def _refuse_step(path: Path, step: str, why: str) -> None:
    if step != LATEST:
        raise CheckpointError(f"{path}: {why}, so --step {step} does not apply; remove it")


@contextmanager
def hugging_face_folder(
    model: NamedModel, dtype: torch.dtype, scratch: Path | None = None
) -> Generator[Path]:
    """Yield a folder from which engines can load the model.

    It is the model's own folder if that contains every tensor exactly once and nothing else. Otherwise the
    model is converted to `dtype` in a temporary folder in `scratch`, which is removed after the block.

    Raises:
        CheckpointError: The temporary folder cannot be written.
    """
    source = model.source
    expected = manifest_of(source.architecture, dtype)

    if source.kind == "Hugging Face":
        stored = read_checkpoint_index(source.folder)
        # Engines read every file of the folder, so extra files would be loaded too. Packed tensors are
        # converted.
        if (
            all(each.scales is None for each in stored.values())
            and stored.keys() == expected.keys()
            and {each.file for each in stored.values()} == set(source.folder.glob("*.safetensors"))
        ):
            yield source.folder
            return

    with tempfile.TemporaryDirectory(prefix=".model-", dir=scratch) as temporary:
        folder = Path(temporary) / "model"
        write_hugging_face(source, folder, dtype)
        yield folder
