"""Lint the English of docs pages, docstrings, comments and messages against the house rules.

    python -m tools.prose                 # the pages, megarl, configs, examples, benchmarks and tools
    python -m tools.prose docs/data.md megarl/weights
    python -m tools.prose --rules opening,retired megarl

Each finding is one line, `file:line: rule: text: suggestion`, and the exit status is 1 if there is any. The
spelling is checked by `codespell` and the layout of docstrings by `ruff`; the rules here are:

    opening   A docstring, or a comment on a line of its own, opens with a bare preposition or pronoun.
    summary   The first line of a docstring is not a complete sentence.
    retired   A word or phrase of the project's former idiom.

Fenced blocks, code spans, quotations, URLs and paths are skipped. In the strings of a program only `retired`
applies, and only to strings of four words or more, which leaves out keys and values. To mention a retired
phrase, put it in quotation marks.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs")
DEFAULT_PATHS = (*PAGES, "megarl", "configs", "examples", "benchmarks", "tools")
# Sources of other projects, and the words of this module itself.
SKIPPED = {".venv", "build", "outputs", "stubs", "__pycache__", "prose.py", "test_prose.py"}
RULES = ("opening", "summary", "retired")

# A docstring says what its object is or does, so none of these opens one.
BARE_OPENINGS = (
    "of|as|by|in|that|those|where|from|beside|behind|to|up|for|with|until|since|on|at|before|after"
    "|which|whose|whom|what|its"
)
# A comment may open with the clause that gives the reason: "# After the fork, ...", "# For each rank, ...".
BARE_COMMENT_OPENINGS = "of|as|by|that|those|where|beside|behind|which|whose|whom|what is|what are|its"

# Pattern -> what to write instead. A word boundary is added on both sides.
RETIRED = {
    "mend(s|ed|ing)?": "fix, correct",
    "anew": "again, re-",
    "go(es|ne|ing)? on|went on": "continue, resume",
    "in (the|its|their) place of": "instead of",
    "so many": "that many, N",
    "gives? up|given up|gave up|giving up": "drop, stop, cancel",
    "deals?|dealt|dealing": "distribute, assign",
    "beside": "next to, compared with, in addition to",
    "behind": "after, following",
    "of now": "current",
    "no more": "no longer",
    "t(ake|akes|aken|ook) back": "cancel",
    "at hand": "available",
    "alike": "the same, equally",
    "nobody|somebody": "name the process, role or user",
    "way back|way there": "backward pass, forward pass",
    "reckon(s|ed|ing)?": "estimate, compute",
    "belongs? into": "belongs in",
    "t(ell|ells|old) apart": "distinguish",
    "spelt": "spelled",
    "of before": "previous, earlier",
    "as ever": "as usual",
    "it is (said|taken)( so)?": "say who reports or assumes it",
    "as far as": "name the condition or the limit",
    "that there (is|are|was|were)": "existing, available",
    "to the bit|same bits": "bitwise identical",
    "says": "contains, specifies, reports",
    "wants": "needs, requires, expects",
    "but for": "except",
    "rehears(als?|ed|es|ing)": "dry run, simulated",
    "carriers?": "transport",
    "(has|have|had) not (the|a|an|what|enough)": "does not have",
    "stand-ins?": "stub, fake",
    "likewise": "also, too",
}

# Plain English that contains a retired word.
ACCEPTED = (
    r"(left|leaves?|leaving|lags?|falls?|versions?) behind",
    r"behind (a|an|one|the) (proxy|firewall|NAT|gateway|load balancer|flag|interface)",
    r"no more (\w+ )?than",
    r"so many that",
    r"as far as (we|I) know",
    # A message, a page or a command may say something. A file, a key or a field contains or specifies it.
    r"(messages?|errors?|warnings?|pages?|documentation|log|doctor|check|it) says",
    r"`(megarl|make) [^`\n]+` says",
    r"says so",
)

_OPENING = re.compile(rf"({BARE_OPENINGS})\b", re.IGNORECASE)
_COMMENT_OPENING = re.compile(rf"({BARE_COMMENT_OPENINGS})\b", re.IGNORECASE)
_RETIRED = [(re.compile(rf"\b({pattern})\b", re.IGNORECASE), instead) for pattern, instead in RETIRED.items()]
_ACCEPTED = re.compile(rf"(?<!\w)({'|'.join(ACCEPTED)})\b", re.IGNORECASE)
_CODE = re.compile(
    r"```[\s\S]*?```|``[^`]+``|`[^`]*`"  # code
    r'|"[^"\n]*"|“[^”]*”'  # quotations
    r"|https?://\S+|[\w.-]*[/_][\w./-]*|\b\w+\.\w[\w.]*"  # addresses, paths, identifiers
)
# Comments for programs: linters, encodings, Slurm, shells.
_DIRECTIVE = re.compile(
    r"(noqa|type:|fmt:|pragma|ruff:|pyrefly:|codespell:|-\*-|!|yaml-language-server|SBATCH)"
)
_SENTENCE_END = re.compile(r"[.?!:][)\"'`]*$")


class Text(NamedTuple):
    """A piece of prose and where it begins. `kind`: docstring, comment, string or page."""

    path: Path
    line: int
    kind: str
    text: str


class Finding(NamedTuple):
    path: Path
    line: int
    rule: str
    text: str
    suggestion: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}: {self.suggestion}"


def check(text: Text) -> Iterator[Finding]:
    """Yield the findings in one piece of prose, in the order of its lines."""
    if text.kind == "docstring":
        yield from _check_docstring(text)
    elif text.kind == "comment" and _COMMENT_OPENING.match(text.text):
        yield _opening(text)

    for number, line in enumerate(_prose(text.text).splitlines()):
        for pattern, instead in _RETIRED:
            for found in pattern.finditer(line):
                yield Finding(text.path, text.line + number, "retired", found[0], instead)


def _check_docstring(text: Text) -> Iterator[Finding]:
    if _OPENING.match(text.text):
        yield _opening(text)

    first = text.text.splitlines()[0] if text.text else ""
    if not _SENTENCE_END.search(first):
        suggestion = "end the first line with a complete sentence; put details after a blank line"
        yield Finding(text.path, text.line, "summary", _shortened(first, from_end=True), suggestion)


def _opening(text: Text) -> Finding:
    suggestion = "say what it is or does, with a subject or an imperative"
    return Finding(text.path, text.line, "opening", _shortened(text.text), suggestion)


def _shortened(text: str, from_end: bool = False, size: int = 50) -> str:
    line = text.splitlines()[0] if text else ""
    if len(line) <= size:
        return line
    return f"...{line[-size:]}" if from_end else f"{line[:size]}..."


def _prose(text: str) -> str:
    """Blank out code, quotations and accepted phrases, and keep the lines."""
    for pattern in (_ACCEPTED, _CODE):
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return text


def python_texts(path: Path, source: str) -> Iterator[Text]:
    """Yield the docstrings, comments and longer strings of a Python file."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            constant = node.body[0].value  # pyrefly: ignore[missing-attribute]
            docstrings.add(id(constant))
            yield Text(path, constant.lineno, "docstring", text)

    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in docstrings:
            continue
        if len(node.value.split()) >= 4:
            yield Text(path, node.lineno, "string", node.value)

    yield from _comments(path, source)


def _comments(path: Path, source: str) -> Iterator[Text]:
    """Yield each block of comment lines as one text, and each comment after code as another."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        text = token.string.removeprefix("#").strip()
        stands_alone = not token.line[:column].strip()
        if _DIRECTIVE.match(text):
            continue
        if not stands_alone:
            yield Text(path, line, "remark", text)
            continue

        if block and line != start + len(block):
            yield Text(path, start, "comment", "\n".join(block))
            block = []
        if not block:
            start = line
        block.append(text)

    if block:
        yield Text(path, start, "comment", "\n".join(block))


def yaml_texts(path: Path, source: str) -> Iterator[Text]:
    """Yield the comments of a YAML file, each line for itself."""
    for number, line in enumerate(source.splitlines(), start=1):
        found = re.search(r"(?:^|\s)#\s*(.*)$", line)
        if found and not _DIRECTIVE.match(found[1]):
            yield Text(path, number, "remark", found[1])


def markdown_texts(path: Path, source: str) -> Iterator[Text]:
    """Yield the paragraphs, headings and table cells of a Markdown page, without its code."""
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        if token.type == "inline":
            start = token.map[0] + 1 if token.map else 1
            yield Text(path, start, "page", token.content)


READERS = {".py": python_texts, ".md": markdown_texts, ".yaml": yaml_texts}


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files below `paths` that can be checked, in order."""
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            if file.suffix in READERS and not SKIPPED.intersection(file.parts):
                yield file


def findings(paths: Iterable[Path], rules: Iterable[str] = RULES) -> list[Finding]:
    """Return the findings in the files below `paths`, in the order of files and lines."""
    wanted = set(rules)
    found = []
    for path in files(paths):
        texts = READERS[path.suffix](path, path.read_text(encoding="utf-8"))
        of_file = [finding for text in texts for finding in check(text) if finding.rule in wanted]
        found += sorted(of_file, key=lambda finding: finding.line)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the findings, and return 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.prose", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("paths", nargs="*", type=Path, help=f"default: {' '.join(DEFAULT_PATHS)}")
    parser.add_argument("--rules", default=",".join(RULES), help="rules to apply, separated by commas")
    parsed = parser.parse_args(arguments)
    rules = parsed.rules.split(",")
    if unknown := set(rules) - set(RULES):
        parser.error(f"no such rule: {', '.join(sorted(unknown))}; rules are {', '.join(RULES)}")

    found = findings(parsed.paths or [ROOT / path for path in DEFAULT_PATHS], rules)
    for finding in found:
        print(finding)
    if found:
        print(f"findings: {len(found)}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
