"""What happens to rows with too many tokens: they are left out and counted, or refused; they are never cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from megarl.config.schema import Overlong
from megarl.data.files import DataError
from megarl.data.tables import DataRow

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


class Measured(NamedTuple):
    """Where a row stands and how many tokens it has."""

    file: str
    number: int
    length: int

    @classmethod
    def of(cls, row: DataRow, length: int) -> Measured:
        return cls(row.file, row.number, length)


def keep_within(items: Sequence[Item], measured: Sequence[Measured], limit: int, option: str, overlong: Overlong) -> list[Item]:
    """The items of at most `limit` tokens; `option` is the limit's name in the configuration.

    Raises DataError for any longer one when `overlong` is `refuse`, and when `filter` would leave nothing.
    """
    over = [row for row in measured if row.length > limit]
    if not over:
        return list(items)
    first, longest = over[0], max(row.length for row in over)
    summary = f"{len(over)} of {len(measured)} rows have more than {option}={limit} tokens, the longest {longest}"
    if overlong == Overlong.refuse:
        raise DataError(
            f"{first.file}, row {first.number}: {first.length} tokens; {summary}. "
            f"Raise {option} to {longest}, or set data.overlong=filter to leave them out"
        )
    if len(over) == len(measured):
        raise DataError(f"{first.file}: no row is left after filtering: {summary}. Raise {option}")
    logger.warning("%s: left out (data.overlong=filter)", summary)
    return [item for item, row in zip(items, measured, strict=True) if row.length <= limit]
