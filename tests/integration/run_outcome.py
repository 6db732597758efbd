"""Outcome of a run for bitwise comparisons: metrics, samples, weights, and its last checkpoint's state."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

from megarl.checkpoints.torch_dist import StoredItem, read_index
from megarl.tracking.samples import read_samples, sample_files
from tests.integration.tiny_run import Finished

# Metrics of clocks, and of the recovery itself.
_TIMED = re.compile(
    r"(timing_s|perf|memory|resharding|recovery)/.*|(rollout|agent)/num_restarts"
    r"|rollout/replica_\d+/tokens_per_s|agent/(tool_s/mean|waiting_share)|.*/judge/\w+/latency_s/\w+"
)


def stored_object(folder: Path, item: StoredItem) -> object:
    """Return an object of a checkpoint, with lists for tensors, which are printed in part."""
    with (folder / item.file).open("rb") as file:
        file.seek(item.position)
        stored = torch.load(io.BytesIO(file.read(item.nbytes)), weights_only=True)
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, stored)


class Outcome:
    """What must not depend on a lost process."""

    def __init__(self, finished: Finished) -> None:
        folder = finished.output_dir
        self.metrics = [
            {name: value for name, value in line.items() if not _TIMED.fullmatch(name)}
            for line in finished.metrics
        ]
        # The numbers of a judge have its latency; the others are in the metrics, too.
        self.samples = {
            step: repr(read_samples(path).rows.drop_columns("reward_numbers").to_pylist())
            for step, path in sample_files(folder).items()
        }
        self.weights = {
            name: tensor.tolist()
            for file in sorted(finished.policy.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        assert self.weights

        # The manifest has a checksum of each tensor: weights, moments and master weights.
        latest = (folder / "checkpoints" / "latest").read_text().strip()
        self.states = {
            path.parent.name: json.loads(path.read_text())["tensors"]
            for path in (folder / "checkpoints" / latest).glob("*/manifest.json")
        }
        assert self.states
        # Of torch, Megatron, numpy and Python, in each rank.
        self.random_states = {
            (role, key): repr(stored_object(index.folder, item))
            for role in self.states
            for index in [read_index(folder / "checkpoints" / latest / role)]
            for key, item in index.objects.items()
            if key.startswith("rng_state")
        }
        assert self.random_states

    def difference(self, other: Outcome) -> list[str]:
        """Return what differs."""
        return [name for name, value in vars(self).items() if value != vars(other)[name]]
