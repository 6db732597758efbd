"""Record hidden states, scores, gradients and weights of an update, to compare them with another layout.

Hidden states are recorded at the first, middle and last response token of some rows. A row is named by a hash
of its tokens, and chosen by it, so that every layout records the same ones. Gradients and weights are written
like a checkpoint, as slices of whole tensors. `megarl/checkpoints/trace_comparison.py` reads the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megarl.checkpoints.trace_comparison import AFTER, BEFORE, forward_file, mini_batch_folder
from megarl.engine.checkpoint import write_tensors
from megarl.engine.engine import MegatronEngine, Outputs, Rows
from megarl.engine.micro_batch import MicroBatch
from megarl.engine.sharding import Shard, sharding_of

_PARTS = ("self_attention", "mlp")  # modules of a layer whose outputs are recorded before the layer's own


class StepTrace:
    """The trace of one model's updates in a step. All of its ranks create one, and call the same methods.

    Args:
        folder: An empty folder, which all ranks see.
        share_of_rows: The share of the rows whose hidden states are recorded.
    """

    def __init__(self, engine: MegatronEngine, folder: Path, share_of_rows: float) -> None:
        self._engine = engine
        self._folder = folder
        self._most = int(share_of_rows * 2.0**64)
        self._number = 0
        self._rows: dict[int, tuple[int, int]] = {}  # row -> hash, response length
        self._micro_batch: MicroBatch | None = None
        self._recorded: dict[str, list[Tensor]] = defaultdict(list)

        self._handles = [
            module.register_forward_hook(partial(self._record, name, is_selected))
            for name, module, is_selected in self._modules()
        ]

        engine.trace = self
        write_tensors(folder / BEFORE, self._weights(), engine.places)

    def begin_update(self, rows: Rows) -> None:
        """Name the rows of the next mini-batch."""
        prompts = list(rows["prompts"].each())
        responses = list(rows["responses"].each())
        self._rows = {
            number: (_hash(prompt, response), len(response))
            for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        }

    @contextmanager
    def recording(self, micro_batch: MicroBatch) -> Generator[None]:
        """Record the outputs of modules in the block, which runs the forward pass of a micro-batch."""
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._micro_batch = None

    def record_scores(self, micro_batch: MicroBatch, outputs: Outputs) -> None:
        """Record the outputs of the model for the chosen tokens."""
        places, names = self._chosen(micro_batch, torch.arange(len(micro_batch.cells)))
        for key, values in outputs.items():
            self._keep(key, names, values.detach()[places][:, None])

    def end_update(self) -> None:
        """Write what was recorded, and the gradients, before the optimizer step."""
        folder = self._folder / mini_batch_folder(self._number)
        write_tensors(folder, self._gradients(), self._engine.places)
        if self._engine.groups.tensor_rank == 0:
            arrays = {name: torch.cat(parts).numpy() for name, parts in self._recorded.items()}
            # pyrefly: ignore[bad-argument-type]  # no name is allow_pickle
            np.savez(folder / forward_file(dist.get_rank()), **arrays)
        self._recorded.clear()
        self._number += 1

    def close(self) -> None:
        """Write the weights after the step, and stop recording."""
        for handle in self._handles:
            handle.remove()
        self._engine.trace = None
        write_tensors(self._folder / AFTER, self._weights(), self._engine.places)

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module, bool]]:
        """Yield (name, module, whether its output may be of the chosen tokens only) in any order."""
        for model in self._engine.models:
            if hasattr(model, "embedding"):
                yield "embedding", model.embedding, False
            for layer in model.decoder.layers:
                # A name sorts in the order of the forward pass.
                prefix = f"layer {layer.layer_number - 1:04d}"
                for place, part in enumerate(_PARTS):
                    if (module := getattr(layer, part, None)) is not None:
                        yield f"{prefix} {place} {part}", module, part == "mlp"
                yield f"{prefix} {len(_PARTS)} output", layer, True

    def _record(self, name: str, may_be_selected: bool, module: Any, inputs: Any, output: Any) -> None:
        micro_batch = self._micro_batch
        if micro_batch is None:
            return
        hidden = (output[0] if isinstance(output, tuple) else output).detach()
        if self._engine.groups.parallel.sequence_parallel:
            hidden = self._gathered(hidden)
        hidden = hidden.flatten(0, 1)

        # The last layer of a packed batch keeps only the tokens that predict another.
        inputs = micro_batch.inputs
        packed = inputs.packed
        last = f"layer {self._engine.spec.architecture.num_hidden_layers - 1:04d} "
        is_last = packed is not None and packed.predicting is not None and name.startswith(last)
        predictors = micro_batch.predictors if may_be_selected and is_last else inputs.predictors
        places, names = self._chosen(micro_batch, inputs.scored.cpu())
        self._keep(name, names, hidden[predictors[places]])

    def _gathered(self, hidden: Tensor) -> Tensor:
        group = self._engine.groups.tensor
        parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        return torch.cat(parts)

    def _chosen(self, micro_batch: MicroBatch, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Choose among response tokens of a micro-batch.

        Args:
            tokens: (N,) indices among all response tokens of the micro-batch.

        Returns:
            The places of the chosen ones in `tokens`, and their names (n, 2): the row's hash and the column.
        """
        cells = micro_batch.cells.cpu()[tokens]
        rows = (cells // micro_batch.shape[1]).tolist()
        columns = (cells % micro_batch.shape[1]).tolist()
        places = []
        names = []
        for place, (row, column) in enumerate(zip(rows, columns, strict=True)):
            name, length = self._rows[micro_batch.row_numbers[row]]
            if name < self._most and column in (0, length // 2, length - 1):
                places.append(place)
                names.append((name - 2**63, column))  # int64
        return torch.tensor(places, dtype=torch.long), torch.tensor(names, dtype=torch.long).view(-1, 2)

    def _keep(self, name: str, tokens: Tensor, values: Tensor) -> None:
        self._recorded[f"{name}|tokens"].append(tokens)
        self._recorded[f"{name}|values"].append(values.float().cpu())

    def _weights(self) -> Iterator[Shard]:
        sharding = sharding_of(self._engine.models, self._engine.groups)
        yield from (shard for shard in sharding.of_weights(self._engine.optimizer.slices()) if shard.is_main)

    def _gradients(self) -> Iterator[Shard]:
        """Yield the reduced gradients: on each data-parallel rank, those that its optimizer reads."""
        sharding = sharding_of(self._engine.models, self._engine.groups)
        for part in self._engine.optimizer.slices():
            gradient: Tensor = part.parameter.main_grad  # pyrefly: ignore[missing-attribute]
            flat = gradient.view(-1)[part.start : part.stop]
            for shard in sharding.parameters[part.parameter]:
                for piece in shard.part(part.start, part.stop, shard.key, flat):
                    if piece.is_main:
                        yield piece


def _hash(prompt: Tensor, response: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(
        b"|".join(tokens.to(torch.int64).numpy().tobytes() for tokens in (prompt, response))
    )
