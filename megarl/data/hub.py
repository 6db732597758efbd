"""Names on the Hugging Face hub in the place of folders and files: fetched once into the hub's own cache,
which then has the path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from megarl.config.roles import model_roles
from megarl.config.rules.data import FORMATS
from megarl.config.schema import RunConfig
from megarl.config.sources import is_hub_name
from megarl.machine.errors import ConfigError, one_line

Run = TypeVar("Run", bound=RunConfig)
_ANSWER_LIMIT_S = 5.0  # for the hub to say what there is
_WEIGHTS = "*.safetensors"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# What asking the hub raises: its answers, no connection (an OSError), a name that it would not have.
_FAILED = (HfHubHTTPError, HFValidationError, OSError)


class HubInputs(NamedTuple, Generic[Run]):
    """A configuration whose names on the hub were looked up.

    Attributes:
        config: Local folders and files replace the names that were found.
        lines: A line, which begins with the key, about each model's weights and each data set that were not
            fetched.
        problems: Names that the hub does not have, or that it does not answer for, one line each.
    """

    config: Run
    lines: list[str]
    problems: list[str]


def with_hub_inputs(config: Run, fetch: bool) -> HubInputs[Run]:
    """Replace each model's and data set's name on the hub by its local folder or file.

    Args:
        fetch: Download weights and data. Otherwise only a model's configuration and tokenizer.
    """
    lines = list[str]()
    problems = list[str]()

    # Problems are collected, so that all names that cannot be found are reported at once.
    for role in model_roles(config):
        if is_hub_name(role.path):
            try:
                folder, has_weights = _model(role.path_key, role.path, fetch)
            except _NotFoundError as error:
                problems.append(str(error))
                continue
            config = _changed(config, role.path_key.split("."), str(folder))
            if not has_weights:
                lines.append(
                    f"{role.path_key}: {role.path} is on the hub; `megarl train` fetches its weights"
                )

    # The data files: a data set that is not fetched keeps its name.
    for key in ("train_files", "val_files"):
        files = list[str]()
        for name in getattr(config.data, key):
            try:
                files.append(_data_file(f"data.{key}", name, fetch) if is_hub_name(name) else name)
            except _NotFoundError as error:
                problems.append(str(error))
        lines += [
            f"data.{key}: {name} is on the hub; `megarl train` fetches it"
            for name in files
            if is_hub_name(name)
        ]
        config = _changed(config, ["data", key], files)

    # Roles that share a model's key repeat its line.
    return HubInputs(config, list(dict.fromkeys(lines)), list(dict.fromkeys(problems)))


def with_cached_models(config: Run) -> Run:
    """Replace the names of models that are whole in the hub's cache by their folders. Asks no hub."""
    for role in model_roles(config):
        if is_hub_name(role.path) and (folder := _whole_model(role.path)) is not None:
            config = _changed(config, role.path_key.split("."), str(folder))
    return config


def model_folder(name: str, key: str, fetch: bool) -> Path:
    """Return the folder of the model that a command's option `key` names. fetch: with its weights.

    Raises:
        ConfigError: The hub does not have it, or does not answer.
    """
    try:
        folder, _ = _model(key, name, fetch)
    except _NotFoundError as error:
        raise ConfigError(name, [str(error)]) from error
    return folder


class _NotFoundError(Exception):
    """Raised for a name that the hub does not have, or does not answer for. The message begins with the
    key."""


def _whole_model(name: str) -> Path | None:
    folder = _in_cache(name, "model", [*_COMPANIONS, _WEIGHTS])
    return folder if folder is not None and any(folder.glob(_WEIGHTS)) else None


def _model(key: str, name: str, fetch: bool) -> tuple[Path, bool]:
    """Its folder, and whether the weights are there."""
    if (whole := _whole_model(name)) is not None:
        return whole, True
    return _fetched(key, name, "model", [*_COMPANIONS, _WEIGHTS] if fetch else _COMPANIONS), fetch


def _data_file(key: str, name: str, fetch: bool) -> str:
    """The only file of a data set; its name where it is not to be fetched."""
    wanted = [f"*{ending}" for ending in FORMATS]
    folder = _in_cache(name, "dataset", wanted)
    if folder is None and not fetch:
        return name
    folder = folder or _fetched(key, name, "dataset", wanted)
    files = sorted(file for file in folder.rglob("*") if file.suffix in FORMATS)

    # Of several files, only the user can say which to train with.
    if len(files) != 1:
        listed = ", ".join(map(str, files)) or "none"
        raise _NotFoundError(
            f"{key}: {name} of the hub has {len(files)} files of data, of which those to read must be "
            f"named: {listed}"
        )

    return str(files[0])


def _in_cache(name: str, kind: str, patterns: Sequence[str]) -> Path | None:
    try:
        return Path(
            snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), local_files_only=True)
        )
    except _FAILED:  # not all of it is here
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
        # Without a network, the files can be brought here by other means.
        hint = (
            f"download it where one can be reached (hf download{of_kind} {name} --local-dir DIR), and "
            f"set {key} to {named}"
        )
        if kind == "model":
            folder = f"models/{name.rpartition('/')[2]}/"
            hint += (
                f"; to check or plan a run, its config.json in {folder} next to the configuration is enough"
            )
        problem = (
            f"there is no {name!r} here, and the hub does not give it ({type(error).__name__}: "
            f"{one_line(error).split('. ')[0]})"
        )
        raise _NotFoundError(f"{key}: {problem}; {hint}") from error


def _changed(section: Any, key: Sequence[str], value: Any) -> Any:
    first, *rest = key
    return replace(section, **{first: _changed(getattr(section, first), rest, value) if rest else value})
