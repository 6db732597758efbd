"""Keep the failure pages in docs/troubleshooting.md equal to what tests print: each test that produces a
failure compares its page with the documented one.

    make troubleshooting        # rewrites the pages, from the same tests

A page is in a fenced block below `<!-- page: NAME -->`. Values that differ between runs (processes, paths,
times, sizes) are replaced.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
WRITE = "MEGARL_WRITE_PAGES"  # if set, the document is changed instead of compared

_VOLATILE = (
    (r"/tmp/ray/session_[^/\s]+/logs/worker-[^\s:]+\.err", "/tmp/ray/SESSION/logs/WORKER.err"),
    (r"/tmp/ray/session_[^/\s]+", "/tmp/ray/SESSION"),
    (r"/[\w./-]*/pytest-[\w-]+/pytest-\d+/(popen-gw\d+/)?[\w-]+?\d+/", ""),
    (r"\bpid \d+", "pid 4242"),
    (r"\breplica \d of", "replica 0 of"),
    (r"uid \d.*? and \d+ more \(", "uid 0-3, 0-17, 0-9, 0-30 and 4 more ("),
    (r"uid 0-\d+\)", "uid 0-3)"),
    (r"[\d.]+ of [\d.]+ GiB free", "123.4 of 567.8 GiB free"),
    (r"port: \d+", "port: 29500"),
    (r"grep \d+`", "grep 29500`"),
    (r"[\d.]+GB of [\d.]+GB used", "543.2GB of 567.8GB used"),
    (r"allocate \d+ bytes", "allocate 123456789 bytes"),
    (r"for \d+ s$", "for 2 s"),
    (r"step \d+, phase", "step 2, phase"),
    # the truncation depends on the length of the paths
    (r"(complete checkpoints: \S+,) .* \.\.\.$", r"\1 ..."),
)


def last_page_of(log: str) -> str:
    """Return the page at the end of a command's output."""
    return re.search(r"(?s).*(^==== megarl .*?^=+$)", log, re.MULTILINE).group(1)  # type: ignore[union-attr]


def without_volatile(page: str) -> str:
    for pattern, replacement in _VOLATILE:
        page = re.sub(pattern, replacement, page, flags=re.MULTILINE)
    return page.strip()


def check_documented(name: str, printed: str) -> None:
    """Compare a printed page, or the message of a command that did not start, with the documented one."""
    page = without_volatile(printed)
    text = DOCUMENT.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- page: {re.escape(name)} -->\n```text\n)(.*?)(\n```)", re.DOTALL)
    found = block.search(text)
    assert found is not None, f"{DOCUMENT} has no block {name}"

    if os.environ.get(WRITE):
        DOCUMENT.write_text(text[: found.start(2)] + page + text[found.end(2) :], encoding="utf-8")
        return

    assert page == found.group(2), (
        f"{DOCUMENT}, page {name}: if the new one is right, `make troubleshooting` writes it:\n{page}"
    )


def documented_pages() -> set[str]:
    return set(re.findall(r"<!-- page: ([\w-]+) -->", DOCUMENT.read_text(encoding="utf-8")))
