"""Code that runs in the ranks of conversion tests: Megatron loads what was written, and an engine saves what
is to be read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from tests.unit.engine.checkpoint_side import Settings, failure_of, open_engine, save_whole, train
from tests.unit.engine.rank_side import Tensors, build, deal, hf_weights, join_rows, replica_rows, start, take


class Loaded(NamedTuple):
    """The result of loading.

    Attributes:
        wrong: Parameters that differ from those that the engine loads from the Hugging Face folder.
        outputs: Outputs of the whole batch.
    """

    wrong: list[str]
    outputs: Tensors
    refusal: str


def load_strictly(settings: Settings, folder: Path, batch: Tensors) -> Loaded:
    """Load in a rank with Megatron's own loader, which fills the state dict of a real GPTModel and finds no
    missing or unexpected tensors."""
    groups = start(settings.parallel)
    engine = build(groups, settings.folder, head=settings.head, dtype=settings.dtype)
    from megatron.core import dist_checkpointing

    from megarl.engine.checkpoint import load

    want = {name: value.clone() for name, value in engine.parameters().items()}
    for value in engine.parameters().values():
        value.fill_(float("nan"))
    metadata = {
        **(dist_checkpointing.load_content_metadata(str(folder)) or {}),
        "dp_cp_group": groups.data_context,
    }
    states = {
        f"model{number}": model.sharded_state_dict(metadata=metadata)
        for number, model in enumerate(engine.models)
    }
    loaded = dist_checkpointing.load(states, str(folder), strict="raise_all")
    for number, model in enumerate(engine.models):
        model.load_state_dict(loaded[f"model{number}"], strict=True)
    wrong = [name for name, value in engine.parameters().items() if not torch.equal(value, want[name])]
    num_rows = len(batch["input_ids"])
    rows = replica_rows(groups, num_rows)
    outputs = join_rows(rows, engine.forward(take(batch, rows), deal(len(rows), 2)), num_rows)

    return Loaded(wrong, outputs, failure_of(lambda: load(open_engine(settings), folder)))


def train_and_save_weights(settings: Settings, folder: Path) -> Tensors:
    """Train a step in a rank, and return the engine's weights by their Hugging Face names after saving
    them."""
    engine = open_engine(settings)
    train(engine, 1)
    save_whole(engine, settings, folder)
    return hf_weights(engine)
