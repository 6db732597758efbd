"""Reads the rows of a new run with the model's tokenizer, as `megarl train` will."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megarl.config.schema import DataConfig, SFTDataConfig

_MOST_ROWS = 1000


def row_lengths(folder: str, data: DataConfig | SFTDataConfig) -> list[int]:
    """Return the tokens of each prompt, or of each conversation for SFT, in the first rows of a run.

    Args:
        folder: The folder of the model. Without a tokenizer, as for a model on the hub, nothing is measured.

    Raises:
        DataError: The tokenizer cannot encode a row.
        ValueError: The tokenizer cannot be used.
    """
    if not any(Path(folder).glob("tokenizer*")):
        return []
    # Imported here, because it takes seconds.
    from megarl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder, key="--model")

    def lengths() -> Iterator[int]:
        if isinstance(data, SFTDataConfig):
            from megarl.data.sft import read_chat_rows, read_example

            for row in read_chat_rows(data.train_files, data.columns):
                example = read_example(row, tokenizer, data)
                yield len(example.prompt_ids) + len(example.response_ids)
        else:
            from megarl.data.prompts import read_prompt, read_prompt_rows

            for row in read_prompt_rows(data.train_files, data.columns):
                yield len(read_prompt(row, tokenizer, data).token_ids)

    return list(islice(lengths(), _MOST_ROWS))
