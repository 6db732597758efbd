"""`megarl report RUN_DIR [RUN_DIR ...]`: an HTML report of runs, written to a file or served live."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megarl.cli.tables.placement import parts_table
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.config.validate import read_architectures, validate
from megarl.machine.errors import ConfigError
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.tracking.report.page import compressed_part, manifest, page, write_page
from megarl.tracking.report.run_folder import RunFolder, RunFolderError, open_runs
from megarl.tracking.run_files import REPORT_FILE

_HOST = "127.0.0.1"
_TEXT = "text/plain; charset=utf-8"


def run(run_dirs: Sequence[str], output: str | None, is_live: bool, port: int) -> None:
    """Write one self-contained HTML file, or serve the report on this machine until Ctrl-C.

    Args:
        output: The file; None: `report.html` in the folder of the run, for several runs in the current one.
        is_live: Serve the report instead of writing it.
        port: The port of the server; 0: any free port.

    Raises:
        RunFolderError: A folder is not that of a run, or the report cannot be written or served.
    """
    runs = list(open_runs([Path(each) for each in run_dirs], planned_memory))
    if is_live:
        _serve(runs, port)
    else:
        # A report of several runs belongs to none of them.
        folder = Path(run_dirs[0]) if len(run_dirs) == 1 else Path()
        _write(runs, folder / REPORT_FILE if output is None else Path(output))


def planned_memory(config_path: Path) -> dict[str, list[Any]] | None:
    """Return the memory of each role on the fullest device of each pool, as `megarl check` shows it.

    Returns:
        The table's `columns` and `rows`; None if the configuration is from another version or its models are
        not on this machine.
    """
    try:
        config = load_config(RunConfig, config_path)
        architectures, absent = read_architectures(config)
        if absent or validate(config):
            return None
        table = parts_table(plan_memory(config, plan_placement(config), architectures))
    # The report is still useful without the plan.
    except ConfigError:
        return None

    rows = zip(*(column.cells for column in table.columns), strict=True)
    return {
        "columns": [str(column.header) for column in table.columns],
        "rows": [list(map(str, row)) for row in rows],
    }


def _write(runs: Sequence[RunFolder], path: Path) -> None:
    try:
        nbytes = write_page(runs, path)
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be written ({error.strerror or error}); give another file with --output FILE"
        ) from error
    print(f"report written to {path} ({nbytes / 2**20:.1f} MiB); open it in a browser")


def _serve(runs: Sequence[RunFolder], port: int) -> None:
    try:
        report = LiveReport(runs, port)
    except (OSError, OverflowError) as error:
        raise RunFolderError(
            f"--port {port}: cannot listen ({error}); give another port, or 0 for any free port"
        ) from error

    print(
        f"following {', '.join(run.name for run in runs)} at {report.url} (this machine only; Ctrl-C stops "
        f"it)",
        flush=True,
    )
    try:
        with report:
            report.serve_forever()
    except KeyboardInterrupt:
        print("stopped")


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802  (the name that http.server calls)
        assert isinstance(self.server, LiveReport)
        status, kind, content = self.server.answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class LiveReport(ThreadingHTTPServer):
    """Server of a live report. The page polls it for changes.

    It listens from construction on, and `url` contains the key.

    Args:
        port: Port to listen on; 0 selects any free port.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, runs: Sequence[RunFolder], port: int = 0) -> None:
        super().__init__((_HOST, port), _Handler)
        self._runs = runs
        self._key = secrets.token_urlsafe(16)
        self._known: dict[tuple[int, str], tuple[str, bytes]] = {}  # (run, part) -> version and content
        self._lock = threading.Lock()
        self._address = f"{_HOST}:{self.server_port}"
        self.url = f"http://{self._address}/{self._key}/"

    def answer(self, path: str, host: str) -> tuple[HTTPStatus, str, bytes]:
        """Return the status, content type and body for a request.

        Args:
            host: Host header. Host names that others have pointed at this machine are refused, since the page
                was not opened by such a name.
        """
        _, key, *rest = (*path.split("/"), "")
        # The key keeps out other users of the machine; the host check keeps out other sites (DNS rebinding).
        if host != self._address or not secrets.compare_digest(key.encode(), self._key.encode()):
            return (
                HTTPStatus.FORBIDDEN,
                _TEXT,
                b"the address has no key or a wrong key: use the address printed by megarl report\n",
            )

        match rest[:-1]:
            case [""]:
                return HTTPStatus.OK, "text/html; charset=utf-8", page(self._runs, is_live=True)
            case ["manifest"]:
                return HTTPStatus.OK, "application/json", json.dumps(manifest(self._runs)).encode()
            case ["part", number, *name] if number.isdecimal() and int(number) < len(self._runs):
                return self._part(int(number), "/".join(name))

        return HTTPStatus.NOT_FOUND, _TEXT, b"no such part\n"

    def _part(self, number: int, name: str) -> tuple[HTTPStatus, str, bytes]:
        run = self._runs[number]
        version = run.versions().get(name)
        if version is None:
            return HTTPStatus.NOT_FOUND, _TEXT, b"no such part\n"

        with self._lock:
            # Compress a part once per version, not per request.
            known = self._known.get((number, name))
            if known is None or known[0] != version:
                known = self._known[number, name] = (version, compressed_part(run, name))

        return HTTPStatus.OK, "application/octet-stream", known[1]
