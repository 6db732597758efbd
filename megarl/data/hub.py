"""Resolves Hugging Face hub names to local folders and files.

They are downloaded once into the hub's own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from megarl.config.dotted import with_value
from megarl.config.roles import model_roles
from megarl.config.rules.data import FORMATS
from megarl.config.schema import RunConfig
from megarl.config.sources import is_hub_name
from megarl.machine.errors import ConfigError, one_line

_ANSWER_LIMIT_S = 5.0  # for the hub to list what it has
_WEIGHTS = "*.safetensors"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Exceptions of hub requests: its responses, a failed connection (an OSError), an invalid name.
_FAILED = (HfHubHTTPError, HFValidationError, OSError)


def with_hub_inputs[Run: RunConfig](config: Run, fetch: bool) -> tuple[Run, list[str], list[str]]:
    """Replace the hub names of models and data sets by local folders and files.

    Args:
        fetch: Download weights and data. Otherwise only the configurations and tokenizers of models.

    Returns:
        The configuration; one line for each model's weights and each data set that were not downloaded, and
        one for each name that the hub does not have or did not answer for. Lines begin with the key.
    """
    lines = list[str]()
    problems = list[str]()

    # Collect the problems, so that all missing names are reported at once.
    for role in model_roles(config):
        if is_hub_name(role.path):
            try:
                folder, has_weights = _model(role.path_key, role.path, fetch)
            except _NotFoundError as error:
                problems.append(str(error))
                continue
            config = with_value(config, role.path_key, str(folder))
            if not has_weights:
                lines.append(
                    f"{role.path_key}: {role.path} is on the hub; `megarl train` downloads its weights"
                )

    # Data files: a data set that is not downloaded keeps its name.
    for key in ("train_files", "val_files"):
        files = list[str]()
        for name in getattr(config.data, key):
            try:
                files.append(_data_file(f"data.{key}", name, fetch) if is_hub_name(name) else name)
            except _NotFoundError as error:
                problems.append(str(error))
        lines += [
            f"data.{key}: {name} is on the hub; `megarl train` downloads it"
            for name in files
            if is_hub_name(name)
        ]
        config = with_value(config, f"data.{key}", files)

    # Remove duplicates, because roles may share a model's key.
    return config, list(dict.fromkeys(lines)), list(dict.fromkeys(problems))


def with_cached_models[Run: RunConfig](config: Run) -> Run:
    """Replace the names of models that are complete in the hub's cache by their folders.

    The hub is not contacted.
    """
    for role in model_roles(config):
        if is_hub_name(role.path) and (folder := _whole_model(role.path)) is not None:
            config = with_value(config, role.path_key, str(folder))
    return config


def model_folder(name: str, key: str, fetch: bool) -> Path:
    """Return the folder of a model named by the option `key` of a command.

    Args:
        fetch: Whether to download its weights.

    Raises:
        ConfigError: The hub does not have it or does not answer.
    """
    try:
        folder, _ = _model(key, name, fetch)
    except _NotFoundError as error:
        raise ConfigError(name, [str(error)]) from error
    return folder


class _NotFoundError(Exception):
    """The hub does not have a name or does not answer. The message begins with the key."""


def _whole_model(name: str) -> Path | None:
    folder = _in_cache(name, "model", [*_COMPANIONS, _WEIGHTS])
    return folder if folder is not None and any(folder.glob(_WEIGHTS)) else None


def _model(key: str, name: str, fetch: bool) -> tuple[Path, bool]:
    """Return the folder of a model, and whether it contains the weights."""
    if (whole := _whole_model(name)) is not None:
        return whole, True
    return _fetched(key, name, "model", [*_COMPANIONS, _WEIGHTS] if fetch else _COMPANIONS), fetch


def _data_file(key: str, name: str, fetch: bool) -> str:
    """Return the only file of a data set, or its name if it is not to be downloaded."""
    wanted = [f"*{ending}" for ending in FORMATS]
    folder = _in_cache(name, "dataset", wanted)
    if folder is None and not fetch:
        return name
    folder = folder or _fetched(key, name, "dataset", wanted)
    files = sorted(file for file in folder.rglob("*") if file.suffix in FORMATS)

    # If there are several files, only the user can decide which ones to read.
    if len(files) != 1:
        listed = ", ".join(map(str, files)) or "none"
        raise _NotFoundError(
            f"{key}: {name} on the hub has {len(files)} data files; name the ones to read: {listed}"
        )

    return str(files[0])


def _in_cache(name: str, kind: str, patterns: Sequence[str]) -> Path | None:
    try:
        return Path(
            snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), local_files_only=True)
        )
    except _FAILED:  # not completely cached
        return None


def _fetched(key: str, name: str, kind: str, patterns: Sequence[str]) -> Path:
    try:
        return Path(
            snapshot_download(
                name, repo_type=kind, allow_patterns=list(patterns), etag_timeout=_ANSWER_LIMIT_S
            )
        )
    except _FAILED as error:
        of_kind = " --repo-type dataset" if kind == "dataset" else ""
        named = "DIR" if kind == "model" else "the files in DIR"
        # Without a network, the files can be copied from elsewhere.
        hint = (
            f"download it on a machine that can reach the hub (hf download{of_kind} {name} --local-dir DIR), "
            f"and set {key} to {named}"
        )
        if kind == "model":
            folder = f"models/{name.rpartition('/')[2]}/"
            hint += (
                f"; to check or plan a run, its config.json in {folder} next to the configuration is enough"
            )
        problem = (
            f"{name!r} does not exist locally, and the hub does not provide it ({type(error).__name__}: "
            f"{one_line(error).split('. ')[0]})"
        )
        raise _NotFoundError(f"{key}: {problem}; {hint}") from error
