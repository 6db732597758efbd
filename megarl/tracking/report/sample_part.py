"""Encode the samples of a step for the page: a JSON header, then compact per-token arrays.

    4 bytes: length of the header, little-endian | header | token numbers | log-probs | gaps | advantages
    | weights | shares | excluded

Token numbers are indices into the header's list of token texts, two bytes each, or four if `wide`. What
excludes a token from the loss is a byte. The other arrays are 16-bit floats, with NaN for missing values; a
share is relative to that of the average token of the file. In each array, the samples are concatenated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.tracking.samples import OF_EPISODES, SamplesFileError, SampleTable, read_samples

# Columns of the file that are copied to the header under their names.
_SHOWN = (
    *(
        "uid",
        "data_source",
        "response",
        "ground_truth",
        "score",
        "score_parts",
        "advantage",
        "weight_version",
    ),
    "prompt_length",
    "response_length",
    "finish_reason",
)
_WIDE_FROM = 2**16


def sample_part(path: Path, step: int, max_tokens: int) -> bytes:
    """Encode as many leading prompts of the file, with all their samples, as fit in `max_tokens` tokens.

    If the first prompt does not fit, encode some of its samples, at least one. If the file cannot be read,
    the header contains a `problem`.
    """
    try:
        table = read_samples(path)
    except SamplesFileError as error:
        return _joined({"step": step, "problem": str(error)}, [])

    rows = _fitting(table.rows, max_tokens)
    num_tokens = sum(table.rows["response_length"].to_pylist())
    header, arrays = _packed(rows, table, num_tokens)
    return _joined({"step": step, "of": len(table.rows), **header}, arrays)


def _fitting(rows: pa.Table, max_tokens: int) -> pa.Table:
    left = max_tokens
    whole = 0
    uids, lengths, prompts = (rows[name].to_pylist() for name in ("uid", "response_length", "prompt_length"))

    for row, uid in enumerate(uids):
        # A new prompt begins. If possible, the samples are truncated between prompts.
        if row == 0 or uid != uids[row - 1]:
            whole = row
            left = left - prompts[row]
        left -= lengths[row]
        if left < 0:
            return rows.slice(0, whole or max(1, row))

    return rows


def _packed(rows: pa.Table, table: SampleTable, num_tokens: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    ids = _flat(rows, "response_ids")
    # Send each token's text once, and the samples as indices into the list of token texts.
    unique, places = np.unique(ids, return_inverse=True)
    is_wide = len(unique) >= _WIDE_FROM
    rollout = _flat(rows, "rollout_log_probs")
    advantages = _flat(rows, "advantages")
    # If the trainer computed no log-probs, show those of the engine and no gap.
    own = _flat(rows, "log_probs")
    gaps = own - rollout
    own = np.where(np.isnan(own), rollout, own)
    lengths = rows["response_length"].to_pylist()
    shares = _flat(rows, "loss_share")
    prompts = list(dict.fromkeys(rows["prompt"].to_pylist()))
    place_of = {prompt: number for number, prompt in enumerate(prompts)}
    header = {
        "parts": list(table.score_parts),
        "tokens": [table.tokens.get(number, "") for number in unique.tolist()],
        "ids": unique.tolist(),
        "wide": is_wide,
        "prompts": prompts,
        "prompt": [place_of[prompt] for prompt in rows["prompt"].to_pylist()],
        "episode": [
            _episode(*row) for row in zip(*(rows[name].to_pylist() for name in OF_EPISODES), strict=True)
        ],
        "numbers": [
            None if text is None else json.loads(text) for text in rows["reward_numbers"].to_pylist()
        ],
        "max_gap": [_rounded(each.max(initial=-np.inf)) for each in _of_each(np.abs(gaps), lengths)],
        "share": [_rounded(each.sum()) for each in _of_each(shares, lengths)],
        "all_tokens": num_tokens,
        **{name: rows[name].to_pylist() for name in _SHOWN},
    }
    # Half precision keeps the page small; its largest finite number is 65504.
    floats = (own, gaps, advantages, _flat(rows, "rollout_weights"), shares * num_tokens)
    halves = [np.clip(values, -65504, 65504).astype("<f2") for values in floats]
    excluded = np.nan_to_num(_flat(rows, "excluded"))

    return header, [places.astype("<u4" if is_wide else "<u2"), *halves, excluded.astype("u1")]


def _episode(
    is_model: list[bool] | None, rewards: list[float], num_calls: int, errors: str, end: str
) -> dict[str, Any] | None:
    """Return the episode of a sample.

    `lengths` counts the tokens of the model's first turn, the result, the next turn, and so on.
    """
    if is_model is None:
        return None
    # Turns and results alternate, so their lengths are sufficient.
    lengths = [len(list(tokens)) for _, tokens in groupby(is_model)]
    return {
        "lengths": lengths,
        "rewards": rewards,
        "calls": num_calls,
        "errors": json.loads(errors),
        "end": end,
    }


def _flat(rows: pa.Table, name: str) -> np.ndarray:
    """Return the values of all tokens; NaN for each token if the file has no such column."""
    if rows[name].null_count:
        return np.full(sum(rows["response_length"].to_pylist()), np.nan, np.float32)
    return rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _of_each(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []


def _rounded(value: Any) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _joined(header: dict[str, Any], arrays: Iterable[np.ndarray]) -> bytes:
    text = json.dumps(finite(header), separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, with null, and round floats to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value
