"""Read a run's folder for the report page, in parts that are read on request.

A live run keeps writing. A damaged file is shown as one line on the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config.dotted import flat
from megarl.config.load import plain_values
from megarl.config.schema import SCHEMAS, RunKind
from megarl.config.values import schema_keys
from megarl.machine.files import parse_yaml
from megarl.machine.folder_kinds import is_run, no_run
from megarl.machine.strict_json import dump_readable
from megarl.tracking.metrics_file import MetricsFileError, read_metrics
from megarl.tracking.report.sample_part import finite, sample_part
from megarl.tracking.report.timeline_part import timeline_part
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, GENERATIONS_FILE, METRICS_FILE, SUMMARY_FILE
from megarl.tracking.samples import sample_files, sample_path
from megarl.tracking.timeline import TIMELINE_FILE

_MAX_TOKENS = 1_000_000  # over all samples of a page
_MAX_GENERATIONS = 2_000  # the newest ones
_ABOUT = "about"
_METRICS = "metrics"
_TIMELINE = "timeline"
_GENERATIONS = "generations"
_SAMPLES = "samples/"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class RunFolderError(ValueError):
    """The folder is not a run's folder."""


class RunFolder:
    """Folder of one run. Raises RunFolderError for a folder to which no run has written."""

    def __init__(
        self, path: Path, name: str, plan: Callable[[Path], Any], max_tokens: int = _MAX_TOKENS
    ) -> None:
        """Open the folder.

        Args:
            plan: Returns the planned memory for a `config.yaml`; None if it is unknown.
            max_tokens: Limit on the number of tokens over all samples of the run.
        """
        self.path = path
        self.name = name
        self._plan = plan
        self._max_tokens = max_tokens
        if not is_run(path):
            raise RunFolderError(no_run(path))

    def versions(self) -> dict[str, str]:
        """Return the version of each available part. The version changes whenever the part does."""
        # A version is derived from the file's time and size, so that the page fetches only what is new.
        about = ",".join(_version(self.path / name) for name in (CONFIG_FILE, SUMMARY_FILE, FAILURE_FILE))
        files = {_METRICS: METRICS_FILE, _TIMELINE: TIMELINE_FILE, _GENERATIONS: GENERATIONS_FILE}
        found = {
            part: _version(self.path / name) for part, name in files.items() if (self.path / name).is_file()
        }
        samples = sample_files(self.path)
        share = self._share(len(samples))
        found |= {f"{_SAMPLES}{step}": f"{_version(path)},{share}" for step, path in samples.items()}

        return {_ABOUT: about, **found}

    def part(self, name: str) -> bytes:
        """Return a part: JSON, or the format of sample_part.py.

        If a file is damaged, the part has a one-line `problem`.

        Raises:
            KeyError: The part does not exist.
        """
        if name.startswith(_SAMPLES):
            step = int(name.removeprefix(_SAMPLES))
            return sample_part(sample_path(self.path, step), step, self._share(len(sample_files(self.path))))

        readers: dict[str, Callable[[], Any]] = {
            _ABOUT: self._about,
            _METRICS: self._metrics,
            _TIMELINE: lambda: timeline_part(self.path / TIMELINE_FILE),
            _GENERATIONS: self._generations,
        }
        return json.dumps(finite(readers[name]()), separators=(",", ":")).encode()

    def _share(self, num_files: int) -> int:
        """Return the number of tokens per file. Powers of two rarely change while a run writes more files."""
        return 1 << (max(1, self._max_tokens // max(1, num_files)).bit_length() - 1)

    def _about(self) -> dict[str, Any]:
        problems: list[str] = []

        # Report a damaged file on the page, which shows everything else.
        def read(name: str, parse: Callable[[str], Any]) -> Any:
            try:
                return parse((self.path / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                return None
            except _DAMAGE as error:
                problems.append(f"{self.path / name}: cannot be read ({_line(error)})")
                return None

        config = read(CONFIG_FILE, _flat_config) or {}
        kind = _kind_of(config)
        defaults = _defaults(kind)

        return {
            "path": str(self.path),
            "kind": kind.value,
            "config": config,
            "foreign": [key for key in config if not all(_can_have(each, key) for each in SCHEMAS)],
            "defaults": {
                key: defaults[key] for key in config if key in defaults and defaults[key] != config[key]
            },
            "summary": read(SUMMARY_FILE, json.loads),
            "plan": self._plan(self.path / CONFIG_FILE) if config else None,
            "failure": read(FAILURE_FILE, str),
            "problems": problems,
        }

    def _metrics(self) -> dict[str, Any]:
        """Return the steps and, for each metric, its values (null at a step without one)."""
        try:
            series = read_metrics(self.path / METRICS_FILE)
        except MetricsFileError as error:
            return {"steps": [], "values": {}, "problem": str(error)}

        # All metrics share one list of steps; a metric without a value at a step has null there.
        steps = sorted({step for points in series.values() for step in points.steps})
        place_of = {step: place for place, step in enumerate(steps)}
        values: dict[str, list[float | None]] = {}

        for name, points in sorted(series.items()):
            values[name] = [None] * len(steps)
            for step, value in zip(points.steps, points.values, strict=True):
                values[name][place_of[step]] = value

        return {"steps": steps, "values": values}

    def _generations(self) -> dict[str, Any]:
        path = self.path / GENERATIONS_FILE
        rows: list[dict[str, Any]] = []

        try:
            # A last line without a newline is still being written.
            for line in path.read_text(encoding="utf-8").split("\n")[:-1][-_MAX_GENERATIONS:]:
                row = json.loads(line)
                shown = {name: str(row[name]) for name in ("uid", "data_source", "response", "ground_truth")}
                rows.append({"step": int(row["step"]), "score": float(row["score"]), **shown})
        except _DAMAGE as error:
            return {
                "rows": rows,
                "problem": f"{path}: cannot be read as validation samples, one per line ({_line(error)})",
            }

        return {"rows": rows}


def _kind_of(config: Mapping[str, str]) -> RunKind:
    """Return the kind of a run. Older versions wrote none."""
    if (written := config.get("kind")) in set(RunKind):
        return RunKind(written)
    return RunKind.ppo if any(key.startswith("algorithm.") for key in config) else RunKind.sft


def _version(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_mtime_ns}.{status.st_size}"


def _flat_config(text: str) -> dict[str, str]:
    return {key: _text(value) for key, value in flat(parse_yaml(text))}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump_readable(value, default=str)


@cache
def _known_keys(kind: RunKind) -> frozenset[str]:
    return frozenset(schema_keys(SCHEMAS[kind]))


@cache
def _can_have(kind: RunKind, key: str) -> bool:
    """Return whether a run of this kind can have a dotted key.

    It can if the schema has the key, or has a mapping or list that contains it.
    """
    known = _known_keys(kind)
    parts = key.split(".")
    # The longest known prefix decides: a mapping or list may contain any key below it.
    longest = next(
        (prefix for end in range(len(parts), 0, -1) if (prefix := ".".join(parts[:end])) in known), None
    )
    is_section = longest is not None and any(each.startswith(f"{longest}.") for each in known)

    return longest == key or (longest is not None and not is_section)


@cache
def _defaults(kind: RunKind) -> dict[str, str]:
    return {key: _text(value) for key, value in flat(plain_values(SCHEMAS[kind]()))}


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def open_runs(paths: list[Path], plan: Callable[[Path], Any] = lambda path: None) -> Iterator[RunFolder]:
    """Open the runs, named by their folders plus as much of the path as makes the names unique.

    Raises RunFolderError.
    """
    whole = [path.resolve() for path in paths]
    if twice := next((path for path in whole if whole.count(path) > 1), None):
        raise RunFolderError(f"{twice}: is listed twice; list each run once")

    for path, resolved in zip(paths, whole, strict=True):
        others = [other for other in whole if other != resolved]
        # Add parts of the path until the name differs from that of every other run.
        count = next(
            count
            for count in range(1, len(resolved.parts) + 1)
            if all(o.parts[-count:] != resolved.parts[-count:] for o in others)
        )
        yield RunFolder(path, "/".join(resolved.parts[-count:]), plan, _MAX_TOKENS // len(paths))
