"""The batches of a run's newest steps, with everything that the updates of trained models read.

`megarl replay` repeats the updates of a step from them.
"""

from __future__ import annotations

import re
from pathlib import Path

from megarl.batch.data_proto import DataProto
from megarl.tracking.run_files import writing

_FOLDER = "batches"
_NAME = re.compile(r"step_(\d{8,})\.batch")


class RecordedBatches:
    """Files of a run's newest batches.

    Args:
        output_dir: The folder of the run.
        num_kept: The number of steps to keep; 0: none.
    """

    def __init__(self, output_dir: Path, num_kept: int) -> None:
        self._output_dir = output_dir
        self._folder = output_dir / _FOLDER
        self._num_kept = num_kept

    def record(self, step: int, batch: DataProto) -> None:
        """Write the batch of a step, and remove those of old steps and of steps that are repeated.

        Raises:
            RunError: The file cannot be written.
        """
        if not self._num_kept:
            return
        uid = [key for key in ("uid",) if key in batch.non_tensor_batch]
        with writing(self._output_dir):
            self._folder.mkdir(exist_ok=True)
            batch.select(None, uid, []).save_to_disk(self._folder / f"step_{step:08d}.batch")
            for other, path in self._files().items():
                if not step - self._num_kept < other <= step:
                    path.unlink()

    def read(self, step: int) -> DataProto:
        """Return the batch of a step.

        Raises:
            ValueError: The run did not keep it.
            SerializationError: The file is damaged.
        """
        files = self._files()
        if step not in files:
            kept = ", ".join(map(str, files)) or "none"
            raise ValueError(
                f"{self._folder}: has no batch of step {step} (steps kept: {kept}); a run keeps the batches "
                f"of its newest steps with tracking.record_batches=N"
            )
        return DataProto.load_from_disk(files[step])

    def _files(self) -> dict[int, Path]:
        found = {
            int(match[1]): path
            for path in self._folder.glob("step_*.batch")
            if (match := _NAME.fullmatch(path.name))
        }
        return dict(sorted(found.items()))
