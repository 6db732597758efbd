"""Names what a folder is, and which folder next to it was probably meant, when a command gets a wrong one.

A run's folder, the files in it, and the folders of other programs:

outputs/sft/run/              config.yaml, plan.txt, metrics.jsonl, status.json
outputs/sft/run/huggingface/  the trained model: config.json, *.safetensors
outputs/sft/run/checkpoints/  latest, step_00000010/checkpoint.json, step_00000010/actor/manifest.json

Only names are read, except the class of a model and the base model of an adapter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.machine.files import read_json_object

_CONFIG = "config.yaml"  # of many programs, so that it makes a run only with what a run writes next to it
_RUN = ("metrics.jsonl", "status.json", "summary.json", "failure.txt")
_RUN_WITH_CONFIG = ("plan.txt", "checkpoints/latest", "checkpoints/step_*")
_MODEL = "config.json"
_WEIGHTS = "*.safetensors"
_STEP = "checkpoint.json"
_STEPS = ("step_*/checkpoint.json",)
_ADAPTER = "adapter_config.json"
_MEGATRON = ("latest_checkpointed_iteration.txt", ".metadata", "mp_rank_*", "iter_*", "manifest.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_DATA = ("*.parquet", "*.jsonl", "*.csv", "*.arrow", "dataset_info.json", "dataset_dict.json")
SCORING_MODELS = ("a reward model", "a critic")  # what models without tokens are called
_HEADS = {
    "ForSequenceClassification": SCORING_MODELS[0],
    "ForTokenClassification": SCORING_MODELS[1],
    "ForCausalLM": "a language model",
    "ForConditionalGeneration": "a language model",
}
_RUN_KIND = "the folder of a run"
_STEP_KIND = "a checkpoint of a run"
_STEPS_KIND = "the folder of a run's checkpoints"
_ADAPTER_KIND = "a LoRA adapter"
_MEGATRON_KIND = "a Megatron checkpoint"
_TOKENIZER_KIND = "a tokenizer without a model"
_DATA_KIND = "a folder of data files"
_CONVERT = "write its model to a folder with `megarl convert {folder} FOLDER`, and give that"
_INSTEAD_OF_MODEL = {
    _RUN_KIND: _CONVERT.replace("{folder}", "{folder}/checkpoints"),
    _STEP_KIND: _CONVERT,
    _STEPS_KIND: _CONVERT,
    _MEGATRON_KIND: _CONVERT,
    _ADAPTER_KIND: "give its base model, and start from the adapter with actor.lora.path={folder}, or merge "
    "both with `megarl convert {folder} FOLDER --base BASE`",
    _TOKENIZER_KIND: "give the folder of the model, or download it (hf download NAME --local-dir FOLDER)",
    _DATA_KIND: "data belongs to data.train_files; give the folder of a model",
}
_OUTPUT_DIR = "give a run's trainer.output_dir"
# How far a folder that was meant is searched: in folders below and above, and in how many of each.
_BELOW = 3
_ABOVE = 4
_MOST_LOOKED_AT = 200
_MOST_NAMED = 3


def model_called(fields: dict[str, Any]) -> str:
    """Return what the classes in a `config.json` say that a model is, such as `a reward model (X)`."""
    names = fields.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    kind = next((kind for head, kind in _HEADS.items() if name.endswith(head)), "a model")
    return f"{kind} ({name})" if name else kind


def instead_of_model(folder: Path) -> str:
    """Say what a folder without a usable model is, and what to give instead; empty if nothing is known."""
    near = [each for each in _below(folder) if (each / _MODEL).is_file() and _has(each, (_WEIGHTS,))]
    return _meant(folder, near, _INSTEAD_OF_MODEL.get(_kind(folder), "").format(folder=folder))


def instead_of_run(folder: Path) -> str:
    """Say what a folder is that is no run's, and which run was meant; empty if nothing is known."""
    return _meant(folder, [each for each in (*_below(folder), *_above(folder)) if is_run(each)])


def instead_of_checkpoint(folder: Path) -> str:
    """Say what a folder without checkpoints is, and which ones were meant; empty if nothing is known."""
    places = [*_below(folder), *(each / "checkpoints" for each in _above(folder))]
    return _meant(folder, [each for each in places if _has(each, _STEPS)])


def _meant(folder: Path, near: list[Path], otherwise: str = "") -> str:
    """Return what a folder is and what to give: folders near it, or otherwise what a text names."""
    give = f"give {_listed(near)}" if near else otherwise
    kind = _kind(folder)
    if kind == _ADAPTER_KIND and (base := fields_of(folder / _ADAPTER).get("base_model_name_or_path")):
        kind = f"{kind} of {base}"
    return f"this is {kind}; {give}" if kind and give else give


def instead_of_data(folder: Path) -> str:
    """Say which data files are in a folder, or what else it is; empty if nothing is known."""
    files = [path for pattern in _DATA[:3] for path in sorted(folder.glob(pattern))]
    if files:
        return f"list the files in it, such as {_listed(files)}"
    kind = _kind(folder)
    return f"this is {kind}, not data" if kind else ""


def no_run(folder: Path) -> str:
    """Return the error for a folder that is no run's, with the run that was meant if it is near."""
    problem = "no run has written here (no config.yaml, no metrics.jsonl)"
    if not os.path.isdir(folder):
        problem = "is a file, not a folder" if os.path.exists(folder) else "there is no such folder"
    elif (folder / _CONFIG).is_file() and not (folder / _STEP).is_file():
        problem = f"no run has written here (a {_CONFIG}, but no metrics.jsonl, plan.txt or checkpoints)"
    return f"{folder}: {problem}; {instead_of_run(folder) or _OUTPUT_DIR}"


def is_run(folder: Path) -> bool:
    """Return whether a run has written to a folder."""
    # A checkpoint has the configuration of its run, too.
    if (folder / _STEP).is_file():
        return False
    return _has(folder, _RUN) or ((folder / _CONFIG).is_file() and _has(folder, _RUN_WITH_CONFIG))


def _kind(folder: Path) -> str:
    """Return what a folder is, from the names in it; empty if they say nothing."""
    if not os.path.isdir(folder):  # False also for a name that is too long
        return ""
    if (folder / _STEP).is_file():
        return _STEP_KIND
    if is_run(folder):
        return _RUN_KIND
    if _has(folder, _STEPS):
        return _STEPS_KIND
    if (folder / _ADAPTER).is_file() and not (folder / _MODEL).is_file():
        return _ADAPTER_KIND
    if _has(folder, _MEGATRON):
        return _MEGATRON_KIND
    if (folder / _MODEL).is_file():
        return model_called(fields_of(folder / _MODEL))
    if _has(folder, _TOKENIZER):
        return _TOKENIZER_KIND
    if _has(folder, _DATA):
        return _DATA_KIND
    return "" if _entries(folder) else "an empty folder"


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing if it cannot be read, which is reported elsewhere."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def fields_of(file: Path) -> dict[str, Any]:
    """Return the fields of a JSON object; none if the file is missing or contains something else."""
    try:
        return read_json_object(file)
    except (OSError, ValueError):  # it is reported when the file is used
        return {}


def _below(folder: Path) -> Iterator[Path]:
    """Yield folders in a folder, those near it first."""
    level = [folder] if os.path.isdir(folder) else []
    for _ in range(_BELOW):
        inside = [each for parent in level for each in _entries(parent) if os.path.isdir(each)]
        level = inside[:_MOST_LOOKED_AT]
        yield from level


def _above(folder: Path) -> Iterator[Path]:
    yield from islice(folder.absolute().parents, _ABOVE)


def _listed(paths: list[Path]) -> str:
    # A path below the current folder is shown like the user would type it.
    here = Path.cwd()
    shown = [str(each.relative_to(here)) if each.is_relative_to(here) else str(each) for each in paths]
    more = f" or another of {len(shown)}" if len(shown) > _MOST_NAMED else ""
    return " or ".join(shown[:_MOST_NAMED]) + more
