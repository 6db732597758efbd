"""Read a run's folder for the report page, in parts that are read on request.

A live run keeps writing. A damaged file is shown as one line on the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
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


# ---- the timeline, as columns instead of one mapping per span


_MAX_SPANS = 60_000  # the newest ones
_UNIT_US = 100.0  # starts and durations are integer multiples of this

# Phase of the driver or method of a worker -> display name. Methods that do the same work share a name.
PHASE_NAMES = {
    # Phases of the driver.
    "step": "step",
    "gen": "wait for samples",
    "adv": "compute advantages",
    "update_actor": "train actor",
    "update_weights": "sync weights",
    "testing": "validate",
    "save_checkpoint": "save checkpoint",
    # Every worker.
    "__init__": "start",
    "visible_gpus": "list GPUs",
    "resident_memory_gb": "measure memory",
    # Models that are trained or that score samples.
    "measure_speed": "measure speed",
    "log_probs": "compute log-probs",
    "values": "compute values",
    "update": "train",
    "update_scored": "train",
    "score_conversations": "score",
    "restore_state": "onload",
    "offload_state": "offload",
    "load_checkpoint": "load checkpoint",
    "begin_save": "save checkpoint",
    "save_is_written": "check checkpoint",
    "finish_save": "commit checkpoint",
    "begin_snapshot": "begin snapshot",
    "await_snapshot": "await snapshot",
    "load_snapshot": "load snapshot",
    "wanted_tensors": "load snapshot",
    "load_resharded": "load snapshot",
    "begin_profile": "begin profile",
    "end_profile": "end profile",
    "begin_trace": "begin trace",
    "end_trace": "end trace",
    # The sending side of a weight sync.
    "weights_are_on_cuda": "plan weight sync",
    "publish_weight_address": "connect weight sync",
    "send_weights": "send weights",
    "continue_weights": "send weights",
    "write_weight_files": "write weights",
    "weight_checksums": "checksum weights",
    "forget_acknowledged_weights": "plan weight sync",
    "leave_weights": "disconnect weight sync",
    "end_weights": "disconnect weight sync",
    # Engines.
    "submit_and_poll": "generate",
    "abort": "cancel requests",
    "interrupt": "wake",
    "wake": "onload",
    "wake_cache": "onload KV cache",
    "sleep": "offload",
    "needed_slices": "plan weight sync",
    "join_weights": "connect weight sync",
    "receive_weights": "receive weights",
    "load_folder": "load weights",
    "checksums": "checksum weights",
    "weight_version": "check weight version",
    "acknowledged_version": "check weight version",
    "process_ids": "list processes",
    # Reward functions.
    "score": "score",
    "endpoint": "start judge",
    "serve": "serve judge",
    "use_judges": "connect judges",
    "begin": "start scoring",
    "scored": "collect scores",
    "forget": "drop scores",
    "finish": "collect scores",
    # Environments of agents.
    "exchange": "run environment",
}
# Also the methods that older timelines have.
_NAMES = PHASE_NAMES | {
    "reserve_weight_group": "connect weight sync",
    "join_weight_group": "connect weight sync",
    "serve_weights": "prepare weights",
}


def timeline_part(path: Path) -> dict[str, Any]:
    """Read the timeline of a run.

    Returns:
        `rows`, the rows of the drawing, sorted by pool, and `names`, the readable names of spans. Spans are
        sorted by start; each has a place in the lists `row`, `name` (index into `names`), `step`, `length`,
        and `gap` (the time since the start of the previous span). `length` and `gap` are in units of 0.1 ms.
        If the file is damaged, `problem` gives the reason.
    """
    try:
        return _columns(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return {"rows": [], "names": [], "row": [], "problem": f"{path}: cannot be read ({_line(error)})"}


def _columns(events: list[dict[str, Any]]) -> dict[str, Any]:
    pools = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    # Keep the rows of a pool together.
    order = sorted(threads, key=lambda place: (pools[place[0]], threads[place]))
    row_of = {place: number for number, place in enumerate(order)}
    # A long run has more spans than a page can draw; keep the latest.
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])[
        -_MAX_SPANS:
    ]
    # Phases that a user's own worker names keep their names.
    span_names = [_NAMES.get(span["name"], span["name"]) for span in spans]
    names = sorted(set(span_names))
    name_of = {name: number for number, name in enumerate(names)}
    # Round the starts before taking differences, so that rounding errors do not accumulate.
    starts = [round(span["ts"] / _UNIT_US) for span in spans]

    return {
        "rows": [{"pool": pools[place[0]], "label": threads[place]} for place in order],
        "names": names,
        "row": [row_of[span["pid"], span["tid"]] for span in spans],
        "name": [name_of[name] for name in span_names],
        "step": [int(span["args"]["step"]) for span in spans],
        "gap": [start - before for before, start in pairwise([*starts[:1], *starts])],
        "length": [round(span["dur"] / _UNIT_US) for span in spans],
    }
