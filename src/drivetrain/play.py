"""Shows exported agents in a browser: serves the page and the agents' files, or writes them as a static site."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import re
import shutil
import urllib.parse
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.runs import EXPORT_CARD, FORMAT, Run, sha256_of

PAGE = Path(__file__).parent / "page"
SHIPPED_AGENTS = PAGE / "agents"
REQUIRED_GRAPHS = ("reset", "policy", "step")
AGENT_LIST = "agents.json"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".json": "application/json", ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8", ".wasm": "application/wasm",
}  # fmt: skip
GZIP_SUFFIX = ".gz"
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)  # a request's Host header

Site = dict[str, Path | bytes]


@dataclass(frozen=True)
class ExportedAgent:
    """An agent's name and the folder with its export."""

    name: str
    folder: Path


def shipped_agents() -> list[ExportedAgent]:
    """Returns the agents that come with the package."""
    return [ExportedAgent(path.parent.name, path.parent) for path in sorted(SHIPPED_AGENTS.glob(f"*/{EXPORT_CARD}"))]


# --- checking an export --------------------------------------------------------------------------


def read_card(agent: ExportedAgent) -> dict[str, Any]:
    """Returns the contents of export.json; raises Problem if a part that the page needs is missing."""
    path = agent.folder / EXPORT_CARD
    try:
        card = json.loads(path.read_text())
        parts = {key: dict(card[key]) for key in ("graphs", "settings", "training")} | {"sha256": dict(card.get("sha256") or {})}
        for graph in parts["graphs"].values():
            graph["bytes"], Path(graph["file"]), [spec["name"] + str(spec["shape"][1:]) for spec in (*graph["inputs"], *graph["outputs"])]
        return dict(card) | parts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path} cannot be read ({type(error).__name__}): drivetrain export {agent.name} writes it again") from None


def is_playable(graphs: Any) -> bool:
    return set(REQUIRED_GRAPHS) <= set(graphs)


def not_playable(name: str, task: str) -> Problem:
    return Problem(f"{name} cannot be played: {task} has no environment that was exported (an example that can: drivetrain play snake)")


def is_current(agent: ExportedAgent, run: Run) -> bool:
    """Whether the export is of the run's current state and has SHA-256 of its files."""
    card = read_card(agent)
    is_same = card["settings"] == run.read()["recipe"]["settings"] and card["training"].get("step") == run.last_row().get("step", 0)
    return bool(is_same and card["sha256"])


def check(agent: ExportedAgent) -> None:
    """Raises Problem, with the name of the file, if a browser could not play an export."""
    card = read_card(agent)
    if not is_playable(card["graphs"]):
        raise not_playable(agent.name, str(card.get("task")))
    fix = f"drivetrain export {agent.name} writes"
    paths = {name: agent.folder / card["graphs"][name]["file"] for name in REQUIRED_GRAPHS}
    for path in paths.values():
        if path.parent != agent.folder or not path.is_file():
            raise Problem(f"{path} is missing: {fix} it again")
    shapes = {name: _read_shapes(path, card["graphs"][name]) for name, path in paths.items()}
    if reason := _shape_mismatch({name: graph for name, graph in shapes.items() if not isinstance(graph, str)}):
        raise Problem(f"{agent.folder}: {reason}: they are of different worlds; {fix} them again")
    for name, path in paths.items():
        size, expected, error = path.stat().st_size, card["graphs"][name]["bytes"], shapes[name]
        if size != expected:
            raise Problem(f"{path} is broken: it has {size} bytes, not {expected}; {fix} it again")
        if isinstance(error, str):
            raise Problem(f"{path} is broken: {error}; {fix} it again")
        if sha256_of(path) != card["sha256"].get(path.name):
            raise Problem(f"{path} is broken: its SHA-256 is not the one in {EXPORT_CARD}; {fix} it again")


@dataclass(frozen=True)
class GraphShapes:
    """The shapes of a graph's inputs and outputs by name, without the batch dimension."""

    inputs: dict[str, list[Any]]
    outputs: dict[str, list[Any]]


def _read_shapes(path: Path, graph_card: Any) -> GraphShapes | str:
    """Returns the shapes in a graph's file, or onnxruntime's error. Without onnxruntime, returns the shapes in export.json."""
    try:
        import onnxruntime
    except ImportError:
        return GraphShapes(*({spec["name"]: spec["shape"][1:] for spec in graph_card[side]} for side in ("inputs", "outputs")))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        graph = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base class
        return str(error).splitlines()[0].split(" : ")[-1][:100]
    return GraphShapes(*({spec.name: list(spec.shape[1:]) for spec in specs} for specs in (graph.get_inputs(), graph.get_outputs())))


def _shape_mismatch(graphs: dict[str, GraphShapes]) -> str:
    """Returns the graph whose input has another shape than the output that feeds it, as for an agent of another grid; "" if none has."""
    connections = [(source, "observation", "policy", "observation") for source in ("reset", "step")] + [
        ("policy", "action", "step", "action")
    ]
    state = set(graphs["step"].inputs) - {"action", "random", "worlds"} if "step" in graphs else set()
    connections += [(source, f"next_{part}", "step", part) for part in sorted(state) for source in ("reset", "step")]
    for source, output, target, name in connections:
        if source in graphs and target in graphs:
            output_shape, input_shape = graphs[source].outputs.get(output), graphs[target].inputs.get(name)
            if output_shape != input_shape:
                return f"{target}.onnx takes {name} of {_format_shape(input_shape)}, {source}.onnx gives {_format_shape(output_shape)}"
    return ""


def _format_shape(shape: list[Any] | None) -> str:
    return "no shape" if shape is None else "x".join(map(str, shape)) or "one number"


# --- the site -----------------------------------------------------------------------------------


def site(agents: list[ExportedAgent]) -> Site:
    """Returns URL path -> file. The server serves no other files."""
    if not (PAGE / "index.html").is_file():
        raise Problem(f"{PAGE} has no page: build it with `make page`")
    files: Site = {}
    for path in sorted(PAGE.rglob("*")):
        if path.is_file() and SHIPPED_AGENTS not in path.parents:
            files[path.relative_to(PAGE).as_posix().removesuffix(GZIP_SUFFIX)] = path
    entries: list[dict[str, str]] = []
    for number, agent in enumerate(agents):
        folder = "agents/" + (re.sub(r"[^A-Za-z0-9.-]+", "-", agent.name).strip("-.") or "agent")
        if any(folder == entry["folder"] for entry in entries):
            folder += f"-{number}"
        entries.append({"name": agent.name, "folder": folder})
        graphs = read_card(agent)["graphs"]
        files |= {f"{folder}/{name}": agent.folder / name for name in (EXPORT_CARD, *(graphs[g]["file"] for g in REQUIRED_GRAPHS))}
    files[AGENT_LIST] = json.dumps({"format": FORMAT, "made_by": "drivetrain play", "agents": entries}, indent=1).encode() + b"\n"
    return files


def content(file: Path | bytes) -> bytes:
    """Returns a file's bytes, decompressed."""
    if isinstance(file, bytes):
        return file
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix == GZIP_SUFFIX else data


def write_site(files: Site, folder: Path) -> int:
    """Writes a static site, which any web server can serve from any path; returns its size in bytes."""
    if folder.exists() and not folder.is_dir():
        raise Problem(f"--out {folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_site(folder):
        raise Problem(f"--out {folder} is not empty, and not a site of drivetrain play: name another folder")
    num_bytes = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in ("assets", "agents"):
            shutil.rmtree(folder / old, ignore_errors=True)
        for name in (AGENT_LIST, *(name for name in files if name != AGENT_LIST)):  # the list first: it marks the folder as a site
            path, data = folder / name, content(files[name])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            num_bytes += len(data)
    except OSError as error:
        raise Problem(f"--out {folder} cannot be written: {error.strerror or error}; name another folder") from None
    return num_bytes


def _is_site(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / AGENT_LIST).read_text())["made_by"] == "drivetrain play")
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- serving it ---------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD with the files of a site."""

    protocol_version = "HTTP/1.1"

    def __init__(self, files: Site, *args: Any) -> None:
        self.files = files
        super().__init__(*args)

    def do_GET(self) -> None:
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        self._respond(with_body=False)

    def _respond(self, with_body: bool) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not LOCAL_HOST.fullmatch(hosts[0]):  # DNS rebinding: another site's page could read this one
            self._send(403, ".txt", b"drivetrain play answers only on this machine: open it at localhost or 127.0.0.1\n", with_body)
            return
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).removeprefix("/") or "index.html"
        try:
            data, is_gzip = self._read(name)
        except (KeyError, OSError):  # an unknown name, or a file deleted since the start
            self._send(404, ".txt", f"this site has no file {name}\n".encode(), with_body)
            return
        self._send(200, Path(name).suffix, data, with_body, is_gzip)

    def _read(self, name: str) -> tuple[bytes, bool]:
        """Returns a file's bytes and whether they are compressed: only for browsers that accept it."""
        file = self.files[name]
        if isinstance(file, Path) and file.suffix == GZIP_SUFFIX and "gzip" in self.headers.get("Accept-Encoding", ""):
            return file.read_bytes(), True
        return content(file), False

    def _send(self, status: int, suffix: str, data: bytes, with_body: bool, is_gzip: bool = False) -> None:
        self.send_response(status)
        content_type = CONTENT_TYPES.get(suffix, "application/octet-stream")
        for key, value in {"Content-Type": content_type, "Content-Length": str(len(data)), "Cache-Control": "no-cache"}.items():
            self.send_header(key, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        if is_gzip:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if with_body:
            with contextlib.suppress(ConnectionError):  # the browser closed the connection
                self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a browser closed the connection."""


def server(files: Site, port: int = 0) -> ThreadingHTTPServer:
    """Returns a server of these files on 127.0.0.1; its `serve_forever` starts it."""
    try:
        return _Server(("127.0.0.1", port), partial(_Handler, files))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Problem(f"port {port} is in use: leave --port out, or name another") from None
        raise Problem(f"port {port} cannot be used: {error.strerror}") from None
    except OverflowError:
        raise Problem(f"--port {port}: a port is a number up to 65535") from None
