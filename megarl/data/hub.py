"""Names on the Hugging Face hub in the place of folders and files: fetched once into the hub's own cache, which then has the path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from megarl.config.data_rules import FORMATS
from megarl.config.errors import ConfigError, one_line
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.config.sources import is_hub_name

RunConfig = TypeVar("RunConfig", bound=PPOConfig | SFTConfig)
_ANSWER_LIMIT_S = 5.0  # for the hub to say what there is
_WEIGHTS = "*.safetensors"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# What asking the hub raises: its answers, no connection (an OSError), a name that it would not have.
_FAILED = (HfHubHTTPError, HFValidationError, OSError)


def with_hub_inputs(config: RunConfig, path: str, large: bool) -> tuple[RunConfig, list[str]]:
    """The configuration, of the file `path`, with the local folder of each model, and the local file of each data set, that it names by a
    name on the hub. large False: weights and data that are not here are not fetched, and the second value has a line about each.

    Raises ConfigError, with what to do, where the hub does not answer or does not have it.
    """
    said: list[str] = []
    for role in model_roles(config):
        if is_hub_name(role.path):
            folder, has_weights = _model(path, role.path_key, role.path, large)
            config = _changed(config, role.path_key.split("."), str(folder))
            if not has_weights:
                said.append(f"{role.path_key}: {role.path} is on the hub; `megarl train` fetches its weights")
    for kind in ("train", "val"):
        names = getattr(config.data, f"{kind}_files")
        files = [_data_file(path, f"data.{kind}_files", name, large) if is_hub_name(name) else name for name in names]
        said += [f"data.{kind}_files: {name} is on the hub; `megarl train` fetches it" for name in files if is_hub_name(name)]
        config = _changed(config, ["data", f"{kind}_files"], files)
    return config, list(dict.fromkeys(said))


def model_folder(name: str, key: str, large: bool) -> Path:
    """Of the model that `key`, of a command, names; large: with its weights. Raises ConfigError as `with_hub_inputs`."""
    folder, _ = _model(name, key, name, large)
    return folder


def _model(path: str, key: str, name: str, large: bool) -> tuple[Path, bool]:
    """Its folder, and whether the weights are there."""
    wanted = [*_COMPANIONS, _WEIGHTS]
    whole = _in_cache(name, "model", wanted)
    if whole is not None and any(whole.glob(_WEIGHTS)):
        return whole, True
    return _fetched(path, key, name, "model", wanted if large else _COMPANIONS), large


def _data_file(path: str, key: str, name: str, large: bool) -> str:
    """The only file of a data set; its name where it is not to be fetched."""
    wanted = [f"*{ending}" for ending in FORMATS]
    folder = _in_cache(name, "dataset", wanted)
    if folder is None and not large:
        return name
    folder = folder or _fetched(path, key, name, "dataset", wanted)
    files = sorted(file for file in folder.rglob("*") if file.suffix in FORMATS)
    if len(files) != 1:
        listed = ", ".join(map(str, files)) or "none"
        raise ConfigError(
            path, [f"{key}: {name} of the hub has {len(files)} files of data, of which those to read must be named: {listed}"]
        )
    return str(files[0])


def _in_cache(name: str, kind: str, patterns: Sequence[str]) -> Path | None:
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), local_files_only=True))
    except _FAILED:  # not all of it is here
        return None


def _fetched(path: str, key: str, name: str, kind: str, patterns: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), etag_timeout=_ANSWER_LIMIT_S))
    except _FAILED as error:
        of_kind = " --repo-type dataset" if kind == "dataset" else ""
        named = "DIR" if kind == "model" else "the files in DIR"
        remedy = f"download it where one can be reached (hf download{of_kind} {name} --local-dir DIR), and set {key} to {named}"
        problem = f"there is no {name!r} here, and no hub gives it ({type(error).__name__}: {one_line(error)[:100]})"
        raise ConfigError(path, [f"{key}: {problem}; {remedy}"]) from error


def _changed(section: Any, key: Sequence[str], value: Any) -> Any:
    first, *rest = key
    return replace(section, **{first: _changed(getattr(section, first), rest, value) if rest else value})
