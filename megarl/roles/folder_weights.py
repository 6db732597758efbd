"""Weights that engines get from a Hugging Face folder, where nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.controller.group import RoleGroup
from megarl.roles.replicas import is_dead_or_unborn, results_of
from megarl.roles.weight_sync import PushReport
from megarl.weights.tensors import Manifest
from megarl.workers.rollout_worker import RolloutWorker


class FolderWeights:
    """A folder that all nodes of the replicas see; `manifest`: of the tensors in its files, all of which are loaded."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def push(self, replicas: Mapping[int, RoleGroup], version: int) -> tuple[PushReport | None, dict[int, Exception]]:
        """As WeightSync.push; there is no report, as no trainer sends anything."""
        lost: dict[int, Exception] = {}
        loading = {
            number: replica.call_rank(0, RolloutWorker.load_folder, str(self._folder), self._manifest, version)
            for number, replica in replicas.items()
        }
        results_of(loading, lost, is_dead_or_unborn)
        return None, lost
