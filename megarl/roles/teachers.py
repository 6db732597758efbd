"""Several teachers, each of which scores the samples of some data sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.controller.futures import DerivedFuture
from megarl.roles.models import Scorer


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """The teachers of a run, by data source.

    Attributes:
        by_source: The teacher of each data source.
        other: The teacher of all other data sources, if there is one.
    """

    by_source: Mapping[str, Scorer]
    other: Scorer | None

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        """Return what `Scorer.log_probs` does, in the order of the batch. Teachers work concurrently.

        Raises:
            ValueError: The batch has no `data_source`, or no teacher scores that of a row.
        """
        if "data_source" not in batch.non_tensor_batch:
            raise ValueError(
                "the batch has no data_source, by which the teacher of a row is chosen; add the array "
                "`data_source` to its non_tensor_batch"
            )

        rows_of: dict[Scorer, list[int]] = {}
        for row, source in enumerate(batch.non_tensor_batch["data_source"]):
            scorer = self.by_source.get(source, self.other)
            if scorer is None:
                raise ValueError(
                    f"row {row} of the batch has data_source {source!r}, which no teacher scores; there are "
                    f"teachers of {', '.join(map(repr, self.by_source))}"
                )
            rows_of.setdefault(scorer, []).append(row)

        futures = [scorer.log_probs(batch.select_idxs(np.array(rows))) for scorer, rows in rows_of.items()]
        # Results come in the order of the teachers. This is the position of each row of the batch in them.
        order = np.argsort(np.concatenate([*rows_of.values()]), kind="stable")
        return DerivedFuture(futures, lambda parts: _in_order(parts, order))


def _in_order(parts: Sequence[Any], order: np.ndarray) -> DataProto:
    """Return the rows `order` of the concatenated parts."""
    return DataProto.from_dict(
        {
            key: RaggedTensor.gather([part.ragged[key] for part in parts], order.tolist())
            for key in parts[0].ragged
        }
    )
