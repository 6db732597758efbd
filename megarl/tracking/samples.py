"""Per-step sample files with per-token columns, `samples/step_<number>.parquet`.

Files are written atomically, in the background. The total size of the folder is bounded: when the limit is
exceeded, the file whose neighboring steps are closest together is deleted, so that the remaining files span
the run evenly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.machine.files import write_whole

SAMPLES_FOLDER = "samples"
_PREFIX = "step_"
_SUFFIX = ".parquet"
# Keys in the schema metadata of a file.
_TOKENS = b"megarl.tokens"
_PARTS = b"megarl.score_parts"

# List columns have one value per token: prompt tokens for `prompt_ids`, response tokens for the others.
# turn_rewards has one value per turn.
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "uid": pa.string(),
        "data_source": pa.string(),
        "prompt": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response": pa.string(),
        "response_ids": pa.list_(pa.int32()),
        "ground_truth": pa.string(),
        "score": pa.float64(),
        "score_parts": pa.list_(pa.float32()),
        # Further numbers returned by reward functions: name -> number, as JSON.
        "reward_numbers": pa.string(),
        "advantage": pa.float32(),
        "advantages": pa.list_(pa.float32()),
        "log_probs": pa.list_(pa.float32()),
        "rollout_log_probs": pa.list_(pa.float32()),
        # The token's factor for the difference between engine and trainer; null without such a correction.
        "rollout_weights": pa.list_(pa.float32()),
        # What leaves the token out of the loss: 0, REJECTED, LATE or OFF_POLICY; null if no rule can.
        "excluded": pa.list_(pa.int8()),
        # The size of the gradient of the policy loss by the token's log-prob, which is |weight * advantage|,
        # over the sum of the step's, as aggregated.
        "loss_share": pa.list_(pa.float32()),
        "weight_version": pa.int64(),
        "prompt_length": pa.int32(),
        "response_length": pa.int32(),
        "finish_reason": pa.string(),
        # Set for agent episodes, otherwise null. call_errors: kind -> number, as JSON.
        "is_model": pa.list_(pa.bool_()),
        "turn_rewards": pa.list_(pa.float32()),
        "num_calls": pa.int32(),
        "call_errors": pa.string(),
        "episode_end": pa.string(),
    }
)
_NUMBERS = "reward_numbers"
# Values of `excluded`.
REJECTED = 1  # its response, by algorithm.rollout_correction.rejection
LATE = 2  # its weights were too old for rollout.late=mask
OFF_POLICY = 3  # its response has become unlikely, by algorithm.policy_loss.off_policy_limit
OF_LOSS = ("rollout_weights", "excluded", "loss_share")
OF_EPISODES = ("is_model", "turn_rewards", "num_calls", "call_errors", "episode_end")


class SamplesFileError(ValueError):
    """A sample file cannot be read. The message names it."""


class SampleTable(NamedTuple):
    """Samples of one step.

    Attributes:
        rows: Table with the schema SCHEMA.
        tokens: Text of each token id in `rows`.
        score_parts: Names of the values in the column `score_parts`.
    """

    rows: pa.Table
    tokens: Mapping[int, str]
    score_parts: Sequence[str]


class SampleWriter:
    """Writes sample files in a background thread, one at a time.

    A step blocks only if the previous file is not written yet.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None

    def write(self, step: int, make: Callable[[], SampleTable], max_bytes: int) -> None:
        """Write the samples of a step in the background.

        Args:
            make: Builds the table; called in the thread.
            max_bytes: Limit on the total size of all files. A single file may exceed it.

        Raises:
            Exception: Any error of the previous write.
        """
        self.flush()
        self._writing = self._thread.submit(self._write, step, make, max_bytes)

    def flush(self) -> None:
        """Wait until all files are on disk.

        Raises:
            OSError: The last file could not be written. Errors of `make` are raised as well.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()
        self.flush()

    def _write(self, step: int, make: Callable[[], SampleTable], max_bytes: int) -> None:
        path = sample_path(self._output_dir, step)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, _encoded(make()))
        _thin(self._output_dir, max_bytes)


def _encoded(table: SampleTable) -> bytes:
    metadata = {
        _TOKENS: json.dumps(dict(table.tokens), ensure_ascii=False),
        _PARTS: json.dumps(list(table.score_parts)),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table.rows.replace_schema_metadata(metadata), sink, compression="zstd")

    return sink.getvalue().to_pybytes()


def sample_path(output_dir: Path, step: int) -> Path:
    return output_dir / SAMPLES_FOLDER / f"{_PREFIX}{step:08d}{_SUFFIX}"


def sample_files(output_dir: Path) -> dict[int, Path]:
    """Return the run's sample files by step, in increasing order. Files with other names are ignored."""
    found = {}
    for path in (output_dir / SAMPLES_FOLDER).glob(f"{_PREFIX}*{_SUFFIX}"):
        number = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if number.isdecimal():
            found[int(number)] = path

    return dict(sorted(found.items()))


def read_samples(path: Path) -> SampleTable:
    """Read the samples of a step.

    Raises:
        SamplesFileError: The file is damaged, or has other columns.
    """
    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        tokens = json.loads(metadata[_TOKENS])
        parts = json.loads(metadata[_PARTS])
        for name in (*OF_EPISODES, *OF_LOSS, _NUMBERS):
            if name not in table.schema.names:  # the file was written by an older version
                table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
        # Bring the columns into the expected order and types, whatever wrote the file.
        rows = table.select(SCHEMA.names).cast(SCHEMA)
        return SampleTable(
            rows, {int(number): str(text) for number, text in tokens.items()}, [str(name) for name in parts]
        )
    except (
        OSError,
        pa.ArrowException,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SamplesFileError(
            f"{path}: cannot be read as the samples of a step ({problem}); it is damaged or not a sample file"
        ) from error


def remove_samples(output_dir: Path, after: int) -> None:
    """Delete the files of all steps after `after`."""
    for step, path in sample_files(output_dir).items():
        if step > after:
            path.unlink()


def _thin(output_dir: Path, max_bytes: int) -> None:
    """Delete files until the total size is within `max_bytes`.

    The first and the newest file are deleted last.
    """
    files = sample_files(output_dir)
    sizes = {step: path.stat().st_size for step, path in files.items()}

    while len(sizes) > 1 and sum(sizes.values()) > max_bytes:
        gone = _most_crowded(list(sizes))
        files[gone].unlink()
        del sizes[gone]


def _most_crowded(steps: Sequence[int]) -> int:
    """Return the step whose neighbors are closest together, the earliest of several.

    For two steps, return the first.
    """
    inner = range(1, len(steps) - 1)
    return steps[min(inner, key=lambda index: steps[index + 1] - steps[index - 1])] if inner else steps[0]


def list_column(lengths: Sequence[int], values: Any, kind: pa.DataType) -> pa.Array:
    """Build a list column.

    Args:
        lengths: Number of values in each row.
        values: Values of all rows, concatenated; an array or a sequence.
    """
    offsets = [0, *accumulate(lengths)]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, kind))
