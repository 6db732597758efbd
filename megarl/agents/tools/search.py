"""Search over a folder of text files: paragraphs ranked by BM25, with SQLite's full-text index."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from megarl.agents.function_tool import function_schema, in_thread
from megarl.agents.protocol import Task

_WORD = re.compile(r"\w+")
_CUT = 1500  # characters shown of a paragraph
_STEPS = 1000  # SQLite instructions between two checks of the clock


class FolderSearch:
    """A tool that finds paragraphs in the text files of a folder and its subfolders by the words of a query.

    Args:
        suffixes: The suffixes of the files to read, as UTF-8.
        num_results: Paragraphs per query.
        time_limit_s: Time limit of a query.
        name: The name shown to the model.
        description: The description shown to the model.

    Raises:
        ValueError: The folder contains nothing to search.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_results: int = 3,
        suffixes: tuple[str, ...] = (".md", ".txt"),
        time_limit_s: float = 5.0,
        name: str = "search",
        description: str = "Finds paragraphs by the words of a query.",
    ) -> None:
        self._num_results = num_results
        self._time_limit_s = time_limit_s
        self._reading = threading.Lock()

        # Other threads than the one that opens the database read it, one at a time.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute(
            "CREATE VIRTUAL TABLE paragraphs USING fts5(text, place UNINDEXED, tokenize='porter unicode61')"
        )
        files = sorted(file for file in Path(folder).rglob("*") if file.suffix in suffixes and file.is_file())
        if not files:
            raise ValueError(f"{folder}: found no file ending in {' or '.join(suffixes)} to search")

        for file in files:
            try:
                paragraphs = re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not UTF-8 text ({error.reason})") from error
            place = file.relative_to(folder).as_posix()
            rows = [(paragraph.strip(), place) for paragraph in paragraphs if paragraph.strip()]
            self._index.executemany("INSERT INTO paragraphs VALUES (?, ?)", rows)

        self.schema = function_schema(self._shape, name, description)

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        words = _WORD.findall(arguments["query"])
        if not words:
            raise ValueError("the query has no word")

        # Quote the words, so that none of them is parsed as an operator.
        query = " OR ".join(f'"{word}"' for word in words)
        found = await in_thread(lambda: self._ranked(query))
        return "\n\n".join(f"{place}: {text[:_CUT]}" for text, place in found) or "nothing was found"

    def _ranked(self, query: str) -> list[tuple[str, str]]:
        ranked = "SELECT text, place FROM paragraphs WHERE paragraphs MATCH ? ORDER BY rank, rowid LIMIT ?"
        with self._reading:
            # SQLite has no time limit of its own, but a progress handler can interrupt the query.
            deadline_s = time.monotonic() + self._time_limit_s
            self._index.set_progress_handler(lambda: time.monotonic() > deadline_s, _STEPS)
            try:
                return self._index.execute(ranked, (query, self._num_results)).fetchall()
            except sqlite3.OperationalError as error:
                if str(error) != "interrupted":
                    raise
                raise TimeoutError(f"the search took longer than {self._time_limit_s:g} s") from error

    @staticmethod
    def _shape(query: Annotated[str, "words to look for"]) -> None:
        """Define the signature shown to the model."""
