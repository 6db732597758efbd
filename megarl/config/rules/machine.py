"""Rules for the machine of a run: input files, GPUs, packages and writable folders.

A violation with an `absence` applies to this machine only: `megarl train` refuses it, while commands that
plan a run for another machine only list it. Wrong names (a folder instead of a file, an unknown file format)
are plain violations.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from megarl.config.finding import Absence, Finding, Findings
from megarl.config.layers import is_installed
from megarl.config.roles import RoleKind, judge_roles, model_roles
from megarl.config.rules.data import FORMATS, SAVED_TO_DISK, SPLITS
from megarl.config.rules.megatron import attention_switches, requirements_here
from megarl.config.schema import (
    RESUME_AUTO,
    RESUME_DISABLE,
    Device,
    LoggerKind,
    PPOConfig,
    RolloutEngineKind,
    RunConfig,
)
from megarl.config.schema.keys import PathKind, leaves, names_code, split_code
from megarl.config.sources import is_hub_name, is_url
from megarl.config.speculation import DRAFT, SECTION, draft_of
from megarl.machine.files import existing_folder, read_json_object
from megarl.machine.folder_kinds import instead_of_data
from megarl.machine.processors import has_gpu
from megarl.machine.ray_address import cluster_address

_WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "*.spm",
)


def has_weights(folder: str) -> bool:
    """Whether a model's folder has weights that megarl reads."""
    return any(Path(folder).glob(_WEIGHTS))


def has_tokenizer(folder: str) -> bool:
    """Whether a model's folder has files of a tokenizer."""
    return any(any(Path(folder).glob(pattern)) for pattern in _TOKENIZERS)


def _data_files(config: RunConfig) -> Findings:
    """Check the names of local files. `megarl.data.hub` looks up names on the hub."""
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for path in files:
            if not is_hub_name(path):
                yield from _data_file(key, path)


def _data_file(key: str, path: str) -> Findings:
    """Check that a path is a file in a known format or a folder saved by `datasets`."""
    if os.path.isdir(path):
        if os.path.isfile(Path(path) / SPLITS):
            message = (
                f"{path!r} contains several splits of a dataset; give the folder of one of them, such "
                f"as {str(Path(path) / 'train')!r}"
            )
            yield Finding((key,), message)
        elif not os.path.isfile(Path(path) / SAVED_TO_DISK):
            otherwise = "list each file in it, or give a folder saved by `datasets`"
            yield Finding((key,), f"{path!r} is a folder; {instead_of_data(Path(path)) or otherwise}")
    elif os.path.isfile(path):
        if Path(path).suffix.lower() not in FORMATS:
            yield Finding((key,), f"{path!r} is not a data file: its name must end in {', '.join(FORMATS)}")
    else:
        yield _no_file(key, path)


def _no_file(key: str, path: str) -> Finding:
    if set(path) & set("*?["):
        return Finding((key,), f"there is no file {path!r}; patterns are not expanded, so list each file")
    return Finding(
        (key,), f"there is no file {path!r} (the current directory is {Path.cwd()})", Absence.input
    )


def code_files(config: RunConfig) -> Findings:
    """Check the Python files of reward functions, tools, environments, estimators, losses and samplers."""
    for leaf in leaves(config):
        named = {leaf.key: leaf.value} if isinstance(leaf.value, str) else {}
        # Built-in functions in a list have no file.
        if leaf.path is PathKind.function and isinstance(leaf.value, list):
            named = {f"{leaf.key}[{i}]": each for i, each in enumerate(leaf.value) if names_code(each)}
        for key, reference in named.items() if leaf.path in (PathKind.code, PathKind.function) else ():
            path, _ = split_code(reference)
            if os.path.isdir(path):
                yield Finding((key,), f"{path!r} is a folder; give the file in it")
            elif not os.path.isfile(path):
                yield _no_file(key, path)


def _model_files(config: RunConfig) -> Findings:
    """Check the weights of all models, and the tokenizers that a run uses.

    `validate` reports a missing `config.json`.
    """
    folders = {role.path: role.path_key for role in model_roles(config)}
    with_tokenizer = {
        role.path
        for role in model_roles(config)
        if role.kind in (RoleKind.actor, RoleKind.reward_model, RoleKind.teacher)
    }
    for judge in judge_roles(config).values():
        folders.setdefault(judge.path, f"{judge.key}.path")
        with_tokenizer.add(judge.path)

    for folder, key in folders.items():
        if not os.path.isfile(Path(folder) / "config.json"):
            continue
        if (outside := _file_outside(Path(folder))) is not None:
            yield Finding(
                (key,),
                f"{folder!r} has an index ({_INDEX}) that lists {outside!r}; only files in this folder are "
                "allowed",
            )
        elif not has_weights(folder):
            # Weights in another format can be converted; otherwise they have to be downloaded.
            message = f"{folder!r} has no weights in safetensors files"
            if any(any(Path(folder).glob(pattern)) for pattern in _OTHER_WEIGHTS):
                yield Finding(
                    (key,),
                    f"{message}; convert the existing weights: save_pretrained(..., safe_serialization=True)",
                )
            else:
                yield Finding(
                    (key,), f"{message}; download them (hf download NAME --local-dir {folder})", Absence.input
                )
        if folder in with_tokenizer and not has_tokenizer(folder):
            message = (
                f"{folder!r} has no tokenizer; copy the model's tokenizer.json, tokenizer_config.json "
                f"and chat_template.jinja into it"
            )
            yield Finding((key,), message, Absence.input)


def _file_outside(folder: Path) -> str | None:
    """Return a file outside the folder that its index of weights lists, None if there is none."""
    try:
        files = read_json_object(folder / _INDEX).get("weight_map")
    except (OSError, ValueError):  # a damaged index is reported when the headers are read
        return None
    names = files.values() if isinstance(files, dict) else ()
    return next((name for name in names if isinstance(name, str) and Path(name).name != name), None)


def _draft_folder(config: RunConfig) -> Findings:
    """Check that the folder of a draft model is here, with weights."""
    folder = draft_of(config.rollout) if isinstance(config, PPOConfig) else None
    if folder is None:
        return
    message = None
    if not os.path.isfile(Path(folder) / "config.json"):
        message = f"there is no draft model in {folder!r}: its config.json is missing"
    elif not has_weights(folder) and not any(Path(folder).glob("*.bin")):
        message = f"{folder!r} has no weights"
    if message is not None:
        download = f"{message}; download the model (hf download NAME --local-dir {folder})"
        yield Finding((f"{SECTION}.{DRAFT}",), download, Absence.input)


def logger_problem(logger: LoggerKind) -> str | None:
    """Return why a logger cannot be used on this machine, or None."""
    needs = logger.needs
    if needs.package is not None and not _can_be_imported(needs.module):
        return f"{logger.value!r} requires a package that is not installed: pip install {needs.package}"
    return None


def _can_be_imported(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that contains the module is missing
        return False


def _gpus(config: RunConfig) -> Findings:
    """Check that this machine has a GPU if the run needs one and joins no cluster."""
    if config.device is Device.cuda and cluster_address() is None and not has_gpu():
        yield Finding(
            ("device",),
            "is cuda, but this machine has no GPU that torch can use; use device=cpu, or join a cluster "
            "with GPUs (RAY_ADDRESS=HOST:PORT)",
            Absence.gpu,
        )


def _engine_switches(config: RunConfig) -> Findings:
    """Check that no switch in this machine's environment silently makes the engine's samples wrong."""
    engine = config.rollout_engine
    if engine is None:
        return
    for name, effect in engine.needs.wrong_switches.items():
        value = os.environ.get(name, "").strip()
        # The engine ignores these values.
        if value.lower() not in ("", "0", "false", "no", "n") and not value.startswith("-"):
            yield Finding(
                ("rollout.engine",),
                f"is {engine.value}, but the variable {name}={value} {effect}; unset {name}",
            )


def _engine_packages(config: RunConfig) -> Findings:
    """Check that the packages of the engines are installed if the run joins no cluster."""
    # The nodes of a cluster have their own environments.
    if cluster_address() is not None:
        return

    if (engine := config.rollout_engine) is not None and (absent := _absent_packages(engine)):
        yield Finding(
            ("rollout.engine",),
            f"{engine.value!r} {absent} (on CPU see docs/install.md), or use rollout.engine=hf",
            Absence.package,
        )

    for judge in judge_roles(config).values():
        if absent := _absent_packages(RolloutEngineKind.sglang):
            yield Finding(
                (f"{judge.key}.path",),
                f"its server {absent} (on CPU see docs/install.md), or start one elsewhere and set url",
                Absence.package,
            )


def _absent_packages(engine: RolloutEngineKind) -> str:
    """Return what an engine needs and this machine does not have, or an empty string."""
    absent = [
        f"{name}{versions}" for name, versions in engine.needs.packages.items() if not is_installed(name)
    ]
    if not absent:
        return ""
    return f"requires packages that are not installed: pip install {' '.join(map(repr, absent))}"


def _loggers(config: RunConfig) -> Findings:
    for logger in config.tracking.loggers:
        if problem := logger_problem(logger):
            yield Finding(("tracking.loggers",), problem, Absence.package)


def writable_folders(config: RunConfig) -> Findings:
    """Check that a run which starts on this machine can write its output folders.

    This creates and removes a temporary folder in the nearest existing parent. Do not call it for a run on
    another machine, where the same path may be on another disk.
    """
    for key, folder in (
        ("trainer.output_dir", config.trainer.output_dir),
        ("checkpoint.dir", config.checkpoint.dir),
    ):
        if folder is None or not folder.strip():
            continue
        nearest = existing_folder(Path(folder))
        try:
            # Creating a folder is the only reliable test: mode bits do not show a read-only mount.
            tempfile.TemporaryDirectory(dir=nearest).cleanup()
        except OSError as error:
            yield Finding(
                (key,), f"{folder!r} cannot be written: {nearest}: {error.strerror}; give a writable folder"
            )


def _resumed_folder(config: RunConfig) -> Findings:
    resume = config.checkpoint.resume
    if is_url(resume):
        yield from _known_protocol("checkpoint.resume", resume)
    elif resume not in (RESUME_AUTO, RESUME_DISABLE) and not (resume.strip() and os.path.isdir(resume)):
        yield Finding(
            ("checkpoint.resume",),
            f"there is no folder {resume!r}; give auto, disable, or the path or URL of a checkpoint",
            Absence.input if resume.strip() else None,
        )


def _upload(config: RunConfig) -> Findings:
    upload = config.checkpoint.upload
    if upload is not None and is_url(upload):
        yield from _known_protocol("checkpoint.upload", upload)
    elif upload is not None:
        yield Finding(
            ("checkpoint.upload",),
            f"{upload!r} is not a URL; give one such as s3://bucket/folder, or file:///path/of/a/folder",
        )


def _known_protocol(key: str, url: str) -> Findings:
    # Only runs with a URL need the library.
    from fsspec import available_protocols, get_filesystem_class
    from fsspec.utils import get_protocol

    protocol = get_protocol(url)
    if protocol not in available_protocols():
        yield Finding(
            (key,), f"{url!r}: fsspec has no protocol {protocol!r}; use s3, gs, hdfs, file or another of them"
        )
        return
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        yield Finding((key,), f"{url!r}: {error}; s3 needs the package s3fs, gs needs gcsfs")


RULES = (
    _data_files,
    code_files,
    _model_files,
    _draft_folder,
    _gpus,
    requirements_here,
    attention_switches,
    _engine_packages,
    _engine_switches,
    _loggers,
    _resumed_folder,
    _upload,
)
